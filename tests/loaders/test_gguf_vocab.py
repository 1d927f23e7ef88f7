"""Vocabularies embedded in GGUF files, against llama.cpp, Hugging Face's originals and sentencepiece."""

from __future__ import annotations

import ctypes
import hashlib
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex

from inferax.errors import LoadError, UnsupportedError
from inferax.loaders.gguf import open_gguf
from inferax.loaders.gguf_pre import PRE
from inferax.loaders.gguf_vocab import derive_merges
from inferax.loaders.tokenizer import Tokenizer, tokenizer_from_gguf
from tests.corpus import corpus, digest
from tests.loaders.vocabularies import (
    FILE,
    SPACE,
    gguf_sentencepiece,
    golden,
    sentencepiece_metadata,
    split_digests,
    superword_metadata,
    train_sentencepiece,
)

# Where llama.cpp's regexes are known to be other than the model's own. It takes upper and lower case for one class and
# leaves marks out of words (o200k's family), does not split digits from each other or from a space (DeepSeek LLM,
# Falcon, AFMoE), knows only ASCII digits (SuperBPE) and no whitespace but ASCII's in plain classes (DeepSeek).
OTHER_IN_LLAMA_CPP = {
    "gpt-4o": r"[^\x00-\x7f]",
    "tekken": r"[^\x00-\x7f]",
    "granite-embed-multi-97m": r"[^\x00-\x7f]",
    "kimi-k2": r"[a-z][A-Z]|[^\x00-\x7f]",
    "youtu": r"[a-z][A-Z]|[^\x00-\x7f]",
    "tiny_aya": r"[a-z][A-Z]|\d|[^\x00-\x7f]",
    "superbpe": r"[^\x00-\x7f]",
    "afmoe": r"\s\d|\d\s",
    "falcon": r" \d|[^\x00-\x7f]",
    "deepseek-llm": r"\d\d|[²½Ⅷ]|[^\S \n]",
    "deepseek-coder": r"[^\x00-\x7f]\s|\s[^\x00-\x7f]",
    "laguna": r"\n",
}
# Published regexes, to be run by another engine than Oniguruma.
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PUBLISHED = {
    "llama-bpe": SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "kimi-k2": r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def read(path: Path) -> tuple[Mapping[str, Any], Tokenizer]:
    file = open_gguf(path)
    try:
        return file.metadata, tokenizer_from_gguf(file.metadata, path)
    finally:
        file.close()


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return read(smollm2_path)[1]


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> tuple[Mapping[str, Any], Tokenizer]:
    return read(gemma3_path)


def other_texts(digests: str, ours: list[str]) -> list[str]:
    pairs = zip(corpus(), ours, split_digests(digests), strict=True)
    return [text for text, mine, theirs in pairs if mine != theirs]


def check_model(tokenizer: Tokenizer, name: str) -> dict[str, list[str]]:
    """Equality with the model's own tokenizer; the texts on which other peers say something else."""
    answers, texts = golden(name), corpus()
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert ids[: len(answers["in_full"])] == answers["in_full"]
    digests = [digest(found) for found in ids]
    assert other_texts(answers["original"], digests) == []
    decoded = [hashlib.sha256(tokenizer.decode(found).encode()).hexdigest()[:8] for found in ids]
    assert other_texts(answers["original_text"], decoded) == []
    plain = [digest(tokenizer.encode(text, add_special_tokens=False, parse_special=False)) for text in texts]
    return {
        "llama_cpp": other_texts(answers["llama_cpp"], digests),
        "llama_cpp_plain": other_texts(answers["llama_cpp_plain"], plain),
        "transformers_gguf": other_texts(answers["transformers_gguf"], digests),
    }


def test_smollm2(smollm2: Tokenizer) -> None:
    """Byte-level BPE. transformers' GGUF reading ignores `tokenizer.ggml.pre`, so it does not split digits."""
    others = check_model(smollm2, "smollm2")
    assert others["llama_cpp"] == others["llama_cpp_plain"] == []
    assert all(any(character.isnumeric() for character in text) for text in others["transformers_gguf"])
    assert sorted(smollm2.eos_ids) == golden("smollm2")["llama_cpp_ends"]
    assert (smollm2.bos_id, smollm2.eos_ids[0], smollm2.pad_id, smollm2.add_bos) == (1, 2, 2, False)
    assert smollm2.vocab_size == 49152


def test_gemma3(gemma3: tuple[Mapping[str, Any], Tokenizer]) -> None:
    """SentencePiece BPE with 262,144 tokens.

    Against Gemma's own tokenizer.json llama.cpp cuts a literal U+2581 otherwise, takes the HTML tag </s> for an end of
    text, and transformers' GGUF reading merges runs of more than 31 spaces in another order.
    """
    _, tokenizer = gemma3
    others = check_model(tokenizer, "gemma3")
    assert all(SPACE in text for text in others["llama_cpp"])
    assert all(SPACE in text or "</s>" in text for text in others["llama_cpp_plain"])
    assert all(SPACE in text or " " * 32 in text for text in others["transformers_gguf"])
    assert len(others["llama_cpp"]) < 20
    html_tag = tokenizer.backend.token_to_id("</s>")
    assert sorted(tokenizer.eos_ids) == [end for end in golden("gemma3")["llama_cpp_ends"] if end != html_tag]
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.vocab_size) == (2, True, 262144)
    assert tokenizer.encode("a")[0] == 2


