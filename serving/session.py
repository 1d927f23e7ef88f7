"""One model in a terminal: it opens with progress on stderr, and answers on stdout with figures on stderr."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from inferax.engine.backend import XlaBackend
from inferax.engine.llm import LLM
from inferax.engine.outputs import RequestOutput
from inferax.engine.params import SamplingParams
from inferax.errors import RequestError
from inferax.loaders.cache import cache_folder
from inferax.loaders.progress import progress_class
from inferax.serving.text import printable

Messages = Sequence[Mapping[str, str]]
Rendered = tuple[str | None, list[int]]


def shows_progress(args: Namespace) -> bool:
    """Whether there are progress bars: where somebody may be watching, or where they are asked for."""
    return bool(args.progress or (sys.stderr.isatty() and not args.quiet))


def keep_compilations() -> None:
    """Turns jax's own compilation cache on: unlike the backend's executables, its entries outlive a change of inferax's
    code."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))


class Session:
    """An `LLM` for one conversation at a time, made from the command line's arguments."""

    def __init__(self, args: Namespace) -> None:
        started = time.perf_counter()
        self.quiet: bool = args.quiet
        self._progress = shows_progress(args)
        self._compiling: Any = None
        keep_compilations()
        self._backend = XlaBackend(programs=cache_folder() / "programs", on_compile=self._announce)
        self.llm = LLM(
            args.model,
            revision=args.revision,
            compute=args.compute,
            max_model_len=args.max_model_len,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            kv_cache_dtype=args.kv_cache_dtype,
            max_num_seqs=1,
            progress=self._progress,
            backend=self._backend,
        )
        self._opening_s = time.perf_counter() - started

    def generate(self, prompt: str, params: SamplingParams, *, system: str | None, raw: bool) -> int:
        """Answers one prompt: by the model's chat template if it has one and `raw` does not forbid it."""
        if raw or self.llm.model.template is None:
            if system is not None:
                raise RequestError("system", f"{self.llm.model.source} has no chat template to put it in")
            self.answer(prompt, params)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            self.answer(self.render([*messages, {"role": "user", "content": prompt}]), params)
        return 0

    def render(self, messages: Messages) -> Rendered:
        """A conversation as the prompt of its next answer."""
        return self.llm.render(messages, add_generation_prompt=True)

    def answer(self, prompt: str | Rendered, params: SamplingParams, stop: Callable[[], bool] | None = None) -> str:
        """Streams an answer to stdout and returns it. `stop` is asked after every token whether that is enough."""
        show = printable if sys.stdout.isatty() else str
        text, output = "", None
        try:
            for new, so_far in self.llm.stream(prompt, params):
                output = so_far
                self._end_progress()
                if new:
                    text += new
                    sys.stdout.write(show(new))
                    sys.stdout.flush()
                if stop is not None and stop():
                    break
        finally:
            self._end_progress()
            if text and not text.endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()
        if output is not None:
            self.note(self._figures(output, params))
        return text

    def note(self, text: str) -> None:
        """Tells something on stderr that is not an error."""
        if not self.quiet:
            print(f"[{text}]", file=sys.stderr, flush=True)

    def _figures(self, output: RequestOutput, params: SamplingParams) -> str:
        sample, metrics = output.outputs[0], output.metrics
        count = len(sample.token_ids)
        figures = [f"{len(output.prompt_token_ids)} tokens in, {count} out"]
        if metrics is not None:
            figures.append(f"first token after {metrics.time_to_first_token_s:.2f} s")
            decode_s = metrics.total_s - metrics.time_to_first_token_s
            if count > 1 and decode_s > 0:
                figures.append(f"then {(count - 1) / decode_s:.1f} tokens/s")
        if sample.finish_reason == "abort":
            figures.append("stopped")
        elif sample.finish_reason == "length":
            full = f"context of {self.llm.max_model_len} tokens full"
            figures.append(f"--max-tokens {count} reached" if count == params.max_tokens else full)
        if params.temperature > 0:
            figures.append(f"seed {sample.seed}")
        if self._opening_s:
            figures.append(f"ready in {self._opening_s:.1f} s")
            self._opening_s = 0.0
        stats = self._backend.stats
        if stats.compiled:
            figures.append(f"{stats.compiled} programs compiled in {stats.compile_seconds:.1f} s")
            stats.compiled, stats.compile_seconds = 0, 0.0
        return ", ".join(figures)

    def _announce(self, program: str) -> None:
        if not self._progress:
            return
        if self._compiling is None:
            bar = "{desc}: program {n} [{elapsed}]"
            self._compiling = progress_class(True)(desc="Compiling", bar_format=bar, leave=False)
        self._compiling.set_description(f"Compiling {program.split('(')[0].strip()}", refresh=False)
        self._compiling.update(1)
        self._compiling.refresh()

    def _end_progress(self) -> None:
        if self._compiling is not None:
            self._compiling.close()
            self._compiling = None
