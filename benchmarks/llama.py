"""What the benchmarks share of llama.cpp's C interface, through llama-cpp-python."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any


@cache  # the library goes on calling it
def _silence() -> Any:
    import llama_cpp

    return llama_cpp.llama_log_callback(lambda *_: None)


@cache
def library() -> Any:
    """llama_cpp, silenced."""
    import llama_cpp

    llama_cpp.llama_log_set(_silence(), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


def decode(context: Any, batch: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
    """Runs rows of (token, position, sequence, whether its logits are wanted). Raises RuntimeError where it can't."""
    for i, (token, position, sequence, wanted) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
        batch.logits[i] = wanted
    batch.n_tokens = len(rows)
    code = library().llama_decode(context, batch)
    if code != 0:
        raise RuntimeError(f"llama_decode returned {code}")
