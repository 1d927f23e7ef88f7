"""What a request returns, in the shapes of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from inferax.errors import InferaxError, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token under the model's own distribution, its rank (1 is the most likely; None for ids that
    were asked for by name), and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample of a request. `stop_reason` is the stop string or token id that ended it, None for EOS.

    `error` is why it ended where `finish_reason` is "error"; the tokens until then are good.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    seed: int | None = None
    error: InferaxError | None = None

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

    @property
    def error(self) -> InferaxError | None:
        """The error of the first sample that failed."""
        return next((out.error for out in self.outputs if out.error is not None), None)

    def echo(self, index: int = 0, prompt: str | None = None) -> CompletionOutput:
        """A sample with its prompt in front of it, as OpenAI's `echo` has it: text, token ids, and log-probabilities
        where both sides have them (the first is empty). prompt: its text, where it was given as token ids.

        Raises RequestError where the prompt has no text.
        """
        text = self.prompt if prompt is None else prompt
        if text is None:
            raise RequestError("echo", "the prompt was given as token ids; its text is needed")
        out = self.outputs[index]
        tables = None
        if self.prompt_logprobs is not None and (out.logprobs is not None or not out.token_ids):
            tables = [*({} if table is None else table for table in self.prompt_logprobs), *(out.logprobs or ())]
        return replace(out, text=text + out.text, token_ids=[*self.prompt_token_ids, *out.token_ids], logprobs=tables)


@dataclass(frozen=True)
class CompletionDelta:
    """What is new of one sample. `finish_reason`, `stop_reason` and `error` come with its last tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: InferaxError | None = None


@dataclass(frozen=True)
class Delta:
    """What is new of a request, and all of it so far. One delta covers as many steps as the reader was behind."""

    outputs: list[CompletionDelta]
    request: RequestOutput

    @property
    def text(self) -> str:
        """The new text, of all samples that have some; for requests with one sample."""
        return "".join(out.text for out in self.outputs)
