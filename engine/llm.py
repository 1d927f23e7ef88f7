"""`LLM`: offline generation in batches, with vLLM's names."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inferax.engine.backend import Backend
from inferax.engine.build import build_engine
from inferax.engine.core import EngineCore, Event
from inferax.engine.metrics import Metric, snapshot
from inferax.engine.outputs import RequestMetrics, RequestOutput
from inferax.engine.params import SamplingParams
from inferax.engine.requests import Messages, Prompt, Rendered, Requests
from inferax.engine.runner import Runner
from inferax.engine.sampler import LogitsProcessor
from inferax.engine.scheduler import Policy
from inferax.engine.sequence import Sequence as Seq
from inferax.errors import EngineError, RequestError
from inferax.loaders.model import Model
from inferax.loaders.progress import progress_class
from inferax.ops.linear import Compute


class LLM:
    """A model with an engine around it.

    model: a path, a Hugging Face id, None for the built-in default model, or a loaded `Model`.
    compute: "fast" (the default: KV cache in bfloat16; platforms may quantize activations) or "exact" (float32).
    max_model_len: tokens of prompt and answer at most; by default the model's context, or what fits the KV cache.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens per step.
    kv_cache_memory_bytes: size of the KV cache; by default room for one sequence of full length, or for 4,096 tokens
        of each if that is more, at most half of the memory that everything else leaves free.
    kv_cache_dtype: "f32", "bf16", "int8", "fp8", or "auto": bf16 for fast, f32 for exact.
    scheduling_policy: "fcfs", "priority" or "lpm" (longest cached prefix first).
    enable_prefix_caching: whether prompts reuse the pages of earlier ones with the same beginning.
    seed: makes the seeds of requests without one reproducible.
    logits_processors: what requests may name in `SamplingParams.logits_processors`; compiled into the sampler.
    reasoning_end: text or token ids at which a reasoning block ends; `structured_outputs` holds from there on.
    warm_up: builds all programs of a step now, while the weights are read, and not when they are first needed.
    progress: bars on stderr while fetching, loading and compiling.
    Raises LoadError or SourceError for a model that cannot be loaded, RequestError for an impossible size.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model | None = None,
        *,
        compute: Compute = "fast",
        dtype: Any = None,
        revision: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 256,
        kv_cache_memory_bytes: int | None = None,
        kv_cache_dtype: str = "auto",
        scheduling_policy: Policy = "fcfs",
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        progress: bool = False,
        logits_processors: Sequence[LogitsProcessor] = (),
        reasoning_end: str | Sequence[int] | None = None,
        warm_up: bool = False,
        backend: Backend | None = None,
    ) -> None:
        self._progress = progress
        engine = build_engine(
            model,
            compute=compute,
            dtype=dtype,
            revision=revision,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=kv_cache_dtype,
            scheduling_policy=scheduling_policy,
            enable_prefix_caching=enable_prefix_caching,
            progress=progress,
            logits_processors=logits_processors,
            warm_up=warm_up,
            backend=backend,
            on_compile=self._announce,
        )
        self.model, self.config, self.max_model_len = engine.model, engine.config, engine.max_model_len
        self.memory_plan = engine.plan
        self.tokenizer = self.model.tokenizer
        self._core = EngineCore(engine.runner, engine.scheduler)
        self._requests = Requests(self.model, self.max_model_len, seed, self.runner.processors, reasoning_end)
        self._events: dict[str, deque[Event]] = {}
        self._count = 0

    @property
    def backend(self) -> Backend:
        return self.runner.backend

    @property
    def runner(self) -> Runner:
        """What holds the device's side; for tests and measurements."""
        return self._core.runner

    @property
    def core(self) -> EngineCore:
        """What runs the requests; for tests and measurements."""
        return self._core

    def metrics(self) -> list[Metric]:
        """Counters, gauges and histograms of what ran so far."""
        return snapshot(self._core)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts: strings, lists of token ids, or {"prompt": …} / {"prompt_token_ids": …}.

        Returns one RequestOutput per prompt, in order. Raises RequestError before anything runs where a prompt or a
        parameter is wrong; StepError or EngineDeadError where a request failed, once all others have finished: the
        error's `outputs` holds them all, and each that failed has an `error`.
        """
        many = _prompts(prompts)
        return self._run([self._requests.prompt(p) for p in many], _params(sampling_params, len(many)), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, rendered with the model's own chat template."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self._run(prompts, _params(sampling_params, len(prompts)), use_tqdm)

    def stream(
        self, prompt: Prompt | Rendered, sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[str, RequestOutput]]:
        """Completes one prompt (or one rendered by `render`), giving new text and the output so far at every token.

        Streams may be read in turns, and run together then. One that is left early ends its request. Raises as
        `generate` does, at the end.
        """
        ((request, seqs),) = self._make([self._requests.prompt(prompt)], _params(sampling_params, 1))
        started = time.perf_counter()
        first = None
        for event in self._drive([(request, seqs)]):
            now = time.perf_counter() - started
            first = now if first is None else first
            request.finished = all(s.finished for s in seqs)
            request.metrics = RequestMetrics(first, now)
            yield event.text, request
        _raise_failed([request])

    def render(self, messages: Messages, **kwargs: Any) -> Rendered:
        """A conversation as the text and token ids that the model sees. Never doubles the BOS token.

        Raises TemplateError where the model has no template, or the template raises.
        """
        return self._requests.render(messages, **kwargs)

    def _make(
        self, prompts: Sequence[Rendered], params: Sequence[SamplingParams]
    ) -> list[tuple[RequestOutput, list[Seq]]]:
        made = []
        for prompt, p in zip(prompts, params, strict=True):
            made.append(self._requests.make(str(self._count), prompt, p))
            self._count += 1
        return made

    def _run(
        self, prompts: Sequence[Rendered], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        requests = self._make(prompts, params)
        unfinished = {output.request_id: len(seqs) for output, seqs in requests}
        first: dict[str, float] = {}
        started = time.perf_counter()
        by_id = {output.request_id: output for output, _ in requests}
        with progress_class(use_tqdm)(total=len(requests), desc="Prompts", unit="prompt") as bar:
            for event in self._drive(requests):
                request_id = event.seq.request_id
                now = time.perf_counter() - started
                first.setdefault(request_id, now)
                unfinished[request_id] -= event.finished
                if not unfinished[request_id]:
                    by_id[request_id].finished = True
                    by_id[request_id].metrics = RequestMetrics(first[request_id], now)
                    bar.update(1)
        outputs = [output for output, _ in requests]
        _raise_failed(outputs)
        return outputs

    def _drive(self, requests: Sequence[tuple[RequestOutput, list[Seq]]]) -> Iterator[Event]:
        """Runs requests to their end, and gives their events. What others have under way runs along."""
        events: deque[Event] = deque()
        left = sum(len(seqs) for _, seqs in requests)
        try:
            for output, seqs in requests:
                self._events[output.request_id] = events
                self._core.add(seqs)
            while left:
                while events:
                    event = events.popleft()
                    left -= event.finished
                    yield event
                if left:
                    for event in self._core.step():
                        self._events[event.seq.request_id].append(event)
        finally:
            for output, _ in requests:
                self._events.pop(output.request_id, None)
                self._core.abort(output.request_id)

    def _announce(self, program: str) -> None:
        if self._progress:
            print(f"Compiling {program.split('(')[0]} …", file=sys.stderr, flush=True)


def _raise_failed(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        if isinstance(output.error, EngineError):
            output.error.outputs = outputs
            raise output.error


def _params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError("sampling_params", f"{len(params)} given for {count} prompts")
    return list(params)


def _prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], int) else items
