"""Grammars over a tokenizer's vocabulary: which tokens may come next in an answer of a given form (llguidance)."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from inferax.engine.structured import StructuredOutputs
from inferax.errors import RequestError, UnsupportedError
from inferax.loaders.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Row = np.ndarray[Any, np.dtype[np.int32]]
_T = TypeVar("_T")
_FIELD = "structured_outputs"
_MAX_GBNF = 100_000  # characters; its conversion is in Python
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")


@dataclass(frozen=True)
class _Vocabulary:
    """What the matchers of one engine share. reasoning: the end marker's bytes or its token ids, or None."""

    tokenizer: LLTokenizer
    tokens: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    everything: Row
    eos_row: Row
    reasoning: bytes | tuple[int, ...] | None
    # By how much of the marker has come: tokens that would end it and go on with text of the answer.
    overruns: dict[int, Row]


class GrammarCompiler:
    """Compiles `StructuredOutputs`, and keeps the last `cache_size` of them. Threads may share it.

    vocab_size: the model's, which is the width of a mask; rows without a token are never allowed. reasoning_end: the
    text, or the token ids, at which a reasoning block ends; the grammar holds from there on.
    Raises UnsupportedError for a tokenizer whose tokens have no bytes of their own or that has no EOS.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        cache_size: int = 64,
        reasoning_end: str | Sequence[int] | None = None,
    ) -> None:
        self._vocabulary = _read(tokenizer, vocab_size, reasoning_end)
        self._cache: OrderedDict[tuple[str, bool], Grammar] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutputs) -> Grammar:
        """The grammar of one form, on the caller's thread: milliseconds, and seconds at most for a hostile one.

        Raises RequestError with llguidance's words if the form is wrong, too large, or allows no answer.
        """
        source = _guarded(spec.kind, lambda: _source(spec))
        waits = self._vocabulary.reasoning is not None and not spec.enable_in_reasoning
        key = (source, waits)
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
                return found
        vocabulary = self._vocabulary if waits else replace(self._vocabulary, reasoning=None)
        grammar = _guarded(spec.kind, lambda: _compile(source, vocabulary, spec.kind))
        with self._lock:
            self._cache[key] = grammar
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return grammar


@dataclass(frozen=True)
class Grammar:
    """A compiled form. `matcher()` follows one sequence."""

    _start: LLMatcher
    _vocabulary: _Vocabulary

    def matcher(self) -> Matcher:
        return Matcher(self._start, self._vocabulary)


class Matcher:
    """Where one answer stands in its grammar. A call that fails raises RequestError; only one thread may use it."""

    def __init__(self, start: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._start, self._vocabulary = start, vocabulary
        self.rebuild(())

    def rebuild(self, tokens: Iterable[int]) -> None:
        """Starts again, with these tokens of the answer taken already."""
        self._matcher = self._start.deep_copy()
        self._tokens: list[int] = []
        self._began: int | None = None if self._vocabulary.reasoning else 0
        self._ended: int | None = None
        self._tail = b""
        for token in tokens:
            self.accept(token)

    @property
    def reasoning(self) -> bool:
        """Whether the end of the reasoning block is still to come, so that every token may."""
        return self._began is None

    @property
    def finished(self) -> bool:
        """Nothing but EOS may follow."""
        return self._ended is not None or (self._began is not None and self._matcher.is_stopped())

    def fill_mask(self, row: Row) -> None:
        """Writes which tokens may come next, int32[ceil(vocab_size / 32)]: bit i of word w is for token 32 w + i.

        EOS may come exactly where the answer may end.
        """
        vocabulary = self._vocabulary
        if self._began is None:
            row[:] = vocabulary.everything
            for come, overrun in vocabulary.overruns.items():
                if self._come(come):
                    row &= ~overrun
            return
        if self._ended is not None or self._matcher.is_stopped():
            self._check()
            row[:] = vocabulary.eos_row
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        row &= vocabulary.everything & ~vocabulary.eos_row
        if self._matcher.is_accepting():
            row |= vocabulary.eos_row

    def accept(self, token: int) -> None:
        """Takes the next token of the answer; raises RequestError if the grammar does not allow it."""
        if self._began is None:
            self._reason(token)
        elif token in self._vocabulary.eos_ids and (self._ended is not None or self._matcher.is_accepting()):
            self._ended = len(self._tokens) if self._ended is None else self._ended
        elif self._ended is not None or not self._matcher.try_consume_tokens([token]):
            self._check()
            raise RequestError(_FIELD, f"token {token} is not allowed after {len(self._tokens)} tokens of the answer")
        self._tokens.append(token)

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        kept = len(self._tokens) - count
        if not 0 <= kept:
            raise ValueError(f"{count} of {len(self._tokens)} tokens cannot be taken back")
        if self._began is None or kept < self._began:
            self.rebuild(self._tokens[:kept])
            return
        taken = len(self._tokens) if self._ended is None else self._ended
        if taken > kept and not self._matcher.rollback(taken - kept):
            self._check()
        if self._ended is not None and kept <= self._ended:
            self._ended = None
        del self._tokens[kept:]

    def _reason(self, token: int) -> None:
        marker = self._vocabulary.reasoning
        if isinstance(marker, tuple):
            if tuple(self._tokens[len(self._tokens) - len(marker) + 1 :]) + (token,) == marker:
                self._began = len(self._tokens) + 1
            return
        assert marker is not None  # the caller has seen to it
        text = self._tail + self._bytes(token)
        if marker in text:
            # What else this token holds is white space (`overruns` forbids the rest), and no part of the answer.
            self._began = len(self._tokens) + 1
        self._tail = text[-len(marker) + 1 :] if len(marker) > 1 else b""

    def _come(self, count: int) -> bool:
        marker = self._vocabulary.reasoning
        return isinstance(marker, bytes) and self._tail.endswith(marker[:count])

    def _bytes(self, token: int) -> bytes:
        return self._vocabulary.tokens[token] if 0 <= token < len(self._vocabulary.tokens) else b""

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(_FIELD, f"the grammar cannot go on: {_message(self._matcher.get_error())}")


class _Tokens:
    """A vocabulary as llguidance's TokenizerWrapper wants it."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self.bos_token_id = self.unk_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        return []  # only forced text is tokenized, and none is forced


