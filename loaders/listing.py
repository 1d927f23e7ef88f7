"""Which files of a folder or repository make up the model."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from inferax.errors import SourceError

QUANT_ORDER = (
    *("Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K", "Q8_0"),
    *("Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "IQ3_S", "IQ3_XS", "IQ3_XXS"),
    *("BF16", "F16", "F32"),
    *("Q2_K", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0"),
)
"""What a repository with several quantizations is searched for when none is named: 4 bits, then 5 to 8, then 3, then
unquantized, then 2 and fewer."""

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_SHARD = re.compile(r"model-\d+-of-(?P<count>\d+)\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
_MAX_LISTED = 20


@dataclass(frozen=True)
class Choice:
    """`weights`: a GGUF's parts in order, or the safetensors files; `others`: what safetensors need beside them."""

    weights: tuple[str, ...]
    others: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        return not self.others


def split_parts(name: str) -> tuple[str, ...]:
    """Names of all parts of the split GGUF that `name` is a part of, or `(name,)` where it is not split."""
    split = _SPLIT.fullmatch(name)
    if split is None:
        return (name,)
    stem, count, suffix = split["stem"], split["count"], split["suffix"]
    return tuple(f"{stem}-{index:05d}-of-{count}{suffix}" for index in range(1, int(count) + 1))


def choose(source: object, names: Collection[str], quant: str | None, *, ranked: bool) -> Choice:
    """The model among the files `names` (with '/' where they lie in subfolders).

    `quant` is a GGUF quantization tag (any case) or a file's full name. Without it safetensors go first; among
    several GGUFs the first of QUANT_ORDER is taken if `ranked`. Raises SourceError, about `source`, where there is no
    model, more than one, only pickled weights, or a part is missing.
    """
    ggufs = sorted({split_parts(name) for name in names if _is_gguf_model(name)})
    weights = _safetensors(names) if "config.json" in names else []
    if quant is not None:
        choice = Choice(_one(source, [parts for parts in ggufs if _has_tag(parts[0], quant)], ggufs, quant))
    elif weights:
        choice = Choice(tuple(weights), tuple(sorted(name for name in names if _is_companion(name))))
    elif len(ggufs) > 1 and ranked:
        tagged = ([parts for parts in ggufs if _has_tag(parts[0], tag)] for tag in QUANT_ORDER)
        choice = Choice(_one(source, next((found for found in tagged if found), ggufs), ggufs, None))
    elif ggufs:
        choice = Choice(_one(source, ggufs, ggufs, None))
    else:
        raise _nothing(source, names)
    missing = sorted(_expected(choice) - set(names))
    if missing:
        raise SourceError(source, f"is incomplete: {_listed(missing)} not there", "Fetch the missing files too")
    return choice


def _is_gguf_model(name: str) -> bool:
    base = name.rpartition("/")[2].lower()
    # Vision projectors and importance matrices share the container but are no models.
    return base.endswith(".gguf") and not base.startswith(".") and "mmproj" not in base and "imatrix" not in base


def _is_companion(name: str) -> bool:
    folder, _, base = name.rpartition("/")
    if folder:
        return base.endswith(".jinja") and folder == "additional_chat_templates"
    return base.endswith((".json", ".jinja")) or base == "tokenizer.model"


def _safetensors(names: Collection[str]) -> list[str]:
    top = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    # Repositories may hold the same weights again in another layout or precision, and adapters.
    standard = [name for name in top if name == "model.safetensors" or _SHARD.fullmatch(name)]
    return standard or [name for name in top if not name.startswith(("consolidated", "adapter_"))]


def _expected(choice: Choice) -> set[str]:
    expected = set(choice.weights)
    for name in choice.weights:
        if shard := _SHARD.fullmatch(name):
            width, count = len(shard["count"]), int(shard["count"])
            expected |= {f"model-{i:0{width}d}-of-{shard['count']}.safetensors" for i in range(1, count + 1)}
    return expected


def _has_tag(name: str, tag: str) -> bool:
    if tag.lower() in (name.lower(), name.rpartition("/")[2].lower()):
        return True
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(tag)}(?![A-Za-z0-9_])", name, re.IGNORECASE) is not None


def _one(
    source: object, found: list[tuple[str, ...]], ggufs: list[tuple[str, ...]], quant: str | None
) -> tuple[str, ...]:
    if len(found) == 1:
        return found[0]
    if not found:
        there = f"it holds {_listed([parts[0] for parts in ggufs])}" if ggufs else "it holds no GGUF file"
        raise SourceError(source, f"has no GGUF file of quantization {quant!r}; {there}", "Name one that is there")
    which = f" of quantization {quant!r}" if quant else ""
    listed = _listed([parts[0] for parts in found])
    raise SourceError(source, f"holds {len(found)} GGUF models{which}: {listed}", "Name one of these files")


def _nothing(source: object, names: Collection[str]) -> SourceError:
    pickles = sorted(name for name in names if name.lower().endswith(_PICKLES))
    remedy = "Give a .gguf file, or safetensors with their config.json"
    safetensors = sorted(name for name in names if name.endswith(".safetensors"))
    if safetensors and "config.json" not in names:
        return SourceError(source, f"has no config.json to go with {_listed(safetensors)}", remedy)
    if safetensors:
        return SourceError(
            source, f"has weights of another layout or of an adapter only: {_listed(safetensors)}", remedy
        )
    if pickles:
        problem = f"holds only pickled or foreign weights ({_listed(pickles)}), which can run code when read"
        return SourceError(source, problem, f"They are never opened. {remedy}")
    return SourceError(source, "holds no model file", remedy)


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
