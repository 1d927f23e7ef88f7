"""Typed errors. Each names the thing, the value it had, and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class InferaxError(Exception):
    """Base of every error that bad input can cause. Its text is meant for the user as it stands."""


class LoadError(InferaxError):
    """A model, tokenizer or template could not be read.

    `file` is what was being read, `problem` what is wrong with it, `remedy` what would make it right.
    """

    def __init__(self, file: object, problem: str, remedy: str) -> None:
        self.file, self.problem, self.remedy = str(file), problem, remedy
        super().__init__(f"{self.file}: {problem}. {remedy}")


class SourceError(LoadError):
    """A model's files could not be found or fetched."""


class TemplateError(LoadError):
    """A chat template is missing, broken, raised an error of its own, or tried to leave its sandbox."""


class RequestError(InferaxError, ValueError):
    """A request asks for something that cannot be done; `field` names the part of it that is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}")


class MemoryPlanError(RequestError):
    """What is asked for does not fit the memory there is; the text tells numbers that would."""


class UnsupportedError(InferaxError):
    """A valid thing that this build, platform or model does not support."""


class EngineError(InferaxError):
    """The engine could not serve a request, through no fault of the request's form.

    `outputs`: from `LLM.generate` and `chat`, the outputs of all requests, finished or failed.
    """

    outputs: Sequence[Any] = ()


class QueueFullError(EngineError):
    """Too much waits already. `limit` is the name of the bound, `allowed` its value, `waiting` and `asked` what there
    is and what came on top; nothing of the request was taken in, so that it can be sent again later."""

    def __init__(self, limit: str, allowed: int, waiting: int, asked: int) -> None:
        self.limit, self.allowed, self.waiting, self.asked = limit, allowed, waiting, asked
        super().__init__(f"{limit} is {allowed}; {waiting} wait and {asked} more were asked for. Try again later")


class StepError(EngineError):
    """A step of the engine failed with this request in it; other requests went on.

    `stage` is what was being done ("schedule", "forward", "sample", "read" the results, "accept" a token, "grammar"),
    `cause` the exception.
    """

    def __init__(self, stage: str, cause: BaseException) -> None:
        self.stage, self.cause = stage, cause
        super().__init__(f"the engine failed in '{stage}': {type(cause).__name__}: {cause}")
        self.__cause__ = cause


class EngineDeadError(EngineError):
    """The engine cannot go on; a new one is needed."""


class EngineClosedError(EngineError):
    """The engine takes no requests any more: it drains, or was shut down."""
