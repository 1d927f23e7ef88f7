"""Pages of the KV cache: reference counts, a prefix index over hashed blocks, and LRU reuse.

A page that nobody holds any more keeps its contents and stays findable by its hash until it is taken for something
else. Pure Python; it knows page numbers, not memory.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NO_PAGE = 0  # stands where a page is no longer needed; kernels never read it, for no row's window reaches it


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block of tokens that follows the chain `parent` (for the first block, the request's salt)."""
    chain = hashlib.blake2b(parent, digest_size=16).digest()
    return hashlib.blake2b(chain + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()


@dataclass
class PagePool:
    """The pages of one cache group, [0, num_pages)."""

    num_pages: int
    _free: OrderedDict[int, None] = field(init=False)
    _refs: list[int] = field(init=False)
    _hash_of: list[bytes | None] = field(init=False)
    _by_hash: dict[bytes, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._free = OrderedDict.fromkeys(range(self.num_pages))
        self._refs = [0] * self.num_pages
        self._hash_of = [None] * self.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be taken, those that are still findable included."""
        return len(self._free)

    def find(self, digest: bytes) -> int | None:
        """The page that holds a block, whether someone uses it or not."""
        return self._by_hash.get(digest)

    def is_free(self, page: int) -> bool:
        return self._refs[page] == 0

    def share(self, page: int) -> None:
        """One more holder of a page that was found."""
        if self._refs[page] == 0:
            del self._free[page]
        self._refs[page] += 1

    def take(self) -> int:
        """A page for new contents: the one that has been free for longest. Its old contents are forgotten."""
        page, _ = self._free.popitem(last=False)
        self._forget(page)
        self._refs[page] = 1
        return page

    def release(self, page: int) -> None:
        """One holder less. The last one puts the page at the end of the queue for reuse."""
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free[page] = None
            if self._hash_of[page] is None:  # nothing to find in it: reuse it first
                self._free.move_to_end(page, last=False)

    def publish(self, page: int, digest: bytes) -> None:
        """Makes a computed block findable. The first page with a block's contents keeps the name."""
        if digest not in self._by_hash and self._hash_of[page] is None:
            self._by_hash[digest] = page
            self._hash_of[page] = digest

    def forget_all(self) -> None:
        """Empties the index; pages in use stay in use."""
        self._by_hash.clear()
        self._hash_of = [None] * self.num_pages

    def _forget(self, page: int) -> None:
        digest = self._hash_of[page]
        if digest is not None:
            del self._by_hash[digest]
            self._hash_of[page] = None

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless references, the free queue and the index agree with the pages `held`."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        assert counts == self._refs, f"references {self._refs} differ from holders {counts}"
        assert set(self._free) == {p for p, n in enumerate(counts) if n == 0}, "the free queue is not the unheld pages"
        for digest, page in self._by_hash.items():
            assert self._hash_of[page] == digest, f"page {page} is found under a hash that is not its own"
        assert sum(h is not None for h in self._hash_of) == len(self._by_hash), "a hashed page can not be found"


@dataclass
class PrefixStats:
    """Tokens looked up in the prefix index, and found there."""

    queries: int = 0
    hits: int = 0


@dataclass
class Pages:
    """The pools of all cache groups, and each sequence's tables into them.

    windows: each group's window in tokens (None: full attention).
    """

    num_pages: Sequence[int]
    page_size: int
    windows: Sequence[int | None]
    caching: bool = True
    stats: PrefixStats = field(default_factory=PrefixStats)
    pools: list[PagePool] = field(init=False)
    windowed: bool = field(init=False)

    def __post_init__(self) -> None:
        self.windowed = any(window is not None for window in self.windows)
        self.clear()

    def clear(self) -> None:
        """All pages are free and empty, as after the cache's memory was lost. Tables that were given out are void."""
        self.pools = [PagePool(count) for count in self.num_pages]

    @property
    def usage(self) -> float:
        """The share of pages that sequences hold, in the group that is fullest."""
        return max(1 - pool.num_free / pool.num_pages for pool in self.pools)

    def fits(self, length: int) -> bool:
        """Whether a sequence of `length` tokens could be computed if nobody else held pages."""
        size = self.page_size
        needs = (
            -(-length // size) if window is None else min(-(-length // size), (window + size - 2) // size + 1)
            for window in self.windows
        )
        return all(need <= pool.num_pages for need, pool in zip(needs, self.pools, strict=True))

    def reach(self, tables: Sequence[list[int]]) -> int:
        """The length in tokens up to which `grow` would succeed."""
        return (len(tables[0]) + min(pool.num_free for pool in self.pools)) * self.page_size

    def first_block(self, group: int, position: int) -> int:
        """The first block that a row at `position` still sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def lookup(self, hashes: Sequence[bytes], known: int) -> int:
        """How many leading tokens of a sequence with `known` tokens are in the cache; at least the last one is not.

        `hashes` are those of its full blocks. A window group needs only the blocks that the window still reaches.
        """
        if not self.caching:
            return 0
        blocks = 0
        full = [pool for pool, window in zip(self.pools, self.windows, strict=True) if window is None] or self.pools
        while blocks < len(hashes) and all(pool.find(hashes[blocks]) is not None for pool in full):
            blocks += 1
        for count in range(blocks, 0, -1):
            length = min(count * self.page_size, known - 1)
            groups = range(len(self.pools))
            if length > 0 and all(
                self.pools[g].find(hashes[b]) is not None
                for g in groups
                for b in range(self.first_block(g, length), count)
            ):
                return length
        return 0

    def start(self, hashes: Sequence[bytes], length: int) -> list[list[int]]:
        """Tables of a new sequence whose first `length` tokens were found by `lookup`; its pages are held from now."""
        tables = []
        count = -(-length // self.page_size)
        for g, pool in enumerate(self.pools):
            first = self.first_block(g, length) if length else 0
            table = [NO_PAGE] * min(first, count)
            for digest in hashes[first:count]:
                page = pool.find(digest)
                if page is None:
                    raise KeyError(digest)
                pool.share(page)
                table.append(page)
            tables.append(table)
        return tables

    def grow(self, tables: Sequence[list[int]], length: int) -> bool:
        """Adds pages up to `length` tokens in every group, or none and False where a group has too few."""
        count = -(-length // self.page_size) - len(tables[0])
        if count > 0 and any(pool.num_free < count for pool in self.pools):
            return False
        for table, pool in zip(tables, self.pools, strict=True):
            table.extend(pool.take() for _ in range(count))
        return True

    def trim(self, tables: Sequence[list[int]], held_from: list[int], computed: int) -> None:
        """Lets go of blocks that lie before every window of rows from `computed` on. `held_from` moves along."""
        for g, (table, pool) in enumerate(zip(tables, self.pools, strict=True)):
            for block in range(held_from[g], min(self.first_block(g, computed), len(table))):
                pool.release(table[block])
                table[block] = NO_PAGE
                held_from[g] = block + 1

    def release(self, tables: Sequence[list[int]], held_from: Sequence[int]) -> None:
        """Lets go of all pages of a sequence, the last blocks first, so that a chain's head is reused last."""
        for table, pool, first in zip(tables, self.pools, held_from, strict=True):
            for page in reversed(table[first:]):
                pool.release(page)
            table.clear()

    def publish(self, tables: Sequence[Sequence[int]], held_from: Sequence[int], block: int, digest: bytes) -> None:
        """Makes a full, computed block of a sequence findable in every group that still holds it."""
        if self.caching:
            for table, pool, first in zip(tables, self.pools, held_from, strict=True):
                if block >= first:
                    pool.publish(table[block], digest)

    def reset(self) -> None:
        """Forgets every cached prefix; pages in use stay in use."""
        for pool in self.pools:
            pool.forget_all()

    def check_integrity(self, holders: Iterable[tuple[Sequence[Sequence[int]], Sequence[int]]]) -> None:
        """Checks every pool against the tables of all sequences that hold pages."""
        every = list(holders)
        for g, pool in enumerate(self.pools):
            pool.check_integrity(page for tables, first in every for page in tables[g][first[g] :])
