"""A GGUF file's embedded vocabulary as a `tokenizers` object.

Keys and token types are those of ggml's docs/gguf.md. Three kinds of vocabulary are built: byte-level BPE ("gpt2"),
SentencePiece BPE ("llama", which stores scores and no merges, and "gemma4") and SentencePiece unigram ("t5").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram

from inferax.errors import LoadError, UnsupportedError
from inferax.loaders.gguf_pre import PRE, Pre

Array = np.ndarray[Any, np.dtype[Any]]
SPACE = "\u2581"  # SentencePiece's spelling of a space
_CONVERT = "Make the file again with llama.cpp's convert_hf_to_gguf.py, or use the original model directory"
_KINDS = ("gpt2", "llama", "gemma4", "t5")

# Texts that end a turn wherever they are a token; llama.cpp's list, since a file names one such token and no more.
# (llama.cpp also counts the ends of files and repositories that a code model writes, and padding.)
_END_TEXTS = frozenset(
    (
        "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <|end_of_text|> "
        "<|endoftext|> <end_of_turn> <turn|> <|tool_response> <end_of_utterance> <eos> <EOT> _<EOT> [EOT] [EOS] [e~[ "
        "<\uff5cend\u2581of\u2581sentence\uff5c> "
        "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
        "<|file_sep|>"
    ).split()
)
_ID_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GGUFVocab:
    """What `tokenizer.ggml.*` says. `end_ids` are all tokens that end a generation, the file's own EOS first."""

    backend: Tokenizer
    vocab_size: int
    bos_id: int | None
    end_ids: tuple[int, ...]
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    add_eos: bool


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    return "a list of other things" if isinstance(value, list) else repr(value)


