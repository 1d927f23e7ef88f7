"""The small JSON files of a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferax.errors import LoadError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file. Raises LoadError if it cannot be read or is something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(path, f"it cannot be read as JSON ({error})", "Fetch it again") from None
    if not isinstance(values, dict):
        raise LoadError(path, f"it holds {type(values).__name__} where a JSON object should be", "Fetch it again")
    return values


def named_tokens(directory: Path) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and so on, from tokenizer_config.json and special_tokens_map.json."""
    config, older = read_json(directory / "tokenizer_config.json"), read_json(directory / "special_tokens_map.json")
    # As transformers has it: before configs listed the added tokens, the map had the last word.
    sources = (config, older) if "added_tokens_decoder" in config else (older, config)
    found = {name: _content(source.get(name)) for source in reversed(sources) for name in _NAMED if source.get(name)}
    return {name: text for name, text in found.items() if text is not None}


def listed_tokens(directory: Path) -> list[str]:
    """The texts of further special tokens that the same files list."""
    texts: list[str] = []
    for source in (read_json(directory / "tokenizer_config.json"), read_json(directory / "special_tokens_map.json")):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            value = source.get(key) or []
            values = list(value.values()) if isinstance(value, Mapping) else value
            texts += [text for item in values if (text := _content(item)) is not None]
    return list(dict.fromkeys(texts))


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None
