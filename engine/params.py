"""`SamplingParams`: how a request's tokens are chosen, with vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from inferax.errors import RequestError

MAX_LOGPROBS = 20
MAX_BIASED = 300
_NEUTRAL: dict[str, Any] = {
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
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer so far, once, and once for
    each time. repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer
    (Keskar et al. 2019). min_tokens: no end or stop token before that many. logit_bias: added to the logits of these
    ids. allowed_token_ids: no other token can come. Order: allowed ids, min_tokens, bias, penalties, temperature,
    min_p, top_k, top_p.
    prompt_logprobs: the same for each token of the prompt after the first; such a request reads no cached prefix.
    bad_words, structured_outputs and extra_args are accepted at their neutral value only.
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
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
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
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0)
                if getattr(self, name) > MAX_LOGPROBS:
                    raise RequestError(name, f"{getattr(self, name)} is more than {MAX_LOGPROBS}")
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.0, math.inf, low_open=True)
        self._integer("min_tokens", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        if len(self.logit_bias or {}) > MAX_BIASED:
            raise RequestError("logit_bias", f"it has {len(self.logit_bias or {})} entries, more than {MAX_BIASED}")
        for token, bias in (self.logit_bias or {}).items():
            self._token("logit_bias", token)
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise RequestError("logit_bias", f"{bias!r} for token {token} is not in [-100, 100]")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids", "it is empty, so that no token could come")
        for token in self.allowed_token_ids or ():
            self._token("allowed_token_ids", token)
        for stop in self.stop_strings:
            if not isinstance(stop, str) or not stop:
                raise RequestError("stop", f"{stop!r} is not a non-empty string")
        if self.stop_strings and not self.detokenize:
            raise RequestError("stop", "stop strings need detokenize=True")
        for token in self.stop_token_ids or ():
            self._token("stop_token_ids", token)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"{getattr(self, name)!r} is not a bool")

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1)
        return any(penalties) or self.min_tokens > 0 or bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def named_tokens(self) -> dict[str, list[int]]:
        """Token ids by the field that names them."""
        return {
            "stop_token_ids": list(self.stop_token_ids or ()),
            "logit_bias": list(self.logit_bias or ()),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
        }

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _token(self, name: str, token: Any) -> None:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(name, f"{token!r} is not a token id")

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
