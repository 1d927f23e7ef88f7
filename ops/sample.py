"""`sample`: picks the next token of each row, by selection and a two-level inverse CDF, never by a sort.

A row's scores pass a chain of stages, in an order that the row names; a removed token's score is -inf.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from inferax.ops.op import Op
from inferax.ops.random import uniform_pair
from inferax.ops.sampler_rows import OWN_CONTEXT, STAGES, SamplerMemory, SamplerRows, unpack_bits

_BLOCK = 256
_XTC_STREAM = 1  # of the uniforms: its draw is independent of the token's
_LARGEST_EXPONENT = 88.7228391  # of e, in float32

Scores = Float32[Array, "R V"]
Stage = Callable[[Scores, SamplerRows, SamplerMemory | None], Scores]


def _penalties(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    """OpenAI's presence and frequency penalties, and the repetition penalty of Keskar et al. 2019."""
    if memory is None:
        return scores
    vocab, own = scores.shape[1], rows["penalty_last_n"] == OWN_CONTEXT
    counts = memory.counts[rows["slot"]].astype(jnp.int32)
    seen = unpack_bits(memory.in_prompt[rows["slot"]], vocab) | (counts > 0)

    def windowed() -> tuple[Array, Array]:
        history, used = _window(rows, memory, "penalty_last_n")
        line = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
        last = jnp.zeros(scores.shape, jnp.int32).at[line, history].add(used.astype(jnp.int32))
        return jnp.where(own[:, None], counts, last), jnp.where(own[:, None], seen, last > 0)

    counts, seen = jax.lax.cond(jnp.all(own), lambda: (counts, seen), windowed)
    repetition = rows["repetition_penalty"][:, None]
    out = jnp.where(seen, jnp.where(scores > 0, scores / repetition, scores * repetition), scores)
    out = out - rows["frequency_penalty"][:, None] * counts.astype(jnp.float32)
    penalized: Array = out - rows["presence_penalty"][:, None] * (counts > 0)
    return penalized


def _window(rows: SamplerRows, memory: SamplerMemory, length: str) -> tuple[Int32[Array, "R C"], Bool[Array, "R C"]]:
    """The history of each row, and which of it is among the last tokens that count."""
    history = memory.history[rows["slot"]]
    at, stop = jnp.arange(history.shape[1], dtype=jnp.int32)[None], rows["position"][:, None]
    last = rows[length][:, None]
    return history, (at < stop) & ((last < 0) | (at >= stop - last))


