"""`inferax perplexity`: how well a model predicts a text."""

from __future__ import annotations

import json
import math
import sys
import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from inferax.engine.llm import LLM
from inferax.engine.params import SamplingParams
from inferax.errors import RequestError
from inferax.loaders.progress import progress_class
from inferax.serving.session import keep_compilations, shows_progress

_WINDOWS_AT_ONCE = 16


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-probability of the scored tokens, and its standard error."""

    perplexity: float
    standard_error: float
    tokens: int
    windows: int
    context: int
    compute: str


def perplexity(args: Namespace) -> int:
    """Prints the perplexity of a file's text, and returns the exit code."""
    text = _text(args.file)
    keep_compilations()
    shows = shows_progress(args)
    try:
        llm = LLM(
            args.model,
            revision=args.revision,
            compute=args.compute,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=args.context + 1,
            max_num_seqs=4,
            max_num_batched_tokens=max(args.context, 256),
            enable_prefix_caching=False,
            progress=shows,
        )
    except RequestError as error:
        if error.field != "max_model_len":
            raise
        problem = str(error).removeprefix("max_model_len: ")
        raise RequestError("context", f"a window of {args.context} tokens and one more: {problem}") from None
    started = time.perf_counter()
    found = measure(llm, text, args.context, progress=shows)
    seconds = time.perf_counter() - started
    if args.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(f"perplexity {found.perplexity:.4f} ± {found.standard_error:.4f}")
    if not args.quiet:
        rate = found.windows * found.context / seconds
        what = f"{found.tokens} tokens scored in {found.windows} windows of {found.context}"
        print(f"[{what}, {llm.config.compute}, {rate:.0f} tokens/s]", file=sys.stderr)
    return 0


def measure(llm: LLM, text: str, context: int, *, progress: bool = False) -> Perplexity:
    """Cuts the text into windows of `context` tokens and scores the second half of each, as llama.cpp does, so that
    every scored token has at least half a window before it. Where the model's texts begin with BOS, each window does.

    Raises RequestError for a text that is shorter than one window.
    """
    ids = llm.tokenizer.encode(text)
    windows = [ids[at : at + context] for at in range(0, len(ids) - context + 1, context)]
    if not windows:
        raise RequestError("file", f"its text has {len(ids)} tokens; a window takes {context} (see --context)")
    if llm.tokenizer.add_bos and llm.tokenizer.bos_id is not None:
        windows = [[llm.tokenizer.bos_id, *window[1:]] for window in windows]
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
    first = context // 2 + 1
    scores: list[float] = []
    with progress_class(progress)(total=len(windows) * context, desc="Scoring", unit=" tokens") as bar:
        for at in range(0, len(windows), _WINDOWS_AT_ONCE):
            for output in llm.generate(windows[at : at + _WINDOWS_AT_ONCE], params):
                tables = zip(output.prompt_logprobs or (), output.prompt_token_ids, strict=True)
                scores += [table[token].logprob for table, token in list(tables)[first:] if table is not None]
                bar.update(context)
    values = -np.asarray(scores, np.float64)
    mean = float(values.mean())
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.inf
    return Perplexity(
        math.exp(mean), math.exp(mean) * error, len(values), len(windows), context, llm.config.compute
    )  # fmt: skip


def _text(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise RequestError("file", f"{file}: {error.strerror}") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise RequestError("file", f"{file} is not UTF-8 ({error.reason} at byte {error.start})") from None
