"""Structured output: what masks allow is what the form means, by jsonschema, `re` and brute force."""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from inferax.engine.grammar import GrammarCompiler, Matcher
from inferax.engine.structured import StructuredOutputs
from inferax.errors import RequestError, UnsupportedError
from inferax.loaders.gguf import open_gguf
from inferax.loaders.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.loaders.vocabularies import byte_fallback, byte_level, word_piece

EXTRA = 70  # rows of the model that no token has


def wrap(backend: tokenizers.Tokenizer, eos: tuple[str, ...] = ("</s>",)) -> Tokenizer:
    special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
    ids = tuple(backend.token_to_id(text) for text in eos)
    unk, size = backend.token_to_id("<unk>"), backend.get_vocab_size()
    return Tokenizer(backend, size, None, ids, None, unk, special, False, False)


def tiny() -> Tokenizer:
    """Two letters, pairs of them, two ends, and a special token that reads as text."""
    vocab = {piece: i for i, piece in enumerate(["a", "b", "ab", "ba", "bb", "aab", "c", "</s>", "<end>", "<unk>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("</s>", "<end>", "<unk>")])
    return wrap(backend, ("</s>", "<end>"))


@cache
def compiler(name: str) -> tuple[Tokenizer, GrammarCompiler]:
    makers = {"tiny": tiny, "byte_level": lambda: wrap(byte_level()), "byte_fallback": lambda: wrap(byte_fallback())}
    tokenizer = makers[name]()
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size + EXTRA)


def allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    row = np.full(-(-vocab_size // 32), 0x5A5A5A5A, np.int32)
    matcher.fill_mask(row)
    return [i for i in range(32 * len(row)) if row[i // 32] >> (i % 32) & 1]


def answer(tokenizer: Tokenizer, grammars: GrammarCompiler, spec: StructuredOutputs, seed: int, size: int = 0) -> bytes:
    """Random tokens under the masks; short ones are preferred once the answer is long, so that it ends."""
    rng = random.Random(seed)
    matcher, text = grammars.compile(spec).matcher(), b""
    for step in range(3000):
        ids = allowed(matcher, size or tokenizer.vocab_size + EXTRA)
        assert ids and max(ids) < tokenizer.vocab_size
        ends = [i for i in ids if i in tokenizer.eos_ids]
        assert not ends or set(ends) == set(tokenizer.eos_ids)
        if ends and (matcher.finished or len(ends) == len(ids) or rng.random() < 0.3):
            matcher.accept(ends[0])
            assert matcher.finished
            return text
        assert not matcher.finished
        ids = [i for i in ids if i not in tokenizer.eos_ids]
        assert not tokenizer.special_ids.intersection(ids)
        closing = [i for i in ids if tokenizer.token_bytes(i)[:1] in b'"]},' and tokenizer.token_bytes(i)]
        token = rng.choice(closing if closing and step > 20 and rng.random() < 0.8 else ids)
        matcher.accept(token)
        text += tokenizer.token_bytes(token)
    raise AssertionError(f"no end: {text[:300]!r}")


STRING, INTEGER = {"type": "string", "maxLength": 6}, {"type": "integer"}
SCHEMAS: list[Any] = [
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 3, "maxLength": 9},
    {"type": "string", "pattern": "^[a-c]{2,4}-\\d+$"},
    {"type": "string", "pattern": "^(é|日本|\\n)$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "enum": ["a", 'q"\\\n', "\u65e5\u672c", "\U0001f600"]},
    {"enum": [1, "1", None, True, [1, 2], {"a": 1}]},
    {"const": {"a": [1, {"b": "é"}]}},
    {"type": "integer", "minimum": -7, "maximum": 123},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 1},
    {"type": ["integer", "null", "boolean"]},
    {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": INTEGER, "b": STRING}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "properties": {'\u00e9\n"': INTEGER}, "required": ['\u00e9\n"'], "additionalProperties": False},
    {"type": "object", "properties": {"a": STRING}, "additionalProperties": INTEGER},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^x_": INTEGER}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"multipleOf": INTEGER},
        "required": ["multipleOf"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "integer"}, STRING, {"type": "array", "items": INTEGER, "maxItems": 1}]},
    {
        "anyOf": [
            {
                "type": "object",
                "properties": {"k": {"const": k}, k: INTEGER},
                "required": ["k", k],
                "additionalProperties": False,
            }
            for k in ("x", "y")
        ]
    },
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer", "minimum": 0}}},
    {
        "$defs": {
            "t": {
                "type": "object",
                "properties": {"v": INTEGER, "n": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/t"}]}},
                "required": ["v", "n"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/t",
    },
    {"definitions": {"s": STRING}, "type": "array", "items": {"$ref": "#/definitions/s"}, "maxItems": 2},
    {
        "type": "object",
        "properties": {
            "o": {
                "type": "object",
                "properties": {"p": {"type": "array", "items": STRING, "maxItems": 2}},
                "required": ["p"],
                "additionalProperties": False,
            }
        },
        "required": ["o"],
        "additionalProperties": False,
    },
    {"type": "boolean"},
    {"type": "null"},
]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_answers_satisfy_their_schema(schema: Any, name: str) -> None:
    tokenizer, grammars = compiler(name)
    for seed in range(4):
        text = answer(tokenizer, grammars, StructuredOutputs(json=schema, disable_any_whitespace=True), seed)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


PATTERNS = ["(ab)*", "a?b{2,3}", "(a|b)*abb", "(a|bb)+a", "((a|ab)(b|ba))*", "a(a|b){0,4}c?", "[^c]{0,3}c"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_exact(pattern: str) -> None:
    """A token may come exactly if some completion of what it makes matches, by enumeration."""
    tokenizer, grammars = compiler("tiny")
    texts, layer = [""], [""]
    for _ in range(9):
        layer = [text + letter for text in layer for letter in "abc" if len(text) < 7 or letter != "c"]
        texts += layer
    prefixes = {text[:cut] for text in texts if re.fullmatch(pattern, text) for cut in range(len(text) + 1)}
    pieces = {i: tokenizer.token_bytes(i).decode() for i in range(tokenizer.vocab_size)}
    grammar = grammars.compile(StructuredOutputs(regex=pattern))
    reached: set[str] = set()
    waiting: list[list[int]] = [[]]
    while waiting:
        tokens = waiting.pop()
        text = "".join(pieces[i] for i in tokens)
        if text in reached or len(text) > 4:
            continue
        reached.add(text)
        matcher = grammar.matcher()
        matcher.rebuild(tokens)
        ends = set(tokenizer.eos_ids) if re.fullmatch(pattern, text) else set()
        letters = {i for i, piece in pieces.items() if i not in tokenizer.special_ids and text + piece in prefixes}
        assert set(allowed(matcher, tokenizer.vocab_size + EXTRA)) == ends | letters, text
        waiting += [[*tokens, i] for i in letters]
    assert len(reached) > 3


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputs(json={"const": "the and"}, disable_any_whitespace=True),
        StructuredOutputs(choice=['"the and"']),
        StructuredOutputs(grammar='%llguidance {}\nstart: "\\"the" rest\nrest: " and\\""'),
        StructuredOutputs(grammar='root ::= "\\"the" " and\\""'),
    ],
    ids=["json", "choice", "lark", "gbnf"],
)
def test_every_spelling_of_a_fixed_text(spec: StructuredOutputs) -> None:
    tokenizer, grammars = compiler("byte_level")
    grammar, want = grammars.compile(spec), b'"the and"'
    pieces = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids}
    for cut in range(len(want)):
        matcher = grammar.matcher()
        matcher.rebuild(next(i for i, piece in pieces.items() if piece == want[at : at + 1]) for at in range(cut))
        fitting = {i for i, piece in pieces.items() if piece and want.startswith(piece, cut)}
        assert set(allowed(matcher, tokenizer.vocab_size + EXTRA)) == fitting, cut


@pytest.mark.parametrize("pattern", [r"\d{3}-[a-z]{1,5}(é|ü)?", "[a-z]{2}/x", "(日本|語)+\\n", "^a|b$", "[^a]{3}"])
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_answers_match_their_regex(pattern: str, name: str) -> None:
    for seed in range(5):
        text = answer(*compiler(name), StructuredOutputs(regex=pattern), seed).decode()
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_choice(name: str) -> None:
    choices = ["yes", "yes, but", 'a/b"\n\\', "", "日本", "|x", "\x00"]
    spec = StructuredOutputs(choice=choices)
    assert {answer(*compiler(name), spec, seed).decode() for seed in range(60)} == set(choices)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (
            'root ::= "x" [\\u00e9a-c]+ ("," y)* # no end\ny ::= [0-9]{1,3} | "\\"\\u0041\\x42["',
            r'x[éa-c]+(,([0-9]{1,3}|"AB\[))*',
        ),
        ("root ::= [^a-y\\n&&b]{2} .", r"(?s)[^a-y\n&]{2}."),
        ('start: "a" b\nb: /[0-9]/ | "(" b ")"', r"a\(*[0-9]\)*"),
    ],
)
def test_grammars(grammar: str, pattern: str) -> None:
    for seed in range(8):
        text = answer(*compiler("byte_level"), StructuredOutputs(grammar=grammar), seed).decode()
        assert re.fullmatch(pattern, text) and text.count("(") == text.count(")")


def test_json_options() -> None:
    schema = {"type": "object", "properties": {"type": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    for seed in range(6):
        closed = StructuredOutputs(json=schema, disable_any_whitespace=True, disable_additional_properties=True)
        value = json.loads(answer(*compiler("byte_level"), closed, seed))
        assert set(value) <= {"type"} and set(value.get("type", {})) <= {"a"}
    spaced = StructuredOutputs(json={"const": [1, 2]}, whitespace_pattern="_")
    assert {answer(*compiler("byte_level"), spaced, seed).replace(b"_", b"") for seed in range(9)} == {b"[1,2]"}


def test_structural_tag() -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {"const": 7}, "end": "</f>"}], "triggers": ["<f"]}
    tokenizer, grammars = compiler("byte_level")
    matcher = grammars.compile(StructuredOutputs(structural_tag=tag)).matcher()
    for token in tokenizer.encode("hello <f", add_special_tokens=False):
        matcher.accept(token)
    assert {tokenizer.token_bytes(i)[:1] for i in allowed(matcher, tokenizer.vocab_size + EXTRA)} == {b">"}


def test_rollback_and_rebuild() -> None:
    tokenizer, grammars = compiler("tiny")
    for end in (None, "c", (6,)):
        grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, reasoning_end=end)
        grammar = grammars.compile(StructuredOutputs(regex="(ab)*c"))
        tokens = ([] if end is None else [0, 1, 4, 6]) + [2, 2, 6, 7, 7]
        masks, matcher = [], grammar.matcher()
        for token in tokens:
            masks.append(allowed(matcher, tokenizer.vocab_size))
            matcher.accept(token)
        for count in range(1, len(tokens) + 1):
            matcher.rollback(count)
            assert allowed(matcher, tokenizer.vocab_size) == masks[-count]
            again = grammar.matcher()
            again.rebuild(tokens[: len(tokens) - count])
            assert allowed(again, tokenizer.vocab_size) == masks[-count]
            for token in tokens[len(tokens) - count :]:
                matcher.accept(token)
    with pytest.raises(ValueError, match="taken back"):
        matcher.rollback(100)


def test_reasoning() -> None:
    tokenizer, _ = compiler("byte_level")
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, reasoning_end="</think>")
    matcher = grammars.compile(StructuredOutputs(regex="42")).matcher()
    pieces = tokenizer.encode("I think </thin </think>", add_special_tokens=False)
    assert len(tokenizer.encode("</think>", add_special_tokens=False)) > 1
    for token in pieces:
        assert matcher.reasoning and not matcher.finished and token in allowed(matcher, tokenizer.vocab_size)
        matcher.accept(token)
    assert not matcher.reasoning
    for digit in "42":
        matcher.accept(tokenizer.encode(digit, add_special_tokens=False)[0])
    assert matcher.finished and allowed(matcher, tokenizer.vocab_size) == list(tokenizer.eos_ids)
    at_once = grammars.compile(StructuredOutputs(regex="42", enable_in_reasoning=True)).matcher()
    assert not at_once.reasoning


HOSTILE: list[tuple[str, Any]] = [
    ("regex", "("),
    ("regex", r"(a)\1"),
    ("regex", "a(?=b)"),
    ("regex", "(" * 100_000),
    ("regex", "[^\\s\\S]"),
    ("json", {"type": "foo"}),
    ("json", {"$ref": "#"}),
    ("json", {"$ref": "#/nope"}),
    ("json", {"$ref": "http://x/y"}),
    ("json", {"unevaluatedProperties": False, "type": "object"}),
    ("json", {"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
    ("json", {"allOf": [{"type": "string"}, {"type": "number"}]}),
    ("json", {"type": "integer", "multipleOf": 99999989}),
    ("json", {"properties": {f"p{i}": {} for i in range(5000)}}),
    ("json", "{"),
    ("json", "3"),
    ("json", [1]),
    ("json", {"a": float("nan")}),
    ("json", {"a": {1}}),
    ("json", "[" * 100_000),
    ("json", int),
    ("choice", []),
    ("choice", "yes"),
    ("choice", [1]),
    ("choice", ["\ud800"]),
    ("choice", ["x" * 1_000_001]),
    ("grammar", 'start: A\nA: "a" A'),
    ("grammar", "start: b"),
    ("grammar", "root ::= b"),
    ("grammar", "root ::= " + "(" * 20_000),
    ("grammar", "start: " + "(" * 5000),
    ("grammar", "start: a\na: b\nb: a"),
    ("grammar", "\x00"),
    ("grammar", ""),
    ("structural_tag", {"structures": [], "triggers": ["<"]}),
    ("structural_tag", {"format": {}}),
    ("structural_tag", 3),
]


@pytest.mark.parametrize(("kind", "value"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_wrong_form_is_refused_by_name(kind: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        compiler("byte_level")[1].compile(StructuredOutputs(**{kind: value}))
    assert error.value.field == f"structured_outputs.{kind}" and len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
        ({"json_object": 1}, "structured_outputs.json_object"),
        ({"json_object": True, "whitespace_pattern": ""}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "enable_in_reasoning": None}, "structured_outputs.enable_in_reasoning"),
    ],
)
def test_wrong_fields(values: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as error:
        StructuredOutputs(**values)
    assert error.value.field == field


def test_a_grammar_that_grows_too_large_ends_its_own_request() -> None:
    tokenizer, grammars = compiler("byte_level")
    matcher = grammars.compile(StructuredOutputs(grammar='start: ("a"{1,1000}){1,1000}')).matcher()
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    with pytest.raises(RequestError, match="the grammar cannot go on.*items"):
        for _ in range(1000):
            allowed(matcher, tokenizer.vocab_size + EXTRA)
            matcher.accept(letter)
    assert answer(tokenizer, grammars, StructuredOutputs(choice=["a"]), 1) == b"a"


def test_a_token_that_is_not_allowed_is_refused() -> None:
    matcher = compiler("tiny")[1].compile(StructuredOutputs(regex="ab")).matcher()
    with pytest.raises(RequestError, match="token 1 is not allowed"):
        matcher.accept(1)
    matcher.accept(2)


def test_cache_keeps_the_last() -> None:
    grammars = GrammarCompiler(tiny(), 10, cache_size=2)
    first, second = (grammars.compile(StructuredOutputs(regex=text)) for text in "ab")
    assert grammars.compile(StructuredOutputs(regex="a")) is first
    grammars.compile(StructuredOutputs(regex="c"))
    assert grammars.compile(StructuredOutputs(regex="a")) is first
    assert grammars.compile(StructuredOutputs(regex="b")) is not second


def test_tokens_without_bytes_of_their_own() -> None:
    with pytest.raises(UnsupportedError, match="token by token"):
        GrammarCompiler(wrap(word_piece()), 2000)


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_real_vocabularies(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    file = open_gguf(path)
    try:
        tokenizer = tokenizer_from_gguf(file.metadata, path)
    finally:
        file.close()
    size = tokenizer.vocab_size + EXTRA
    grammars = GrammarCompiler(tokenizer, size)
    text = answer(tokenizer, grammars, StructuredOutputs(choice=["日本 é", "a/b"]), 3, size).decode()
    assert text in ("日本 é", "a/b")
    schema = {
        "type": "object",
        "properties": {"a": STRING, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
    spec = StructuredOutputs(json=schema, disable_any_whitespace=True)
    matcher = grammars.compile(spec).matcher()
    for token in tokenizer.encode('{"a":" 日é","n":42}', add_special_tokens=False):
        matcher.accept(token)
    assert matcher.finished
