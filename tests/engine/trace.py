"""A trace of what happened in an engine: requests, aborts, plans, sampled tokens. Replayed without a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inferax.engine.core import EngineCore
from inferax.engine.pages import Pages
from inferax.engine.params import SamplingParams
from inferax.engine.scheduler import Plan, Scheduler
from inferax.engine.sequence import Sequence


def chunks(plan: Plan) -> list[list[Any]]:
    return [[c.seq.request_id, c.start, c.stop, int(c.samples)] for c in plan.chunks]


@dataclass
class Recorder:
    """Writes down what a core does. Its requests need ids of their own."""

    core: EngineCore
    events: list[list[Any]] = field(default_factory=list)

    def add(self, seq: Sequence) -> None:
        sibling = None if seq.sibling is None else seq.sibling.request_id
        self.events.append(["add", seq.request_id, list(seq.prompt), seq.max_tokens, seq.priority, sibling])
        self.core.add([seq])

    def abort(self, request_id: str) -> None:
        self.events.append(["abort", request_id])
        self.core.abort(request_id)

    def step(self) -> None:
        schedule = self.core.scheduler.schedule

        def recorded() -> Plan:
            plan = schedule()
            self.events.append(["plan", chunks(plan), [seq.request_id for seq in plan.preempted]])
            return plan

        self.core.scheduler.schedule = recorded  # type: ignore[method-assign]
        try:
            events = self.core.step()
        finally:
            del self.core.scheduler.schedule
        self.events.append(["tokens", [[e.seq.request_id, e.token] for e in events]])


def replay(settings: dict[str, Any], events: list[list[Any]]) -> list[list[Any]]:
    """The plans that the scheduler makes of a trace's events."""
    pages = Pages(settings["pages"], settings["page_size"], settings["windows"])
    scheduler = Scheduler(pages, settings["max_seqs"], settings["max_batched_tokens"], settings["policy"])
    seqs: dict[str, Sequence] = {}
    plans = []
    for kind, *event in events:
        if kind == "add":
            name, prompt, count, priority, sibling = event
            params = SamplingParams(temperature=0, max_tokens=count)
            seqs[name] = Sequence(name, prompt, params, 0, 0, count, frozenset(), priority=priority)
            seqs[name].sibling = seqs.get(sibling)
            scheduler.add(seqs[name])
        elif kind == "abort":
            if not seqs[event[0]].finished:
                seqs[event[0]].output.finish_reason = "abort"
                scheduler.finish(seqs[event[0]])
        elif kind == "plan":
            plan = scheduler.schedule()
            scheduler.commit(plan)
            plans.append([chunks(plan), [seq.request_id for seq in plan.preempted]])
        else:
            for name, token in event[0]:
                seqs[name].accept(token)
            for name, _ in event[0]:
                if seqs[name].finished:
                    scheduler.finish(seqs[name])
        scheduler.check_integrity()
    assert scheduler.idle
    return plans
