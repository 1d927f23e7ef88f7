"""Typed errors. Each names the thing, the value it had, and what would be right."""


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


class UnsupportedError(InferaxError):
    """A valid thing that this build, platform or model does not support."""
