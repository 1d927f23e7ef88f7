"""Text to token ids and back: one `Tokenizer` over a `tokenizers` object, from a model directory or a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, pre_tokenizers

from inferax.errors import LoadError, RequestError
from inferax.loaders.gguf_vocab import SPACE, read_vocab
from inferax.loaders.hf_files import listed_tokens, named_tokens, read_json
from inferax.loaders.pieces import Pieces, read_pieces

_FETCH = "Fetch the tokenizer's files again, all from the same model"
_MAKE = (
    "Put the model's tokenizer.json there; where it has none, make it with transformers: "
    "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)"
)


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with its rules. Threads may share it.

    eos_ids: every token that ends a generation, the tokenizer's own EOS first. special_ids: the tokens that
    `skip_special_tokens` leaves out. add_bos, add_eos: what `add_special_tokens` puts around a text.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    unk_id: int | None
    special_ids: frozenset[int]
    add_bos: bool
    add_eos: bool

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of a text.

        parse_special: text that spells a special token is that token; otherwise it is text like any other.
        Raises RequestError if `text` is not a string of Unicode characters.
        """
        backend = self.backend if parse_special else self._literal
        try:
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
            if not parse_special and self._spells_special(text, encoding):
                encoding = self._guarded.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            problem = "it has a lone surrogate, which is no character" if isinstance(text, str) else "it is no string"
            raise RequestError("text", problem) from None
        return encoding.ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a sequence. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary have no text.

        Raises RequestError for a negative id.
        """
        ids = list(ids)
        if self.pieces is None or self.pieces.byte_letters:
            try:
                return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
            except OverflowError:
                raise RequestError("token ids", f"{min(ids)} is no token id") from None
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids))
        text, _ = self.pieces.read(data, final=True)
        return self.pieces.cut_prefix(text, self.pieces.prefix_count)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text; they may be part of a character. Empty outside the vocabulary."""
        try:
            piece = self.backend.id_to_token(token_id)
        except OverflowError:
            raise RequestError("token ids", f"{token_id} is no token id") from None
        if piece is None:
            return b""
        if self.pieces is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return self.pieces.bytes_of(piece)

    def token_text(self, token_id: int) -> str:
        """One token as text, for display: U+FFFD stands for bytes that are no whole character."""
        return self.token_bytes(token_id).decode(errors="replace")

    @cached_property
    def pieces(self) -> Pieces | None:
        """How pieces become bytes; None if the decoder does not work token by token."""
        return read_pieces(self.backend.decoder)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The backend, with special tokens' texts as plain text."""
        return _twin(self.backend, self.backend.pre_tokenizer)

    @cached_property
    def _guarded(self) -> tokenizers.Tokenizer:
        """`_literal`, cut inside every special token's text, so that the model cannot put one together by itself."""
        special = [token.content for token in self.backend.get_added_tokens_decoder().values() if token.special]
        texts = sorted({form for text in special for form in (text, text.replace(" ", SPACE)) if len(text) > 1})
        cut = "|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts)
        steps = [pre_tokenizers.Split(Regex(cut), "merged_with_previous")]
        if self.backend.pre_tokenizer is not None:
            steps.append(self.backend.pre_tokenizer)
        return _twin(self.backend, pre_tokenizers.Sequence(steps))

    def _spells_special(self, text: str, encoding: tokenizers.Encoding) -> bool:
        hit = self.special_ids.intersection(encoding.ids)
        if self.unk_id in hit and str(self.backend.id_to_token(self.unk_id)) not in text:
            hit -= {self.unk_id}  # unknown text, as it should be
        return bool(hit) and any(
            index in hit and not template
            for index, template in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        )


