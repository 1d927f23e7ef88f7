"""What a request's texts and arrays mean to the engine: bad words, DRY's breakers, parameters of processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from inferax.engine.sampler import MAX_BAD_WORD_TOKENS, LogitsProcessor
from inferax.errors import RequestError
from inferax.loaders.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The token sequences that complete each word, as it stands and after a space."""
    found: list[list[int]] = []
    for word in words:
        for text in (word, f" {word}"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > MAX_BAD_WORD_TOKENS:
                problem = f"{word!r} has {len(ids)} tokens, more than {MAX_BAD_WORD_TOKENS}"
                raise RequestError("bad_words", problem)
            if ids and ids not in found:
                found.append(ids)
    return found


class Breakers:
    """The tokens at which DRY's repetitions end. The vocabulary is searched once for each breaker."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._tokens = lru_cache(maxsize=64)(self._search)

    def tokens(self, breakers: Sequence[str]) -> list[int]:
        """Every token with one of the texts in its own, or that ends the text's encoding."""
        return sorted({token for breaker in breakers for token in self._tokens(breaker)})

    def _search(self, breaker: str) -> tuple[int, ...]:
        if not self._texts:
            self._texts = [self._tokenizer.token_text(i) for i in range(self._tokenizer.vocab_size)]
        containing = [i for i, text in enumerate(self._texts) if breaker in text]
        return (*containing, *self._tokenizer.encode(breaker, add_special_tokens=False)[-1:])


def check_processors(
    given: Mapping[str, Mapping[str, Any]], processors: Sequence[LogitsProcessor]
) -> dict[str, dict[str, np.ndarray]]:
    """The parameters of a request's processors as arrays. Raises RequestError for what was not registered like that."""
    registered = {p.name: p for p in processors}
    found = {}
    for name, values in given.items():
        if name not in registered:
            known = ", ".join(sorted(registered)) or "none"
            raise RequestError("logits_processors", f"{name!r} is not registered; registered: {known}")
        wanted = registered[name].parameters
        if set(values) != set(wanted):
            raise RequestError(
                f"logits_processors.{name}", f"it has parameters {sorted(values)}, and takes {sorted(wanted)}"
            )
        found[name] = {key: _array(f"logits_processors.{name}.{key}", values[key], wanted[key]) for key in wanted}
    return found


def _array(field: str, value: Any, wanted: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
        if not np.can_cast(array.dtype, wanted.dtype, "same_kind") and array.dtype.kind not in "iu":
            raise ValueError(f"{array.dtype} is not {wanted.dtype}")
        return np.broadcast_to(array, wanted.shape).astype(wanted.dtype)
    except (TypeError, ValueError) as error:
        raise RequestError(field, f"it is no {wanted.dtype} array of shape {list(wanted.shape)} ({error})") from None
