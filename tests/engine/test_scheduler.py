"""Scheduler and pages under random arrivals, aborts, priorities, shared prefixes and tiny pools. No device.

The stand-in for a device keeps, for each page slot, the whole token history that was written there, and checks that
every row reads exactly its own history: a page that is lost, used twice, freed too early or found wrongly shows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferax.engine.pages import PagePool, Pages, block_hash
from inferax.engine.params import SamplingParams
from inferax.engine.scheduler import LPM_PATIENCE, Plan, Policy, Scheduler
from inferax.engine.sequence import Sequence

PAGE = 4


def next_token(history: tuple[int, ...]) -> int:
    return hashlib.blake2b(repr(history).encode(), digest_size=2).digest()[0] % 50


def expected(prompt: list[int], count: int) -> list[int]:
    history = tuple(prompt)
    for _ in range(count):
        history += (next_token(history),)
    return list(history[len(prompt) :])


def sequence(name: int, prompt: list[int], count: int, priority: int = 0, sibling: Sequence | None = None) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=count)
    seq = Sequence(str(name), prompt, params, 0, 0, count, frozenset(), priority=priority)
    seq.sibling = sibling
    return seq


@dataclass
class Device:
    """Runs plans one step ahead of the host, as the engine does."""

    scheduler: Scheduler
    contents: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    histories: dict[int, tuple[int, ...]] = field(default_factory=dict)
    in_flight: list[tuple[Sequence, int]] = field(default_factory=list)
    plans: list[list[tuple[str, int, int, bool]]] = field(default_factory=list)

    def step(self, fault: str | None = None) -> Plan:
        """One step. fault: it fails when it is enqueued, or the one before it when it is read."""
        pages, budget = self.scheduler.pages, self.scheduler.max_batched_tokens
        plan = self.scheduler.schedule()
        assert sum(c.stop - c.start for c in plan.chunks) <= budget
        assert len({id(c.seq) for c in plan.chunks}) == len(plan.chunks) <= self.scheduler.max_seqs
        if fault is not None and plan.chunks:
            self.fail(plan, fault)
            return plan
        enqueued = []
        for chunk in plan.chunks:
            history = self.histories.setdefault(id(chunk.seq), tuple(chunk.seq.prompt))
            assert 0 <= chunk.start < chunk.stop <= len(history)
            for group, table in enumerate(chunk.seq.tables):
                for position in range(chunk.start, chunk.stop):
                    slot = table[position // PAGE] * PAGE + position % PAGE
                    self.contents[group, slot] = history[: position + 1]
        for chunk in plan.chunks:
            history = self.histories[id(chunk.seq)]
            for group, window in enumerate(pages.windows):
                first = 0 if window is None else max(0, chunk.start - window + 1)
                for position in range(first, chunk.stop):
                    slot = chunk.seq.tables[group][position // PAGE] * PAGE + position % PAGE
                    assert self.contents[group, slot] == history[: position + 1], "a row reads what is not its own"
            if chunk.samples:
                assert chunk.stop == len(history)
                token = next_token(history)
                self.histories[id(chunk.seq)] = (*history, token)
                enqueued.append((chunk.seq, token))
        self.scheduler.commit(plan)
        self.plans.append([(c.seq.request_id, c.start, c.stop, c.samples) for c in plan.chunks])
        self.retire()
        self.in_flight = enqueued
        self.scheduler.check_integrity()
        return plan

    def retire(self) -> None:
        for seq, token in self.in_flight:
            if not seq.finished:
                seq.accept(token)
                if seq.finished:
                    self.scheduler.finish(seq)
        self.in_flight = []

    def fail(self, plan: Plan, fault: str) -> None:
        """As the engine core does it: the cache is lost, those at fault end, and the others begin anew."""
        if fault == "enqueue":
            self.retire()
            lost = [chunk.seq for chunk in plan.chunks]
        else:
            self.scheduler.commit(plan)
            lost, self.in_flight = [seq for seq, _ in self.in_flight], []
        live = self.scheduler.live
        for seq in lost:
            if not seq.finished:
                seq.output.finish_reason = "error"
        self.scheduler.restart(sorted((seq for seq in live if not seq.finished), key=lambda seq: seq.arrival))
        self.contents.clear()
        for seq in live:
            self.histories[id(seq)] = tuple(seq.tokens)
        self.scheduler.check_integrity()

    def run(self) -> None:
        while not self.scheduler.idle or self.in_flight:
            waited = bool(self.in_flight)
            assert self.step().chunks or waited, "nothing runs and something waits"


def scheduler(
    pages: list[int], windows: list[int | None], seqs: int, budget: int, policy: Policy = "fcfs", caching: bool = True
) -> Scheduler:
    return Scheduler(Pages(pages, PAGE, windows, caching), seqs, budget, policy)


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, object]:
    longest = 40
    least = -(-longest // PAGE)
    groups = draw(st.sampled_from([[None], [None, 6], [5], [None, 4, 9]]))
    prefixes = [draw(st.lists(st.integers(0, 3), min_size=0, max_size=20)) for _ in range(3)]
    requests = [
        {
            "prompt": (draw(st.sampled_from(prefixes)) + draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)))[
                :28
            ],
            "count": draw(st.integers(1, 12)),
            "priority": draw(st.integers(0, 2)),
            "arrives": draw(st.integers(0, 12)),
            "aborts": draw(st.none() | st.integers(0, 20)),
            "sibling": draw(st.booleans()),
        }
        for _ in range(draw(st.integers(1, 10)))
    ]
    return {
        "groups": groups,
        "pages": [draw(st.integers(least, least * 3)) for _ in groups],
        "seqs": draw(st.integers(1, 5)),
        "budget": draw(st.integers(1, 40)),
        "policy": draw(st.sampled_from(["fcfs", "priority", "lpm"])),
        "caching": draw(st.booleans()),
        "faults": draw(st.dictionaries(st.integers(0, 40), st.sampled_from(["enqueue", "read"]), max_size=3)),
        "requests": requests,
    }


def play(scenario: dict[str, object]) -> tuple[Device, list[Sequence]]:
    device = Device(
        scheduler(
            scenario["pages"], scenario["groups"], scenario["seqs"], scenario["budget"], scenario["policy"],
            scenario["caching"],
        )  # type: ignore[arg-type]
    )  # fmt: skip
    seqs: list[Sequence] = []
    for i, request in enumerate(scenario["requests"]):  # type: ignore[arg-type,var-annotated]
        sibling = seqs[-1] if request["sibling"] and seqs and list(seqs[-1].prompt) == request["prompt"] else None
        seqs.append(sequence(i, request["prompt"], request["count"], request["priority"], sibling))
    events = sorted(
        [(r["arrives"], 0, i) for i, r in enumerate(scenario["requests"])]  # type: ignore[arg-type]
        + [
            (r["arrives"] + r["aborts"], 1, i)
            for i, r in enumerate(scenario["requests"])  # type: ignore[arg-type]
            if r["aborts"] is not None
        ]
    )
    now = 0
    while events or not device.scheduler.idle or device.in_flight:
        while events and events[0][0] <= now:
            _, kind, i = events.pop(0)
            if kind == 0:
                device.scheduler.add(seqs[i])
            elif not seqs[i].finished:
                seqs[i].output.finish_reason = "abort"
                device.scheduler.finish(seqs[i])
        waited = bool(device.in_flight) or device.scheduler.idle
        assert device.step(scenario["faults"].get(now)).chunks or waited, "nothing runs and something waits"
        now += 1
        assert now < 2000, "it does not end"
    return device, seqs


# 5,000 examples; `--hypothesis-profile prove` makes that 50,000.
@settings(max_examples=50 * settings.default.max_examples, deadline=None)
@given(scenarios())
def test_every_request_ends_with_its_own_tokens(scenario: dict[str, object]) -> None:
    device, seqs = play(scenario)
    for seq in seqs:
        truth = expected(list(seq.prompt), seq.max_tokens)
        if seq.output.finish_reason in ("abort", "error"):
            assert seq.output.token_ids == truth[: len(seq.output.token_ids)]
        else:
            assert (seq.output.finish_reason, seq.output.token_ids) == ("length", truth)
    for pool in device.scheduler.pages.pools:
        assert pool.num_free == pool.num_pages, "pages are lost"


@settings(max_examples=2 * settings.default.max_examples, deadline=None)
@given(scenarios())
def test_the_same_events_give_the_same_plans(scenario: dict[str, object]) -> None:
    assert play(scenario)[0].plans == play(scenario)[0].plans


def test_a_cached_prompt_computes_its_last_token_only() -> None:
    device = Device(scheduler([16], [None], 2, 64))
    prompt = [1] * 12
    for name in range(2):
        device.scheduler.add(sequence(name, prompt, 2))
        device.run()
    assert device.plans[0] == [("0", 0, 12, True)]
    first = next(plan for plan in device.plans if plan and plan[0][0] == "1")
    assert first == [("1", 11, 12, True)]
    assert (device.scheduler.pages.stats.queries, device.scheduler.pages.stats.hits) == (24, 11)


def test_another_salt_finds_nothing() -> None:
    assert block_hash(b"a", [1, 2]) != block_hash(b"b", [1, 2]) != block_hash(b"", [1, 2])
    device = Device(scheduler([16], [None], 2, 64))
    for name in range(2):
        seq = sequence(name, [1] * 12, 1)
        seq.salt = b"%d" % name
        device.scheduler.add(seq)
        device.run()
    assert device.scheduler.pages.stats.hits == 0


def test_a_window_holds_its_pages_only() -> None:
    pages = Pages([32, 4], PAGE, [None, 6])
    device = Device(Scheduler(pages, 1, PAGE))
    device.scheduler.add(sequence(0, [1] * 60, 20))
    held = 0
    while not device.scheduler.idle or device.in_flight:
        device.step()
        held = max(held, pages.pools[1].num_pages - pages.pools[1].num_free)
    assert held <= 4


def test_siblings_wait_for_their_prompt() -> None:
    device = Device(scheduler([32], [None], 4, 8))
    first = sequence(0, list(range(20)), 3)
    for name in range(3):
        device.scheduler.add(first if name == 0 else sequence(name, list(range(20)), 3, sibling=first))
    device.run()
    computed = [chunk for plan in device.plans for chunk in plan if chunk[1] < 16]
    assert {chunk[0] for chunk in computed} == {"0"}


def test_priority_preempts_the_least_urgent_and_newest() -> None:
    device = Device(scheduler([6], [None], 3, 64, "priority", caching=False))
    low, lower = sequence(0, [1] * 8, 12, priority=1), sequence(1, [2] * 8, 12, priority=2)
    device.scheduler.add(low)
    device.scheduler.add(lower)
    preempted = []
    while not device.scheduler.idle or device.in_flight:
        preempted += [s.request_id for s in device.step().preempted]
    assert preempted and set(preempted) == {"1"}


def test_lpm_prefers_the_cached_and_starves_nobody() -> None:
    device = Device(scheduler([64], [None], 1, 64, "lpm"))
    device.scheduler.add(sequence(0, [7] * 16, 1))
    device.run()
    cold = sequence(1, [1] * 16, 1)
    device.scheduler.add(cold)
    for name in range(2, 2 + 3 * LPM_PATIENCE):
        device.scheduler.add(sequence(name, [7] * 16 + [name], 1))
    device.run()
    order = [plan[0][0] for plan in device.plans if plan]
    assert order[1] != "1", "the cached prefix goes first"
    assert order.index("1") <= LPM_PATIENCE + 2


def test_ten_thousand_waiting_cost_nothing_per_step() -> None:
    """Counts, not time: how many entries a step looks at does not depend on how many wait."""
    for policy in ("fcfs", "priority", "lpm"):
        looked = []
        for waiting in (100, 10_000):
            s = scheduler([64], [None], 2, 8, policy)  # type: ignore[arg-type]
            for name in range(waiting):
                s.add(sequence(name, [name % 5] * 8, 4))
            calls = 0
            pop = s._pop

            def counted(pop=pop):  # type: ignore[no-untyped-def]
                nonlocal calls
                calls += 1
                return pop()

            s._pop = counted  # type: ignore[method-assign]
            s.commit(s.schedule())
            looked.append(calls)
        assert looked[0] == looked[1], policy


def test_pool_reuses_the_oldest_and_forgets_it() -> None:
    pool = PagePool(3)
    pages = [pool.take() for _ in range(3)]
    for i, page in enumerate(pages):
        pool.publish(page, b"%d" % i)
    for page in (pages[1], pages[0], pages[2]):
        pool.release(page)
    assert pool.find(b"1") == pages[1]
    assert pool.take() == pages[1]
    assert pool.find(b"1") is None and pool.find(b"0") == pages[0]
    pool.share(pages[0])
    pool.check_integrity([pages[1], pages[0]])
    with pytest.raises(AssertionError):
        pool.check_integrity([pages[1]])
