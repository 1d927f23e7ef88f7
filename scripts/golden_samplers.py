"""Golden scores: what llama.cpp's samplers leave of rows of logits, as tests/golden/llama_samplers.gz.

    python scripts/golden_samplers.py SmolLM2-135M-Instruct.Q4_1.gguf

The model gives nothing but its vocabulary, which DRY's sequence breakers need. Needs llama-cpp-python and numpy;
nothing of inferax is imported here.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden" / "llama_samplers.gz"
VOCAB = 256
BREAKERS = ["\n", ":", '"', "*"]

# Each case: which row of logits, which tokens came before, and the samplers in their order, with inferax's names.
LOOP = [40, 41, 42, 43, 44, 45, 40, 41, 42, 43, 50, 51, 41, 42, 43]
CASES: list[dict[str, Any]] = [
    *({"row": r, "samplers": [{"typical_p": p}]} for r in (0, 1, 2) for p in (0.2, 0.5, 0.9, 0.99)),
    *({"row": r, "samplers": [{"top_n_sigma": n}]} for r in (0, 1, 2) for n in (0.5, 1.0, 2.5)),
    *({"row": r, "samplers": [{"top_k": k}]} for r in (0, 2) for k in (1, 7, 100, 1000)),
    *({"row": r, "samplers": [{"top_p": p}]} for r in (0, 1) for p in (0.1, 0.5, 0.95)),
    *({"row": r, "samplers": [{"min_p": p}]} for r in (0, 1) for p in (0.01, 0.1, 0.6)),
    *({"row": r, "samplers": [{"xtc_probability": 1.0, "xtc_threshold": t}]} for r in (0, 1) for t in (0.01, 0.1, 0.6)),
    *({"row": r, "samplers": [{"temperature": t}]} for r in (0, 1) for t in (0.3, 1.7)),
    *(
        {"row": r, "samplers": [{"temperature": t, "dynatemp_range": d, "dynatemp_exponent": e}]}
        for r in (0, 1, 2)
        for t, d, e in ((1.0, 0.5, 1.0), (0.8, 1.5, 1.0), (1.2, 0.4, 2.0))
    ),
    *(
        {"row": 0, "before": LOOP, "samplers": [{"penalty_last_n": n, "repetition_penalty": r, "frequency_penalty": f,
                                                 "presence_penalty": p}]}
        for n, r, f, p in ((-1, 1.3, 0.0, 0.0), (4, 1.3, 0.2, 0.5), (8, 0.7, -0.4, 0.1), (1, 2.0, 1.0, 0.0))
    ),
    *(
        {"row": 0, "before": before, "samplers": [
            {"dry_multiplier": 0.8, "dry_base": base, "dry_allowed_length": allowed, "dry_penalty_last_n": n}]}
        for before in (LOOP, [*LOOP, 198, 41, 42], [60] * 30, [1, 2, 3, 198, 1, 2, 3, 4, 1, 2, 3], [7, 8], [5])
        for base, allowed, n in ((1.75, 2, -1), (1.2, 1, -1), (1.75, 3, 9), (1.0, 2, -1))
    ),
    {"row": 1, "before": LOOP, "samplers": [
        {"penalty_last_n": -1, "repetition_penalty": 1.2, "frequency_penalty": 0.0, "presence_penalty": 0.0},
        {"dry_multiplier": 0.5, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1},
        {"top_n_sigma": 2.0}, {"top_k": 40}, {"typical_p": 0.9}, {"top_p": 0.9}, {"min_p": 0.02},
        {"xtc_probability": 1.0, "xtc_threshold": 0.1}, {"temperature": 0.7}]},
    {"row": 1, "samplers": [{"top_k": 12}, {"temperature": 2.0}, {"top_p": 0.8}, {"min_p": 0.3}]},
    {"row": 1, "samplers": [{"min_p": 0.3}, {"top_p": 0.8}, {"temperature": 2.0}, {"top_k": 12}]},
    {"row": 0, "samplers": [{"temperature": 1.5}, {"typical_p": 0.8}, {"xtc_probability": 1.0, "xtc_threshold": 0.05},
                            {"top_k": 5}]},
]  # fmt: skip
MIROSTAT = [{"row": 0, "tau": 3.0, "eta": 0.1}, {"row": 2, "tau": 5.0, "eta": 0.3}, {"row": 1, "tau": 0.5, "eta": 1.0}]


def rows() -> np.ndarray:
    rng = np.random.default_rng(11)
    return np.round(np.stack([rng.standard_normal(VOCAB) * s for s in (2.0, 4.0, 0.6)]), 4).astype(np.float32)


def sampler(vocab: Any, given: dict[str, Any]) -> Any:
    """One of llama.cpp's samplers, by inferax's names of its parameters."""
    g = given
    build: dict[str, Callable[[], Any]] = {
        "typical_p": lambda: llama_cpp.llama_sampler_init_typical(g["typical_p"], 0),
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(g["top_n_sigma"]),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(g["top_k"]),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(g["top_p"], 0),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(g["min_p"], 0),
        "xtc_probability": lambda: llama_cpp.llama_sampler_init_xtc(g["xtc_probability"], g["xtc_threshold"], 0, 1),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
            g["temperature"], g.get("dynatemp_range", 0.0), g.get("dynatemp_exponent", 1.0)
        ),
        "penalty_last_n": lambda: llama_cpp.llama_sampler_init_penalties(
            VOCAB, 1000 if g["penalty_last_n"] == -1 else g["penalty_last_n"], g["repetition_penalty"],
            g["frequency_penalty"], g["presence_penalty"],
        ),
        "dry_multiplier": lambda: llama_cpp.llama_sampler_init_dry(
            vocab, g["dry_multiplier"], g["dry_base"], g["dry_allowed_length"],
            1000 if g["dry_penalty_last_n"] == -1 else g["dry_penalty_last_n"],
            (ctypes.c_char_p * len(BREAKERS))(*(b.encode() for b in BREAKERS)), len(BREAKERS),
        ),
    }  # fmt: skip
    return build[next(iter(given))]()


def candidates(logits: np.ndarray) -> Any:
    data = (llama_cpp.llama_token_data * len(logits))()
    for i, value in enumerate(logits):
        data[i].id, data[i].logit, data[i].p = i, float(value), 0.0
    array = llama_cpp.llama_token_data_array(ctypes.cast(data, llama_cpp.llama_token_data_p), len(logits), -1, False)
    return array, data


def left(array: Any) -> dict[str, float]:
    """The logits of the tokens that are left. A sampler may mark a token as removed by its logit."""
    pairs = ((array.data[i].id, array.data[i].logit) for i in range(array.size))
    return {str(t): round(float(v), 5) for t, v in sorted(pairs) if v > -1e30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model
    llama = llama_cpp.Llama(model_path=str(model), vocab_only=True, verbose=False)
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    logits = rows()
    for case in CASES:
        array, keep = candidates(logits[case["row"]])
        for given in case["samplers"]:
            one = sampler(vocab, given)
            for token in case.get("before", []):
                llama_cpp.llama_sampler_accept(one, token)
            llama_cpp.llama_sampler_apply(one, ctypes.byref(array))
            llama_cpp.llama_sampler_free(one)
        case["left"] = left(array)
        del keep
    for case in MIROSTAT:
        one = llama_cpp.llama_sampler_init_mirostat_v2(42, case["tau"], case["eta"])
        case["steps"] = []
        for _ in range(8):
            array, keep = candidates(logits[case["row"]])
            llama_cpp.llama_sampler_apply(one, ctypes.byref(array))
            chosen = array.data[array.selected].id
            case["steps"].append({"kept": sorted(int(t) for t in left(array)), "token": int(chosen)})
            del keep
        llama_cpp.llama_sampler_free(one)
    pieces = [llama.detokenize([t], special=True).decode(errors="replace") for t in range(VOCAB)]
    golden = {
        "made_by": {
            "command": "python scripts/golden_samplers.py MODEL",
            "llama-cpp-python": version("llama-cpp-python"),
            "numpy": version("numpy"),
            "vocabulary of": {"file": model.name, "sha256": hashlib.sha256(model.read_bytes()).hexdigest()},
        },
        "breaks": [t for t, piece in enumerate(pieces) if any(b in piece for b in BREAKERS)],
        "logits": [[round(float(x), 4) for x in row] for row in logits],
        "cases": CASES,
        "mirostat": MIROSTAT,
    }
    GOLDEN.write_bytes(gzip.compress(json.dumps(golden, separators=(",", ":")).encode(), mtime=0))
    print(f"{GOLDEN}: {len(CASES)} cases, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