def tokenizer_from_gguf(metadata: Mapping[str, Any], file: Path) -> Tokenizer:
    """The tokenizer that a GGUF file embeds.

    metadata: the file's key-value pairs as Python scalars, lists of strings and numpy arrays.
    Raises LoadError or UnsupportedError, naming `file`, the key and what would be right.
    """
    vocab = read_vocab(metadata, file)
    return Tokenizer(
        backend=vocab.backend,
        vocab_size=vocab.vocab_size,
        bos_id=vocab.bos_id,
        eos_ids=vocab.end_ids,
        pad_id=vocab.pad_id,
        unk_id=vocab.unk_id,
        special_ids=_special_ids(vocab.backend),
        add_bos=vocab.add_bos,
        add_eos=vocab.add_eos,
    )


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory: tokenizer.json, with what the configs beside it say of its tokens.

    As in transformers 5, tokenizer.json alone says whether BOS and EOS go around a text, whatever `add_bos_token` in
    tokenizer_config.json is. The ends of a generation are all that generation_config.json, config.json and the
    tokenizer name. Raises LoadError, naming the file and the remedy.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise LoadError(file, "the model's tokenizer is missing", _MAKE)
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise LoadError(file, f"it is no tokenizer that can be read ({error})", _FETCH) from None
    backend.no_truncation()
    backend.no_padding()

    config = read_json(directory / "tokenizer_config.json")
    named = named_tokens(directory)
    _add_listed(backend, config, [*named.values(), *listed_tokens(directory)], directory / "tokenizer_config.json")
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    around = backend.encode("", add_special_tokens=True).ids
    ends = [eos, *_config_ids(directory / "generation_config.json"), *_config_ids(directory / "config.json")]
    return Tokenizer(
        backend=backend,
        vocab_size=backend.get_vocab_size(),
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_id=ids.get("pad_token"),
        unk_id=ids.get("unk_token"),
        special_ids=_special_ids(backend),
        add_bos=bos is not None and around[:1] == [bos],
        add_eos=eos is not None and around[-1:] == [eos],
    )


def _twin(backend: tokenizers.Tokenizer, pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> tokenizers.Tokenizer:
    """A tokenizer with the same model and rules that takes special tokens' texts as text. Shares the vocabulary."""
    added = backend.get_added_tokens_decoder()
    twin = tokenizers.Tokenizer(backend.model)
    twin.add_tokens([added[index] for index in sorted(added)])
    if any(twin.token_to_id(token.content) != index for index, token in added.items()):
        twin = tokenizers.Tokenizer.from_str(backend.to_str())  # ids with gaps, which only the file format can say
    for part, value in (
        ("normalizer", backend.normalizer),
        ("pre_tokenizer", pre_tokenizer),
        ("post_processor", backend.post_processor),
        ("decoder", backend.decoder),
    ):
        if value is not None:
            setattr(twin, part, value)
    twin.encode_special_tokens = True
    return twin


def _special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(index for index, token in backend.get_added_tokens_decoder().items() if token.special)


def _add_listed(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: list[str], file: Path) -> None:
    """Gives tokens the flags that tokenizer_config.json lists, adds those that tokenizer.json lacks, in id order."""
    listed = config.get("added_tokens_decoder") or {}
    added = backend.get_added_tokens_decoder()
    try:
        wanted = {int(index): AddedToken(**_flags(token)) for index, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LoadError(file, f"its added_tokens_decoder is not a table of tokens ({error})", _FETCH) from None
    for index, token in sorted(wanted.items()):
        if token.content in special:
            token.special = True
        if index in added and repr(added[index]) == repr(token):
            continue
        backend.add_tokens([token])
        if (got := backend.token_to_id(token.content)) != index:
            problem = f"it gives token {token.content!r} the id {index}, in tokenizer.json it is {got}"
            raise LoadError(file, problem, _FETCH)
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    known = [text for text in special if text not in marked and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in dict.fromkeys(known)])


def _flags(token: Mapping[str, Any]) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: token[name] for name in names if name == "content" or name in token}


def _config_ids(path: Path) -> list[int]:
    """`eos_token_id` of a config, or of its text part, as a list."""
    values = read_json(path)
    part = values.get("text_config")
    value = values.get("eos_token_id", part.get("eos_token_id") if isinstance(part, dict) else None)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
        raise LoadError(path, f"eos_token_id should be a token id or a list of them, and is {value!r}", _FETCH)
    return found
