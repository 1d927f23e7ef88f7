"""From the headers of a model's files to its config; no weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inferax.errors import LoadError
from inferax.loaders.gguf import GGUFFile
from inferax.models.config import ModelConfig
from inferax.models.families import family_of_gguf, family_of_hf
from inferax.models.readings import GGUFConfig, HFConfig


def gguf_config(file: GGUFFile, path: Path) -> ModelConfig:
    """The config that a GGUF file's metadata and tensor names tell."""
    family = family_of_gguf(file.metadata.get("general.architecture"), str(path))
    shapes = {name: info.shape for name, info in file.tensors.items()}
    return family.from_gguf(GGUFConfig(file.metadata, str(path), shapes, file.read))


def hf_config(directory: Path) -> ModelConfig:
    """The config that a directory's config.json tells."""
    values = config_json(directory)
    file = str(directory / "config.json")
    return family_of_hf(values.get("model_type"), file).from_hf(HFConfig(values, file))


def config_json(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(path, "the file is missing", "A model directory needs its config.json.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LoadError(path, f"it is not valid JSON ({error})", "Fetch it again.") from None
    if not isinstance(values, dict):
        raise LoadError(path, "it is not a JSON object", "Fetch it again.")
    return values
