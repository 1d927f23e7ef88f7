"""From a plan to the int32 array that a forward program reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inferax.engine.programs import EngineShape
from inferax.engine.scheduler import Chunk
from inferax.engine.sequence import Sequence as Seq
from inferax.ops.batch import BatchShape


@dataclass
class Packer:
    """Packs the batches of an engine. Page tables are kept by slot, so that a step writes what is new only."""

    shape: EngineShape
    _rows: list[np.ndarray] = field(init=False)  # [slots, pages] for each group
    _tables: list[list[list[int]] | None] = field(init=False)  # those that a slot's rows are copies of
    _written: list[int] = field(init=False)  # how many pages of them

    def __post_init__(self) -> None:
        slots = self.shape.max_seqs
        self._rows = [np.zeros((slots, pages), np.int32) for pages in self.shape.pages_per_seq]
        self._tables, self._written = [None] * slots, [0] * slots

    def pack(self, shape: BatchShape, chunks: Sequence[Chunk]) -> np.ndarray:
        """A token that the host does not know yet is -(slot + 1)."""
        views = shape.empty()
        tokens: list[int] = []
        for chunk in chunks:
            seq, start, stop = chunk.seq, chunk.start, chunk.stop
            known = seq.tokens
            if stop <= len(known):
                tokens += known[start:stop]
            else:
                tokens += [*known[start:], *[-(seq.slot + 1)] * (stop - max(start, len(known)))]
            self._follow(seq)
        count, total = len(chunks), len(tokens)
        first = np.array([chunk.start for chunk in chunks], np.int32)
        last = np.array([chunk.stop for chunk in chunks], np.int32)
        slots = np.array([chunk.seq.slot for chunk in chunks], np.int32)
        starts = np.zeros(count + 1, np.int32)
        np.cumsum(last - first, out=starts[1:])
        line = np.repeat(np.arange(count, dtype=np.int32), last - first)  # the sequence of each token
        positions = np.arange(total, dtype=np.int32) + (first - starts[:-1])[line]
        views["tokens"][0][:total] = tokens
        views["positions"][0][:total] = positions
        views["query_start"][0][: count + 1] = starts
        views["query_start"][0][count + 1 :] = total
        views["context_len"][0][:count] = last
        views["prompt_len"][0][:count] = [chunk.seq.prompt_len for chunk in chunks]
        views["state_slot"][0][:count] = slots
        views["state_slot"][0][count:] = self.shape.max_seqs
        page, offset = np.divmod(positions, self.shape.page_size)
        for group, rows in enumerate(self._rows):
            table = rows[slots]
            views["page_table"][group][:count] = table
            views["slots"][group][:total] = table[line, page] * self.shape.page_size + offset
        sampled = [starts[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.samples]
        views["sample_rows"][0][: len(sampled)] = sampled
        views["num_tokens"][0][()] = total
        views["num_seqs"][0][()] = count
        return views["packed"][0]

    def _follow(self, seq: Seq) -> None:
        """Brings a slot's rows up to date with its sequence's tables, which only grow, and lose pages that no row sees
        any more."""
        slot, tables = seq.slot, seq.tables
        done = self._written[slot] if self._tables[slot] is tables else 0
        if done < len(tables[0]):
            for row, table in zip(self._rows, tables, strict=True):
                row[slot, done : len(table)] = table[done:]
            self._tables[slot], self._written[slot] = tables, len(tables[0])
