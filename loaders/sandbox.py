"""A Jinja environment for templates that nobody vouches for.

Jinja's immutable sandbox keeps a template from Python and from changing its data; nothing in it bounds time and memory.
Here every turn of a loop, every call and every filter counts against one budget, and no text or number may outgrow a
bound, whatever makes it: operators, methods, filters, blocks. Globals and filters are those of transformers' templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, Never

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 5_000_000  # turns, calls and filters of one rendering: some seconds at most
MAX_LENGTH = 1 << 26  # characters of a text, entries of a list
MAX_WIDTH = 1 << 12  # of padding
MAX_INDENT = 64  # of JSON
MAX_BITS = 1 << 14  # of a number

# No template can name these: a filter's name has no space.
_METERED, _BOUNDED, _WEIGHED = "metered loop", "bounded text", "weighed value"
_WIDTH_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
_WIDTH_FILTERS = frozenset({"batch", "center", "slice"})
_LINE_FILTERS = frozenset({"indent", "wordwrap"})
_TEXT_FILTERS = frozenset({"format", "join", "pprint", "string", "tojson", "urlencode", "xmlattr"})
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{5,}|\*)")
_WIDE_BRACES = re.compile(r"\d{5,}|\{[^{}]*\{")


class LimitError(TemplateRuntimeError):
    """A template takes more than its share of time or memory."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders templates within bounds. Threads may share it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=self._weighed
        )
        self._left: ContextVar[int] = ContextVar("steps left", default=MAX_STEPS)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}
        self.filters |= {_METERED: self._metered, _BOUNDED: _bounded, _WEIGHED: self._weighed}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The text of a template. Raises what the template raises, and LimitError if it exceeds a bound."""
        token = self._left.set(MAX_STEPS)
        try:
            parts, length = [], 0
            for part in template.generate(variables):
                length += len(part)
                if length > MAX_LENGTH:
                    _refuse(f"its text is longer than {MAX_LENGTH} characters")
                parts.append(part)
            return "".join(parts)
        finally:
            self._left.reset(token)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._spend(1)
        if operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                _refuse(f"{left} ** {right} has more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_format(_WIDE_PERCENT, left, right)
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(5)  # a call costs as much as several turns of an empty loop
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", None)
        if isinstance(function, LoopContext) and args:
            self._spend(len(args[0]) if isinstance(args[0], Sized) else MAX_RANGE)
        if isinstance(owner, (str, bytes, int)):
            if name in _WIDTH_METHODS:
                _check_widths([*args, *kwargs.values()], MAX_WIDTH)
            elif name == "join" and args:
                args = (list(args[0]), *args[1:])
                _check_join(owner, args[0])
            elif name == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
            elif name == "translate" and args:
                _check_lengths(owner, args[0].values() if isinstance(args[0], Mapping) else ())
        return _bounded(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_safely = super().wrap_str_format(value)
        if format_safely is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            self._check_format(_WIDE_BRACES, value.__self__, (args, kwargs))
            return format_safely(*args, **kwargs)

        return checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounding(self).visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _spend(self, steps: int) -> None:
        left = self._left.get() - steps
        self._left.set(left)
        if left < 0:
            _refuse(f"it takes more than {MAX_STEPS} steps")

    def _metered(self, items: Any) -> Any:
        return _Metered(items, self._spend) if isinstance(items, Sized) else self._each(items)

    def _each(self, items: Any) -> Iterator[Any]:
        for item in items:
            self._spend(1)
            yield item

    def _weighed(self, value: Any) -> Any:
        """The value, once a walk over all that its text will spell out has been paid for."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            if isinstance(item, Mapping):
                waiting += [*item.keys(), *item.values()]
                self._spend(2 * len(item))
            elif isinstance(item, (list, tuple)):
                waiting += item
                self._spend(len(item))
        return value

    def _check_format(self, wide: re.Pattern[str], template: str, values: Any) -> None:
        if wide.search(template):
            _refuse(f"the format {template[:80]!r} is too wide")
        self._weighed(values)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._spend(1)
            value, rest = args[passed], [*args[passed + 1 :], *kwargs.values()]
            if name in _TEXT_FILTERS:
                if name == "join":
                    value = list(value)
                    args = (*args[:passed], value, *args[passed + 1 :])
                    _check_join(str(rest[0]) if rest else "", value)
                self._weighed((value, rest))
            if name == "format":
                self._check_format(_WIDE_PERCENT, str(value), rest)
            elif name == "replace" and len(rest) >= 2:
                _check_replace(str(value), str(rest[0]), str(rest[1]))
            elif name == "tojson":
                _check_widths([len(item) if isinstance(item, str) else item for item in rest], MAX_INDENT)
            elif name in _WIDTH_FILTERS:
                _check_widths(rest, MAX_WIDTH)
            elif name in _LINE_FILTERS:
                _check_lengths(str(value), rest)
            return _bounded(function(*args, **kwargs))

        return guarded


