"""The bodies of OpenAI's chat and completion requests. Every field is honoured, or refused by its name."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from inferax.engine.params import SamplingParams
from inferax.engine.structured import StructuredOutputs
from inferax.errors import RequestError


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None


class Body(BaseModel):
    """What chat and completions have in common. None is as good as absent. Sampling fields are `SamplingParams`'."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    penalty_last_n: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    logprob_token_ids: list[int] | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat_mode: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    samplers: list[str] | None = None
    logits_processors: dict[str, dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    request_id: str | None = Field(None, max_length=256, pattern="^[!-~]+$")  # it goes into a header
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    # These say something about the caller and nothing about the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    # Accepted where they ask for what is done anyway.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    use_beam_search: Literal[False] | None = None
    length_penalty: Literal[1] | None = None
    spaces_between_special_tokens: Literal[True] | None = None

    def sampling(self, **more: Any) -> SamplingParams:
        """The request's SamplingParams, with some fields given by the dialect."""
        named = {f.name for f in dataclass_fields(SamplingParams)} & set(type(self).model_fields)
        given = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        if self.logit_bias is not None:
            for token in self.logit_bias:
                if not (token.isascii() and token.isdecimal() and len(token) < 10):
                    raise RequestError("logit_bias", f"{token!r} is not a token id")
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        form = self._form()
        if form is not None:
            if self.structured_outputs is not None:
                raise RequestError("response_format", "it cannot be together with structured_outputs")
            given["structured_outputs"] = form
        return SamplingParams(**given | more)

    def _form(self) -> StructuredOutputs | None:
        form = self.response_format
        if form is None:
            return None
        kind, rest = form.get("type"), {name: value for name, value in form.items() if name != "type"}
        if kind == "json_schema":
            inner = rest.pop("json_schema", None)
            if not isinstance(inner, dict) or "schema" not in inner:
                raise RequestError("response_format", "type json_schema needs json_schema with a schema")
            unknown = sorted(set(inner) - {"name", "description", "schema", "strict"})
            if unknown:
                raise RequestError("response_format", f"json_schema has no field {unknown[0]!r}")
            made = StructuredOutputs(json=inner["schema"])
        elif kind == "structural_tag":
            made, rest = StructuredOutputs(structural_tag=form), {}
        elif kind == "json_object":
            made = StructuredOutputs(json_object=True)
        elif kind == "text":
            made = None
        else:
            raise RequestError(
                "response_format", f"type {kind!r} is none of text, json_object, json_schema and structural_tag"
            )
        if rest:
            raise RequestError("response_format", f"type {kind} has no field {min(rest)!r}")
        return made


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # OpenAI's clients send these beside no tools at all.
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None


class TokenizeBody(BaseModel):
    """`POST /tokenize` and `POST /apply-template`: a prompt, or a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    tokens: list[int]
