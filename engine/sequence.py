"""`Sequence`: one sample of one request while it runs. The host's side of it; what it computes lives on the device."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from inferax.engine.outputs import CompletionOutput, Logprob
from inferax.engine.params import SamplingParams
from inferax.engine.sampler import LogitsProcessor, pack_request, slot_state


class TextSink(Protocol):
    """What turns tokens into text as they come."""

    def add(self, token: int, /) -> str: ...

    def flush(self) -> str: ...


class Matcher(Protocol):
    """Where a sequence stands in its grammar."""

    def fill_mask(self, row: np.ndarray, /) -> None:
        """Writes a bit for each token that may come next: int32 [ceil(V / 32)]."""
        ...

    def accept(self, token: int, /) -> None: ...


@dataclass(eq=False)
class Sequence:
    """`tokens` are those the host knows; the device may be one sampled token ahead (`pending`)."""

    request_id: str
    prompt: SequenceType[int]
    params: SamplingParams
    seed: int
    index: int
    max_tokens: int
    eos_ids: frozenset[int]
    detokenizer: TextSink | None = None
    token_text: Callable[[int], str] | None = None
    priority: int = 0
    salt: bytes = b""
    sibling: Sequence | None = None
    grammar: Matcher | None = None
    bad_words: SequenceType[SequenceType[int]] = ()
    breaks: SequenceType[int] = ()
    processors: SequenceType[str] = ()

    tokens: list[int] = field(init=False)
    computed: int = field(init=False, default=0)
    pending: int = field(init=False, default=0)
    slot: int = field(init=False, default=-1)
    slot_loaded: bool = field(init=False, default=False)
    # The scheduler's: pages of each cache group by block, the first block still held, hashes of full blocks.
    tables: list[list[int]] = field(init=False, default_factory=list)
    held_from: list[int] = field(init=False, default_factory=list)
    hashes: list[bytes] = field(init=False, default_factory=list)
    published: int = field(init=False, default=0)
    cached: int = field(init=False, default=0)
    arrival: int = field(init=False, default=-1)
    passed_over: int = field(init=False, default=0)
    output: CompletionOutput = field(init=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(init=False, default=None)
    sampler_row: np.ndarray = field(init=False)
    mu: float | None = field(init=False, default=None)  # mirostat's, after the last token
    _held: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        logprobs: list[dict[int, Logprob]] | None = [] if self.wants_logprobs else None
        self.output = CompletionOutput(
            self.index, "", [], 0.0 if logprobs is not None else None, logprobs, seed=self.seed
        )
        if self.params.prompt_logprobs is not None and self.index == 0:
            self.prompt_logprobs = [None]
        self.sampler_row = pack_request(
            self.params,
            seed=self.seed,
            index=self.index,
            prompt_len=self.prompt_len,
            has_grammar=self.grammar is not None,
            processors=self.processors,
        )

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def known(self) -> int:
        """Tokens known to the host or the device."""
        return len(self.tokens) + self.pending

    @property
    def wants_logprobs(self) -> bool:
        return self.params.logprobs is not None or bool(self.params.logprob_token_ids)

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still to come."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    @property
    def finished(self) -> bool:
        return self.output.finished

    @property
    def wants_compute(self) -> bool:
        """Whether there are tokens whose keys and values, or whose successor, are still to be computed."""
        return not self.finished and self.computed < self.known and not (self.exhausted and self.pending > 0)

    @property
    def exhausted(self) -> bool:
        """Whether as many tokens are sampled or on their way as the request may have."""
        return self.known - self.prompt_len >= self.max_tokens

    def slot_state(self, vocab_size: int, context: int, processors: SequenceType[LogitsProcessor]) -> dict[str, Any]:
        """What the sampler must know of the request, besides its row."""
        return slot_state(
            self.params,
            self.tokens,
            self.prompt_len,
            vocab_size=vocab_size,
            context=context,
            ends=[*self.eos_ids, *(self.params.stop_token_ids or ())],
            breaks=self.breaks,
            bad_words=self.bad_words,
            mu=self.mu,
            processors=processors,
        )

    def accept(self, token: int, logprobs: dict[int, Logprob] | None = None) -> str:
        """Takes a sampled token, ends the sequence where a stop condition holds, and returns the text that is new."""
        self.pending -= 1
        self.tokens.append(token)
        if self.grammar is not None:
            self.grammar.accept(token)
        out = self.output
        out.token_ids.append(token)
        if logprobs is not None and out.logprobs is not None and out.cumulative_logprob is not None:
            out.logprobs.append(logprobs)
            out.cumulative_logprob += logprobs[token].logprob
        stop_ids = self.params.stop_token_ids or ()
        if token in stop_ids or (token in self.eos_ids and not self.params.ignore_eos):
            out.finish_reason, out.stop_reason = "stop", token if token in stop_ids else None
        elif len(out.token_ids) >= self.max_tokens:
            out.finish_reason = "length"
        if self.detokenizer is None:
            return ""
        # The token that ends the sequence is not part of its text.
        ended_by_token = out.finish_reason == "stop"
        self._held += "" if ended_by_token else self.detokenizer.add(token)
        if out.finish_reason is not None:
            self._held += self.detokenizer.flush()
        return self._release()

    def flush(self) -> str:
        """Text that was held back, where the sequence ends for a reason that is not in its tokens."""
        if self.detokenizer is None:
            return ""
        text, self._held = self._held + self.detokenizer.flush(), ""
        self.output.text += text
        return text

    def _release(self) -> str:
        """Held text up to a stop string, or up to what may still become one."""
        out = self.output
        held = self._held
        stops = self.params.stop_strings if len(out.token_ids) >= self.params.min_tokens else ()
        found = [(held.find(stop), stop) for stop in stops if stop in held]
        if found:
            at, stop = min(found)
            end = at + len(stop) if self.params.include_stop_str_in_output else at
            out.finish_reason, out.stop_reason = "stop", stop
            text, self._held = held[:end], ""
        elif out.finish_reason is not None:
            text, self._held = held, ""
        else:
            keep = max((_overlap(held, stop) for stop in stops), default=0)
            text, self._held = held[: len(held) - keep], held[len(held) - keep :]
        out.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
