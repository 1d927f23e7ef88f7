"""Chat templates, against transformers' rendering; and templates that mean harm."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from inferax.errors import LoadError, RequestError, TemplateError
from inferax.loaders import sandbox
from inferax.loaders.gguf import open_gguf
from inferax.loaders.template import ChatTemplate, encode_chat, load_template, template_from_gguf
from inferax.loaders.tokenizer import tokenizer_from_gguf
from tests.loaders.chat_templates import TEMPLATES
from tests.loaders.vocabularies import FILE, byte_level, superword_metadata

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather of a city <now> & later, it\'s "exact".',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Zürich, 東京 …"},
                    "days": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"properties": {}}}},
]
DOCUMENTS = [{"title": "A", "text": "first"}, {"title": "Ü", "text": "second\nline"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": '  What\'s <b>this</b> & "that"? 你好 \U0001f44d '}],
    "system": [
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello.  "},
        {"role": "user", "content": "Bye"},
    ],
    "tool calls": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "abc123def",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2.5, None, True]}},
                }
            ],
        },
        {"role": "tool", "name": "weather", "tool_call_id": "abc123def", "content": '{"sky": "<blue>"}'},
        {"role": "assistant", "content": "Blue.", "reasoning_content": "The tool says\nblue."},
        {"role": "user", "content": "Thanks"},
    ],
    "thinking": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nTwo.\n</think>\n\n2"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nFour.\n</think>\n\n4"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "image"}]}],
    "alternation broken": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    "none": [
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": "a", "tool_calls": None, "reasoning_content": None},
        {"role": "user", "content": "q2"},
    ],
}


@pytest.fixture(scope="module")
def peer() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMED)


def template(source: str) -> ChatTemplate:
    others = {"unk_token": "<unk>", "pad_token": "<pad>"}
    return ChatTemplate(source, Path("chat.jinja"), "<s>", "</s>", others)


def same(ours: Any, theirs: Any) -> None:
    """Both give the same text, or both refuse."""
    try:
        expected = theirs()
    except Exception:
        with pytest.raises((TemplateError, RequestError)):
            ours()
        return
    assert ours() == expected


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_renders_as_transformers(name: str, chat: str, peer: Any) -> None:
    """Every style with every chat, with and without tools, documents, an opened answer and further variables."""
    ours = template(TEMPLATES[name])
    rendered = 0
    for tools in (None, TOOLS):
        for documents in (None, DOCUMENTS):
            for opened in (True, False):
                for more in ({}, {"enable_thinking": False, "date_string": "1 Jan", "controls": {"length": "é"}}):
                    options: dict[str, Any] = {
                        "tools": tools, "documents": documents, "add_generation_prompt": opened, **more
                    }  # fmt: skip
                    same(
                        lambda options=options: ours.render(CHATS[chat], **options),
                        lambda options=options: peer.apply_chat_template(
                            CHATS[chat], tokenize=False, chat_template=TEMPLATES[name], **options
                        ),
                    )
                    rendered += 1
    assert rendered == 16


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("field", [True, "content", "reasoning_content", "nonesuch"])
def test_continues_the_last_message(name: str, field: bool | str, peer: Any) -> None:
    for content in ("The answer", " The answer is ", "The\nanswer\n", [{"type": "text", "text": "The answer "}]):
        chat = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": content, "reasoning_content": "I think "},
        ]
        same(
            lambda chat=chat: template(TEMPLATES[name]).render(chat, continue_final_message=field),
            lambda chat=chat: peer.apply_chat_template(
                chat, tokenize=False, chat_template=TEMPLATES[name], continue_final_message=field
            ),
        )


def test_continuing_is_no_opening() -> None:
    chat = [{"role": "assistant", "content": "a"}]
    with pytest.raises(RequestError, match="continue_final_message"):
        template("{{ messages[0].content }}").render(chat, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RequestError, match="does not use 'content'"):
        template("fixed").render(chat, continue_final_message=True)


def test_data_of_many_types_is_plain_in_a_template() -> None:
    class Text(str):
        def leak(self) -> str:
            return "leaked"

    class Other:
        pass

    data = {"text": Text("a"), "number": np.float32(0.5), "many": (1, np.int64(2)), "other": Other()}
    assert template("{{ data | tojson }}").render([{"role": "user"}], data=data) == (
        '{"text": "a", "number": 0.5, "many": [1, 2], "other": "<Other>"}'
    )
    with pytest.raises(TemplateError, match="has no attribute 'leak'"):
        template("{{ data.leak() }}").render([{"role": "user"}], data=Text("a"))


def test_messages_stay_as_they_were() -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "thinking": "t", "x": None}]
    before = json.dumps(chat)
    template("{{ messages[1].reasoning_content }}{{ messages[1].content }}").render(chat, continue_final_message=True)
    assert json.dumps(chat) == before


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": "hello"}),
        ("messages", {"messages": {"role": "user"}}),
        (r"messages\[0\]", {"messages": ["hello"]}),
        ("tools", {"tools": {"name": "f"}}),
        (r"tools\[1\]", {"tools": [{}, print]}),
        (r"documents\[0\]", {"documents": ["text"]}),
    ],
)
def test_requests_that_are_none(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{field}: it should be"):
        template("x").render(**({"messages": [{"role": "user"}]} | options))


HARM = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "refuses this chat: roles must alternate"),
    "syntax": ("a\n{% if %}", "broken in line 2"),
    "unknown tag": ("{% while true %}", "Encountered unknown tag 'while'"),
    "undefined": ("{{ messages[0].nope.deeper }}", "has no attribute 'nope'"),
    "python error": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "leave its sandbox"),
    "globals of a function": ("{{ raise_exception.__globals__['x'] }}", "leave its sandbox"),
    "attribute filter": ("{{ (''|attr('__class__')).__mro__ }}", "leave its sandbox"),
    "format": ("{{ '{0.__class__.__mro__}'.format(1) }}", "leave its sandbox"),
    "changes data": ("{{ messages.append(1) }}", "leave its sandbox"),
    "namespace": ("{{ namespace(__init__=1) }}", "leave its sandbox"),
    "namespace later": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "leave its sandbox"),
    "files": ("{% include 'other' %}", "no loader"),
    "range": ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    "nested loops": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more than 300000 steps",
    ),
    "loop with a test": (
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
        "more than 300000 steps",
    ),
    "recursive loop": ("{% for x in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}", "steps|RecursionError"),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "wide macro": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "more than 300000 steps",
    ),
    "power": ("{{ 9 ** (9 ** 9) }}", "more than 16384 bits"),
    "product of numbers": (
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "more than 16384 bits",
    ),
    "repetition": ("{{ 'a' * 10 ** 12 }}", "1000000000000 entries"),
    "repetition of a list": ("{{ [1] * 10 ** 12 }}", "1000000000000 entries"),
    "sum": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "makes a",
    ),
    "concatenation": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "makes a str",
    ),
    "block": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "makes a str",
    ),
    "output": (
        "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
        "longer than 67108864 characters",
    ),
    "shared lists": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "more than 300000 steps",
    ),
    "shared lists in JSON": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}",
        "more than 300000 steps",
    ),
    "padding": ("{{ 'a'.ljust(10 ** 11) }}", "pads, cuts or indents"),
    "padding filter": ("{{ 'a' | center(100000000000) }}", "pads, cuts or indents"),
    "indentation": ("{{ {'a': 1} | tojson(indent=1000000000) }}", "pads, cuts or indents"),
    "format width": ("{{ '{:>10000000000}'.format('a') }}", "too wide"),
    "nested format width": ("{{ '{:>{w}}'.format('a', w=10 ** 10) }}", "too wide"),
    "percent width": ("{{ '%10000000000d' % 1 }}", "too wide"),
    "percent star": ("{{ '%*d' | format(10000000000, 1) }}", "too wide"),
    "replacement": ("{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}", "more than 67108864 characters"),
    "replacement filter": ("{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}", "more than 67108864 characters"),
    "joining": ("{{ range(99999) | join('a' * 1000000) }}", "joins more than"),
    "bytes": ("{{ (5).to_bytes(10 ** 11, 'big') }}", "pads, cuts or indents"),
    "lipsum": ("{{ lipsum(n=1000000000) }}", "'lipsum' is undefined"),
}


@pytest.mark.parametrize("case", HARM)
def test_harm(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 300_000)
    source, problem = HARM[case]
    start = time.monotonic()
    with pytest.raises(TemplateError, match=problem) as caught:
        template(source).render([{"role": "user", "content": "hi"}])
    assert time.monotonic() - start < 30  # the slowest takes half a second
    assert str(caught.value).startswith("chat.jinja: the chat template ") and caught.value.remedy


def test_a_long_chat_is_within_the_bounds() -> None:
    chat = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 200} for turn in range(2001)]
    for name in ("qwen3", "mistral", "granite"):
        assert len(template(TEMPLATES[name]).render(chat, tools=TOOLS)) > 2_000_000


def test_one_rendering_does_not_count_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 1000)
    busy = template("{% for i in range(900) %}{% endfor %}done")
    assert [busy.render([{"role": "user"}]) for _ in range(3)] == ["done"] * 3


def test_the_bound_on_steps_is_some_seconds() -> None:
    start = time.monotonic()
    with pytest.raises(TemplateError, match="more than 5000000 steps"):
        template(HARM["nested loops"][0]).render([{"role": "user"}])
    assert time.monotonic() - start < 60  # 1.5 s on an idle core


def directory(path: Path, files: Mapping[str, Any]) -> Path:
    for name, values in files.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return path


CHAT = [{"role": "user", "content": "q"}]


def test_templates_of_directories(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}config", "bos_token": {"content": "<s>"}, "eos_token": None}
    assert load_template(tmp_path) is None
    directory(tmp_path, {"chat_template.json": {"chat_template": "processor"}})
    found = load_template(tmp_path)
    assert found is not None and found.render(CHAT) == "processor"
    directory(tmp_path, {"tokenizer_config.json": config})
    found = load_template(tmp_path)
    assert found is not None and found.render(CHAT) == "<s>config"
    assert found.file == tmp_path / "tokenizer_config.json" and found.eos_token is None
    directory(tmp_path, {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "rag"})
    found = load_template(tmp_path)
    assert found is not None and found.render(CHAT) == "file" and found.variant("rag").render(CHAT) == "rag"
    with pytest.raises(RequestError, match="no template 'x'; named templates: rag"):
        found.variant("x")


def test_named_templates(tmp_path: Path) -> None:
    """`tool_use` is taken where there are tools, as in transformers."""
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    directory(tmp_path, {"tokenizer_config.json": {"chat_template": named}})
    found = load_template(tmp_path)
    assert found is not None
    assert (found.render(CHAT), found.render(CHAT, tools=TOOLS), found.render(CHAT, tools=[])) == (
        "plain", "tools", "tools"
    )  # fmt: skip


@pytest.mark.parametrize("value", [3, {"default": "x"}, [{"name": "default"}], [{"name": "a", "template": 1}]])
def test_templates_of_the_wrong_type(value: Any, tmp_path: Path) -> None:
    directory(tmp_path, {"tokenizer_config.json": {"chat_template": value}})
    with pytest.raises(LoadError, match=r"tokenizer_config.json: chat_template should be"):
        load_template(tmp_path)


def test_templates_of_gguf_files(smollm2_path: Path, gemma3_path: Path) -> None:
    file = open_gguf(smollm2_path)
    found = template_from_gguf(file.metadata, smollm2_path)
    assert found is not None and (found.bos_token, found.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = found.render(CHAT)
    assert text.endswith("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n")
    assert encode_chat(tokenizer_from_gguf(file.metadata, smollm2_path), text)[:2] == [1, 9690]
    file.close()
    file = open_gguf(gemma3_path)
    assert template_from_gguf(file.metadata, gemma3_path) is None
    file.close()
    named = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b", "tokenizer.chat_templates": ["x"]}
    found = template_from_gguf(named, FILE)
    assert found is not None and found.variants == {"tool_use": "b"}
    with pytest.raises(LoadError, match="tokenizer.chat_template should be a string"):
        template_from_gguf({"tokenizer.chat_template": 3}, FILE)


def test_bos_never_comes_twice() -> None:
    metadata = superword_metadata("smollm")
    tokens = [*metadata["tokenizer.ggml.tokens"], "<s>"]
    bos = len(tokens) - 1
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * bos + [3], np.int32),
        "tokenizer.ggml.bos_token_id": bos,
    }
    for add_bos, text, expected in (
        (True, "<s>a", 1),
        (True, "a", 1),
        (True, "", 1),
        (False, "<s>a", 1),
        (False, "a", 0),
    ):
        tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_bos_token": add_bos}, FILE)
        ids = encode_chat(tokenizer, text)
        assert ids.count(bos) == expected
        assert not expected or ids[0] == bos
