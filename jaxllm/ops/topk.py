"""The lightning indexer's scores and the choice of the best keys by them (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

    I[t, s] = sum_h w[t, h] relu(scale q_h[t] . k[s]),        chosen[t] = the `top_k` visible s of the largest I[t, s]

Scores are fp32. The weights have a sign, so a score may be negative, and where relu gives 0 for every head it is exactly 0: such ties are
common, and are always won by the earlier key, whatever the shape of the call. A query that sees fewer than `top_k` keys gets all of them
and `EMPTY` in the other places.

Long inputs never hold scores `[t, s]`: a block of queries is scored with a part of the keys after the other, chooses when it has met `KEYS`
of them, and keeps the best so far. The best so far stand before those of the next keys and `largest` prefers what stands first, so the
result is that of one piece. It is ascending in place within each block of keys, and best first where a heap makes a few choices: the order
has no meaning. The heads' scores of a part exist at a time.

Shapes: `q [b t h k]`, `w [b t h]` fp32, `k [b s k]`, result int32 `[b t top_k]`. Query t sees key s where `s < reach[t]` and both are of
the same document; where documents are not given, all keys are.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.cache import EMPTY
from jaxllm.ops.selection import LEAST, WORD, Halves, at_places, largest, ordered, places

QUERIES = 64  # queries scored at a time: their heads' scores of a part of the keys stay in the caches of a CPU
KEYS = 32768  # keys that they choose from at a time
TILE = 2048  # scores that are looked at at a time in choosing
PART = 512  # keys that they are scored with at a time
# A compromise of what one to sixteen rows took on a CPU; on GPUs and TPUs neither way was timed.
HEAPED = 1024  # choices that a heap makes sooner on a CPU than a search, whose passes cost the same for few and many
DIRECT = 16  # so few queries hold their scores of the whole cache at once

Docs = tuple[Array, Array]  # document ids of queries [b t] and of keys [b s]; 0 = padding


def index_scores(q: Array, w: Array, k: Array, scale: float) -> Array:
    """fp32 `[b t s]`. Queries and heads form one axis of the product; the sum over heads is no product of its own.

    Few queries on many keys, as in a decode step, are the columns of the product: as its rows they took a CPU five times as long.
    """
    b, t, h, width = q.shape
    rows = q.reshape(b, t * h, width)
    w = w.astype(jnp.float32) * scale  # what is positive goes through relu: one product less for every head's score
    if t <= DIRECT:
        dots = jnp.einsum("bsk,bmk->bsm", k, rows, preferred_element_type=jnp.float32).reshape(b, -1, t, h)
        return jnp.swapaxes(jnp.sum(jax.nn.relu(dots) * w[:, None], axis=-1), 1, 2)
    dots = jnp.einsum("bmk,bsk->bms", rows, k, preferred_element_type=jnp.float32).reshape(b, t, h, -1)
    return jnp.sum(jax.nn.relu(dots) * w[..., None], axis=2)


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
    heaped: int = HEAPED,
) -> Array:
    """The `top_k` best visible keys of every query, int32 `[b t top_k]`. Not differentiable."""
    b, t = q.shape[:2]
    s = k.shape[1]
    if s <= top_k:  # whatever the scores are, all that is visible is chosen
        index = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, t, s))
        return _chosen(jnp.where(reachable(reach, s, docs), 0.0, -jnp.inf), index, top_k)
    if t <= direct or (t <= queries and s <= part):
        scores, seen = index_scores(q, w, k, scale), reachable(reach, s, docs)
        if b * t * top_k < heaped:
            return top_k_naive(scores, seen, top_k)
        at = largest(ordered(jnp.where(seen, scores, -jnp.inf)), top_k)
        return jnp.where(at < s, at, EMPTY)
    return _by_blocks(q, w, k, reach, top_k, scale, docs, min(queries, t), keys, min(part, keys, s))


def _by_blocks(
    q: Array,
    w: Array,
    k: Array,
    reach: Array,
    top_k: int,
    scale: float,
    docs: Docs | None,
    c: int,
    keys: int,
    part: int,
) -> Array:
    """c queries choose from `keys` keys at a time and are scored with `part` of those."""
    b, t = q.shape[:2]
    s = k.shape[1]
    count = -(-s // keys)
    size = -(-s // (count * part)) * part  # keys of a block
    whole = math.lcm(part, WORD)
    tile = whole * max(1, min(TILE, size) // whole)
    reach = jnp.minimum(reach, s)
    many = ((0, 0), (0, count * size - s))
    k = jnp.pad(k, (*many, (0, 0)))  # no query reaches what is added
    docs_k = None if docs is None else jnp.pad(docs[1], many)

    def blocks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -t % c)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, -1, c, *x.shape[2:]), 1, 0)

    parts = (blocks(q), blocks(w), blocks(reach), None if docs is None else blocks(docs[0]))

    def one(held: Halves, parts_c: tuple[Array, Array, Array, Array | None]) -> tuple[Halves, Array]:
        q_c, w_c, reach_c, docs_c = parts_c
        last = jnp.max(reach_c)

        def choose(start: Array | int, held: Halves) -> tuple[Halves, Array]:
            """The best of the keys `start .. start + size - 1`, by their places in the block."""

            def score(j: Array, held: Halves) -> Halves:
                first = start + j * part
                pair = None
                if docs_k is not None and docs_c is not None:
                    pair = (docs_c, lax.dynamic_slice_in_dim(docs_k, first, part, 1))
                new = index_scores(q_c, w_c, lax.dynamic_slice_in_dim(k, first, part, 1), scale)
                keys_c = ordered(jnp.where(reachable(reach_c, part, pair, first), new, -jnp.inf))
                # the barrier keeps each of the two halves that are written from summing over the heads anew
                return held.write(lax.optimization_barrier(keys_c), j * part)

            reached = jnp.clip((last - start + part - 1) // part, 0, size // part)
            held = lax.fori_loop(0, reached, score, held)
            tiles = jnp.maximum(1, (reached * part + tile - 1) // tile)  # one at least is looked at
            nothing = jnp.full((b, c, part), LEAST)
            held = lax.fori_loop(reached, tiles * (tile // part), lambda j, held: held.write(nothing, j * part), held)
            return held, places(dataclasses.replace(held, count=tiles), top_k)

        if count == 1:
            held, at = choose(0, held)
            return held, jnp.where(at < size, at, EMPTY)

        def meet(i: Array, state: tuple[Halves, Array, Array]) -> tuple[Halves, Array, Array]:
            held, best, index = state
            held, at = choose(i * size, held)
            best = jnp.concatenate([best, held.at(at)], axis=-1)
            index = jnp.concatenate([index, jnp.where(at < size, i * size + at, EMPTY)], axis=-1)
            at = largest(best, top_k)
            return held, at_places(best, at, LEAST), at_places(index, at, EMPTY)

        start = held, jnp.full((b, c, top_k), LEAST, jnp.int32), jnp.full((b, c, top_k), EMPTY, jnp.int32)
        held, _, index = lax.fori_loop(0, jnp.minimum((last + size - 1) // size, count), meet, start)
        return held, index

    index = lax.scan(one, Halves.empty(-(-size // tile), b, c, tile), parts)[1]
    return jnp.moveaxis(index, 0, 1).reshape(b, -1, top_k)[:, :t]
