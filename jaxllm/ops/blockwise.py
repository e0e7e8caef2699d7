"""Exact softmax attention in blocks, with memory linear in the length (FlashAttention-2, Dao 2023, arXiv 2307.08691), in plain XLA.

Queries are taken a block at a time; each block meets keys a block at a time and keeps a running maximum m, sum Z and output o
(online softmax, Milakov and Gimelshein 2018, arXiv 1805.02867):

    m' = max(m, max s);   Z' = e^(m - m') Z + sum e^(s - m');   o' = e^(m - m') o + e^(s - m') v

A sink is where the running sums start: m = sink, Z = 1, o = 0. The backward makes the weights again from the scores and their
log-sum-exp. No score matrix and no mask larger than a block ever exists. Blocks that lie wholly outside are not computed:

- keys after a block of queries, or before the document of its first query began;
- under a window, keys farther back than its span: the cost is n x (span + block), whatever n is;
- the global tokens of that one document are gathered, because every other document of the block begins inside it.

This holds when positions grow by at least one from token to token of a document, as they do in whole sequences.

Shapes: `q [b t h k]`, `k [b t g k]`, `v [b t g v]`, `positions, segments [b t]`, `sinks [h]`; output `[b t h v]`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.attention import LOWEST, per_group, per_head, pull_back, scores_under, sink_gradient
from jaxllm.ops.mask import Mask, visible

State = tuple[Array, Array, Array]  # running output [b g r c v], maximum and sum [b g r c 1], fp32


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known before tracing: the mask, the score's scale and cap, and the blocks.

    `steps` key blocks of `keys` keys end where a block of `queries` queries ends; None: as many as there are before it.
    """

    mask: Mask
    scale: float
    softcap: float | None
    queries: int
    keys: int
    steps: int | None

    @classmethod
    def of(cls, t: int, mask: Mask, scale: float, softcap: float | None, queries: int, keys: int) -> "Plan":
        """Blocks of at most `keys` keys; under a window much shorter than t, blocks that fill its reach evenly."""
        if mask.span is None or 2 * mask.span > t:
            return cls(mask, scale, softcap, queries, keys, None)
        reach = mask.span - 1 + queries
        steps = -(-reach // keys)
        return cls(mask, scale, softcap, queries, -(-reach // steps), steps)

    @property
    def ahead(self) -> int:
        """Padding before the first key, so that the first block's window begins inside the array."""
        return 0 if self.steps is None else self.steps * self.keys - self.queries


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The arrays of a call, cut: queries `[n b g r c .]`, keys `[b g ahead+s .]`."""

    q: Array
    k: Array
    v: Array
    q_positions: Array
    q_segments: Array
    k_positions: Array
    k_segments: Array
    first: Array  # [n b]: index, in the padded keys, at which the document of the block's first query begins


def _cut(q: Array, k: Array, v: Array, positions: Array, segments: Array, plan: Plan) -> _Blocks:
    b, t, h, _ = q.shape
    g, c = k.shape[2], plan.queries
    unit = c if plan.steps is not None else math.lcm(c, plan.keys)
    extra = -t % unit
    q = query_blocks(q, g, c, extra)

    def rows(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, extra))).reshape(b, -1, c).transpose(1, 0, 2)

    def columns(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (plan.ahead, extra)))

    def keys(x: Array) -> Array:
        return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (plan.ahead, extra), (0, 0)))

    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    first = lax.cummax(jnp.where(begins, index, 0), axis=1)
    return _Blocks(
        q,
        keys(k),
        keys(v),
        rows(positions),
        rows(segments),
        columns(positions),
        columns(segments),
        rows(first)[:, :, 0] + plan.ahead,
    )


def query_blocks(x: Array, g: int, c: int, extra: int) -> Array:
    """`[b t h .]` to blocks `[n b g r c .]`."""
    b, t, h, _ = x.shape
    x = jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))).reshape(b, -1, c, g, h // g, x.shape[-1])
    return x.transpose(1, 0, 3, 4, 2, 5)


def tokens_of(x: Array, t: int) -> Array:
    """`[n b g r c .]` back to `[b t h .]`."""
    n, b, g, r, c, v = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(b, n * c, g * r, v)[:, :t]


def _range(j: Array, first: Array, plan: Plan) -> tuple[Any, Any]:
    """Key blocks, from and to, that query block j meets; block i begins at key `_start(i, j)`."""
    if plan.steps is not None:
        return 0, plan.steps
    least = jnp.min(first)
    if plan.mask.span is not None and not plan.mask.global_tokens:
        least = jnp.maximum(least, j * plan.queries - plan.mask.span + 1)
    return least // plan.keys, ((j + 1) * plan.queries + plan.keys - 1) // plan.keys


def _start(i: Any, j: Array, plan: Plan) -> Array:
    return i * plan.keys + (0 if plan.steps is None else j * plan.queries)


def take(x: Array, start: Array, size: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _seen(cut: _Blocks, j: Array, start: Array, plan: Plan) -> Array:
    """bool `[b c s]` of query block j on the key block at `start`."""
    return visible(
        cut.q_positions[j],
        take(cut.k_positions, start, plan.keys, 1),
        cut.q_segments[j],
        take(cut.k_segments, start, plan.keys, 1),
        plan.mask,
    )


def _globals(cut: _Blocks, j: Array, plan: Plan) -> tuple[Array, Array]:
    """Indices `[b G]` of the global tokens before the window of block j, and who sees them, `[b c G]`."""
    index = cut.first[j][:, None] + jnp.arange(plan.mask.global_tokens, dtype=jnp.int32)
    outside = index < _start(0, j, plan)
    index = jnp.minimum(index, cut.k_positions.shape[1] - 1)

    def at(x: Array) -> Array:
        return jnp.take_along_axis(x, index, axis=1)

    seen = visible(cut.q_positions[j], at(cut.k_positions), cut.q_segments[j], at(cut.k_segments) * outside, plan.mask)
    return index, seen


def _gather(x: Array, index: Array) -> Array:
    """Keys or values `[b g s .]` at `index [b G]`."""
    return jnp.take_along_axis(x, index[:, None, :, None], axis=2)


def online_start(shape: tuple[int, ...], sinks: Array | None) -> State:
    """The state before any key, for an output of `shape [b g r c v]`; a sink counts as a key with value 0."""
    ones = jnp.zeros((*shape[:-1], 1), jnp.float32)
    if sinks is None:
        return jnp.zeros(shape, jnp.float32), ones + LOWEST, ones
    return jnp.zeros(shape, jnp.float32), ones + sinks, ones + 1.0


def online_step(state: State, q: Array, k: Array, v: Array, seen: Array, scale: float, softcap: float | None) -> State:
    """One block of keys `k [b (g) s k]`, `v [b (g) s v]`, seen by queries `q [b g r c k]` where `seen [b c s]`."""
    out, top, total = state
    b, g, r, c, _ = q.shape
    scores, _ = scores_under(q, k, seen, scale, softcap)
    higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
    weights, keep = jnp.exp(scores - higher), jnp.exp(top - higher)
    more = per_head("ns,sv->nv", weights.astype(v.dtype).reshape(b, g, r * c, -1), v).reshape(out.shape)
    return out * keep + more, higher, total * keep + jnp.sum(weights, axis=-1, keepdims=True)


def online_finish(state: State, dtype: Any) -> tuple[Array, Array]:
    """Output and log-sum-exp."""
    out, top, total = state
    total = jnp.where(total > 0, total, 1.0)
    return (out / total).astype(dtype), top + jnp.log(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _blockwise(
    q: Array, k: Array, v: Array, positions: Array, segments: Array, sinks: Array | None, plan: Plan
) -> Array:
    return _forward(q, k, v, positions, segments, sinks, plan)[0]


def _forward(
    q: Array, k: Array, v: Array, positions: Array, segments: Array, sinks: Array | None, plan: Plan
) -> tuple[Array, tuple[Any, ...]]:
    cut = _cut(q, k, v, positions, segments, plan)

    def one(carry: None, j: Array) -> tuple[None, tuple[Array, Array]]:
        part = cut.q[j]
        state = online_start((*part.shape[:-1], v.shape[-1]), sinks)

        def meet(i: Any, state: State) -> State:
            start = _start(i, j, plan)
            keys, values = take(cut.k, start, plan.keys, 2), take(cut.v, start, plan.keys, 2)
            return online_step(state, part, keys, values, _seen(cut, j, start, plan), plan.scale, plan.softcap)

        state = lax.fori_loop(*_range(j, cut.first[j], plan), meet, state)
        if plan.mask.global_tokens and plan.steps is not None:
            index, seen = _globals(cut, j, plan)
            keys, values = _gather(cut.k, index), _gather(cut.v, index)
            state = online_step(state, part, keys, values, seen, plan.scale, plan.softcap)
        return carry, online_finish(state, v.dtype)

    _, (out, norm) = lax.scan(one, None, jnp.arange(cut.q.shape[0], dtype=jnp.int32))
    out = tokens_of(out, q.shape[1])
    return out, (q, k, v, positions, segments, sinks, out, norm)


def _backward(plan: Plan, saved: tuple[Any, ...], d_out: Array) -> tuple[Any, ...]:
    q, k, v, positions, segments, sinks, out, norm = saved
    cut = _cut(q, k, v, positions, segments, plan)
    g, c, t = k.shape[2], plan.queries, q.shape[1]
    extra = cut.q.shape[0] * c - t
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    delta, d_blocks = query_blocks(delta, g, c, extra), query_blocks(d_out, g, c, extra)
    Carry = tuple[Array, Array]

    def one(carry: Carry, j: Array) -> tuple[Carry, Array]:
        part, d_part = cut.q[j], d_blocks[j]

        def meet(i: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = state
            start = _start(i, j, plan)
            keys, values = take(cut.k, start, plan.keys, 2), take(cut.v, start, plan.keys, 2)
            seen = _seen(cut, j, start, plan)
            more_q, more_k, more_v = pull_back(
                part, keys, values, seen, norm[j], delta[j], d_part, plan.scale, plan.softcap
            )

            def add(x: Array, y: Array) -> Array:
                return lax.dynamic_update_slice_in_dim(x, take(x, start, plan.keys, 2) + y, start, 2)

            return d_q + more_q, add(d_k, more_k), add(d_v, more_v)

        d_q, d_k, d_v = lax.fori_loop(
            *_range(j, cut.first[j], plan), meet, (jnp.zeros(part.shape, jnp.float32), *carry)
        )
        if plan.mask.global_tokens and plan.steps is not None:
            index, seen = _globals(cut, j, plan)
            keys, values = _gather(cut.k, index), _gather(cut.v, index)
            more_q, more_k, more_v = pull_back(
                part, keys, values, seen, norm[j], delta[j], d_part, plan.scale, plan.softcap
            )
            rows = jnp.arange(index.shape[0])[:, None]

            def scatter(x: Array, y: Array) -> Array:
                return x.at[rows, :, index].add(y.transpose(0, 2, 1, 3))

            d_q, d_k, d_v = d_q + more_q, scatter(d_k, more_k), scatter(d_v, more_v)
        return (d_k, d_v), d_q.astype(q.dtype)

    start = jnp.zeros(cut.k.shape, jnp.float32), jnp.zeros(cut.v.shape, jnp.float32)
    (d_k, d_v), d_q = lax.scan(one, start, jnp.arange(cut.q.shape[0], dtype=jnp.int32))
    d_k, d_v = (x[:, :, plan.ahead : plan.ahead + t].transpose(0, 2, 1, 3) for x in (d_k, d_v))
    d_sinks = None if sinks is None else jnp.sum(jax.vmap(functools.partial(sink_gradient, sinks))(norm, delta), axis=0)
    return tokens_of(d_q, t), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, d_sinks


_blockwise.defvjp(_forward, _backward)


# Measured on CPU, heads of 64: smaller blocks lose to the overhead of the loop, larger ones fall out of the cache.
BLOCK = 128


def blockwise(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    segments: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    block: int = BLOCK,
) -> Array:
    """Attention of whole sequences on themselves, forward and backward. `block`: queries, and keys, taken at a time."""
    plan = Plan.of(q.shape[1], mask, scale, softcap, block, block)
    return _blockwise(q, k, v, positions, segments, per_group(sinks, k.shape[2]), plan)
