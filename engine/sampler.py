"""The second program of a step: what a request's parameters do to its logits, and the state that this needs by slot."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from inferax.engine.params import MAX_BIASED, MAX_LOGPROBS, MAX_WANTED, SamplingParams
from inferax.errors import RequestError
from inferax.models import decoder
from inferax.models.config import ModelConfig
from inferax.models.decoder import Params
from inferax.ops.sample import sample_after
from inferax.ops.sampler_rows import (
    FLOATS,
    INTS,
    OWN_CONTEXT,
    ROW_WIDTH,
    SamplerMemory,
    SamplerRows,
    pack_bits,
    pack_row,
    unpack_bits,
    words_for,
)

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 16

# Columns of a row that only the engine reads, after those of the op.
_EXTRA = ("logprobs", "changes", "may_end")
ROW_SIZE = ROW_WIDTH + len(_EXTRA)
SLOT, POSITION = list(INTS).index("slot"), list(INTS).index("position")
_LOGPROBS = ROW_WIDTH + _EXTRA.index("logprobs")
# Bits of "changes"; those of registered processors follow.
_CHANGES = ("allowed_token_ids", "min_tokens", "bad_words", "grammar", "logit_bias")
_MAX_PROCESSORS = 31 - len(_CHANGES)

State = dict[str, Any]


@dataclass(frozen=True)
class LogitsProcessor:
    """A pure function that changes the logits of requests that name it, compiled into the sampling program.

    function: (logits [V] float32, tokens [C] int32, length, parameters) -> logits [V]; tokens [0, length) are prompt
        and answer so far, the rest is of no meaning. It must be jittable and may be vmapped.
    parameters: shape and dtype of each parameter, of which every request gives its own values.
    """

    name: str
    function: Callable[[Array, Array, Array, Mapping[str, Array]], Array]
    parameters: Mapping[str, jax.ShapeDtypeStruct]


def processors_key(processors: Sequence[LogitsProcessor], vocab_size: int, context: int) -> str:
    """Identifies what registered functions compute, constants that they close over included.

    Raises RequestError for a function that cannot be traced, or a name that is registered twice.
    """
    if len({p.name for p in processors}) < len(processors):
        raise RequestError("logits_processors", f"{[p.name for p in processors]} names one twice")
    if len(processors) > _MAX_PROCESSORS:
        raise RequestError("logits_processors", f"{len(processors)} are more than {_MAX_PROCESSORS}")
    digest = hashlib.sha256()
    for p in processors:
        shapes = (
            jax.ShapeDtypeStruct((vocab_size,), jnp.float32),
            jax.ShapeDtypeStruct((context,), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.int32),
            dict(p.parameters),
        )
        try:
            traced, out = jax.make_jaxpr(p.function, return_shape=True)(*shapes)
        except Exception as error:  # whatever a user's function raises
            raise RequestError("logits_processors", f"{p.name!r} cannot be traced: {error}") from error
        if (getattr(out, "shape", None), getattr(out, "dtype", None)) != ((vocab_size,), jnp.float32):
            raise RequestError("logits_processors", f"{p.name!r} returns {out}, and not float32 [{vocab_size}]")
        digest.update(f"{p.name} {traced.jaxpr}".encode())
        for constant in traced.consts:
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest() if processors else ""


def pack_request(
    params: SamplingParams, *, seed: int, index: int, prompt_len: int, has_grammar: bool, processors: Sequence[str]
) -> np.ndarray:
    """A request's row; slot and position are filled in at each step."""
    p = params
    mirostat = {"mirostat_tau": p.mirostat_tau, "mirostat_eta": p.mirostat_eta} if p.mirostat_mode == 2 else {}
    row = pack_row(
        seed=seed % 2**64,
        sample_index=index,
        top_k=max(p.top_k, 0),
        penalty_last_n=OWN_CONTEXT if p.penalty_last_n is None else p.penalty_last_n,
        dry_allowed_length=p.dry_allowed_length,
        dry_penalty_last_n=p.dry_penalty_last_n,
        samplers=p.samplers,
        **{name: getattr(p, name) for name in FLOATS if not name.startswith("mirostat")},
        **mirostat,
    )
    wanted = -1 if p.logprobs is None else p.logprobs
    on = {
        "allowed_token_ids": p.allowed_token_ids is not None,
        "min_tokens": p.min_tokens > 0,
        "bad_words": bool(p.bad_words),
        "grammar": has_grammar,
        "logit_bias": bool(p.logit_bias),
    }
    bits = [on[name] for name in _CHANGES] + [name in (p.logits_processors or {}) for name in processors]
    changes = sum(1 << i for i, bit in enumerate(bits) if bit)
    extra = {
        "logprobs": max(wanted, 0) if p.logprob_token_ids else wanted,
        "changes": changes,
        "may_end": prompt_len + p.min_tokens,
    }
    return np.concatenate([row, np.array([extra[name] for name in _EXTRA], np.int32)])


