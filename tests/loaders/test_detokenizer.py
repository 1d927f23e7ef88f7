"""Text as its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferax.loaders.detokenizer import Detokenizer
from inferax.loaders.gguf import open_gguf
from inferax.loaders.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.corpus import corpus
from tests.loaders.vocabularies import (
    FILE,
    byte_fallback,
    byte_level,
    metaspace,
    sentencepiece_metadata,
    train_sentencepiece,
    word_piece,
)


def wrapped(backend: tokenizers.Tokenizer) -> Tokenizer:
    added = backend.get_added_tokens_decoder()
    special = frozenset(index for index, token in added.items() if token.special)
    return Tokenizer(backend, backend.get_vocab_size(), 1, (2,), 3, 0, special, True, False)


MAKERS = {make.__name__: make for make in (byte_level, byte_fallback, word_piece, metaspace)}


@cache
def made(name: str) -> Tokenizer:
    return wrapped(MAKERS[name]())


def streamed(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip_special_tokens: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
    return [*(detokenizer.add(index) for index in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any tokens, bytes more often than others, and some outside of the vocabulary."""
    return st.lists(
        st.integers(0, 300) | st.integers(0, tokenizer.vocab_size - 1) | st.just(tokenizer.vocab_size + 7), max_size=24
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("skip_special_tokens", [False, True])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_tokens(name: str, skip_special_tokens: bool, data: st.DataObject) -> None:
    """What comes is what `decode` gives, also behind a prompt, of which only an unfinished character is given again."""
    tokenizer = made(name)
    ids, prompt = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    decode: Callable[[list[int]], str] = lambda all_ids: tokenizer.decode(  # noqa: E731
        all_ids, skip_special_tokens=skip_special_tokens
    )
    assert "".join(streamed(tokenizer, ids, (), skip_special_tokens)) == decode(ids)
    whole, before = decode(prompt + ids), "".join(streamed(tokenizer, prompt, (), skip_special_tokens)[:-1])
    assert decode(prompt).rstrip("\ufffd") == before.rstrip("\ufffd")
    assert before + "".join(streamed(tokenizer, ids, prompt, skip_special_tokens)) == whole


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_texts(name: str) -> None:
    """A text comes back as it was, and never shows half a character on the way."""
    tokenizer = made(name)
    for text in corpus(450):
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        if tokenizer.unk_id in ids or "\ufffd" in text or "\u2581" in text:
            continue
        parts = streamed(tokenizer, ids)
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)
        assert parts[-1] == ""


def test_a_character_in_parts() -> None:
    tokenizer = made("byte_level")
    token_of = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    star, bolt = ([token_of[bytes([byte])] for byte in text.encode()] for text in ("\U0001f31f", "\u26a1"))
    assert streamed(tokenizer, star) == ["", "", "", "\U0001f31f", ""]
    assert streamed(tokenizer, star[2:], star[:2]) == ["", "\U0001f31f", ""]  # begun by the prompt
    assert streamed(tokenizer, [*star[:3], *bolt]) == ["", "", "", "\ufffd", "", "\u26a1", ""]
    assert streamed(tokenizer, star[:3]) == ["", "", "", "\ufffd"]
    skipped = [star[0], tokenizer.eos_ids[0], *star[1:]]
    assert "".join(streamed(tokenizer, skipped)) == "\U0001f31f"


def test_leading_space() -> None:
    """The space that the tokenizer puts before a text goes again, but not behind a prompt."""
    tokenizer = made("byte_fallback")
    ids = tokenizer.encode("the of", add_special_tokens=False)
    assert "".join(streamed(tokenizer, ids)) == "the of"
    assert "".join(streamed(tokenizer, ids, [tokenizer.bos_id or 0])) == "the of"
    assert "".join(streamed(tokenizer, ids, [tokenizer.bos_id or 0], skip_special_tokens=False)) == " the of"
    assert "".join(streamed(tokenizer, ids, ids)) == " the of"


@pytest.fixture(scope="module")
def sentencepiece_pair() -> tuple[Any, Tokenizer]:
    peer = train_sentencepiece(corpus(400), model_type="bpe", byte_fallback=True, normalization_rule_name="identity")
    return peer, tokenizer_from_gguf(sentencepiece_metadata(peer), FILE)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ids=st.lists(st.integers(3, 258) | st.integers(3, 900), max_size=20))
def test_broken_bytes_are_read_as_sentencepiece_reads_them(
    ids: list[int], sentencepiece_pair: tuple[Any, Tokenizer]
) -> None:
    peer, tokenizer = sentencepiece_pair
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == peer.decode(ids)


@pytest.mark.parametrize("name", MAKERS)
def test_the_state_stays_small(name: str) -> None:
    """Constant work per token: nothing that is decoded again grows with the answer, not even with broken characters."""
    tokenizer = made(name)
    lead = tokenizer.backend.token_to_id("<0xF0>") or tokenizer.backend.token_to_id("\u00f0") or 0
    detokenizer = Detokenizer(tokenizer, [5] * 5000)
    for step in range(3000):
        detokenizer.add(lead if step % 3 else step % tokenizer.vocab_size)
        state: Mapping[str, Any] = vars(detokenizer._text)
        assert sum(len(value) for value in state.values() if isinstance(value, (list, bytes))) <= 32


def test_gemma3(gemma3_path: Path) -> None:
    file = open_gguf(gemma3_path)
    tokenizer = tokenizer_from_gguf(file.metadata, gemma3_path)
    file.close()
    for text in corpus(300):
        ids = tokenizer.encode(text, parse_special=False)
        assert "".join(streamed(tokenizer, ids)) == text.replace("\u2581", " ")