def test_gemma3_is_what_sentencepiece_says(gemma3: tuple[Mapping[str, Any], Tokenizer]) -> None:
    metadata, tokenizer = gemma3
    peer = gguf_sentencepiece(metadata)
    for text in corpus():
        if SPACE * 2 in text:  # a run of spaces to sentencepiece, a token of its own to tokenizer.json
            continue
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert ids == peer.encode(text)
        assert tokenizer.decode(ids) == peer.decode(ids)


@pytest.mark.llama_cpp
def test_llama_cpp_itself_agrees(smollm2_path: Path, smollm2: Tokenizer) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    peer = llama_cpp.Llama(model_path=str(smollm2_path), vocab_only=True, verbose=False)
    for text in corpus(300):
        ids = smollm2.encode(text, add_special_tokens=False)
        assert ids == peer.tokenize(text.encode(), add_bos=False, special=True)
        data = ctypes.create_string_buffer(4096)
        size = llama_cpp.llama_detokenize(
            peer._model.vocab, (llama_cpp.llama_token * len(ids))(*ids), len(ids), data, len(data), False, True
        )
        assert b"".join(map(smollm2.token_bytes, ids)) == data.raw[:size]


@pytest.mark.parametrize("chain", sorted(golden("pre")["chains"]))
def test_pre_tokenizers(chain: str) -> None:
    """Every name that llama.cpp knows, with a vocabulary that shows every cut."""
    answers = golden("pre")
    texts = corpus(answers["texts"])
    expected = split_digests(answers["chains"][chain])
    names = answers["names"][chain]
    other = next((pattern for name, pattern in OTHER_IN_LLAMA_CPP.items() if name in names), None)
    for name in names:
        tokenizer = tokenizer_from_gguf(superword_metadata(name), FILE)
        found = [digest(tokenizer.encode(text)) for text in texts]
        differ = [text for text, ours, theirs in zip(texts, found, expected, strict=True) if ours != theirs]
        assert [text for text in differ if other is None or not re.search(other, text)] == [], name
        for original in set(answers["originals"]) & set(names):
            assert found == split_digests(answers["originals"][original]), name


def test_all_pre_tokenizers_are_tested() -> None:
    tested = {name for names in golden("pre")["names"].values() for name in names}
    assert tested == {name for name, pre in PRE.items() if not pre.raw}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_pre_tokenizers_cut_as_published(name: str) -> None:
    pattern = regex.compile(PUBLISHED[name], regex.V1)
    pre_tokenizer = tokenizer_from_gguf(superword_metadata(name), FILE).backend.pre_tokenizer
    for text in corpus(405):
        pieces = [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]
        assert pieces == pattern.findall(text)


def test_characters_are_composed_where_the_model_does() -> None:
    apart, composed = unicodedata.normalize("NFD", "Zürich, 각"), "Zürich, 각"
    for name, same in (("qwen2", True), ("command-r", True), ("mpt", True), ("llama-bpe", False), ("smollm", False)):
        tokenizer = tokenizer_from_gguf(superword_metadata(name), FILE)
        assert (tokenizer.encode(apart) == tokenizer.encode(composed)) is same
        assert tokenizer.decode(tokenizer.encode(apart)) == (composed if same else apart)