def empty_rows(count: int) -> np.ndarray:
    """Rows that belong to no sequence: greedy, without any change, in the slot that is yet to be filled in."""
    row = np.concatenate([pack_row(temperature=0.0), np.array([-1, 0, 0], np.int32)])
    return np.tile(row, (count, 1))


def state_shapes(slots: int, vocab_size: int, context: int, processors: Sequence[LogitsProcessor] = ()) -> State:
    """Shapes of the sampler's state by sequence slot, with a spare last one for padding rows. Donated to each step.

    last_tokens: the token sampled last. history: the tokens so far. counts: how often each came in the answer. mu:
    mirostat's. Sets of tokens are bits: in_prompt, breaks (of DRY), allowed, ends (forbidden while the answer may not
    end). bias: added to the logits of bias_ids. bad_words: sequences, padded with -1 in front. wanted: ids whose
    log-probabilities are reported. Only for requests that need it is a slot filled; other rows do not read theirs.
    """
    n, words = slots + 1, words_for(vocab_size)

    def leaf(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n, *shape), dtype)

    return {name: leaf(words, dtype=jnp.uint32) for name in ("in_prompt", "breaks", "allowed", "ends")} | {
        "last_tokens": leaf(),
        "history": leaf(context),
        "counts": leaf(vocab_size, dtype=jnp.int16),
        "mu": leaf(dtype=jnp.float32),
        "bias_ids": leaf(MAX_BIASED),
        "bias": leaf(MAX_BIASED, dtype=jnp.float32),
        "bad_words": leaf(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS),
        "wanted": leaf(MAX_WANTED),
        "processors": {p.name: {k: leaf(*v.shape, dtype=v.dtype) for k, v in p.parameters.items()} for p in processors},
    }


def slot_state(
    params: SamplingParams,
    tokens: Sequence[int],
    prompt_len: int,
    *,
    vocab_size: int,
    context: int,
    ends: Sequence[int],
    breaks: Sequence[int],
    bad_words: Sequence[Sequence[int]],
    mu: float | None,
    processors: Sequence[LogitsProcessor],
) -> dict[str, Any]:
    """One slot's state for a request with these tokens so far: from token ids alone, but for mirostat's mu, which the
    host is told with every token."""
    p = params
    history = np.zeros(context, np.int32)
    history[: len(tokens)] = tokens
    bias_ids, bias = np.full(MAX_BIASED, vocab_size, np.int32), np.zeros(MAX_BIASED, np.float32)
    for i, (token, value) in enumerate((p.logit_bias or {}).items()):
        bias_ids[i], bias[i] = token, value
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for i, word in enumerate(bad_words):
        words[i, -len(word) :] = word
    wanted = np.zeros(MAX_WANTED, np.int32)
    wanted[: len(p.logprob_token_ids or ())] = p.logprob_token_ids or ()
    given = p.logits_processors or {}
    return {
        "in_prompt": pack_bits(tokens[:prompt_len], vocab_size),
        "breaks": pack_bits(breaks, vocab_size),
        "allowed": pack_bits(p.allowed_token_ids or (), vocab_size),
        "ends": pack_bits(ends, vocab_size),
        "history": history,
        "counts": np.bincount(tokens[prompt_len:], minlength=vocab_size).astype(np.int16),
        "mu": np.float32(2 * p.mirostat_tau if mu is None else mu),
        "bias_ids": bias_ids,
        "bias": bias,
        "bad_words": words,
        "wanted": wanted,
        "processors": {
            q.name: {
                k: np.asarray(given[q.name][k] if q.name in given else np.zeros(v.shape), v.dtype)
                for k, v in q.parameters.items()
            }
            for q in processors
        },
    }


def load_slot(state: State, slot: Int32[Array, ""], row: dict[str, Any]) -> State:
    """The state with one slot's leaves replaced, whatever ran in the slot before."""
    part = {name: state[name] for name in row}
    loaded: State = jax.tree.map(lambda x, value: x.at[slot].set(value), part, row)
    return state | loaded


def sample_step(
    config: ModelConfig,
    processors: Sequence[LogitsProcessor],
    params: Params,
    hidden: Float32[Array, "R D"],
    packed: Int32[Array, "R W"],
    masks: UInt32[Array, "R M"],
    state: State,
) -> tuple[dict[str, Array], State]:
    """The next token of each row, its log-probabilities where asked for, and the new state.

    masks: a bit for each token that a grammar allows, for the rows that have one. Padding rows write to the spare slot.
    """
    rows = SamplerRows(packed[:, :ROW_WIDTH])
    extra = {name: packed[:, ROW_WIDTH + i] for i, name in enumerate(_EXTRA)}
    slot, position = rows["slot"], rows["position"]
    spare = state["last_tokens"].shape[0] - 1
    raw = decoder.logits(config, params, hidden, jnp.sum(slot != spare, dtype=jnp.int32))
    logits = jax.lax.cond(
        jnp.any(extra["changes"] > 0), partial(_change, processors, raw, masks, state, rows, extra), lambda: raw
    )
    memory = SamplerMemory(*(state[name] for name in ("history", "counts", "in_prompt", "breaks", "mu")))
    tokens, mu = sample_after(logits, rows, memory)
    out = {"tokens": tokens, "mu": mu}
    out |= jax.lax.cond(
        jnp.any(extra["logprobs"] >= 0),
        lambda: logprob_tables(config, params, hidden, raw, tokens, state["wanted"][slot]),
        lambda: _no_tables(raw, tokens, MAX_WANTED),
    )
    return out, state | {
        "last_tokens": state["last_tokens"].at[slot].set(tokens),
        "history": state["history"].at[slot, position].set(tokens),
        "counts": state["counts"].at[slot, tokens].add(1),
        "mu": state["mu"].at[slot].set(mu),
    }


