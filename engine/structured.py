"""`StructuredOutputs`: the form that an answer must have, with vLLM's names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from inferax.errors import RequestError

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_JSON_ONLY = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
MAX_BYTES = 1_000_000  # of any one grammar as it is written
MAX_DEPTH = 64  # of a schema
# A divisor becomes an automaton with that many states and edges for each digit; larger ones take minutes.
MAX_MULTIPLE = 1000
MAX_PROPERTIES = 1000  # of one object; compiling takes time with their square


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must look like: exactly one of the first six. A wrong value is a RequestError naming it.

    json: a JSON schema, as a dict, as text, or as a class with `model_json_schema()` (pydantic). json_object: any JSON
    object. regex: the whole answer matches it (Rust's syntax, in which there is no look-around and no back-reference).
    choice: one of these strings. grammar: Lark as llguidance reads it, or llama.cpp's GBNF. structural_tag: text that
    is free until a trigger comes; {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as in vLLM.
    disable_any_whitespace: JSON without whitespace between its tokens. whitespace_pattern: a regex for it instead.
    disable_additional_properties: objects have only the properties that the schema names, wherever it says nothing.
    enable_in_reasoning: the form holds from the first token on, and not only after the end of the reasoning block.
    """

    json: dict[str, Any] | bool | str | type | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning"):
            if not isinstance(getattr(self, name), bool):
                self._wrong(name, f"{getattr(self, name)!r} is not true or false")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            self._wrong("json_object", f"{self.json_object!r} is not true or false")
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json is False:
            self._wrong("json", "the schema false allows nothing")
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise RequestError("structured_outputs", f"needs exactly one of {', '.join(KINDS)}, and has {found}")
        for name in _JSON_ONLY:
            if getattr(self, name) not in (False, None) and self.kind not in ("json", "json_object"):
                self._wrong(name, f"is for json and json_object, and not for {self.kind}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            self._wrong("whitespace_pattern", "cannot be together with disable_any_whitespace")
        if self.whitespace_pattern is not None:
            self._text("whitespace_pattern")
        if self.kind in ("regex", "grammar"):
            self._text(self.kind)
        elif self.kind == "choice":
            self._check_choice()
        elif self.kind == "json":
            self._check_schema("json", self.schema())
        elif self.kind == "structural_tag":
            self.tags()

    @property
    def kind(self) -> str:
        """Which of KINDS is set."""
        return next(name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False)

    def schema(self) -> dict[str, Any] | bool:
        """The JSON schema that `json` or `json_object` stands for, before any option."""
        if self.json_object:
            return {"type": "object"}
        value: Any = self.json
        if isinstance(value, type):
            make = getattr(value, "model_json_schema", None)
            if make is None:
                self._wrong("json", f"the class {value.__name__} has no model_json_schema()")
            value = make()
        if isinstance(value, str):
            value = self._parsed("json", value)
        if not isinstance(value, (dict, bool)):
            self._wrong("json", f"a schema is an object, and this is {_short(value)}")
        return value

    def tags(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Structures (begin, schema, end) and triggers of `structural_tag`."""
        name = "structural_tag"
        value: Any = self._parsed(name, self.structural_tag) if isinstance(self.structural_tag, str) else None
        value = self.structural_tag if value is None else value
        if not isinstance(value, dict):
            self._wrong(name, f"should be an object, and is {_short(value)}")
        if "format" in value:
            self._wrong(name, "the form with 'format' is not supported; give 'structures' and 'triggers'")
        structures, triggers = value.get("structures"), value.get("triggers")
        if not isinstance(structures, list) or not structures or not all(isinstance(s, dict) for s in structures):
            self._wrong(name, f"'structures' should be a list of objects, and is {_short(structures)}")
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            self._wrong(name, f"'triggers' should be a list of texts, and is {_short(triggers)}")
        for structure in structures:
            begin, end = structure.get("begin"), structure.get("end")
            if not isinstance(begin, str) or not isinstance(end, str):
                self._wrong(name, f"each structure has texts 'begin' and 'end': {_short(structure)}")
            if not any(begin.startswith(trigger) for trigger in triggers):
                self._wrong(name, f"begin {begin!r} starts with none of the triggers {_short(triggers)}")
            if not isinstance(structure.get("schema"), dict):
                self._wrong(name, f"each structure has a 'schema', an object: {_short(structure)}")
            self._check_schema(name, structure["schema"])
        return structures, triggers

    def _check_choice(self) -> None:
        if not isinstance(self.choice, (list, tuple)) or not self.choice:
            self._wrong("choice", f"should be a list of texts, and is {_short(self.choice)}")
        for text in self.choice:
            if not isinstance(text, str):
                self._wrong("choice", f"{_short(text)} is no text")
            self._encodable("choice", text)
        if sum(map(len, self.choice)) > MAX_BYTES:
            self._wrong("choice", f"has more than {MAX_BYTES} characters")

    def _text(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value:
            self._wrong(name, f"should be a text that is not empty, and is {_short(value)}")
        self._encodable(name, value)
        if len(value) > MAX_BYTES:
            self._wrong(name, f"has {len(value)} characters, more than {MAX_BYTES}")

    def _encodable(self, name: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            self._wrong(name, "has a lone surrogate, which is no character")

    def _parsed(self, name: str, text: str) -> Any:
        if len(text) > MAX_BYTES:
            self._wrong(name, f"has {len(text)} characters, more than {MAX_BYTES}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self._wrong(name, f"is no JSON: {error}")

    def _check_schema(self, name: str, schema: Any) -> None:
        """Bounds what llguidance does not bound by itself."""
        waiting: list[tuple[Any, int]] = [(schema, 1)]
        seen = 0
        while waiting:
            node, depth = waiting.pop()
            seen += 1
            if depth > MAX_DEPTH:
                self._wrong(name, f"the schema is nested deeper than {MAX_DEPTH} levels")
            if seen > MAX_BYTES:
                self._wrong(name, f"the schema has more than {MAX_BYTES} values")
            if isinstance(node, Mapping):
                self._check_multiple(name, node.get("multipleOf"))
                if len(node) > MAX_PROPERTIES:
                    self._wrong(name, f"the schema has an object of {len(node)} keys, more than {MAX_PROPERTIES}")
                if any(not isinstance(key, str) for key in node):
                    self._wrong(name, "the schema has a key that is no text")
                waiting += [(inner, depth + 1) for inner in node.values()]
            elif isinstance(node, (list, tuple)):
                waiting += [(inner, depth + 1) for inner in node]
            elif isinstance(node, float) and not math.isfinite(node):
                self._wrong(name, f"the schema has {node}, which is no JSON")
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            self._wrong(name, f"the schema is no JSON: {error}")
        if len(text) > MAX_BYTES:
            self._wrong(name, f"the schema has {len(text)} characters, more than {MAX_BYTES}")
        self._encodable(name, json.dumps(schema, ensure_ascii=False))

    def _check_multiple(self, name: str, value: Any) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            return  # llguidance refuses it, or it is a property of that name
        digits, _, places = f"{value:.15f}".rstrip("0").partition(".")
        if int(digits + places) > MAX_MULTIPLE:
            self._wrong(name, f"multipleOf {value} has more than {MAX_MULTIPLE} units of its last place")

    def _wrong(self, name: str, problem: str) -> NoReturn:
        raise RequestError(f"structured_outputs.{name}", problem)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
