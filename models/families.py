"""The known families, and how to find the one that a file belongs to."""

from __future__ import annotations

import difflib

from inferax.errors import LoadError
from inferax.models import gemma3, llama, mistral, qwen2, qwen3
from inferax.models.family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, gemma3.FAMILY)


def family_of_hf(model_type: object, file: str) -> Family:
    """The family of a config.json's model_type; an unknown one is an error that names the nearest known."""
    for family in FAMILIES:
        if model_type in family.hf_types:
            return family
    known = [t for f in FAMILIES for t in f.hf_types]
    raise _unknown("model_type", model_type, known, file)


def family_of_gguf(architecture: object, file: str) -> Family:
    """The family of a GGUF file's general.architecture."""
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    known = [a for f in FAMILIES for a in f.gguf_architectures]
    raise _unknown("general.architecture", architecture, known, file)


def _unknown(key: str, value: object, known: list[str], file: str) -> LoadError:
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
    hint = f"The nearest known one is {near[0]!r}. " if near else ""
    return LoadError(file, f"{key} {value!r} is unknown", f"{hint}Known: {', '.join(sorted(known))}.")
