"""What a step computed, read to the host and given to its sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferax.engine.outputs import Logprob
from inferax.engine.runner import StepResult
from inferax.engine.scheduler import Chunk
from inferax.engine.sequence import Sequence


@dataclass(frozen=True)
class Results:
    """A step's arrays on the host: tokens and tables by row of `samples`, scores by row of the step."""

    tokens: list[int]
    tables: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]


def read(step: StepResult) -> Results:
    """Waits for a step. An error of the device that came up while it ran is raised here."""
    scores = {name: copy.result() for name, copy in step.scores.items()}
    tables = {name: step.array(name) for name in step.copies if name != "tokens"}
    return Results(step.tokens() if step.samples else [], tables, scores)


def take_token(seq: Sequence, row: int, results: Results) -> str:
    """Gives a sequence the token of its row, and returns the text that is new."""
    token, tables = results.tokens[row], results.tables
    if "mu" in tables:
        seq.mu = float(tables["mu"][row])
    if not seq.wants_logprobs:
        return seq.accept(token)
    return seq.accept(token, _logprobs(seq, token, tables, row, seq.params.logprobs or 0))


def take_scores(chunk: Chunk, first: int, scores: dict[str, np.ndarray]) -> None:
    """Gives a sequence the scores of the prompt tokens that follow its chunk's, whose rows begin at `first`."""
    seq, taken = chunk.seq, chunk.seq.prompt_logprobs
    if taken is None:
        return
    for position in range(chunk.start + 1, min(chunk.stop + 1, seq.prompt_len)):
        if position == len(taken):  # what was computed again after a preemption is there already
            row = first + position - 1 - chunk.start
            taken.append(_logprobs(seq, seq.prompt[position], scores, row, seq.params.prompt_logprobs or 0))


def _logprobs(seq: Sequence, token: int, tables: dict[str, np.ndarray], row: int, count: int) -> dict[int, Logprob]:
    def text(token: int) -> str | None:
        return None if seq.token_text is None else seq.token_text(token)

    found = {token: Logprob(float(tables["logprob"][row]), int(tables["rank"][row]), text(token))}
    best = zip(tables["top_ids"][row][:count], tables["top_logprobs"][row][:count], strict=True)
    for rank, (other, logprob) in enumerate(best, start=1):
        found.setdefault(int(other), Logprob(float(logprob), rank, text(int(other))))
    if "wanted_logprobs" in tables:
        for other, logprob in zip(seq.params.logprob_token_ids or (), tables["wanted_logprobs"][row], strict=False):
            found.setdefault(other, Logprob(float(logprob), None, text(other)))
    return found
