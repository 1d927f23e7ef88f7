"""What a request returns, in the shapes of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model's own distribution, its rank (1 is the most likely; None for ids that
    were asked for by name), and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample of a request. `stop_reason` is the stop string or token id that ended it, None for EOS."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds, from the moment the request was given to the engine."""

    time_to_first_token_s: float
    total_s: float


@dataclass
class RequestOutput:
    """All samples of one request. `prompt_logprobs` begins with None: nothing comes before the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