def _read(tokenizer: Tokenizer, vocab_size: int, end: str | Sequence[int] | None) -> _Vocabulary:
    from llguidance import LLTokenizer, TokenizerWrapper

    if tokenizer.pieces is None:
        raise UnsupportedError("structured_outputs: the tokenizer's decoder does not work token by token")
    count = min(tokenizer.vocab_size, vocab_size)
    eos_ids = tuple(token for token in tokenizer.eos_ids if token < count)
    if not eos_ids:
        raise UnsupportedError("structured_outputs: the tokenizer has no EOS token, with which an answer could end")
    named = {token for token in (tokenizer.bos_id, tokenizer.pad_id, tokenizer.unk_id) if token is not None}
    special = sorted(token for token in tokenizer.special_ids | named | set(eos_ids) if token < count)
    tokens = tuple(tokenizer.token_bytes(token) for token in range(count))
    padded = [*tokens, *[b""] * (vocab_size - count)]
    inner = LLTokenizer(
        TokenizerWrapper(_Tokens(padded, special, eos_ids[0])),
        n_vocab=vocab_size,
        eos_token=list(eos_ids),
        slices=LLTokenizer.json_slices(),
    )
    marker: bytes | tuple[int, ...] = end.encode() if isinstance(end, str) else tuple(end or ())
    overruns: dict[int, Row] = {}
    if isinstance(marker, bytes):
        for come in range(len(marker)):
            rest = marker[come:]
            over = [i for i, text in enumerate(tokens) if text.startswith(rest) and text[len(rest) :].strip()]
            if over:
                overruns[come] = _bits(over, vocab_size)
        inside = [i for i, text in enumerate(tokens) if text.partition(marker)[2].strip()]
        if inside:
            overruns[0] = overruns.get(0, np.zeros_like(_bits([], vocab_size))) | _bits(inside, vocab_size)
    everything, eos_row = _bits(range(count), vocab_size), _bits(eos_ids, vocab_size)
    return _Vocabulary(inner, tokens, eos_ids, everything, eos_row, marker or None, overruns)


