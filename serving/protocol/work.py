"""`Work`: what any dialect's request comes down to, and the protocol of what answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inferax.engine.async_engine import Stream
from inferax.engine.outputs import Delta
from inferax.engine.params import SamplingParams
from inferax.engine.requests import Rendered


class Answer(Protocol):
    """Writes one request's answer in a dialect."""

    def opening(self) -> list[dict[str, Any]]:
        """Events before the first token."""
        ...

    def events(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """Events for what is new of a prompt."""
        ...

    def closing(self) -> list[dict[str, Any]]:
        """Events after the last token."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, where it was not streamed."""
        ...


@dataclass(frozen=True)
class Work:
    """Prompts to complete with the same parameters, as one request. `answer` is made from their streams."""

    request_id: str
    prompts: Sequence[Rendered]
    params: SamplingParams
    stream: bool
    priority: int
    answer: Any  # Callable[[Sequence[Stream]], Answer]

    def answer_from(self, streams: Sequence[Stream]) -> Answer:
        made: Answer = self.answer(streams)
        return made