class _Metadata:
    """Typed reading of `tokenizer.ggml.*`; every method raises LoadError, naming the key."""

    def __init__(self, values: Mapping[str, Any], file: Path) -> None:
        self.values, self.file = values, file

    def error(self, problem: str, remedy: str = _CONVERT) -> LoadError:
        return LoadError(self.file, problem, remedy)

    def strings(self, key: str) -> list[str] | None:
        value = self.values.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"tokenizer.ggml.{key} should be an array of strings, and is {_kind_of(value)}")
        return value

    def numbers(self, key: str, count: int | None = None) -> Array | None:
        """A numeric array, cut to `count` entries (None: all of them)."""
        value = self.values.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise self.error(f"tokenizer.ggml.{key} should be an array of numbers, and is {_kind_of(value)}")
        if count is not None and len(array) < count:
            raise self.error(f"tokenizer.ggml.{key} has {len(array)} entries for {count} tokens")
        return array[:count]

    def text(self, key: str, default: str) -> str:
        value = self.values.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, str):
            raise self.error(f"tokenizer.ggml.{key} should be a string, and is {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.values.get(f"tokenizer.ggml.{key}", default))

    def token_id(self, key: str, count: int, default: int | None = None) -> int | None:
        """A token's id; None where the file has none, or one outside the vocabulary, as converters write for none."""
        value = self.values.get(f"tokenizer.ggml.{key}_token_id", default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self.error(f"tokenizer.ggml.{key}_token_id should be an integer, and is {value!r}")
        return int(value) if 0 <= value < count else None


def read_vocab(metadata: Mapping[str, Any], file: Path) -> GGUFVocab:
    """The vocabulary that a GGUF file embeds.

    metadata: the file's key-value pairs as Python scalars, lists of strings and numpy arrays.
    Raises LoadError, naming `file` and the key, if the vocabulary is missing, broken or of an unknown pre-tokenizer;
    UnsupportedError if it is of a kind that is not built here.
    """
    meta = _Metadata(metadata, file)
    kind = meta.text("model", "")
    if not kind:
        raise meta.error("it embeds no tokenizer: tokenizer.ggml.model is missing")
    if kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise UnsupportedError(f"{file}: tokenizer.ggml.model is {kind!r}; supported are {known}. Use another model")
    tokens = meta.strings("tokens")
    if not tokens:
        raise meta.error("its vocabulary is missing or empty: tokenizer.ggml.tokens")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    count = len(tokens)
    types = meta.numbers("token_type", count)
    types = np.ones(count, np.int32) if types is None else types.astype(np.int32)
    architecture = metadata.get("general.architecture")

    if kind == "gpt2":
        pre_name = meta.text("pre", "default")
        if pre_name not in PRE:
            known = ", ".join(sorted(PRE))
            raise meta.error(f"tokenizer.ggml.pre {pre_name!r} is not known; known are {known}")
        pre = PRE[pre_name]
    else:
        pre_name = kind
        pre = PRE["gemma4"] if kind == "gemma4" else Pre(add_bos=kind == "llama")
    bos_default, eos_default, unk_default, pad_default = {
        "llama": (1, 2, 0, None),
        "t5": (None, 1, 2, 0),
    }.get(kind, (None, None, None, None))
    bos, eos = meta.token_id("bos", count, bos_default), meta.token_id("eos", count, eos_default)
    unk, pad = meta.token_id("unknown", count, unk_default), meta.token_id("padding", count, pad_default)
    add_bos, add_eos = meta.flag("add_bos_token", pre.add_bos), meta.flag("add_eos_token", kind == "t5")
    for wanted, token_id, name in ((add_bos, bos, "bos"), (add_eos, eos, "eos")):
        if wanted and token_id is None:
            raise meta.error(f"text should get a {name} token, and tokenizer.ggml.{name}_token_id names none")

    end_ids = _end_ids(meta, tokens, types, eos)
    types[list(end_ids)] = TokenType.CONTROL
    space_prefix = meta.flag("add_space_prefix", kind in ("llama", "t5"))
    if kind == "t5":
        backend = _unigram(meta, tokens, types, unk, space_prefix)
    elif kind == "llama" or pre.raw:
        tokens = _respelled(tokens, types) if kind == "llama" else tokens
        backend = _sentencepiece_bpe(meta, tokens, types, unk, space_prefix and kind == "llama")
    else:
        backend = _byte_level_bpe(meta, tokens, types, pre, pre_name)
    _add_tokens(backend, tokens, types, strip_right=architecture == "phi3" and kind == "llama")
    _set_template(backend, bos if add_bos else None, eos if add_eos else None)
    return GGUFVocab(backend, count, bos, end_ids, pad, unk, add_bos, add_eos)


def _set_template(backend: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Makes `encode(..., add_special_tokens=True)` begin with bos_id and end with eos_id, where given."""
    pieces = [("bos", bos_id), ("$A", None), ("eos", eos_id)]
    backend.post_processor = processors.TemplateProcessing(
        single=[name for name, token_id in pieces if name == "$A" or token_id is not None],
        special_tokens=[(name, token_id) for name, token_id in pieces if token_id is not None],
    )


def derive_merges(pieces: Sequence[str], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """BPE merges, best first, that give what SentencePiece gives by merging to the piece of the highest rank.

    Every cut of a piece into two known pieces is a merge. Those of pieces of equal rank come in the order of a
    tokenizer.json: the longest left half first. Takes about 3 us per piece.
    """
    known = frozenset(pieces)

    def cuts(indices: Iterable[int]) -> list[tuple[str, str]]:
        return [
            (left, right)
            for piece in map(pieces.__getitem__, indices)
            for cut in range(len(piece) - 1, 0, -1)
            if (right := piece[cut:]) in known and (left := piece[:cut]) in known
        ]

    values = np.asarray(ranks, np.float64)
    order = np.argsort(-values, kind="stable")
    values = values[order]
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    sizes = np.diff(starts, append=len(order))
    merges: list[tuple[str, str]] = []
    done = 0
    for start, size in zip(starts[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        merges += cuts(order[done:start].tolist())
        done = start + size
        tied = cuts(order[start:done].tolist())
        merges += sorted(tied, key=lambda merge: (len(merge[0]), len(merge[1])), reverse=True)
    return merges + cuts(order[done:].tolist())


def _end_ids(meta: _Metadata, tokens: Sequence[str], types: Array, eos: int | None) -> tuple[int, ...]:
    count = len(tokens)
    found = {token: index for index, token in enumerate(tokens) if token in _END_TEXTS}
    # In Gemma's vocabulary, for one, </s> is an HTML tag.
    if "</s>" in tokens and types[index := tokens.index("</s>")] == TokenType.CONTROL:
        found["</s>"] = index
    # Where these are the ends, <|end|> only closes a part of an answer (gpt-oss, Solar Open).
    calls = {"<|call|>", "<|calls|>"} & found.keys()
    if calls and {"<|return|>", "<|flush|>"} & found.keys():
        found.pop("<|end|>", None)
    named = [meta.token_id(key, count) for key in _ID_KEYS]
    return tuple(dict.fromkeys(index for index in (eos, *named, *sorted(found.values())) if index is not None))


def _respelled(tokens: list[str], types: Array) -> list[str]:
    """Runs of spaces as SentencePiece spells them: converters write those of user-defined tokens as plain spaces."""
    return [
        SPACE * len(token) if kind == TokenType.USER_DEFINED and len(token) > 1 and not token.strip(" ") else token
        for token, kind in zip(tokens, types.tolist(), strict=True)
    ]


def _index(meta: _Metadata, tokens: Sequence[str]) -> dict[str, int]:
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise meta.error(f"tokenizer.ggml.tokens has {twice!r} twice, as {tokens.index(twice)} and {vocab[twice]}")
    return vocab


def _merges(meta: _Metadata) -> list[tuple[str, str]] | None:
    lines = meta.strings("merges")
    if lines is None:
        return None
    merges = [tuple(line.split(" ", 1)) for line in lines]
    if lines and set(map(len, merges)) != {2}:
        broken = next(line for line, merge in zip(lines, merges, strict=True) if len(merge) != 2)
        raise meta.error(f"tokenizer.ggml.merges has {broken!r}, which is not two tokens with a space between them")
    return merges  # type: ignore[return-value]  # each has just been seen to be a pair


def _bpe(meta: _Metadata, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    try:
        return BPE(vocab, merges, **options)
    except Exception as error:  # tokenizers raises plain Exception
        raise meta.error(f"its vocabulary and merges do not fit together ({error})") from None


def _byte_level_bpe(meta: _Metadata, tokens: list[str], types: Array, pre: Pre, pre_name: str) -> Tokenizer:
    vocab = _index(meta, tokens)
    merges = _merges(meta)
    if merges is None:
        if pre_name != "kimi-k2":
            raise meta.error("its byte-level BPE vocabulary has no tokenizer.ggml.merges")
        # A tiktoken vocabulary: a token's id is its rank.
        normal = np.flatnonzero(types == TokenType.NORMAL).tolist()
        merges = derive_merges([tokens[index] for index in normal], [-index for index in normal])
    backend = Tokenizer(_bpe(meta, vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    meta: _Metadata, tokens: list[str], types: Array, unk: int | None, space_prefix: bool
) -> Tokenizer:
    vocab = _index(meta, tokens)
    merges = _merges(meta)
    if merges is None:
        scores = meta.numbers("scores", len(tokens))
        if scores is None:
            raise meta.error("its SentencePiece vocabulary has neither tokenizer.ggml.scores nor tokenizer.ggml.merges")
        # Text must never merge into a control token. User-defined pieces go before all others, whatever their score.
        ranks = np.where(types == TokenType.USER_DEFINED, np.inf, scores.astype(np.float64))
        pieces = np.flatnonzero((types == TokenType.NORMAL) | (types == TokenType.USER_DEFINED)).tolist()
        merges = derive_merges([tokens[index] for index in pieces], ranks[pieces].tolist())
    unk_token = None if unk is None else tokens[unk]
    backend = Tokenizer(_bpe(meta, vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape]) if space_prefix else escape
    backend.decoder = _sentencepiece_decoder(space_prefix)
    return backend


def _unigram(meta: _Metadata, tokens: list[str], types: Array, unk: int | None, space_prefix: bool) -> Tokenizer:
    _index(meta, tokens)
    scores = meta.numbers("scores", len(tokens))
    if scores is None:
        raise meta.error("its unigram vocabulary has no tokenizer.ggml.scores")
    if unk is None:
        raise meta.error("its unigram vocabulary names no token for unknown text: tokenizer.ggml.unknown_token_id")
    scores = np.where(types == TokenType.USER_DEFINED, 0.0, scores.astype(np.float64))
    byte_fallback = bool((types == TokenType.BYTE).any())
    steps: list[normalizers.Normalizer] = []
    charsmap = meta.numbers("precompiled_charsmap")
    try:
        backend = Tokenizer(Unigram(list(zip(tokens, scores.tolist(), strict=True)), unk, byte_fallback))
        if charsmap is not None:
            steps.append(normalizers.Precompiled(charsmap.astype(np.uint8).tobytes()))
    except Exception as error:  # tokenizers raises plain Exception
        raise meta.error(f"its unigram vocabulary cannot be built ({error})") from None
    if meta.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if space_prefix:
        steps.append(normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if byte_fallback:  # text that spells a byte token is not that token
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
    backend.decoder = _sentencepiece_decoder(space_prefix)
    return backend


def _sentencepiece_decoder(space_prefix: bool) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], types: Array, strip_right: bool) -> None:
    """Control and unknown tokens become special added tokens, user-defined ones plain added tokens.

    strip_right: the space behind a token belongs to it, but for a few. No key of a file says so; Phi-3's does.
    """
    special = (types == TokenType.CONTROL) | (types == TokenType.UNKNOWN)
    added: list[AddedToken] = []
    for index in np.flatnonzero(special | (types == TokenType.USER_DEFINED)).tolist():
        strip = strip_right and tokens[index] not in ("<unk>", "<s>", "<|endoftext|>")
        added.append(AddedToken(tokens[index], rstrip=strip, normalized=False, special=bool(special[index])))
    backend.add_tokens(added)
