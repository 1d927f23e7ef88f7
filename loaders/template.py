"""Chat templates: a model's own Jinja template, rendered as transformers renders it, but in a bounded sandbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import numpy as np

from inferax.errors import LoadError, RequestError, TemplateError
from inferax.loaders.hf_files import named_tokens, read_json
from inferax.loaders.sandbox import LimitError, TemplateEnvironment, TemplateRaised
from inferax.loaders.tokenizer import Tokenizer

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_FETCH = "Fetch the model's files again"


@dataclass(frozen=True)
class ChatTemplate:
    """One Jinja chat template with the special tokens it can name. It is compiled when it is first rendered.

    file: where it comes from, for errors. special_tokens: texts by name besides bos_token and eos_token.
    variants: further templates of the same model by name; `tool_use` is taken where there are tools.
    """

    source: str
    file: Path
    bos_token: str | None = None
    eos_token: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, str] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, with the same rules and variables as transformers' `apply_chat_template`.

        tools: JSON schemas. documents: objects with title and text. add_generation_prompt: ends with the header of an
        answer; by default unless the last message is to be continued. continue_final_message: ends within the last
        message, after its content or the field named. kwargs: further variables of the template.
        Raises RequestError for messages that are no conversation, TemplateError if the template is broken, raises an
        error of its own, tries to leave its sandbox, or takes more time or memory than a template should.
        """
        if tools is not None and "tool_use" in self.variants:
            return self._tool_use.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message", "a message cannot be continued while a new one is opened")
        chat = _conversation(messages)
        _check_objects("tools", tools)
        _check_objects("documents", documents)
        final = self._mark_final(chat, continue_final_message) if continue_final_message else ""
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token, **self.special_tokens}
        text = self._rendered(
            {
                **{name: token for name, token in named.items() if token is not None},
                **_plain(kwargs),
                "messages": chat,
                "tools": _plain(tools),
                "documents": _plain(documents),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text, final) if continue_final_message else text

    def variant(self, name: str) -> ChatTemplate:
        """The template of that name. Raises RequestError if there is none."""
        if name not in self.variants:
            known = ", ".join(sorted(self.variants)) or "none"
            raise RequestError("chat_template", f"{self.file} has no template {name!r}; named templates: {known}")
        return replace(self, source=self.variants[name], variants={})

    @cached_property
    def _tool_use(self) -> ChatTemplate:
        return self.variant("tool_use")

    @cached_property
    def _environment(self) -> TemplateEnvironment:
        return TemplateEnvironment()

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return self._environment.from_string(self.source)

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        broken = "Use another template, or a model file with a working one"
        try:
            return self._environment.render(self._compiled, variables)
        except TemplateRaised as error:
            problem, remedy = f"the chat template refuses this chat: {error.message}", "Change the chat as it asks"
        except LimitError as error:
            problem, remedy = f"the chat template is stopped: {error.message}", broken
        except jinja2.exceptions.SecurityError as error:
            problem, remedy = f"the chat template tries to leave its sandbox: {error.message}", broken
        except jinja2.TemplateSyntaxError as error:
            problem, remedy = f"the chat template is broken in line {error.lineno}: {error.message}", broken
        except jinja2.UndefinedError as error:
            remedy = "Give what it asks for in the messages or as a template variable, or use another template"
            problem = f"the chat template uses something that is not there: {error.message}"
        except Exception as error:  # a template can raise anything that Python can
            problem, remedy = f"the chat template fails with {type(error).__name__}: {error}", broken
        raise TemplateError(self.file, problem.rstrip("."), remedy) from None

    def _mark_final(self, chat: list[dict[str, Any]], continue_final_message: bool | str) -> str:
        """Puts a mark behind the text to be continued, in place; returns that text."""
        name = continue_final_message if isinstance(continue_final_message, str) else "content"
        value = chat[-1].get(name)
        names = [name]
        if name in _REASONING:
            names = [other for other in _REASONING if chat[-1].get(other) == value]
        if value is None:
            raise RequestError("continue_final_message", f"the last message has no {name!r} to be continued")
        if not any(other in self.source for other in names):
            raise RequestError("continue_final_message", f"the chat template of {self.file} does not use {name!r}")
        if isinstance(value, str):
            for other in names:
                chat[-1][other] = value + _CONTINUE
            return value
        parts = [part for part in value if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if not parts:
            raise RequestError("continue_final_message", "the last message has no text to be continued")
        text: str = parts[-1]["text"]
        parts[-1]["text"] = text + _CONTINUE
        return text


def load_template(directory: Path) -> ChatTemplate | None:
    """The chat template of a model directory, or None if it has none.

    Looks into chat_template.jinja, tokenizer_config.json (one template or named ones) and chat_template.json, in that
    order; additional_chat_templates/NAME.jinja add named ones. Raises LoadError for files that cannot be read.
    """
    templates: dict[str, str] = {}
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = _read_text(file)
    else:
        for file in (directory / "tokenizer_config.json", directory / "chat_template.json"):
            if templates := _named_templates(read_json(file).get("chat_template"), file):
                break
    for extra in sorted(directory.glob("additional_chat_templates/*.jinja")):
        templates[extra.stem] = _read_text(extra)
    return _template(templates, file, named_tokens(directory))


def template_from_gguf(metadata: Mapping[str, Any], file: Path) -> ChatTemplate | None:
    """The chat template that a GGUF file embeds, or None: `tokenizer.chat_template`, and named ones below that key.

    metadata: the file's key-value pairs. Raises LoadError if a template is no string.
    """
    key = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for name, value in metadata.items():
        if name == key or name.startswith(f"{key}."):
            if not isinstance(value, str):
                raise LoadError(file, f"{name} should be a string, and is a {type(value).__name__}", _FETCH)
            templates[name.removeprefix(key).removeprefix(".") or "default"] = value
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    named: dict[str, str] = {}
    for name, id_name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{id_name}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            named[f"{name}_token"] = tokens[token_id]
    return _template(templates, file, named)


def encode_chat(tokenizer: Tokenizer, text: str) -> list[int]:
    """The token ids of a rendered chat: BOS first if the tokenizer adds one, and never twice."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _template(templates: dict[str, str], file: Path, named: Mapping[str, str]) -> ChatTemplate | None:
    if not templates:
        return None
    default = "default" if "default" in templates else next(iter(templates))
    others = {name: token for name, token in named.items() if name not in ("bos_token", "eos_token")}
    return ChatTemplate(
        source=templates[default],
        file=file,
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        special_tokens=MappingProxyType(others),
        variants=MappingProxyType({name: source for name, source in templates.items() if name != default}),
    )


def _named_templates(value: Any, file: Path) -> dict[str, str]:
    if value is None:
        return {}
    listed = [{"name": "default", "template": value}] if isinstance(value, str) else value
    try:
        templates = {entry["name"]: entry["template"] for entry in listed}
    except (TypeError, KeyError):
        templates = {"": None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        problem = "chat_template should be a string or a list of objects with name and template"
        raise LoadError(file, problem, _FETCH)
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(file, f"the chat template cannot be read ({error})", _FETCH) from None


def _conversation(messages: Any) -> list[dict[str, Any]]:
    """Plain copies of the messages, without keys whose value is None, and reasoning under every name it goes by."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", "it should be a list of at least one message")
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(_plain(messages)):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{index}]", "it should be an object with role and content")
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[name] for name in _REASONING if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        chat.append(message)
    return chat


def _check_objects(name: str, values: Any) -> None:
    if values is None:
        return
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise RequestError(name, "it should be a list of objects")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{name}[{index}]", f"it should be an object, and is a {type(value).__name__}")


def _plain(value: Any) -> Any:
    """JSON-like data of exact types: objects with methods of their own would be holes in the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    return f"<{type(value).__name__}>"


def _cut_at_mark(text: str, final: str) -> str:
    mark = _CONTINUE.strip()
    if final.strip() not in text or mark not in text:
        raise RequestError("continue_final_message", "the chat template changes or omits the end of the last message")
    place = text.rindex(mark)
    # A template that trims content has taken the mark's space away, and with it the space before the mark counts.
    return text[:place] if text.startswith(_CONTINUE, place) else text[:place].rstrip()
