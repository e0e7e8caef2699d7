"""How a discrete choice is trained: the indexer learns to imitate attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1.1).

    L[t] = KL(p[t] || softmax_{s in S_t} I[t, s]),      p[t, s] = attention's weights summed over heads, brought to a sum of 1

over all visible keys while attention is dense (warm-up), over the chosen ones afterwards. The choice itself has no gradient; its scores
have, and dL/dI = softmax(I) - p. The target is a constant. Where an index key is of a pool of tokens, S_t are complete pools and a pool's
weight is that of its tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.attention import LOWEST, causal_blocks, normalised, scores_under
from jaxllm.ops.mask import visible
from jaxllm.ops.sparse_attention import SCORES, by_queries, rows_at
from jaxllm.ops.topk import index_scores, reachable, top_k_naive

SCORED = 2**24  # bytes of index keys that a block of queries gathers at a time


class Queries(NamedTuple):
    """`positions, segments [b t]`; where index keys are pools, `reach [b t]`: how many of them end at or before each query."""

    positions: Array
    segments: Array
    reach: Array | None = None


class Keys(NamedTuple):
    """`positions, segments [b s]` of the tokens; where index keys are pools, their `tokens [b e m]` in the order of their ends, and
    their documents `docs [b e]`."""

    positions: Array
    segments: Array
    tokens: Array | None = None
    docs: Array | None = None

    def first(self, s: int) -> tuple["Keys", int]:
        """The first s tokens, and how many of the index keys are of these (one at least, which then nobody sees)."""
        if self.tokens is None or self.docs is None:
            return Keys(self.positions[:, :s], self.segments[:, :s]), s
        e = max(s // self.tokens.shape[2], 1)
        return Keys(self.positions[:, :s], self.segments[:, :s], self.tokens[:, :e], self.docs[:, :e]), e


def sight(queries: Queries, keys: Keys) -> tuple[Array, tuple[Array, Array] | None]:
    """Which tokens each query sees, bool `[b t s]`; and of pools, their tokens `[b e m]` and who sees which, bool `[b t e]`."""
    seen = visible(queries.positions, keys.positions, queries.segments, keys.segments)
    if queries.reach is None or keys.tokens is None or keys.docs is None:
        return seen, None
    docs = (queries.segments, keys.docs)
    return seen, (keys.tokens, reachable(queries.reach, keys.tokens.shape[1], docs))


def divergence(scores: Array, mass: Array, seen: Array) -> Array:
    """`L [b t]` from `scores, mass, seen [b t s]`, mass of any sum; 0 for a query that sees nothing."""
    mass = lax.stop_gradient(jnp.where(seen, mass, 0.0))
    total = jnp.sum(mass, axis=-1, keepdims=True)
    p = mass / jnp.where(total > 0, total, 1.0)
    scores = jnp.where(seen, scores, 10 * LOWEST)
    scores = scores - lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST))
    norm = jnp.sum(jnp.where(seen, jnp.exp(scores), 0.0), axis=-1, keepdims=True)
    logs = jnp.where(seen, scores, 0.0) - jnp.log(jnp.where(norm > 0, norm, 1.0))
    entropy = jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)
    return jnp.sum(entropy - p * logs, axis=-1)


def imitate_chosen(
    q: Array, w: Array, k: Array, index: Array, mass: Array, *, scale: float, size: int = SCORED
) -> Array:
    """`L [b t]` on the chosen keys: the indexer's `q [b t h k]`, `w [b t h]`, `k [b s k]`; `index, mass [b t n]`."""
    b, _, n = index.shape
    s, width = k.shape[1:]

    def block(part: tuple[Array, ...]) -> Array:
        q, w, places, mass = part
        dots = jnp.einsum("bthk,btnk->bthn", q, rows_at(k, places), preferred_element_type=jnp.float32)
        scores = jnp.sum(jax.nn.relu(dots * scale) * w.astype(jnp.float32)[..., None], axis=2)
        return divergence(scores, mass, places < s)

    return by_queries(block, (q, w, index, lax.stop_gradient(mass)), max(1, size // (b * n * width * k.dtype.itemsize)))


def imitate_all(
    index: tuple[Array, Array, Array],
    attention: tuple[Array, Array],
    queries: Queries,
    keys: Keys,
    top_k: int,
    *,
    index_scale: float,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    size: int = SCORES,
) -> tuple[Array, Array, Array]:
    """`L [b t]` on all visible keys of whole sequences; recall `[b t]`; and where recall means anything.

    `index`: the indexer's `q, w, k`. `attention`: `q [b t h k]` and `k [b g s k]` of the attention that is imitated. `sinks [g r 1 1]`.
    top_k counts index keys, which may be pools. Recall: see `recall_of`.

    Blocks of queries meet no key beyond them, and hold `size` scores of attention at a time, so memory grows as t.
    """
    (q_i, w, k_i), (q, k) = index, lax.stop_gradient(attention)
    b, t, h, _ = q.shape
    n = causal_blocks(t)
    options: dict[str, Any] = {"index_scale": index_scale, "scale": scale, "softcap": softcap, "sinks": sinks}
    parts = []
    for j in range(n):
        at, end = slice(j * t // n, (j + 1) * t // n), (j + 1) * t // n
        some, count = keys.first(end)

        def block(part: Any, some: Keys = some, k_i: Array = k_i[:, :count], k: Array = k[:, :, :end]) -> Any:
            (q_i, w, q), here = part
            seen, pools = sight(here, some)
            scores, mass, seen = beside_all((q_i, w, k_i), (q, k), seen, pools=pools, **options)
            return divergence(scores, mass, seen), *recall_of(scores, mass, seen, top_k)

        own = jax.tree.map(lambda x, at=at: x[:, at], ((q_i, w, q), queries))
        parts.append(by_queries(block, own, max(1, size // (b * h * end))))
    loss, recall, free = (jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return loss, recall, free


def beside_all(
    index: tuple[Array, Array, Array],
    attention: tuple[Array, Array],
    seen: Array,
    *,
    index_scale: float,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    pools: tuple[Array, Array] | None = None,
) -> tuple[Array, Array, Array]:
    """The indexer's scores of some queries on all index keys, attention's mass there (a constant), and who sees which, all `[b t e]`.

    Arguments as of `imitate_all`, where t may be a few of the queries; `seen` and `pools` are their `sight`.
    """
    q, k = attention
    b, t, h, _ = q.shape
    g = k.shape[1]
    grouped = q.reshape(b, t, g, h // g, -1).transpose(0, 2, 3, 1, 4)
    weights, total, _ = normalised(scores_under(grouped, k, seen, scale, softcap)[0], sinks)
    mass = lax.stop_gradient(jnp.sum(weights / total, axis=(1, 2)))
    if pools is not None:
        tokens, seen = pools
        own = jax.vmap(lambda m, at: m.at[:, at].get(mode="clip"))(mass, tokens.reshape(b, -1))
        mass = jnp.sum(own.reshape(*own.shape[:2], *tokens.shape[1:]), axis=-1)
    return index_scores(*index, index_scale), mass, seen


def recall_of(scores: Array, mass: Array, seen: Array, top_k: int) -> tuple[Array, Array]:
    """Attention's mass on the keys that the indexer would choose, of the mass on the best `top_k`, `[b t]`, from arrays `[b t s]`; and
    where that means anything: queries that see no more than `top_k` keys have no choice. Not differentiable."""
    scores, mass = lax.stop_gradient((scores, mass))
    found, best = (_mass_at(mass, top_k_naive(x, seen, top_k)) for x in (scores, mass))
    free = jnp.sum(seen, axis=-1) > top_k
    return jnp.where(free, found / jnp.where(best > 0, best, 1.0), 0.0), free


def _mass_at(mass: Array, places: Array) -> Array:
    """Sum of `mass [b t s]` at `places [b t n]`."""
    s = mass.shape[-1]
    got = jnp.take_along_axis(mass, jnp.minimum(places, s - 1), axis=-1)
    return jnp.sum(jnp.where(places < s, got, 0.0), axis=-1)