def _change(
    processors: Sequence[LogitsProcessor],
    raw: Float32[Array, "R V"],
    masks: UInt32[Array, "R M"],
    state: State,
    rows: SamplerRows,
    extra: dict[str, Array],
) -> Float32[Array, "R V"]:
    """What forbids and favours tokens before the sampler's chain, for the rows that ask for it."""
    slot, position, vocab = rows["slot"], rows["position"], raw.shape[1]
    line = jnp.arange(raw.shape[0], dtype=jnp.int32)[:, None]

    def forbid(logits: Array, forbidden: Array) -> Array:
        return jnp.where(forbidden, -jnp.inf, logits)

    def words(logits: Array) -> Array:
        sequences, before = state["bad_words"][slot], state["history"][slot]  # [R, B, N], [R, C]
        size = sequences.shape[2]
        back = position[:, None] - size + 1 + jnp.arange(size - 1, dtype=jnp.int32)  # the last N - 1 tokens
        recent = jnp.where(back >= 0, jnp.take_along_axis(before, jnp.maximum(back, 0), axis=1), -1)
        start = sequences[:, :, :-1]
        matches = jnp.all((start < 0) | (start == recent[:, None, :]), axis=2)
        last = sequences[:, :, -1]
        banned = jnp.where(matches & (last >= 0), last, vocab)
        return logits.at[line, banned].set(-jnp.inf, mode="drop")

    steps: list[Callable[[Array], Array]] = [
        lambda x: forbid(x, ~unpack_bits(state["allowed"][slot], vocab)),
        lambda x: forbid(x, unpack_bits(state["ends"][slot], vocab) & (position < extra["may_end"])[:, None]),
        words,
        lambda x: forbid(x, ~unpack_bits(masks, vocab)),
        lambda x: x.at[line, state["bias_ids"][slot]].add(state["bias"][slot], mode="drop"),
    ]

    def processed(processor: LogitsProcessor) -> Callable[[Array], Array]:
        def run(x: Array) -> Array:
            own = jax.tree.map(lambda leaf: leaf[slot], state["processors"][processor.name])
            return jax.vmap(processor.function)(x, state["history"][slot], position, own)

        return run

    logits = raw
    for bit, step in enumerate([*steps, *(processed(p) for p in processors)]):
        mine = (extra["changes"] >> bit & 1) > 0

        def apply(x: Array, step: Callable[[Array], Array] = step, mine: Array = mine) -> Array:
            return jnp.where(mine[:, None], step(x), x)

        logits = jax.lax.cond(jnp.any(mine), apply, lambda x: x, logits)
    return logits


def logprob_tables(
    config: ModelConfig,
    params: Params,
    hidden: Float32[Array, "R D"],
    logits: Float32[Array, "R V"],
    tokens: Int32[Array, " R"],
    wanted: Int32[Array, "R J"],
) -> dict[str, Array]:
    """Log-probabilities under the model's own distribution: of `tokens`, of the most likely ones, and of `wanted`."""
    # The op's log-sum-exp, whose order of summation does not depend on the bucket.
    _, lse = decoder.logprobs(config, params, hidden, tokens[:, None])
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    top, ids = jax.lax.top_k(logits, _num_top(logits))
    return {
        "logprob": chosen[:, 0] - lse,
        "rank": 1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32),
        "top_logprobs": top - lse[:, None],
        "top_ids": ids.astype(jnp.int32),
        "wanted_logprobs": jnp.take_along_axis(logits, wanted, axis=1) - lse[:, None],
    }


def _no_tables(logits: Float32[Array, "R V"], tokens: Int32[Array, " R"], wanted: int) -> dict[str, Array]:
    rows, top = tokens.shape[0], _num_top(logits)
    return {
        "logprob": jnp.zeros(rows, jnp.float32),
        "rank": jnp.zeros(rows, jnp.int32),
        "top_logprobs": jnp.zeros((rows, top), jnp.float32),
        "top_ids": jnp.zeros((rows, top), jnp.int32),
        "wanted_logprobs": jnp.zeros((rows, wanted), jnp.float32),
    }


def _num_top(logits: Array) -> int:
    return min(MAX_LOGPROBS, int(logits.shape[1]))
