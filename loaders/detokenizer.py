"""Incremental detokenization: text as its tokens come, in constant time per token."""

from __future__ import annotations

from collections.abc import Sequence

from inferax.loaders.pieces import Pieces
from inferax.loaders.tokenizer import Tokenizer

# A character has at most four bytes, so four tokens with text before the answer decide how it begins.
_CONTEXT = 4
# For decoders that look at neighbours: how many tokens may wait for a character to become whole.
_MAX_WAITING = 8


class Detokenizer:
    """Turns one sequence's tokens into text, as they come.

    The texts of all `add`s and of `flush`, put together, are what `tokenizer.decode` of prompt and tokens has beyond
    the prompt's text. A character that is not whole yet is held back, also one that the prompt began.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        context = self._context(tokenizer, prompt_ids)
        pieces = tokenizer.pieces
        self._text: _PieceText | _WindowText
        if pieces is None:
            self._text = _WindowText(tokenizer, context)
        else:
            self._text = _PieceText(tokenizer, pieces, context)

    def add(self, token_id: int) -> str:
        """The text that has become whole with this token; often its own, sometimes none."""
        return "" if token_id in self._skipped else self._text.add(token_id)

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        return self._text.flush()

    def _context(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
        context: list[int] = []
        for token_id in reversed(prompt_ids):
            if len(context) == _CONTEXT:
                break
            if token_id not in self._skipped and tokenizer.token_bytes(token_id):
                context.append(token_id)
        return context[::-1]


class _PieceText:
    """For decoders that work token by token."""

    def __init__(self, tokenizer: Tokenizer, pieces: Pieces, context: Sequence[int]) -> None:
        self._tokenizer, self._pieces = tokenizer, pieces
        self._waiting = b""
        self._prefix_count = pieces.prefix_count
        for token_id in context:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        return self._take(self._tokenizer.token_bytes(token_id), final=False)

    def flush(self) -> str:
        return self._take(b"", final=True)

    def _take(self, data: bytes, final: bool) -> str:
        text, self._waiting = self._pieces.read(self._waiting + data, final=final)
        if self._prefix_count:
            text, self._prefix_count = self._pieces.cut_prefix(text, self._prefix_count)
        return text


class _WindowText:
    """For other decoders: decodes a window of the last tokens, and takes what the newest one adds to its text."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = list(context)
        self._waiting: list[int] = []
        while self._shown and tokenizer.decode(self._shown).endswith("\ufffd"):
            self._waiting.insert(0, self._shown.pop())

    def add(self, token_id: int) -> str:
        self._waiting.append(token_id)
        text = self._new_text()
        if not text or (text.endswith("\ufffd") and len(self._waiting) < _MAX_WAITING):
            return ""
        self._shown, self._waiting = self._waiting, []
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._shown, self._waiting = self._waiting, []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode([*self._shown, *self._waiting])[len(before) :]
