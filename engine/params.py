"""`SamplingParams`: how a request's tokens are chosen, with vLLM's names."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from inferax.errors import RequestError
from inferax.ops.sampler_rows import STAGES

if TYPE_CHECKING:
    from inferax.engine.structured import StructuredOutputs

MAX_LOGPROBS = 20
MAX_BIASED = 300
MAX_WANTED = 32
MAX_BAD_WORDS = 64
BREAKERS = ("\n", ":", '"', "*")
_INT32 = 2**31
_FLOAT32 = float(np.finfo(np.float32).max)
_NEUTRAL: dict[str, Any] = {"extra_args": None}
# The fields that each stage of the sampler's chain reads, with the value at which it does nothing.
_STAGE_FIELDS: dict[str, dict[str, float]] = {
    "penalties": {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1},
    "dry": {"dry_multiplier": 0},
    "top_n_sigma": {"top_n_sigma": 0},
    "temperature": {"dynatemp_range": 0},
    "typical_p": {"typical_p": 1},
    "min_p": {"min_p": 0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1},
    "xtc": {"xtc_probability": 0},
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. Every value is checked; a wrong one is a RequestError naming it.

    n: how many samples of the prompt. seed: None draws one, which the output tells.
    temperature: 0 is greedy. dynatemp_range, dynatemp_exponent: the temperature moves in temperature ± range with the
    entropy, to that power (llama.cpp). top_k: 0 or -1 keeps all. top_p, min_p, typical_p: shares of the mass, of the
    best token's probability, of the mass nearest to the entropy. top_n_sigma: keeps logits within n standard deviations
    of the best; 0 or -1 keeps all. xtc_probability, xtc_threshold: how often all but the least likely of the tokens
    above the threshold are removed. mirostat_mode: 0, or 2 with mirostat_tau (bits) and mirostat_eta; it draws last.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens in the answer so far, once, and once for
    each time. repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer
    (Keskar et al. 2019). penalty_last_n: all three count the last n tokens of prompt and answer instead; -1 all, 0
    none. dry_*: a token that would continue a repetition of m >= dry_allowed_length tokens within the last
    dry_penalty_last_n (-1: all) loses dry_multiplier * dry_base ** (m - dry_allowed_length); no repetition goes across
    a token with one of dry_sequence_breakers in its text, or that ends the breaker's own encoding.
    samplers: the stages of the chain in order; what it leaves out must be neutral. min_tokens: no end or stop token
    before that many. allowed_token_ids: no other token can come. bad_words: texts that cannot be completed, where they
    begin in the prompt too. logit_bias: added to the logits of these ids. logits_processors: parameters of registered
    processors by name. All these come before the chain, in this order. structured_outputs: the form of the answer, as
    `StructuredOutputs` or a dict of its fields.
    max_tokens: new tokens at most (None: up to the context's end; 0 only with prompt_logprobs). stop: strings that end
    the text; they are not part of it unless include_stop_str_in_output. logprobs: how many of the most likely tokens to
    report at each position, besides the chosen one. logprob_token_ids: ids to report besides. prompt_logprobs: as
    logprobs, for each token of the prompt after the first; such a request reads no cached prefix.
    extra_args is accepted at its neutral value only.
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
    penalty_last_n: int | None = None
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | tuple[int, ...] | None = None
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] | tuple[str, ...] = BREAKERS
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: list[str] | tuple[str, ...] = STAGES
    logits_processors: dict[str, dict[str, Any]] | None = None
    structured_outputs: StructuredOutputs | dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) != neutral:
                raise RequestError(name, f"{getattr(self, name)!r} is not supported; only {neutral!r} is")
        self._integer("n", 1, 2**28)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, low_open=True)
        self._integer("top_k", -1, _INT32)
        self._number("min_p", 0.0, 1.0)
        if self.seed is not None:
            self._integer("seed", -(2**63))
            if self.seed >= 2**64:
                raise RequestError("seed", f"{self.seed} does not fit 64 bits")
        if self.max_tokens is not None:
            self._integer("max_tokens", 1 if self.prompt_logprobs is None else 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0)
                if getattr(self, name) > MAX_LOGPROBS:
                    raise RequestError(name, f"{getattr(self, name)} is more than {MAX_LOGPROBS}")
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.0, math.inf, low_open=True)
        self._integer("min_tokens", 0, _INT32)
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
        for token in self.logprob_token_ids or ():
            self._token("logprob_token_ids", token)
        if len(self.logprob_token_ids or ()) > MAX_WANTED:
            raise RequestError(
                "logprob_token_ids", f"it has {len(self.logprob_token_ids or ())}, more than {MAX_WANTED}"
            )
        self._texts("bad_words", self.bad_words or ())
        if len(self.bad_words or ()) > MAX_BAD_WORDS // 2:  # each stands for itself and for itself after a space
            raise RequestError("bad_words", f"it has {len(self.bad_words or ())}, more than {MAX_BAD_WORDS // 2}")
        self._check_chain()
        if self.structured_outputs is not None:
            self._check_form()
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

    def _check_form(self) -> None:
        from inferax.engine.structured import StructuredOutputs

        given: Any = self.structured_outputs
        if isinstance(given, dict):
            unknown = sorted(set(given) - {f.name for f in fields(StructuredOutputs)})
            if unknown:
                raise RequestError("structured_outputs", f"it has no field {unknown[0]!r}")
            object.__setattr__(self, "structured_outputs", StructuredOutputs(**given))
        elif not isinstance(given, StructuredOutputs):
            raise RequestError("structured_outputs", f"{given!r} is no StructuredOutputs")

    def _check_chain(self) -> None:
        self._number("typical_p", 0.0, 1.0, low_open=True)
        self._number("top_n_sigma", -1.0, math.inf)
        if self.top_n_sigma < 0:
            object.__setattr__(self, "top_n_sigma", 0.0)
        self._number("xtc_probability", 0.0, 1.0)
        self._number("xtc_threshold", 0.0, 1.0)
        self._number("dynatemp_range", 0.0, math.inf)
        self._number("dynatemp_exponent", 0.0, math.inf)
        self._number("dry_multiplier", 0.0, math.inf)
        self._number("dry_base", 1.0, math.inf)
        self._integer("dry_allowed_length", 1, _INT32)
        self._integer("dry_penalty_last_n", -1, _INT32)
        self._texts("dry_sequence_breakers", self.dry_sequence_breakers)
        if self.penalty_last_n is not None:
            self._integer("penalty_last_n", -1, _INT32)
        self._integer("mirostat_mode", 0)
        if self.mirostat_mode not in (0, 2):
            raise RequestError("mirostat_mode", f"{self.mirostat_mode} is neither 0 nor 2")
        self._number("mirostat_tau", 0.0, math.inf, low_open=True)
        self._number("mirostat_eta", 0.0, math.inf)
        for stage in self.samplers:
            if stage not in STAGES:
                raise RequestError("samplers", f"{stage!r} is none of {', '.join(STAGES)}")
        if len(set(self.samplers)) != len(self.samplers):
            raise RequestError("samplers", f"{list(self.samplers)} names one twice")
        for stage in set(STAGES) - set(self.samplers):
            for name, neutral in _STAGE_FIELDS[stage].items():
                value = getattr(self, name)
                if value != neutral and not (name == "top_k" and value < 0):
                    raise RequestError(name, f"it is {value}, but samplers leaves out {stage!r}")
        if "temperature" not in self.samplers and self.temperature not in (0, 1):
            raise RequestError("temperature", f"it is {self.temperature}, but samplers leaves out 'temperature'")

    def _texts(self, name: str, values: Any) -> None:
        if isinstance(values, str) or not all(isinstance(value, str) and value for value in values):
            raise RequestError(name, f"{values!r} is not a list of non-empty strings")

    @property
    def needs_slot(self) -> bool:
        """Whether the sampler must be told more of the request than its row of numbers."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1, self.dry_multiplier)
        given = (self.logit_bias, self.bad_words, self.logits_processors, self.logprob_token_ids)
        more = (self.min_tokens, self.mirostat_mode, self.allowed_token_ids is not None)
        return any(penalties) or any(given) or any(more)

    @property
    def named_tokens(self) -> dict[str, list[int]]:
        """Token ids by the field that names them."""
        return {
            "stop_token_ids": list(self.stop_token_ids or ()),
            "logit_bias": list(self.logit_bias or ()),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "logprob_token_ids": list(self.logprob_token_ids or ()),
        }

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _token(self, name: str, token: Any) -> None:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(name, f"{token!r} is not a token id")

    def _integer(self, name: str, least: int, end: int | None = None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(name, f"{value!r} is not an integer")
        if value < least:
            raise RequestError(name, f"{value} is less than {least}")
        if end is not None and value >= end:
            raise RequestError(name, f"{value} is not less than {end}")

    def _number(self, name: str, low: float, high: float, *, low_open: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _FLOAT32:
            raise RequestError(name, f"{value!r} is not a finite float32")
        if value < low or value > high or (low_open and value == low):
            bracket = "(" if low_open else "["
            raise RequestError(name, f"{value} is not in {bracket}{low}, {high}]")


FIELDS = tuple(f.name for f in fields(SamplingParams))