class _Bounding(NodeTransformer):
    """Puts a meter at every loop, and a bound on texts that are put together outside of calls and operators."""

    def __init__(self, environment: TemplateEnvironment) -> None:
        self._environment = environment

    def _through(self, name: str, node: nodes.Node | None, lineno: int) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=lineno, environment=self._environment)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through(_METERED, node.iter, node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._through(_WEIGHED, part, node.lineno) for part in node.nodes]
        return self._through(_BOUNDED, node, node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = self._through(_BOUNDED, node.filter, node.lineno)
        return node


class _Metered:
    """The items of a loop, counted as they are taken; as long as they are."""

    def __init__(self, items: Any, spend: Callable[[int], None]) -> None:
        self._items, self._spend = items, spend

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._spend(1)
            yield item

    def __len__(self) -> int:
        return len(self._items)


class _GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training. The text inside is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace that refuses names beginning with an underscore, which could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no self, so that a template may call an attribute so
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: Any) -> Never:
    raise TemplateRaised(message)


class TemplateRaised(TemplateRuntimeError):
    """The template called `raise_exception`."""


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(problem: str) -> Never:
    raise LimitError(problem)


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple, bytes)) and len(value) > MAX_LENGTH:
        _refuse(f"it makes a {type(value).__name__} of {len(value)} entries")
    return value


def _check_product(left: Any, right: Any) -> None:
    if not isinstance(right, int):
        return
    if isinstance(left, (str, list, tuple, bytes)) and len(left) * right > MAX_LENGTH:
        _refuse(f"it makes a {type(left).__name__} of {len(left) * right} entries")
    if isinstance(left, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        _refuse(f"it makes a number of more than {MAX_BITS} bits")


def _check_widths(values: list[Any], limit: int) -> None:
    wide = next((value for value in values if isinstance(value, int) and value > limit), None)
    if wide is not None:
        _refuse(f"it pads, cuts or indents by {wide}")


def _check_lengths(text: Any, parts: Iterable[Any]) -> None:
    """For what may put any of `parts`, a text or a number of spaces, at every place of `text`."""
    widths = [part if isinstance(part, int) else len(part) if isinstance(part, str) else 0 for part in parts]
    if isinstance(text, str) and len(text) * max(widths, default=0) > MAX_LENGTH:
        _refuse(f"it makes a text of more than {MAX_LENGTH} characters")


def _check_join(separator: Any, items: list[Any]) -> None:
    lengths = sum(len(item) for item in items if isinstance(item, (str, bytes)))
    if lengths + (len(separator) if isinstance(separator, (str, bytes)) else 0) * len(items) > MAX_LENGTH:
        _refuse(f"it joins more than {MAX_LENGTH} characters")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    kinds = {type(text), type(old), type(new)}
    if kinds in ({str}, {bytes}) and len(text) + text.count(old) * len(new) > MAX_LENGTH:
        _refuse(f"it makes a text of more than {MAX_LENGTH} characters")