@pytest.mark.parametrize("dummy_prefix", [False, True])
@pytest.mark.parametrize("user_defined", [[], ["<tag>", SPACE * 2, SPACE * 3, "\n"]])
def test_sentencepiece_bpe(dummy_prefix: bool, user_defined: list[str]) -> None:
    peer = train_sentencepiece(
        corpus(400),
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        user_defined_symbols=user_defined,
    )
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(peer), FILE)
    for text in corpus(600):
        # The legacy rule of Llama's tokenizers puts a space after a special token too, and so does llama.cpp's.
        if SPACE in text or (dummy_prefix and any(symbol in text for symbol in user_defined)):
            continue
        ids = tokenizer.encode(text, parse_special=False)
        assert ids == peer.encode(text)
        assert tokenizer.decode(ids) == peer.decode(ids) == text


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True, "add_dummy_prefix": True},
        {"normalization_rule_name": "identity", "remove_extra_whitespaces": True, "byte_fallback": True},
    ],
)
def test_sentencepiece_unigram(options: dict[str, Any]) -> None:
    texts = [text for text in corpus(600) if SPACE not in text]
    peer = train_sentencepiece(texts, model_type="unigram", **options)
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(peer), FILE)
    scores = [peer.get_score(index) for index in range(peer.get_piece_size())]
    clusters = regex.compile(r"\X")
    for text in texts:
        # `tokenizers` looks up whole grapheme clusters in the character map, sentencepiece the longest prefixes.
        mapped = options["normalization_rule_name"] != "identity"
        if mapped and any(len(cluster) > 1 for cluster in clusters.findall(text)):
            continue
        ids, expected = tokenizer.encode(text, parse_special=False), peer.encode(text)
        if ids != expected:  # two ways of the same likelihood
            assert sum(scores[index] for index in ids) == pytest.approx(sum(scores[index] for index in expected))
            assert len(ids) == len(expected) and tokenizer.decode(ids) == peer.decode(expected)
        if peer.unk_id() not in expected:  # which sentencepiece shows as " \u2047 "
            assert tokenizer.decode(expected) == peer.decode(expected)


def test_gemma4_takes_the_merges_of_its_file() -> None:
    peer = train_sentencepiece(
        corpus(400), model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=False,
    )  # fmt: skip
    metadata = sentencepiece_metadata(peer)
    normal = np.flatnonzero(metadata["tokenizer.ggml.token_type"] == 1).tolist()
    pieces = [metadata["tokenizer.ggml.tokens"][index] for index in normal]
    merges = derive_merges(pieces, metadata["tokenizer.ggml.scores"][normal].tolist())
    metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    metadata["tokenizer.ggml.model"] = "gemma4"
    tokenizer = tokenizer_from_gguf(metadata, FILE)
    for text in corpus(300):
        if SPACE not in text:
            assert tokenizer.encode(text, parse_special=False) == peer.encode(text)


def test_merges_from_tiktoken_ranks() -> None:
    """Kimi K2 has no merges: tiktoken joins the pair whose joint rank is lowest, until there is none."""
    metadata = superword_metadata("kimi-k2")
    del metadata["tokenizer.ggml.merges"]
    tokenizer = tokenizer_from_gguf(metadata, FILE)
    rank = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    for text in corpus(60):
        for word in re.findall("[a-z]{2,}", text):
            parts = list(word)
            while pairs := [
                (rank[left + right], place)
                for place, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
                if left + right in rank
            ]:
                _, place = min(pairs)
                parts[place : place + 2] = [parts[place] + parts[place + 1]]
            assert tokenizer.encode(word) == [rank[part] for part in parts]


