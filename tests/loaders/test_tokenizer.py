"""`Tokenizer`, and tokenizers of model directories, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from inferax.errors import LoadError, RequestError
from inferax.loaders.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from tests.corpus import corpus
from tests.loaders.vocabularies import FILE, byte_fallback, byte_level, superword_metadata, word_piece


def save(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **named).save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def write(directory: Path, name: str, values: Any) -> None:
    (directory / name).write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_directories_are_read_as_transformers_reads_them(make: Any, config: dict[str, Any], tmp_path: Path) -> None:
    directory = save(tmp_path, make(), **config)
    tokenizer, peer = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert tokenizer.vocab_size == len(peer)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.unk_id) == (1, (2,), 3, 0)
    assert tokenizer.special_ids == set(peer.all_special_ids)
    empty = peer.encode("")
    assert (tokenizer.add_bos, tokenizer.add_eos) == (empty[:1] == [1], empty[-1:] == [2])
    for text in [*corpus(150), "<s>a<tool>b</s>", ""]:
        ids = tokenizer.encode(text)
        assert ids == peer.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == peer.encode(text, add_special_tokens=False)
        for skip in (False, True):
            expected = peer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
        plain = tokenizer.encode(text, parse_special=False)
        assert plain == peer.encode(text, split_special_tokens=True)


def test_config_gives_tokens_their_flags(tmp_path: Path) -> None:
    """added_tokens_decoder marks a token of tokenizer.json as special, and adds one."""
    backend = byte_level()
    count = backend.get_vocab_size()
    tool, new = backend.token_to_id("<tool>"), {"content": "<new>", "special": True, "normalized": False}
    directory = save(tmp_path, backend)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    listed = {str(tool): {"content": "<tool>", "special": True, "rstrip": True}, str(count): new}
    write(directory, "tokenizer_config.json", config | {"added_tokens_decoder": listed})
    tokenizer, peer = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert {tool, count} <= tokenizer.special_ids
    assert tokenizer.vocab_size == count + 1
    assert tokenizer.encode("a<new> <tool>  b") == peer.encode("a<new> <tool>  b")


def test_ends_come_from_all_configs(tmp_path: Path) -> None:
    directory = save(tmp_path, byte_level())
    write(directory, "config.json", {"text_config": {"eos_token_id": 7}})
    write(directory, "generation_config.json", {"eos_token_id": [5, 2, 6]})
    assert load_tokenizer(directory).eos_ids == (2, 5, 6, 7)
    write(directory, "config.json", {"eos_token_id": 9})
    assert load_tokenizer(directory).eos_ids == (2, 5, 6, 9)


def test_older_directories(tmp_path: Path) -> None:
    """special_tokens_map.json alone names the tokens."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, (2,), None)


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("tokenizer.json", None, "tokenizer is missing"),
        ("tokenizer.json", "{", "no tokenizer that can be read"),
        ("tokenizer_config.json", "{", "cannot be read as JSON"),
        ("tokenizer_config.json", [], "list where a JSON object should be"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<x>"}}}, "'<x>' the id 9999"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id"),
        ("config.json", "\x00", "cannot be read as JSON"),
    ],
)
def test_broken_directories(name: str, values: Any, problem: str, tmp_path: Path) -> None:
    directory = save(tmp_path, byte_level())
    (directory / name).unlink(missing_ok=True)
    if values is not None:
        write(directory, name, values)
    with pytest.raises(LoadError) as caught:
        load_tokenizer(directory)
    assert str(directory / name) in str(caught.value) and problem in str(caught.value) and caught.value.remedy


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(superword_metadata("smollm"), FILE)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 3, None, ["a"]])
def test_text_that_is_none(text: Any, tokenizer: Tokenizer) -> None:
    for parse_special in (True, False):
        with pytest.raises(RequestError, match="text: it"):
            tokenizer.encode(text, parse_special=parse_special)


def test_ids_outside_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    """A model's embedding may have more rows than there are tokens: such ids have no text."""
    assert tokenizer.decode([0, 1 << 20, 1]) == tokenizer.decode([0, 1])
    assert tokenizer.token_bytes(1 << 20) == b""
    for call in (tokenizer.token_bytes, lambda token_id: tokenizer.decode([token_id])):
        with pytest.raises(RequestError, match="-1 is no token id"):
            call(-1)


def test_pieces_of_a_character(tokenizer: Tokenizer) -> None:
    """Bytes of single tokens put together are the text; alone they may be no character."""
    text = "a ☃ \U0001f9ff"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert any(tokenizer.token_text(index) == "\ufffd" for index in ids)
    assert tokenizer.token_text(ids[0]) == "a"
