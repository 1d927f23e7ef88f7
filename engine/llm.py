"""`LLM`: offline generation in batches, with vLLM's names."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from inferax.engine.backend import Backend, XlaBackend
from inferax.engine.loop import Event, run, scheduler_for
from inferax.engine.memory import available_memory
from inferax.engine.outputs import RequestMetrics, RequestOutput
from inferax.engine.params import SamplingParams
from inferax.engine.programs import EngineShape
from inferax.engine.runner import Runner
from inferax.engine.scheduler import Policy
from inferax.engine.sequence import Sequence as Seq
from inferax.errors import RequestError
from inferax.loaders.cache import cache_folder
from inferax.loaders.detokenizer import Detokenizer
from inferax.loaders.model import Model, load
from inferax.loaders.progress import progress_class
from inferax.loaders.template import encode_chat
from inferax.ops.linear import Compute

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

_PAGE_SIZE = 16
_DEFAULT_KV_BYTES = 1 << 30


class LLM:
    """A model with an engine around it.

    model: a path, a Hugging Face id, None for the built-in default model, or a loaded `Model`.
    compute: "fast" (the default: KV cache in bfloat16; platforms may quantize activations) or "exact" (float32).
    max_model_len: tokens of prompt and answer at most; by default the model's context, or what fits the KV cache.
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens per step.
    kv_cache_memory_bytes: size of the KV cache; by default what the sequences can need, at most 1 GiB and a
        quarter of the memory that is free.
    scheduling_policy: "fcfs", "priority" or "lpm" (longest cached prefix first).
    enable_prefix_caching: whether prompts reuse the pages of earlier ones with the same beginning.
    seed: makes the seeds of requests without one reproducible.
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
        scheduling_policy: Policy = "fcfs",
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        progress: bool = False,
        backend: Backend | None = None,
    ) -> None:
        if compute not in ("exact", "fast"):
            raise RequestError("compute", f"{compute!r} is neither 'exact' nor 'fast'")
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value < 1:
                raise RequestError(name, f"{value} is less than 1")
        self._progress = progress
        self._backend = backend or XlaBackend(programs=cache_folder() / "programs", on_compile=self._announce)
        self.model = (
            model if isinstance(model, Model) else load(model, dtype=dtype, revision=revision, progress=progress)
        )
        self.config = replace(self.model.config, compute=compute)
        self.tokenizer = self.model.tokenizer
        self._cache_dtype = jnp.bfloat16 if compute == "fast" else jnp.float32
        shape = self._shape(max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory_bytes)
        self.max_model_len = min(
            self.config.context_length,
            max_model_len or shape.pages_per_seq[0] * _PAGE_SIZE,
            shape.num_pages[0] * _PAGE_SIZE,
        )
        self._scheduler = scheduler_for(
            shape, self.config.windows, policy=scheduling_policy, caching=enable_prefix_caching
        )
        self._runner = Runner(self.config, shape, self._backend, self.model.params, self._cache_dtype)
        self._seeds = np.random.default_rng(seed)
        self._count = 0

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def runner(self) -> Runner:
        """What holds the device's side; for tests and measurements."""
        return self._runner

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts: strings, lists of token ids, or {"prompt": …} / {"prompt_token_ids": …}.

        Returns one RequestOutput per prompt, in order. Raises RequestError before anything runs where a prompt or a
        parameter is wrong.
        """
        many = _prompts(prompts)
        return self._run([self._prompt(p) for p in many], self._params(sampling_params, len(many)), use_tqdm)

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
        return self._run(prompts, self._params(sampling_params, len(prompts)), use_tqdm)

    def stream(
        self, prompt: Prompt | tuple[str | None, list[int]], sampling_params: SamplingParams | None = None
    ) -> Iterator[tuple[str, RequestOutput]]:
        """Completes one prompt (or one rendered by `render`), giving new text and the output so far at every token."""
        given = prompt if _is_rendered(prompt) else self._prompt(prompt)  # type: ignore[arg-type]
        params = self._params(sampling_params, 1)
        requests = self._requests([given], params)  # type: ignore[list-item]
        started = time.perf_counter()
        first = None
        (request, seqs) = requests[0]
        for event in run(self._runner, seqs, self._scheduler):
            now = time.perf_counter() - started
            first = now if first is None else first
            request.finished = all(s.finished for s in seqs)
            request.metrics = RequestMetrics(first, now)
            yield event.text, request

    def render(self, messages: Messages, **kwargs: Any) -> tuple[str | None, list[int]]:
        """A conversation as the text and token ids that the model sees. Never doubles the BOS token.

        Raises TemplateError where the model has no template, or the template raises.
        """
        if self.model.template is None:
            raise RequestError(
                "messages", f"{self.model.source} has no chat template; use generate with a plain prompt instead"
            )
        text = self.model.template.render(messages, **kwargs)
        return text, self._ids(encode_chat(self.tokenizer, text))

    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._ids(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self._prompt(prompt["prompt"])
            raise RequestError("prompt", "a prompt mapping needs 'prompt' (a string) or 'prompt_token_ids'")
        if isinstance(prompt, str):
            return prompt, self._ids(self.tokenizer.encode(prompt))
        return None, self._ids(prompt)

    def _ids(self, ids: Any) -> list[int]:
        out = []
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError("prompt_token_ids", f"{token!r} is not a token id")
            if not 0 <= token < self.config.vocab_size:
                raise RequestError("prompt_token_ids", f"{token} is not in [0, {self.config.vocab_size})")
            out.append(int(token))
        return out

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise RequestError("sampling_params", f"{len(params)} given for {count} prompts")
        return list(params)

    def _requests(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Sequence[SamplingParams]
    ) -> list[tuple[RequestOutput, list[Seq]]]:
        requests = []
        for (text, ids), p in zip(prompts, params, strict=True):
            if not ids:
                raise RequestError("prompt", "it has no tokens")
            if len(ids) >= self.max_model_len:
                raise RequestError(
                    "prompt",
                    f"it has {len(ids)} tokens, which leaves no room for an answer in the context of "
                    f"{self.max_model_len} tokens; shorten it or raise max_model_len",
                )
            room = self.max_model_len - len(ids)
            for field, named in p.named_tokens.items():
                for token in named:
                    if token >= self.config.vocab_size:
                        raise RequestError(field, f"{token} is not in [0, {self.config.vocab_size})")
            seed = int(self._seeds.integers(2**63)) if p.seed is None else p.seed
            # Where frequencies follow the prompt's length, its keys fit no prompt of another length.
            salt = f"{len(ids)}".encode() if any(r.length_dependent for r in self.config.rotaries) else b""
            seqs = [
                Seq(
                    request_id=str(self._count),
                    prompt=ids,
                    params=p,
                    seed=seed,
                    index=i,
                    max_tokens=min(room, p.max_tokens or room),
                    eos_ids=frozenset(self.tokenizer.eos_ids),
                    detokenizer=self._detokenizer(p, ids),
                    token_text=self.tokenizer.token_text,
                    salt=salt,
                )
                for i in range(p.n)
            ]
            for other in seqs[1:]:
                other.sibling = seqs[0]
            output = RequestOutput(str(self._count), text, ids, [s.output for s in seqs], False)
            output.prompt_logprobs = seqs[0].prompt_logprobs
            requests.append((output, seqs))
            self._count += 1
        return requests

    def _detokenizer(self, params: SamplingParams, ids: list[int]) -> Detokenizer | None:
        if not params.detokenize:
            return None
        return Detokenizer(self.tokenizer, ids, skip_special_tokens=params.skip_special_tokens)

    def _run(
        self, prompts: Sequence[tuple[str | None, list[int]]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        requests = self._requests(prompts, params)
        by_id = {output.request_id: (output, seqs) for output, seqs in requests}
        first: dict[str, float] = {}
        started = time.perf_counter()
        bar = progress_class(use_tqdm)(total=len(requests), desc="Prompts", unit="prompt")
        with bar:
            for event in run(self._runner, [s for _, seqs in requests for s in seqs], self._scheduler):
                self._note(event, by_id, first, started, bar)
        return [output for output, _ in requests]

    def _note(self, event: Event, by_id: Mapping[str, Any], first: dict[str, float], started: float, bar: Any) -> None:
        request_id = event.seq.request_id
        now = time.perf_counter() - started
        first.setdefault(request_id, now)
        output, seqs = by_id[request_id]
        if event.seq.finished and all(s.finished for s in seqs):
            output.finished = True
            output.metrics = RequestMetrics(first[request_id], now)
            bar.update(1)

    def _shape(self, max_model_len: int | None, max_seqs: int, max_tokens: int, kv_bytes: int | None) -> EngineShape:
        config = self.config
        if max_model_len is not None and not 2 <= max_model_len <= config.context_length:
            raise RequestError("max_model_len", f"{max_model_len} is not in [2, {config.context_length}]")
        per_page = config.kv_bytes_per_token(jnp.dtype(self._cache_dtype).itemsize) * _PAGE_SIZE
        wanted = -(-(max_model_len or config.context_length) // _PAGE_SIZE)
        budget = kv_bytes or min(_DEFAULT_KV_BYTES, available_memory() // 4)
        pages = min(budget // per_page, wanted * max_seqs)
        if pages < 1 or (max_model_len is not None and pages < wanted):
            need = wanted * per_page
            raise RequestError(
                "kv_cache_memory_bytes",
                f"{budget} bytes hold {pages * _PAGE_SIZE} tokens; one sequence of {wanted * _PAGE_SIZE} needs {need}",
            )
        groups = len(config.windows)
        return EngineShape(max_seqs, max_tokens, _PAGE_SIZE, (min(wanted, pages),) * groups, (pages,) * groups)

    def _announce(self, program: str) -> None:
        if self._progress:
            import sys

            print(f"Compiling {program.split('(')[0]} …", file=sys.stderr, flush=True)


def _prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    return [items] if items and isinstance(items[0], int | np.integer) else items


def _is_rendered(prompt: Any) -> bool:
    return isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], list)