def specials(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary with special tokens that its own merges spell, too."""
    words = ["<s>", "</s>", "<unk>", "<think>", "<|im_end|>"]
    metadata = superword_metadata("llama-bpe")
    tokens = [*metadata["tokenizer.ggml.tokens"], *words, "stop"]
    types = np.ones(len(tokens), np.int32)
    types[[tokens.index(word) for word in words]] = [3, 3, 2, 4, 3]
    types[tokens.index("stop")] = 3
    return {
        **metadata,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        **changes,
    }


def test_special_tokens() -> None:
    metadata = specials()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = tokenizer_from_gguf(metadata, FILE)
    special = {tokens.index(word) for word in ("<s>", "</s>", "<unk>", "<|im_end|>", "stop")}
    assert tokenizer.special_ids == special
    assert tokenizer.eos_ids == (tokens.index("</s>"), tokens.index("<|im_end|>"))
    text = "<s>hi <think>stop</s><|im_end|>"
    ids = tokenizer.encode(text)
    assert special & set(ids) == special - {tokens.index("<unk>")}
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi <think>"
    plain = tokenizer.encode(text, parse_special=False)
    # "stop" is a word that this pre-tokenizer takes whole where it is a token: not as a special one.
    assert special & set(plain) == set() and tokens.index("<think>") in plain
    assert tokenizer.decode(plain) == text


def test_bos_and_eos() -> None:
    metadata = specials(**{"tokenizer.ggml.add_eos_token": True})
    bos, eos = metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    del metadata["tokenizer.ggml.add_bos_token"]  # this pre-tokenizer's models want it
    tokenizer = tokenizer_from_gguf(metadata, FILE)
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, True)
    for parse_special in (True, False):
        assert tokenizer.encode("", parse_special=parse_special) == [bos, eos]
        ids = tokenizer.encode("stop", parse_special=parse_special)
        assert (ids[0], ids[-1], len(set(ids) & {bos, eos})) == (bos, eos, 2)
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_ends_of_a_generation() -> None:
    harmony = ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]
    metadata = superword_metadata("gpt-4o")
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"] + harmony
    metadata["tokenizer.ggml.token_type"] = np.array([1] * count + [3] * 4, np.int32)
    metadata["tokenizer.ggml.eot_token_id"] = count + 3
    assert tokenizer_from_gguf(metadata, FILE).eos_ids == (count + 3, count, count + 1)


def test_phi3_tokens_take_the_space_behind_them() -> None:
    peer = train_sentencepiece(corpus(300), model_type="bpe", byte_fallback=True, user_defined_symbols=["<|user|>"])
    metadata = sentencepiece_metadata(peer) | {"general.architecture": "phi3"}
    tokenizer = tokenizer_from_gguf(metadata, FILE)
    assert tokenizer.encode("<|user|> \n hi") == tokenizer.encode("<|user|>hi")
    other = tokenizer_from_gguf(metadata | {"general.architecture": "llama"}, FILE)
    assert other.encode("<|user|> \n hi") != other.encode("<|user|>hi")


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"model": None}, "tokenizer.ggml.model"),
    "model is no string": ({"model": 3}, "tokenizer.ggml.model"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens"),
    "tokens are numbers": ({"tokens": np.arange(4)}, "tokenizer.ggml.tokens"),
    "unknown pre-tokenizer": ({"pre": "nonesuch"}, "'nonesuch' is not known; known are a.x-4.0, afmoe"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges"),
    "half a merge": ({"merges": ["ab"]}, "'ab'"),
    "merge of unknown tokens": ({"merges": ["\u4e00 \u4e01"]}, "do not fit together"),
    "types too short": ({"token_type": np.ones(3, np.int32)}, "tokenizer.ggml.token_type has 3 entries"),
    "types are strings": ({"token_type": ["a"]}, "tokenizer.ggml.token_type"),
    "id is a string": ({"bos_token_id": "x"}, "tokenizer.ggml.bos_token_id"),
    "no BOS to add": ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id"),
    "BOS out of range": ({"add_bos_token": True, "bos_token_id": 1 << 30}, "tokenizer.ggml.bos_token_id"),
    "no scores": ({"model": "llama", "merges": None}, "tokenizer.ggml.scores"),
    "no unigram scores": ({"model": "t5"}, "tokenizer.ggml.scores"),
    "scores too short": ({"model": "llama", "merges": None, "scores": np.ones(2, np.float32)}, "has 2 entries"),
    "charsmap is broken": (
        {"model": "t5", "scores": np.zeros(3256, np.float32), "precompiled_charsmap": np.ones(3, np.uint8)},
        "cannot be built",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_vocabularies(case: str) -> None:
    changes, problem = BROKEN[case]
    metadata = superword_metadata("smollm") | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(LoadError) as caught:
        tokenizer_from_gguf(metadata, FILE)
    assert str(FILE) in str(caught.value) and problem in str(caught.value) and caught.value.remedy


def test_token_twice() -> None:
    metadata = superword_metadata("smollm")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "!"]
    with pytest.raises(LoadError, match="'!' twice, as 0 and 3256"):
        tokenizer_from_gguf(metadata, FILE)


def test_kinds_that_are_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="'bert'; supported are gpt2, llama, gemma4, t5"):
        tokenizer_from_gguf(superword_metadata("smollm") | {"tokenizer.ggml.model": "bert"}, FILE)
