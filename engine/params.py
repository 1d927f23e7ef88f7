"""`SamplingParams`: how a request's tokens are chosen, with vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from inferax.errors import RequestError

MAX_LOGPROBS = 20
_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "extra_args": None,
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. Every value is checked; a wrong one is a RequestError naming it.

    n: how many samples of the prompt. temperature: 0 is greedy. top_k: 0 or -1 keeps all.
    seed: None draws one, which the output tells. stop: strings that end the text; they are not part of it unless
    include_stop_str_in_output. max_tokens: new tokens at most (None: up to the context's end).
    logprobs: how many of the most likely tokens to report at each position, besides the chosen one.
    The fields from presence_penalty on are accepted at their neutral value only.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) != neutral:
                raise RequestError(name, f"{getattr(self, name)!r} is not supported; only {neutral!r} is")
        self._integer("n", 1)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, low_open=True)
        self._integer("top_k", -1)
        self._number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._integer("seed", -(2**63))
            if self.seed >= 2**64:
                raise RequestError("seed", f"{self.seed} does not fit 64 bits")
        if self.max_tokens is not None:
            self._integer("max_tokens", 1)
        if self.logprobs is not None:
            self._integer("logprobs", 0)
            if self.logprobs > MAX_LOGPROBS:
                raise RequestError("logprobs", f"{self.logprobs} is more than {MAX_LOGPROBS}")
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                raise RequestError("stop", f"{stop!r} is not a non-empty string")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop", "stop strings need detokenize=True")
        for token in self.stop_token_ids or ():
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise RequestError("stop_token_ids", f"{token!r} is not a token id")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"{getattr(self, name)!r} is not a bool")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(name, f"{value!r} is not an integer")
        if value < least:
            raise RequestError(name, f"{value} is less than {least}")

    def _number(self, name: str, low: float, high: float, *, low_open: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RequestError(name, f"{value!r} is not a finite number")
        if value < low or value > high or (low_open and value == low):
            bracket = "(" if low_open else "["
            raise RequestError(name, f"{value} is not in {bracket}{low}, {high}]")


FIELDS = tuple(f.name for f in fields(SamplingParams))
