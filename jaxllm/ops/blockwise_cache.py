"""Online softmax for long calls with a cache (prefill): new queries on what a cache holds, and on each other. Forward only.

The blocks are those of `jaxllm.ops.blockwise`; what differs is where keys lie: in order, anywhere (a ring), or beside the queries.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.attention import per_group
from jaxllm.ops.blockwise import BLOCK, State, online_finish, online_start, online_step, query_blocks, take, tokens_of
from jaxllm.ops.mask import Mask


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("k", "v", "positions"), meta_fields=("local", "ordered")
)
@dataclasses.dataclass(frozen=True)
class Source:
    """Keys and values that queries with a cache meet: `k [b (g) s k]`, `v [b (g) s v]` and the `positions [b s]` of the keys.

    Positions beyond every query (`jaxllm.cache.EMPTY`) are seen by nobody. `local`: key i is the token of query i, so that only keys
    before a query, and within its span, need to be met; else the keys lie anywhere, or (`ordered`) at index = position.
    """

    k: Array
    v: Array
    positions: Array
    local: bool = False
    ordered: bool = False


def blockwise_sources(
    q: Array,
    sources: tuple[Source, ...],
    positions: Array,
    valid: Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    block: int = BLOCK,
) -> Array:
    """Forward of queries `q [b t h k]` at `positions [b t]` on everything that the `sources` hold: long calls with a cache.

    Queries that are not `valid` give 0. Key blocks beyond the last query's position are not met.
    """
    b, t, h, _ = q.shape
    one = sources[0].k
    g = 1 if one.ndim == 3 else one.shape[1]
    c = min(block, t)
    extra = -t % c
    blocks = query_blocks(q, g, c, extra)

    def rows(x: Array, fill: int) -> Array:
        return jnp.pad(x, ((0, 0), (0, extra)), constant_values=fill).reshape(b, -1, c).transpose(1, 0, 2)

    at, live, sinks = rows(positions, 0), rows(valid, False), per_group(sinks, g)

    def meet_all(carry: None, j: Array) -> tuple[None, Array]:
        state = online_start((*blocks.shape[1:-1], sources[0].v.shape[-1]), sinks)
        for source in sources:
            size = min(block, source.k.shape[-2])

            def meet(i: Any, state: State, source: Source = source, size: int = size) -> State:
                start = jnp.minimum(i * size, source.k.shape[-2] - size)  # the last block may begin earlier: what it
                fresh = (
                    start + jnp.arange(size, dtype=jnp.int32) >= i * size
                )  # has in common with the one before is masked
                keys, values = (take(x, start, size, x.ndim - 2).astype(q.dtype) for x in (source.k, source.v))
                held = take(source.positions, start, size, 1)
                seen = mask.sees(at[j][:, :, None], held[:, None, :]) & fresh & live[j][:, :, None]
                return online_step(state, blocks[j], keys, values, seen, scale, softcap)

            last = jnp.max(jnp.where(live[j], at[j], -1)) + 1
            state = lax.fori_loop(*_source_range(source, size, j * c, c, last, mask), meet, state)
        return carry, online_finish(state, q.dtype)[0]

    _, out = lax.scan(meet_all, None, jnp.arange(blocks.shape[0], dtype=jnp.int32))
    return tokens_of(out, t)


def _source_range(source: Source, size: int, query: Array, queries: int, last: Array, mask: Mask) -> tuple[Any, Any]:
    """Key blocks, from and to, of the queries at index `query` and on, the last of which stands before position `last`."""
    count = -(-source.k.shape[-2] // size)
    if source.ordered:
        return 0, jnp.minimum((last + size - 1) // size, count)
    if not source.local:
        return 0, count
    least = 0 if mask.span is None or mask.global_tokens else jnp.maximum(query - mask.span + 1, 0) // size
    return least, jnp.minimum((query + queries + size - 1) // size, count)
