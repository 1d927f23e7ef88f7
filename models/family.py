"""`Family`: what one model family adds to the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inferax.models.config import ModelConfig
from inferax.models.readings import GGUFConfig, HFConfig
from inferax.models.weights import NameTable


@dataclass(frozen=True)
class Family:
    """How a family's files are read; its name is the HF model_type it is known by."""

    name: str
    hf_types: tuple[str, ...]  # config.json's model_type
    gguf_architectures: tuple[str, ...]  # general.architecture
    from_hf: Callable[[HFConfig], ModelConfig]
    from_gguf: Callable[[GGUFConfig], ModelConfig]
    hf_names: Callable[[ModelConfig], NameTable]
    gguf_names: Callable[[ModelConfig], NameTable]