def _dry(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    """DRY as in llama.cpp: a token that would go on with a repetition of `length` tokens loses
    multiplier * base ** (length - allowed_length). Breakers themselves lose nothing."""
    if memory is None:
        return scores
    history, used = _window(rows, memory, "dry_penalty_last_n")
    size = history.shape[1]
    at, end = jnp.arange(size, dtype=jnp.int32)[None], rows["position"][:, None] - 1
    breaks = unpack_bits(memory.breaks[rows["slot"]], scores.shape[1])
    broken = jnp.take_along_axis(breaks, history, axis=1) & used
    total = jnp.sum(used, axis=1, keepdims=True, dtype=jnp.int32)
    # A repetition reaches back to the last breaker at most.
    limit = jnp.min(jnp.where(broken, end - at, total), axis=1, keepdims=True)

    def longer(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, alive, length = state
        back = jnp.roll(history, step, axis=1)
        within = (at >= step) & jnp.roll(used, step, axis=1)
        tail = jnp.take_along_axis(history, jnp.maximum(end - step, 0), axis=1)
        alive = alive & within & (back == tail) & (step < limit)
        return step + 1, alive, length + alive

    before = used & (at < end)
    start = (jnp.int32(0), before, jnp.zeros(history.shape, jnp.int32))
    length = jax.lax.while_loop(lambda s: jnp.any(s[1]) & (s[0] < size), longer, start)[2]
    allowed = rows["dry_allowed_length"][:, None]
    counted = jnp.where(before & (length >= allowed), length, 0)
    line = jnp.arange(scores.shape[0], dtype=jnp.int32)[:, None]
    longest = jnp.zeros(scores.shape, jnp.int32).at[line, jnp.roll(history, -1, axis=1)].max(counted)
    base = rows["dry_base"][:, None]
    most = jnp.where(base > 1.000001, jnp.floor(_LARGEST_EXPONENT / jnp.log(jnp.maximum(base, 1.000002))), 0.0)
    exponent = (longest - allowed).astype(jnp.float32)
    exponent = jnp.where(most > 0, jnp.minimum(exponent, most), exponent)
    return jnp.where(
        (longest > 0) & ~breaks, scores - rows["dry_multiplier"][:, None] * jnp.power(base, exponent), scores
    )


def _top_n_sigma(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    """Keeps what is within n standard deviations of the best (Tang et al. 2024)."""
    there = scores > -jnp.inf
    count = jnp.sum(there, axis=1, keepdims=True).astype(jnp.float32)
    mean = jnp.sum(jnp.where(there, scores, 0.0), axis=1, keepdims=True) / count
    variance = jnp.sum(jnp.where(there, jnp.square(scores - mean), 0.0), axis=1, keepdims=True) / count
    floor = jnp.max(scores, axis=1, keepdims=True) - rows["top_n_sigma"][:, None] * jnp.sqrt(variance)
    return jnp.where(scores >= floor, scores, -jnp.inf)


def _temperature(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    """Divides by the temperature; a dynamic one follows the entropy, as in llama.cpp."""
    # The largest score is 0 before the division, so that no temperature overflows it.
    top = jnp.max(scores, axis=1, keepdims=True)
    shifted = scores - jnp.where(top > -jnp.inf, top, 0.0)
    fixed, spread = rows["temperature"], rows["dynatemp_range"]

    def dynamic() -> Float32[Array, " R"]:
        p, entropy = _softmax(shifted)
        most = jnp.log(jnp.sum(p > 0, axis=1).astype(jnp.float32))
        share = jnp.where(most > 0, entropy[:, 0] / jnp.maximum(most, 1e-9), 0.0)
        low, high = jnp.maximum(fixed - spread, 0.0), fixed + spread
        moved = low + (high - low) * jnp.power(share, rows["dynatemp_exponent"])
        return jnp.where(spread > 0, moved, fixed)

    value = jax.lax.cond(jnp.any(spread > 0), dynamic, lambda: fixed)
    return shifted / jnp.maximum(value, 1e-30)[:, None]


def _softmax(scores: Scores) -> tuple[Scores, Float32[Array, "R 1"]]:
    """Probabilities and their entropy in nats."""
    weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    total = jnp.sum(weights, axis=1, keepdims=True)
    p = weights / total
    return p, -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0), axis=1, keepdims=True)


def _typical_p(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    """Keeps the tokens whose surprise is nearest to the entropy, up to a share of the mass (Meister et al. 2022)."""
    p, entropy = _softmax(scores)
    there = p > 0
    far = jnp.abs(-jnp.log(jnp.where(there, p, 1.0)) - entropy)
    keys = _ordered(jnp.where(there, -far, -jnp.inf))
    return jnp.where(keys >= _mass_floor(keys, p, rows["typical_p"]), scores, -jnp.inf)


def _min_p(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    floor = jnp.max(scores, axis=1, keepdims=True) + jnp.log(rows["min_p"])[:, None]
    return jnp.where(scores >= floor, scores, -jnp.inf)


def _top_k(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    keys = _ordered(scores)
    wanted = jnp.minimum(rows["top_k"], scores.shape[1])[:, None]
    floor = _largest_threshold(keys, lambda kept: jnp.sum(kept, axis=1, keepdims=True, dtype=jnp.int32) >= wanted)
    return jnp.where(keys >= floor, scores, -jnp.inf)


def _top_p(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    keys = _ordered(scores)
    weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    return jnp.where(keys >= _mass_floor(keys, weights, rows["top_p"]), scores, -jnp.inf)


def _xtc(scores: Scores, rows: SamplerRows, memory: SamplerMemory | None) -> Scores:
    """With some probability, removes all but the least likely of the tokens above a threshold."""
    p, _ = _softmax(scores)
    above = p >= rows["xtc_threshold"][:, None]
    least = jnp.min(jnp.where(above, p, jnp.inf), axis=1, keepdims=True)
    chosen = _uniforms(rows, _XTC_STREAM)[0] < rows["xtc_probability"]
    return jnp.where(above & (p > least) & chosen[:, None], -jnp.inf, scores)


_STAGES: dict[str, Stage] = {
    "penalties": _penalties, "dry": _dry, "top_n_sigma": _top_n_sigma, "temperature": _temperature,
    "typical_p": _typical_p, "min_p": _min_p, "top_k": _top_k, "top_p": _top_p, "xtc": _xtc,
}  # fmt: skip


def _active(rows: SamplerRows) -> Bool[Array, "R N"]:
    """Which stages do anything, for each row."""
    drawn = rows["temperature"] > 0
    penalties = (rows["presence_penalty"] != 0) | (rows["frequency_penalty"] != 0) | (rows["repetition_penalty"] != 1)
    typical, xtc = rows["typical_p"] < 1, rows["xtc_probability"] > 0
    # The others keep the best token, so that they do nothing for a greedy row.
    filtered = drawn | typical | xtc
    on = {
        "penalties": penalties & (rows["penalty_last_n"] != 0),
        "dry": (rows["dry_multiplier"] != 0) & (rows["dry_penalty_last_n"] != 0),
        "top_n_sigma": filtered & (rows["top_n_sigma"] > 0),
        "temperature": drawn,
        "typical_p": typical,
        "min_p": filtered & (rows["min_p"] > 0),
        "top_k": filtered & (rows["top_k"] > 0),
        "top_p": filtered & (rows["top_p"] < 1),
        "xtc": xtc,
    }
    return jnp.stack([on[stage] for stage in STAGES], axis=1)


def _ordered(x: Scores) -> Int32[Array, "R V"]:
    """Integers in the same order as the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _largest_threshold(
    keys: Int32[Array, "R V"], enough: Callable[[Bool[Array, "R V"]], Bool[Array, "R 1"]]
) -> Int32[Array, "R 1"]:
    """The largest integer t for which `enough(keys >= t)` holds per row, by bisection over its 32 bits."""
    rows = keys.shape[0]
    low = jnp.full((rows, 1), -(2**31), jnp.int32)
    high = jnp.full((rows, 1), 2**31 - 1, jnp.int32)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        # Rounds up without overflow; `low` always satisfies the condition.
        middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
        holds = enough(keys >= middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, middle - 1)

    found: Array = jax.lax.fori_loop(0, 32, halve, (low, high))[0]
    return found


def _mass_floor(keys: Int32[Array, "R V"], weights: Scores, share: Float32[Array, " R"]) -> Int32[Array, "R 1"]:
    """The largest key from which on the tokens hold that share of the weight."""
    wanted = share[:, None] * jnp.sum(weights, axis=1, keepdims=True)

    def enough(kept: Bool[Array, "R V"]) -> Bool[Array, "R 1"]:
        return jnp.sum(jnp.where(kept, weights, 0.0), axis=1, keepdims=True) >= wanted

    return jnp.minimum(_largest_threshold(keys, enough), jnp.max(keys, axis=1, keepdims=True))


def _uniforms(rows: SamplerRows, stream: int = 0) -> tuple[Float32[Array, " R"], Float32[Array, " R"]]:
    seed = jnp.stack([rows.unsigned("seed_low"), rows.unsigned("seed_high")], axis=1)
    return uniform_pair(seed, rows.unsigned("sample_index"), rows.unsigned("position"), stream)


def _draw(scores: Scores, rows: SamplerRows) -> Int32[Array, " R"]:
    """Inverse CDF in two levels: one uniform picks a block of the vocabulary, a second a token inside it."""
    count, vocab = scores.shape
    weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    blocks = -(-vocab // _BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab))).reshape(count, blocks, _BLOCK)
    first, second = _uniforms(rows)

    def pick(mass: Float32[Array, "R n"], u: Float32[Array, " R"]) -> Int32[Array, " R"]:
        # A parallel sum need not rise only where there is mass: blocks and tokens without any are excluded by name.
        running = jnp.cumsum(mass, axis=1)
        above = (running > (u * running[:, -1])[:, None]) & (mass > 0)
        last = mass.shape[1] - 1 - jnp.argmax((mass > 0)[:, ::-1], axis=1)
        return jnp.where(jnp.any(above, axis=1), jnp.argmax(above, axis=1), last).astype(jnp.int32)

    block = pick(jnp.sum(weights, axis=2), first)
    inside = pick(jnp.take_along_axis(weights, block[:, None, None], axis=1)[:, 0], second)
    # Logits that are all NaN or masked have no right answer, but the id must be one.
    return jnp.minimum(block * _BLOCK + inside, vocab - 1)


def _mirostat(
    scores: Scores, rows: SamplerRows, mu: Float32[Array, " R"]
) -> tuple[Int32[Array, " R"], Float32[Array, " R"]]:
    """Mirostat 2 (Basu et al. 2021): draws among the tokens whose surprise is at most mu bits, and moves mu by how far
    the drawn token's surprise is from the target."""
    p, _ = _softmax(scores)
    kept = (-jnp.log2(p) <= mu[:, None]) | (p >= jnp.max(p, axis=1, keepdims=True))
    tokens = _draw(jnp.where(kept, scores, -jnp.inf), rows)
    of_token = jnp.take_along_axis(p, tokens[:, None], axis=1)[:, 0]
    surprise = jnp.log2(jnp.sum(jnp.where(kept, p, 0.0), axis=1)) - jnp.log2(of_token)
    return tokens, mu - rows["mirostat_eta"] * (surprise - rows["mirostat_tau"])


def filtered_scores(
    logits: Float32[Array, "R V"], rows: SamplerRows, memory: SamplerMemory | None = None
) -> Float32[Array, "R V"]:
    """The scores that a token is drawn from: exp of them is its share, up to a factor; -inf is a removed token."""
    return _chain(logits.astype(jnp.float32), rows, memory, _active(rows))


def _chain(logits: Scores, rows: SamplerRows, memory: SamplerMemory | None, active: Bool[Array, "R N"]) -> Scores:
    order = jnp.stack([rows[f"stage_{i}"] for i in range(len(STAGES))], axis=1)  # [R, N]
    # [N, R, N]: in which place which row takes which stage.
    takes = (order.T[:, :, None] == jnp.arange(len(STAGES), dtype=jnp.int32)) & active[None]

    def place(i: Array, scores: Array) -> Array:
        for number, name in enumerate(STAGES):
            mine = takes[i, :, number]

            def apply(scores: Array, name: str = name, mine: Array = mine) -> Array:
                return jnp.where(mine[:, None], _STAGES[name](scores, rows, memory), scores)

            scores = jax.lax.cond(jnp.any(mine), apply, lambda s: s, scores)
        return scores

    scores: Array = jax.lax.fori_loop(0, len(STAGES), place, logits)
    return scores


def sample_reference(
    logits: Float32[Array, "R V"], rows: SamplerRows, memory: SamplerMemory | None
) -> tuple[Int32[Array, " R"], Float32[Array, " R"]]:
    logits = logits.astype(jnp.float32)
    mu = jnp.zeros(logits.shape[0], jnp.float32) if memory is None else memory.mu[rows["slot"]]
    active = _active(rows)

    def chosen() -> tuple[Array, Array]:
        scores = _chain(logits, rows, memory, active)
        greedy = jnp.argmax(scores, axis=1).astype(jnp.int32)
        drawn, steered = rows["temperature"] > 0, rows["mirostat_tau"] > 0

        def draw() -> tuple[Array, Array]:
            plain = _draw(scores, rows)
            tokens, moved = jax.lax.cond(
                jnp.any(steered & drawn), lambda: _mirostat(scores, rows, mu), lambda: (plain, mu)
            )
            return jnp.where(steered, tokens, plain), jnp.where(steered & drawn, moved, mu)

        tokens, moved = jax.lax.cond(jnp.any(drawn), draw, lambda: (greedy, mu))
        return jnp.where(drawn, tokens, greedy), moved

    def best() -> tuple[Array, Array]:
        return jnp.argmax(logits, axis=1).astype(jnp.int32), mu

    found: tuple[Array, Array] = jax.lax.cond(jnp.any(active), chosen, best)
    return found


_sample = Op("sample", sample_reference, rows=(0, 1))


def sample(logits: Float32[Array, "R V"], rows: SamplerRows) -> Int32[Array, " R"]:
    """One token per row: greedy where the temperature is 0, else drawn from the filtered distribution.

    Tokens that tie with the last one that a filter keeps are kept too. Stages that look at earlier tokens (penalties,
    DRY, mirostat) need `sample_after`.
    """
    return _sample(logits, rows, None)[0]


def sample_after(
    logits: Float32[Array, "R V"], rows: SamplerRows, memory: SamplerMemory
) -> tuple[Int32[Array, " R"], Float32[Array, " R"]]:
    """`sample`, with the memory of the tokens before; returns mirostat's new mu of each row besides."""
    return _sample(logits, rows, memory)
