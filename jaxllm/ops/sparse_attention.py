"""Softmax attention of each query on keys of its own choice: `index [b t n]`, places of the key axis; `EMPTY` is no key.

    o_h[t] = sum_{s in S_t} softmax_{S_t}(scale q_h[t] . k[s]) v[s],        mass[t, s] = sum_h of the weights

*Gathered*: a block of queries gathers its n keys each and attends to them, which costs t n whatever the length. *Masked*: all keys, and a
mask: t s, but one product for a block of queries, so it is faster while s is not many times n. Both give output and, where asked for, the
weights summed over heads, which an indexer learns to predict.

Gathered keys have no axis of kv heads: MLA's latents have none (its absorbed form is multi-query attention on pairs of arrays, latent and
rotated key), and grouped-query attention makes rows of its groups. No block keeps anything for the backward: it gathers again.

Shapes, gathered: queries, one array for each key array, `[b t h k]`; keys `[b s k]`; value `[b s v]`, or None: the first keys. Masked:
`q [b t h k]`, `k [b g s k]`, `v [b g s v]`. Output `[b t h v]`, mass fp32 `[b t n]`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.attention import LOWEST, causal_blocks, normalised, per_head, scores_under

GATHERED = 2**24  # bytes of keys that a block of queries gathers at a time
SCORES = 2**22  # scores that a block of queries holds at a time, masked
PENALTY = 4.0  # a gathered multiply-add costs this many masked ones: keys are copied first and shared by no other query


def gathered_is_cheaper(s: float, n: int, gathered: float, masked: float) -> bool:
    """Whether n keys of a query's own beat s common ones, of so many multiply-adds each per head."""
    return PENALTY * n * gathered < s * masked


def rows_at(x: Array, index: Array) -> Array:
    """`x [b s k]` at `index [b t n]` -> `[b t n k]`; places beyond the end give any row."""
    return jax.vmap(lambda one, places: one.at[places].get(mode="clip"))(x, index)


def by_queries(f: Callable[..., Any], arrays: Any, c: int) -> Any:
    """`f(arrays)` for blocks of c queries (axis 1 of every array and result), with nothing kept for the backward.

    Blocks are up to half as large where that divides the queries: else all arrays are copied, to pad them.
    """
    t = jax.tree.leaves(arrays)[0].shape[1]
    body = jax.checkpoint(f)
    if t <= c:
        return body(arrays)
    c = next((n for n in range(c, c // 2, -1) if t % n == 0), c)
    count = -(-t // c)

    def cut(x: Array) -> Array:  # an array may have channels of width 0, so that no size can be left open
        if t % c:
            x = jnp.pad(x, ((0, 0), (0, -t % c)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, c, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], count * c, *x.shape[3:])[:, :t]

    return jax.tree.map(join, lax.map(body, jax.tree.map(cut, arrays)))


def attend_gathered(
    queries: Sequence[Array],
    keys: Sequence[Array],
    value: Array | None,
    index: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    want_mass: bool = False,
    size: int = GATHERED,
) -> tuple[Array, Array | None]:
    """Output and mass of queries on keys that each gathers for itself; `sinks` broadcasts to `[b t 1 h]`.

    size: bytes that are gathered at a time. Heads stand last in the scores: of a product of many gathered keys and few heads a CPU
    makes the long axis the rows, and is twice as fast as with heads as rows.
    """
    b, t, n = index.shape
    s, width = keys[0].shape[1], None
    joined = value is None and t * n > s
    if joined:  # rows are read more often than a copy of all of them costs: one gather for two
        keys, width = [jnp.concatenate(keys, axis=-1)], keys[0].shape[-1]
    widths = sum(k.shape[-1] * k.dtype.itemsize for k in (*keys, *([] if value is None else [value])))

    def block(part: tuple[tuple[Array, ...], Array]) -> tuple[Array, Array | None]:
        q, places = part
        if joined:
            q = (jnp.concatenate(q, axis=-1),)
        own = [rows_at(k, places) for k in keys]
        scores = scale * sum(
            jnp.einsum("bthk,btnk->btnh", a, k, preferred_element_type=jnp.float32) for a, k in zip(q, own, strict=True)
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        weights, total, _ = normalised(jnp.where((places < s)[..., None], scores, 10 * LOWEST), sinks, axis=2)
        v = own[0] if value is None else rows_at(value, places)
        out = jnp.einsum("btnh,btnv->bthv", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)[..., :width]
        out = out / jnp.swapaxes(total, 2, 3)
        return out.astype(queries[0].dtype), jnp.sum(weights / total, axis=3) if want_mass else None

    return by_queries(block, (tuple(queries), index), max(1, size // (b * n * widths)))


def chosen_mask(index: Array, s: int) -> Array:
    """bool `[b t s]`: the keys that `index [b t n]` names."""
    return jax.vmap(jax.vmap(lambda places: jnp.zeros(s, bool).at[places].set(True, mode="drop")))(index)


def attend_masked(
    q: Array,
    k: Array,
    v: Array,
    index: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    want_mass: bool = False,
    causal: bool = False,
    size: int = SCORES,
) -> tuple[Array, Array | None]:
    """Output and mass of queries on all keys under a mask; `sinks [g r 1 1]`. `causal` promises that query i chose no key beyond i:
    the first queries then meet the first keys only. `size`: scores that exist at a time where it does not."""
    b, t, h, _ = q.shape
    g, s = k.shape[1], k.shape[2]

    def block(q: Array, places: Array, k: Array, v: Array) -> tuple[Array, Array | None]:
        c = q.shape[1]
        grouped = q.reshape(b, c, g, h // g, -1).transpose(0, 2, 3, 1, 4)
        scores, _ = scores_under(grouped, k, chosen_mask(places, k.shape[2]), scale, softcap)
        weights, total, _ = normalised(scores, sinks)
        rows = weights.reshape(b, g, -1, k.shape[2]).astype(v.dtype)
        out = per_head("ns,sv->nv", rows, v).reshape(*scores.shape[:-1], -1) / total
        mass = None
        if want_mass:
            mass = jnp.sum(weights / total, axis=(1, 2))
            mass = jnp.take_along_axis(mass, jnp.minimum(places, mass.shape[-1] - 1), axis=-1)
            mass = jnp.where(places < k.shape[2], mass, 0.0)
        return out.transpose(0, 3, 1, 2, 4).reshape(b, c, h, -1).astype(q.dtype), mass

    if not causal:
        return by_queries(lambda part: block(part[0], part[1], k, v), (q, index), max(1, size // (b * h * s)))
    n = causal_blocks(t)
    parts = []
    for j in range(n):
        at, end = slice(j * t // n, (j + 1) * t // n), (j + 1) * t // n
        parts.append(jax.checkpoint(block)(q[:, at], index[:, at], k[:, :, :end], v[:, :, :end]))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
