"""What text a token stands for, as bytes: the part of a `tokenizers` decoder that works token by token."""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers.decoders import Decoder

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Pieces:
    """Rules of a decoder under which the text of a sequence is its tokens' bytes one after another, read as UTF-8.

    byte_letters: pieces are spelled in GPT-2's letters for bytes. replaced: strings to be replaced in a piece.
    byte_fallback: a piece <0xHH> is that byte. prefix, prefix_count: what is cut from the start of the whole text.
    """

    byte_letters: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    prefix: str = ""
    prefix_count: int = 0

    def bytes_of(self, piece: str) -> bytes:
        """The bytes that a token's piece stands for."""
        if self.byte_letters:
            byte_of = _byte_of_letter()
            try:
                return bytes([byte_of[letter] for letter in piece])
            except KeyError:  # an added token, spelled as it reads
                return piece.encode()
        for old, new in self.replaced:
            piece = piece.replace(old, new)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.encode()

    def read(self, data: bytes, *, final: bool) -> tuple[str, bytes]:
        """UTF-8 text of `data`, and the bytes at its end that may become a character yet (none of them if final).

        What is no UTF-8 becomes U+FFFD: one for a broken character, as in `tokenizers`' byte-level decoder, but one for
        every byte of it under byte_fallback, as in SentencePiece.
        """
        text = ""
        while data:
            try:
                read, used = codecs.utf_8_decode(data, "strict", final)
                return text + read, data[used:]
            except UnicodeDecodeError as error:
                broken = error.end - error.start if self.byte_fallback else 1
                text += data[: error.start].decode() + "\ufffd" * broken
                data = data[error.end :]
        return text, b""

    def cut_prefix(self, text: str, count: int) -> tuple[str, int]:
        """Cuts up to `count` prefixes from text that begins an answer; also returns how many may still be cut."""
        while count and text:
            if not text.startswith(self.prefix):
                return text, 0
            text, count = text[len(self.prefix) :], count - 1
        return text, count


def read_pieces(decoder: Decoder | None) -> Pieces | None:
    """The rules of a `tokenizers` decoder, or None if it does not work token by token."""
    if decoder is None:
        return None
    steps = _flat(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds and set(kinds) <= {"ByteLevel", "Fuse"} and kinds.count("ByteLevel") == 1:
        return Pieces(byte_letters=True)
    replaced: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and isinstance(old := steps[0]["pattern"].get("String"), str):
        replaced.append((old, steps.pop(0)["content"]))
    byte_fallback = bool(steps) and steps[0]["type"] == "ByteFallback" and bool(steps.pop(0))
    fused = bool(steps) and steps[0]["type"] == "Fuse" and bool(steps.pop(0))
    prefix, count = "", 0
    if fused and steps and steps[0]["type"] == "Strip" and steps[0]["stop"] == 0:
        strip = steps.pop(0)
        prefix, count = strip["content"], strip["start"]
    if steps or not fused:
        return None
    return Pieces(replaced=tuple(replaced), byte_fallback=byte_fallback, prefix=prefix, prefix_count=count)


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for each in step["decoders"] for inner in _flat(each)] if step["type"] == "Sequence" else [step]


@cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the 68 others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
