"""`Runner`: holds what lives on the device (params, cache, sampler state) and runs one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from inferax.engine.backend import Backend, Executable, HostCopy
from inferax.engine.compiled import Programs
from inferax.engine.packing import Packer
from inferax.engine.programs import EngineShape, sampler_params
from inferax.engine.sampler import POSITION, SLOT, LogitsProcessor, empty_rows
from inferax.engine.scheduler import Chunk
from inferax.engine.sequence import Sequence as Seq
from inferax.models.config import ModelConfig
from inferax.models.decoder import Params
from inferax.ops.sampler_rows import words_for


@dataclass
class StepResult:
    """A step under way: first its hidden states, then its sampled tokens on their way to the host."""

    samples: list[Chunk]  # chunks after which a token is sampled, in the order of the rows
    num_rows: int
    rows: Any = None
    failed: list[tuple[Seq, Exception]] = field(default_factory=list)  # whose grammar gave no mask
    copies: dict[str, HostCopy] = field(default_factory=dict)
    # Chunks whose prompts are scored, with their first row; and the scores of all rows.
    scored: list[tuple[Chunk, int]] = field(default_factory=list)
    scores: dict[str, HostCopy] = field(default_factory=dict)

    @property
    def sampled(self) -> list[Seq]:
        return [chunk.seq for chunk in self.samples]

    def tokens(self) -> list[int]:
        return [int(t) for t in self.copies["tokens"].result()[: len(self.samples)]]

    def array(self, name: str) -> np.ndarray:
        return self.copies[name].result()[: len(self.samples)]


@dataclass
class Runner:
    """Runs chunks of sequences through the two programs of a step. Programs are built when first needed.

    cache_dtype: dtype of the KV cache; ops/cache.py says how each holds a head.
    processors: what requests may name in `SamplingParams.logits_processors`. programs: those that were begun before the
        params were there.
    """

    config: ModelConfig
    shape: EngineShape
    backend: Backend
    params: Params
    cache_dtype: Any
    processors: tuple[LogitsProcessor, ...] = ()
    programs: Programs | None = None
    _cache: Any = field(init=False)
    _state: Any = field(init=False)
    _sampler_params: Any = field(init=False)
    _masks_of: dict[int, Any] = field(init=False, default_factory=dict)
    _packer: Packer = field(init=False)
    _scoring: list[Future[Executable]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._packer = Packer(self.shape)
        self.params = self.backend.put(self.params)
        self._sampler_params = sampler_params(self.config, self.params)
        self._compiled = self.programs or Programs(
            self.config, self.shape, self.backend, self.params, self.cache_dtype, self.processors
        )
        self.reset()

    @property
    def compiled(self) -> Programs:
        return self._compiled

    def reset(self) -> None:
        """Empties the cache and the sampler state."""
        self._cache = self._state = None  # so that there are never two
        self._cache, self._state = self._compiled.get(("empty", 0))()

    def may_score(self) -> bool:
        """Whether prompts can be scored without waiting for a compiler; where not, it is set to work in a thread."""
        if self._scoring is None:
            missing = [key for key in self._compiled.scoring if not self._compiled.there([key])]
            self._scoring = self._compiled.start(missing, threads=1)
        # One that could not be built is built again where it is needed, and fails who needs it.
        return all(future.done() for future in self._scoring)

    def wait_to_score(self, timeout_s: float) -> None:
        """Waits until prompts can be scored, but no longer than that."""
        wait(self._scoring or (), timeout_s)

    def forward_program(self, tokens: int, *, scores: bool = False) -> Executable:
        """The forward program of a bucket, or the one that keeps all hidden states."""
        return self._compiled.get(("forward_all" if scores else "forward", tokens))

    def sample_program(self, rows: int) -> Executable:
        """The sampling program for a bucket of rows."""
        return self._compiled.get(("sample", rows))

    def load_program(self) -> Executable:
        """The program that writes one slot of the sampler's state."""
        return self._compiled.get(("load slot", 0))

    def _no_masks(self, rows: int) -> Any:
        """Masks for steps without a grammar, made once for each bucket."""
        if rows not in self._masks_of:
            self._masks_of[rows] = self.backend.put(np.zeros((rows, words_for(self.config.vocab_size)), np.uint32))
        return self._masks_of[rows]

    def step(self, chunks: Sequence[Chunk]) -> StepResult:
        """Enqueues one step and returns without waiting for it."""
        step = self.forward(chunks)
        self.sample(step)
        return step

    def forward(self, chunks: Sequence[Chunk]) -> StepResult:
        """Enqueues the first half of a step.

        A token that the host does not know yet (its sequence sampled it in the step before) is read on the device.
        """
        shape = self.shape.batch_shape(sum(c.stop - c.start for c in chunks))
        arguments = (
            self.params,
            self._packer.pack(shape, chunks),
            self._cache,
            {"last_tokens": self._state["last_tokens"]},
        )
        step = StepResult([c for c in chunks if c.samples], shape.rows)
        if any(c.seq.scoring for c in chunks):
            step.rows, hidden, self._cache = self.forward_program(shape.tokens, scores=True)(*arguments)
            self._score(step, chunks, hidden, shape.tokens)
        else:
            step.rows, self._cache = self.forward_program(shape.tokens)(*arguments)
        return step

    def sample(self, step: StepResult) -> None:
        """Enqueues the second half: the next token of each sequence whose last known token the step computes."""
        if not step.samples:
            return
        for seq in step.sampled:
            if seq.params.needs_slot and not seq.slot_loaded:
                row = seq.slot_state(self.config.vocab_size, self.shape.context, self.processors)
                self._state = self.load_program()(self._state, np.int32(seq.slot), row)
                seq.slot_loaded = True
        packed = self._sampler_rows(step.num_rows, step.samples)
        masks = self._masks(step)
        program = self.sample_program(step.num_rows)
        out, self._state = program(self._sampler_params, step.rows, packed, masks, self._state)
        step.rows = None
        wanted = ["tokens"]
        if any(seq.wants_logprobs for seq in step.sampled):
            wanted += ["logprob", "rank", "top_logprobs", "top_ids"]
        if any(seq.params.logprob_token_ids for seq in step.sampled):
            wanted.append("wanted_logprobs")
        if any(seq.params.mirostat_mode for seq in step.sampled):
            wanted.append("mu")
        step.copies = {name: self.backend.get_async(out[name]) for name in wanted}

    def _score(self, result: StepResult, chunks: Sequence[Chunk], hidden: Any, tokens: int) -> None:
        """Enqueues the scores of the prompt tokens that follow the rows of this step."""
        ids = np.zeros(tokens, np.int32)
        row = 0
        for chunk in chunks:
            following = chunk.seq.tokens[chunk.start + 1 : min(chunk.stop + 1, chunk.seq.prompt_len)]
            if chunk.seq.scoring and following:
                ids[row : row + len(following)] = following
                result.scored.append((chunk, row))
            row += chunk.stop - chunk.start
        out = self._compiled.get(("score", tokens))(self._sampler_params, hidden, ids)
        result.scores = {name: self.backend.get_async(array) for name, array in out.items()}

    def _sampler_rows(self, rows: int, sampled: Sequence[Chunk]) -> np.ndarray:
        packed = self._empty_rows[:rows].copy()
        if sampled:
            mine = packed[: len(sampled)]
            np.stack([chunk.seq.sampler_row for chunk in sampled], out=mine)
            mine[:, SLOT] = [chunk.seq.slot for chunk in sampled]
            mine[:, POSITION] = [chunk.stop for chunk in sampled]
        return packed

    @cached_property
    def _empty_rows(self) -> np.ndarray:
        rows = empty_rows(self.shape.row_ladder[-1])
        rows[:, SLOT] = self.shape.max_seqs
        return rows

    def _masks(self, step: StepResult) -> Any:
        if all(seq.grammar is None for seq in step.sampled):
            return self._no_masks(step.num_rows)
        masks = np.zeros((step.num_rows, words_for(self.config.vocab_size)), np.uint32)
        for row, seq in zip(masks, step.sampled, strict=False):
            if seq.grammar is None or seq.finished:
                continue
            try:
                seq.grammar.fill_mask(row.view(np.int32))
            except Exception as error:
                step.failed.append((seq, error))
        return masks
