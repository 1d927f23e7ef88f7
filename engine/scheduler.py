"""The scheduler: a pure core that decides what each step computes. It touches no device.

There is no prefill phase and no decode phase: every sequence has tokens that are known and tokens that are computed,
and a step lets computed catch up with known under a budget of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from inferax.engine.pages import Pages, block_hash
from inferax.engine.sequence import Sequence
from inferax.errors import QueueFullError, RequestError

Policy = Literal["fcfs", "priority", "lpm"]
# lpm looks at this many waiting sequences, so that its cost does not grow with the queue; a sequence that was passed
# over this often goes first. Nor does a step look at more than that many samples that wait for their prompt.
LPM_LOOKAHEAD = 32
LPM_PATIENCE = 64

Entry = tuple[tuple[int, int], Sequence]


@dataclass(frozen=True)
class Chunk:
    """What one sequence does in a step: compute its tokens [start, stop), and sample after the last known one."""

    seq: Sequence
    start: int
    stop: int
    samples: bool


@dataclass(frozen=True)
class Plan:
    """One step: its chunks, the sequences that gave up their pages for it, and those that were let in."""

    chunks: list[Chunk]
    preempted: list[Sequence]
    admitted: list[Sequence]


@dataclass
class Scheduler:
    """Sequences that wait and that run, and the pages they hold.

    policy: "fcfs" by arrival; "priority" by `Sequence.priority` (smaller first), then arrival; "lpm" the longest cached
        prefix first, with a bound on how often a sequence is passed over.
    max_waiting, max_waiting_tokens: bounds on the sequences that wait and on their prompts' tokens (samples of one
        prompt count it once). What is larger than a bound by itself may wait while nothing else does.
    """

    pages: Pages
    max_seqs: int
    max_batched_tokens: int
    policy: Policy = "fcfs"
    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    running: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    looking_at: Sequence | None = None  # whose turn it is within `schedule`: the one at fault where that fails
    _waiting: list[Entry] = field(default_factory=list)
    _gone: set[int] = field(default_factory=set)
    _slots: list[int] = field(init=False)
    _arrivals: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._slots = list(range(self.max_seqs))[::-1]

    @property
    def idle(self) -> bool:
        return not self.running and self.num_waiting == 0

    def check(self, seqs: SequenceType[Sequence], requests: int = 0, tokens: int = 0) -> None:
        """Raises QueueFullError where `seqs` find no room in the queue, with as much more on its way as given, and
        RequestError where one could not run even with all pages to itself."""
        for seq in seqs:
            if not self.pages.fits(seq.prompt_len + 1):
                pool = self.pages.num_pages[0] * self.pages.page_size
                raise RequestError(
                    "prompt",
                    f"its {seq.prompt_len} tokens and one more do not fit the KV cache of {pool} tokens; "
                    "shorten it or raise kv_cache_memory_bytes",
                )
        for name, allowed, waiting, asked in (
            ("max_waiting", self.max_waiting, self.num_waiting + requests, len(seqs)),
            ("max_waiting_tokens", self.max_waiting_tokens, self.num_waiting_tokens + tokens, tokens_of(seqs)),
        ):
            if allowed is not None and waiting > 0 and waiting + asked > allowed:
                raise QueueFullError(name, allowed, waiting, asked)

    def add(self, seq: Sequence) -> None:
        """Queues a sequence behind those that came before it."""
        seq.arrival = next(self._arrivals)
        self._queue(seq)

    @property
    def live(self) -> list[Sequence]:
        """All sequences, those that run first."""
        return self.running + [seq for _, seq in self._waiting if seq.arrival not in self._gone]

    def next_in_line(self) -> Sequence | None:
        """The sequence that comes next: of those that run, or else of those that wait."""
        if self.running:
            return self.running[0]
        entry = self._pop()
        if entry is None:
            return None
        heapq.heappush(self._waiting, entry)
        return entry[1]

    def restart(self, seqs: Iterable[Sequence]) -> None:
        """Starts over with every page free and empty: whatever state this was in, `seqs` now wait, in order of their
        arrival, with the tokens that the host knows; what the device may be ahead is sampled again."""
        self.pages.clear()
        for seq in self.running:
            seq.slot = -1
        self.running.clear()
        self._waiting.clear()
        self._gone.clear()
        self._slots = list(range(self.max_seqs))[::-1]
        self.looking_at = None
        self.num_waiting = self.num_waiting_tokens = 0
        for seq in seqs:
            seq.slot, seq.computed, seq.pending = -1, 0, 0
            seq.tables, seq.held_from = [], []
            self._queue(seq)

    def schedule(self) -> Plan:
        """The next step. Pages are taken at once; `commit` says that the step was enqueued."""
        budget, size = self.max_batched_tokens, self.pages.page_size
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        admitted: list[Sequence] = []
        for seq in list(self.running):
            if budget == 0:
                break
            if seq.slot < 0 or not seq.wants_compute:  # preempted in this loop, or waiting for its last token
                continue
            self.looking_at = seq
            stop = min(seq.known, seq.computed + budget)
            if len(self.running) == 1:
                stop = self._within_reach(seq, stop)
            if stop > len(seq.tables[0]) * size and not self._make_room(seq, stop, preempted):
                continue
            chunks.append(self._chunk(seq, stop))
            budget -= stop - seq.computed
        if preempted:
            chunks = [chunk for chunk in chunks if chunk.seq.slot >= 0]
        else:
            self._admit(budget, chunks, admitted)
        self.looking_at = None
        return Plan(chunks, preempted, admitted)

    def commit(self, plan: Plan) -> None:
        """The plan's step was enqueued: what it computes counts as computed, and full blocks can be found."""
        size = self.pages.page_size
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.computed = chunk.stop
            seq.pending += chunk.samples
            if chunk.stop // size > seq.published:
                self._publish(seq)
            if self.pages.windowed:
                self.pages.trim(seq.tables, seq.held_from, seq.computed)

    def finish(self, seq: Sequence) -> None:
        """Takes a sequence out, wherever it is; its pages stay findable."""
        if seq.slot >= 0:
            self._publish(seq)
            self._leave(seq)
        else:
            self._gone.add(seq.arrival)  # its entry is dropped when it comes up
            self._waits_no_more(seq)
            if len(self._gone) > max(64, self.num_waiting):  # or when most are of that kind
                self._waiting = [entry for entry in self._waiting if entry[1].arrival not in self._gone]
                heapq.heapify(self._waiting)
                self._gone.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots and pages agree with the sequences that hold them."""
        slots = [seq.slot for seq in self.running]
        assert sorted(slots + self._slots) == list(range(self.max_seqs)), "slots are lost or used twice"
        waiting = [seq for _, seq in self._waiting if seq.arrival not in self._gone]
        assert len(waiting) == self.num_waiting, "the count of waiting sequences is wrong"
        assert tokens_of(waiting) == self.num_waiting_tokens, "the count of waiting tokens is wrong"
        assert all(seq.slot < 0 and not any(seq.tables) for seq in waiting), "a waiting sequence holds pages"
        self.pages.check_integrity((seq.tables, seq.held_from) for seq in self.running)

    def _queue(self, seq: Sequence) -> None:
        key = (seq.priority if self.policy == "priority" else 0, seq.arrival)
        heapq.heappush(self._waiting, (key, seq))
        self.num_waiting += 1
        self.num_waiting_tokens += tokens_of((seq,))

    def _waits_no_more(self, seq: Sequence) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= tokens_of((seq,))

    def _within_reach(self, seq: Sequence, stop: int) -> int:
        """A sequence that is alone has nobody to take pages from: it goes as far as the free ones do."""
        return max(min(stop, self.pages.reach(seq.tables)), seq.computed + 1)

    def _chunk(self, seq: Sequence, stop: int) -> Chunk:
        return Chunk(seq, seq.computed, stop, samples=stop == seq.known and not seq.exhausted)

    def _make_room(self, seq: Sequence, stop: int, preempted: list[Sequence]) -> bool:
        """Pages for `seq` up to `stop`, by preempting what is least urgent; False where that is `seq` itself."""
        while not self.pages.grow(seq.tables, stop):
            victim = max(self.running, key=self._urgency)
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _urgency(self, seq: Sequence) -> tuple[int, int]:
        return (seq.priority if self.policy == "priority" else 0, seq.arrival)

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.computed = 0
        self.num_preemptions += 1
        self._queue(seq)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pages.release(seq.tables, seq.held_from)
        self._slots.append(seq.slot)
        seq.slot = -1

    def _admit(self, budget: int, chunks: list[Chunk], admitted: list[Sequence]) -> None:
        passed: list[Entry] = []
        while self._slots and budget > 0 and len(passed) < LPM_LOOKAHEAD:
            entry = self._next()
            if entry is None:
                break
            seq = self.looking_at = entry[1]
            if seq.sibling is not None and seq.sibling.slot >= 0 and seq.sibling.computed < seq.prompt_len:
                passed.append(entry)  # it will find the prompt that its sibling is computing
                continue
            found = 0 if seq.scoring else self.pages.lookup(self._hashes(seq), seq.known)
            seq.tables = self.pages.start(seq.hashes, found)
            seq.held_from = [self.pages.first_block(g, found) if found else 0 for g in range(len(seq.tables))]
            seq.computed = found
            stop = found + min(seq.known - found, budget)
            if not self.running:
                stop = self._within_reach(seq, stop)
            if not self.pages.grow(seq.tables, stop):
                self.pages.release(seq.tables, seq.held_from)
                seq.computed = 0
                passed.append(entry)
                break
            self._waits_no_more(seq)
            self.pages.stats.queries += seq.known
            self.pages.stats.hits += found
            seq.cached = found
            seq.published = found // self.pages.page_size
            seq.slot = self._slots.pop()
            seq.slot_loaded = False
            self.running.append(seq)
            admitted.append(seq)
            chunks.append(self._chunk(seq, stop))
            budget -= stop - found
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _next(self) -> Entry | None:
        """Takes the entry that should run next out of the queue."""
        first = self._pop()
        if first is None or self.policy != "lpm" or first[1].passed_over >= LPM_PATIENCE:
            return first
        seen = [first]
        while len(seen) < LPM_LOOKAHEAD and (entry := self._pop()) is not None:
            seen.append(entry)
        best = max(seen, key=lambda e: (self.pages.lookup(self._hashes(e[1]), e[1].known), -e[1].arrival))
        for entry in seen:
            if entry is not best:
                entry[1].passed_over += entry[1].arrival < best[1].arrival
                heapq.heappush(self._waiting, entry)
        return best

    def _pop(self) -> Entry | None:
        while self._waiting:
            entry = heapq.heappop(self._waiting)
            if entry[1].arrival not in self._gone:
                return entry
            self._gone.discard(entry[1].arrival)
        return None

    def _hashes(self, seq: Sequence) -> list[bytes]:
        """The hashes of the sequence's full blocks of known tokens, extended as tokens come."""
        size = self.pages.page_size
        while (len(seq.hashes) + 1) * size <= len(seq.tokens):
            at = len(seq.hashes) * size
            parent = seq.hashes[-1] if seq.hashes else seq.salt
            seq.hashes.append(block_hash(parent, seq.tokens[at : at + size]))
        return seq.hashes

    def _publish(self, seq: Sequence) -> None:
        hashes = self._hashes(seq)
        full = min(seq.computed // self.pages.page_size, len(hashes))
        for block in range(seq.published, full):
            self.pages.publish(seq.tables, seq.held_from, block, hashes[block])
        seq.published = max(seq.published, full)


def tokens_of(seqs: Iterable[Sequence]) -> int:
    """Tokens of the sequences' prompts, once for samples of the same one."""
    return sum(seq.prompt_len for seq in seqs if seq.sibling is None)