def _bits(tokens: Iterable[int], vocab_size: int) -> Row:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def _source(spec: StructuredOutputs) -> str:
    """The grammar as llguidance reads it; the same text for the same form."""
    from llguidance import LLMatcher

    if spec.kind in ("json", "json_object"):
        schema = spec.schema()
        if spec.disable_additional_properties:
            schema = _closed(schema)
        # The schema may hold options of its own ("x-guidance"); unknown keywords are an error all the same.
        options: dict[str, Any] = {"lenient": False, "whitespace_flexible": not spec.disable_any_whitespace}
        if spec.whitespace_pattern is not None:
            options["whitespace_pattern"] = spec.whitespace_pattern
        made = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]
        lark = f"start: %json {json.dumps(json.loads(made)['grammars'][0]['json_schema'])}"
    elif spec.kind in ("regex", "choice"):
        pattern = spec.regex if spec.kind == "regex" else "|".join(map(_literal, spec.choice or ()))
        lark = json.loads(LLMatcher.grammar_from_regex(str(pattern)))["grammars"][0]["lark_grammar"]
    elif spec.kind == "structural_tag":
        lark = _tags(spec)
    else:
        lark = _lark(str(spec.grammar))
    # Without this, text that only one way leads through may come in one spelling by tokens alone.
    return f"{_OPTIONS.sub('', lark)}\n%llguidance {json.dumps(_options(lark) | {'no_forcing': True})}\n"


_OPTIONS = re.compile(r"^[ \t]*%llguidance[ \t]*(\{.*\})[ \t]*$", re.MULTILINE)


def _options(lark: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for text in _OPTIONS.findall(lark):
        merged |= json.loads(text)
    return merged


def _tags(spec: StructuredOutputs) -> str:
    from llguidance import StructTag

    structures, triggers = spec.tags()
    tags = []
    for structure in structures:
        begin = structure["begin"]
        trigger = next(trigger for trigger in triggers if begin.startswith(trigger))
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=structure["end"]))
    return str(StructTag.to_grammar(tags, assume_special=False))


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever an object says nothing of it."""
    if not isinstance(schema, dict):
        return [_closed(item) for item in schema] if isinstance(schema, list) else schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
        else:
            closed[key] = value if key in _VALUES else _closed(value)
    kind = schema.get("type")
    if "properties" in schema or kind == "object" or (isinstance(kind, list) and "object" in kind):
        closed.setdefault("additionalProperties", False)
    return closed


def _literal(text: str) -> str:
    return "".join(char if char.isalnum() or ord(char) > 127 else f"\\x{ord(char):02x}" for char in text)


_GBNF = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\.', re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if is_lark_syntax(text) or "::=" not in text:
        return text
    if len(text) > _MAX_GBNF:
        raise ValueError(f"GBNF of {len(text)} characters, more than {_MAX_GBNF}")
    return str(gbnf_to_lark(_GBNF.sub(_respell, text)))


def _respell(match: re.Match[str]) -> str:
    """Spells a literal or class of GBNF so that it means the same to llguidance's converter."""
    part = match[0]
    if part == ".":  # any character, line ends too
        return f"[\\x00-{chr(0x10FFFF)}]"
    if part.startswith("#"):
        return part

    def escape(found: re.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        if code is None:
            return found[4] if part[0] == '"' and found[4] in "[]" else found[0]
        value = int(code, 16)
        return f"\\x{value:02x}" if value < 128 else chr(value)

    part = _ESCAPE.sub(escape, part)
    return part if part[0] == '"' else part.replace("&", "\\x26").replace("~", "\\x7e")


def _compile(source: str, vocabulary: _Vocabulary, kind: str) -> Grammar:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        max_items_in_row=2000,
        step_max_items=20_000,
        max_grammar_size=100_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
    start = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
    if start.is_error():
        raise ValueError(start.get_error())
    grammar = Grammar(start, vocabulary)
    row = np.empty_like(vocabulary.everything)
    try:
        Matcher(start, replace(vocabulary, reasoning=None)).fill_mask(row)
    except RequestError as error:
        raise ValueError(f"it allows no answer, or none that can be followed: {error}") from None
    if not row.any():
        raise ValueError("it allows no answer")
    return grammar


def _guarded(kind: str, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, RequestError):
        raise
    except BaseException as error:  # a panic of the Rust side is no Exception
        raise RequestError(f"{_FIELD}.{kind}", _message(str(error))) from None


def _message(text: str) -> str:
    text = text.partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    return text if len(text) <= 500 else f"{text[:500]}..."
