"""Progress bars for downloads: tqdm's class, a subclass of it, or none."""

from typing import Any, TypeAlias

ProgressFactory: TypeAlias = type[Any]
"""`tqdm.tqdm` or a subclass of it."""


def progress_class(progress: bool | ProgressFactory) -> ProgressFactory:
    """The class of the bars: tqdm's own for True (it draws on stderr), one that draws nothing for False."""
    if not isinstance(progress, bool):
        return progress
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    if progress:
        return tqdm  # type: ignore[no-any-return]

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"disable": True}))

    return Silent
