"""The lightning indexer's scores and the choice of the best keys by them (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

    I[t, s] = sum_h w[t, h] relu(scale q_h[t] . k[s]),        chosen[t] = the `top_k` visible s of the largest I[t, s]

Scores are fp32. The weights have a sign, so a score may be negative, and where relu gives 0 for every head it is exactly 0: such ties are
common, and are always won by the earlier key, whatever the shape of the call. A query that sees fewer than `top_k` keys gets all of them
and `EMPTY` in the other places.

Long inputs never hold scores `[t, s]`: a block of queries meets keys a block at a time and keeps the best so far. The running best stand
before the new block's scores and `largest` prefers what stands first, so the result is that of one piece. It is ascending in place
there, and best first where a few queries hold their scores of all keys: the order has no meaning. The heads' scores of a part of a
block exist at a time; the choice, much of whose cost is by query and not by key, waits for the whole block.

Shapes: `q [b t h k]`, `w [b t h]` fp32, `k [b s k]`, result int32 `[b t top_k]`. Query t sees key s where `s < reach[t]` and both are of
the same document; where documents are not given, all keys are.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.cache import EMPTY
from jaxllm.ops.selection import largest

QUERIES = 32  # queries scored at a time: their heads' scores of a part of the keys stay in the caches of a CPU
KEYS = 8192  # keys that they choose from at a time
PART = 1024  # keys that they are scored with at a time
DIRECT = 16  # so few queries hold their scores of the whole cache at once

Docs = tuple[Array, Array]  # document ids of queries [b t] and of keys [b s]; 0 = padding


def index_scores(q: Array, w: Array, k: Array, scale: float) -> Array:
    """fp32 `[b t s]`. Queries and heads form one axis of the product; the sum over heads is no product of its own.

    Few queries on many keys, as in a decode step, are the columns of the product: as its rows they took a CPU five times as long.
    """
    b, t, h, width = q.shape
    rows, w = q.reshape(b, t * h, width), w.astype(jnp.float32)
    if t <= DIRECT:
        dots = jnp.einsum("bsk,bmk->bsm", k, rows, preferred_element_type=jnp.float32).reshape(b, -1, t, h)
        return jnp.swapaxes(jnp.sum(jax.nn.relu(dots * scale) * w[:, None], axis=-1), 1, 2)
    dots = jnp.einsum("bmk,bsk->bms", rows, k, preferred_element_type=jnp.float32).reshape(b, t, h, -1)
    return jnp.sum(jax.nn.relu(dots * scale) * w[..., None], axis=2)


def reachable(reach: Array, s: int, docs: Docs | None, start: Array | int = 0) -> Array:
    """bool `[b t s]`: which of the keys `start .. start + s - 1` each query sees. `docs` are those of these keys."""
    seen = start + jnp.arange(s, dtype=jnp.int32) < reach[:, :, None]
    if docs is None:
        return seen
    return seen & (docs[0][:, :, None] == docs[1][:, None]) & (docs[1][:, None] > 0)


def _ranked(scores: Array, seen: Array) -> Array:
    """Scores that order as they compare: -0.0, which a sort may put below 0.0, becomes 0.0, and what is not seen -inf."""
    return jnp.where(seen, jnp.where(scores == 0, 0.0, scores), -jnp.inf)


def _chosen(values: Array, index: Array, top_k: int) -> Array:
    index = jnp.where(values > -jnp.inf, index, EMPTY)
    return jnp.pad(index, ((0, 0), (0, 0), (0, top_k - index.shape[-1])), constant_values=EMPTY)


def top_k_naive(scores: Array, seen: Array, top_k: int) -> Array:
    """The truth, and the choice from scores that exist: of `scores, seen [b t s]` the `top_k` best, int32 `[b t top_k]`."""
    values, index = lax.top_k(_ranked(scores, seen), min(top_k, scores.shape[-1]))
    return _chosen(values, index, top_k)


def select(
    q: Array,
    w: Array,
    k: Array,
    reach: Array,
    top_k: int,
    *,
    scale: float,
    docs: Docs | None = None,
    queries: int = QUERIES,
    keys: int = KEYS,
    part: int = PART,
    direct: int = DIRECT,
) -> Array:
    """The `top_k` best visible keys of every query, int32 `[b t top_k]`. Not differentiable."""
    b, t = q.shape[:2]
    s = k.shape[1]
    if s <= top_k:  # whatever the scores are, all that is visible is chosen
        index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, t, s))
        return _chosen(jnp.where(reachable(reach, s, docs), 0.0, -jnp.inf), index, top_k)
    if t <= direct or (t <= queries and s <= part):
        return top_k_naive(index_scores(q, w, k, scale), reachable(reach, s, docs), top_k)
    return _by_blocks(q, w, k, reach, top_k, scale, docs, min(queries, t), min(keys, s), min(part, keys, s))


def _by_blocks(
    q: Array,
    w: Array,
    k: Array,
    reach: Array,
    top_k: int,
    scale: float,
    docs: Docs | None,
    c: int,
    size: int,
    part: int,
) -> Array:
    """c queries choose from `size` keys at a time and are scored with `part` of those."""
    b, t = q.shape[:2]
    s = k.shape[1]

    def blocks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -t % c)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, c, *x.shape[2:]), 1, 0)

    parts = (blocks(q), blocks(w), blocks(reach), None if docs is None else blocks(docs[0]))

    def one(parts_c: tuple[Array, Array, Array, Array | None]) -> Array:
        q_c, w_c, reach_c, docs_c = parts_c
        last = jnp.max(reach_c)

        def meet(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            start = jnp.minimum(i * size, s - size)  # the last block may overlap the one before it

            def score(j: Array, scores: Array) -> Array:
                at = jnp.minimum(j * part, size - part)
                first = start + at
                pair = None
                if docs is not None and docs_c is not None:
                    pair = (docs_c, lax.dynamic_slice_in_dim(docs[1], first, part, 1))
                seen = reachable(reach_c, part, pair, first) & (first + jnp.arange(part, dtype=jnp.int32) >= i * size)
                new = index_scores(q_c, w_c, lax.dynamic_slice_in_dim(k, first, part, 1), scale)
                return lax.dynamic_update_slice_in_dim(scores, jnp.where(seen, new, -jnp.inf), at, 2)

            count = jnp.clip((last - start + part - 1) // part, 0, -(-size // part))
            fresh = (i * size - start) // part  # what stands before was in the last block
            scores = lax.fori_loop(fresh, count, score, jnp.full((b, c, size), -jnp.inf))
            index = start + jnp.arange(size, dtype=jnp.int32)
            values = jnp.concatenate([best[0], scores], axis=-1)
            places = jnp.concatenate([best[1], jnp.broadcast_to(index, scores.shape)], axis=-1)
            at = largest(values, top_k)
            values = jnp.take_along_axis(values, at, axis=-1, mode="fill", fill_value=-jnp.inf)
            return values, jnp.take_along_axis(places, at, axis=-1, mode="fill", fill_value=EMPTY)

        start = jnp.full((b, c, top_k), -jnp.inf), jnp.full((b, c, top_k), EMPTY, jnp.int32)
        count = (last + size - 1) // size
        return lax.fori_loop(0, jnp.minimum(count, -(-s // size)), meet, start)[1]

    return jnp.moveaxis(lax.map(one, parts), 0, 1).reshape(b, -1, top_k)[:, :t]
