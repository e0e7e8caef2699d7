"""Attention of a draft layer that is trained as it will be used: unrolled over its own outputs (EAGLE-3, arXiv 2503.01840, section 3.2).

Step 0 is causal attention on what the trunk's features gave. At step j the query of index i stands j tokens later, and sees

    the keys of step 0 at indices i' <= i,   and its own keys of steps 1 ... j at the same index i

which is what the layer's cache would hold after j drafted tokens: trunk features for the past, its own outputs since. So step j has one
score matrix and j numbers a query, not (j + 1) matrices; both parts are one softmax, summed online (`jaxllm.ops.blockwise`).

Shapes: `query [b t h k]`, `keys` and `values` a tuple of one `[b t g k]`, `[b t g v]` a step, `positions` of step 0 and `segments [b t]`.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.attention import attention_naive, per_group
from jaxllm.ops.blockwise import BLOCK, State, online_finish, online_start, online_step, query_blocks, tokens_of
from jaxllm.ops.mask import Mask


def unrolled_attention(
    query: Array,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    positions: Array,
    q_segments: Array,
    k_segments: Array | None,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    block: int = BLOCK,
) -> Array:
    """Output `[b t h v]` of step `len(keys) - 1`. q_segments: documents of this step's queries, 0 where the token it reads lies beyond;
    k_segments: those of step 0, null = the same. Queries are taken `block` at a time; the backward pass makes their weights again."""
    t, g, step = query.shape[1], keys[0].shape[2], len(keys) - 1
    k_segments = q_segments if k_segments is None else k_segments
    block = min(block, t)
    extra = -t % block
    key, value = keys[0].transpose(0, 2, 1, 3), values[0].transpose(0, 2, 1, 3)
    start_at = per_group(sinks, g)

    def rows(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, extra))).reshape(x.shape[0], -1, block).transpose(1, 0, 2)

    def own(x: Array) -> Array:
        """`[b t g .]` to blocks `[n b g 1 c .]`: a key meets the queries of its index."""
        return query_blocks(x, g, block, extra)

    @jax.checkpoint
    def one(part: tuple[Array, ...]) -> Array:
        q, at, document, *later = part
        state = online_start((*q.shape[:-1], value.shape[-1]), start_at)
        same = (document[:, :, None] == k_segments[:, None]) & (document[:, :, None] > 0)
        seen = same & _causal(mask, at, positions, step)
        state = online_step(state, q, key, value, seen, scale, softcap)
        for m, (k, v) in enumerate(zip(later[:step], later[step:], strict=True), 1):
            visible = (document > 0) & mask.sees(at + step, at + m)
            state = _one_key(state, q, k, v, visible, scale, softcap)
        return online_finish(state, value.dtype)[0]

    parts = (query_blocks(query, g, block, extra), rows(positions), rows(q_segments))
    out = lax.map(one, (*parts, *map(own, keys[1:]), *map(own, values[1:])))
    return tokens_of(out, t)


def _causal(mask: Mask, queries: Array, keys: Array, step: int) -> Array:
    """`[b c s]`: keys of step 0, not after the query's index, at the distance that the query has moved on to."""
    q, k = queries[:, :, None], keys[:, None]
    return (k <= q) & mask.sees(q + step, k)


def _one_key(state: State, q: Array, k: Array, v: Array, visible: Array, scale: float, softcap: float | None) -> State:
    """One key a query: `q [b g r c k]`, `k [b g 1 c k]`, `v [b g 1 c v]`, `visible [b c]`."""
    out, top, total = state
    score = jnp.sum(q.astype(jnp.float32) * k.astype(jnp.float32), axis=-1, keepdims=True) * scale
    score = score if softcap is None else softcap * jnp.tanh(score / softcap)
    on = visible[:, None, None, :, None]
    higher = jnp.where(on, jnp.maximum(top, score), top)
    weight, keep = jnp.where(on, jnp.exp(jnp.where(on, score, higher) - higher), 0.0), jnp.exp(top - higher)
    return out * keep + weight * v.astype(jnp.float32), higher, total * keep + weight


def unrolled_naive(
    query: Array,
    keys: tuple[Array, ...],
    values: tuple[Array, ...],
    positions: Array,
    q_segments: Array,
    k_segments: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """The truth: the keys of all steps in one row, under one mask `[b t (step + 1) t]`."""
    step, t = len(keys) - 1, query.shape[1]
    same = (q_segments[:, :, None] == k_segments[:, None]) & (q_segments[:, :, None] > 0)
    masks = [same & _causal(mask, positions, positions, step)]
    for m in range(1, step + 1):
        own = mask.sees(positions + step, positions + m) & (q_segments > 0)
        masks.append(jnp.eye(t, dtype=bool) & own[:, :, None])
    every, all_values = jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1)
    seen = jnp.concatenate(masks, axis=2)
    return attention_naive(query, every, all_values, seen, scale=scale, softcap=softcap, sinks=sinks)
