"""The softmax attention core (Vaswani et al. 2017, arXiv 1706.03762), grouped-query form.

    o_h = softmax(scale q_h K_g^T + mask) V_g,    query head h reads kv head g = h // (heads / kv_heads)

Visible keys are decided by absolute positions and document ids, never by indices. Softmax statistics are fp32. A query without any
visible key (padding) gives exactly 0 and finite gradients, where an additive -inf mask would give NaN.

Shapes: `q [b t h k]`, `k [b s g k]`, `v [b s g v]`, output `[b t h v]`.
"""

import jax
import jax.numpy as jnp
from jax import Array

_MASKED = -1e30  # below any score; exp(x - max) is then exactly 0 without producing inf - inf


def visible(q_positions: Array, k_positions: Array, q_segments: Array, k_segments: Array) -> Array:
    """bool `[b t s]`: same document, not padding, and not in the future."""
    same = (q_segments[:, :, None] == k_segments[:, None, :]) & (k_segments[:, None, :] > 0)
    return same & (k_positions[:, None, :] <= q_positions[:, :, None])


def attention_naive(q: Array, k: Array, v: Array, mask: Array, *, scale: float, softcap: float | None = None) -> Array:
    """The truth: one score matrix per head, `mask [b t s]`."""
    heads = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, heads, axis=2), jnp.repeat(v, heads, axis=2)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None], scores, _MASKED)
    weights = jnp.where(mask[:, None], jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bhts,bshv->bthv", weights.astype(v.dtype), v)


def _core(q: Array, k: Array, v: Array, mask: Array, scale: float, softcap: float | None) -> Array:
    """`q [b g r t k]`, `k [b g s k]`, `v [b g s v]`, `mask [b t s]` -> `[b g r t v]`.

    Heads of a group and their queries form one axis in both products: with two axes XLA transposes k first, which in decoding is a
    copy of the whole cache. The sum of the weights is divided out after the product with v: t x v divisions instead of t x s.
    """
    b, g, r, t, _ = q.shape
    scores = jnp.einsum("bgnk,bgsk->bgns", q.reshape(b, g, r * t, -1), k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None], scores.reshape(b, g, r, t, -1), _MASKED)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), 0.1 * _MASKED))
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = jnp.where(total > 0, total, 1.0)
    weights = weights.astype(v.dtype).reshape(b, g, r * t, -1)
    out = jnp.einsum("bgns,bgsv->bgnv", weights, v, preferred_element_type=jnp.float32)
    return (out.reshape(b, g, r, t, -1) / total).astype(v.dtype)


def attend(q: Array, k: Array, v: Array, mask: Array, *, scale: float, softcap: float | None = None, causal_blocks: int = 1) -> Array:
    """Fast path. `causal_blocks` = n > 1 promises that row i sees no key beyond index i (whole sequences): queries are then cut
    into n blocks and block j meets only the first (j + 1)/n of the keys, which leaves (n + 1)/(2n) of the arithmetic.
    """
    b, t, h, _ = q.shape
    g = k.shape[2]
    q = q.reshape(b, t, g, h // g, -1).transpose(0, 2, 3, 1, 4)
    out = attend_cache(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask, scale=scale, softcap=softcap, causal_blocks=causal_blocks)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)


def attend_cache(
    q: Array, k: Array, v: Array, mask: Array, *, scale: float, softcap: float | None = None, causal_blocks: int = 1
) -> Array:
    """`attend` on arrays that already lie as the cache does: `q [b g r t k]`, `k [b g s k]`, `v [b g s v]` -> `[b g r t v]`."""
    t = q.shape[3]
    if causal_blocks <= 1 or t % causal_blocks or k.shape[2] != t:
        return _core(q, k, v, mask, scale, softcap)
    c = t // causal_blocks
    parts = []
    for j in range(causal_blocks):
        end = (j + 1) * c
        parts.append(_core(q[:, :, :, j * c : end], k[:, :, :end], v[:, :, :end], mask[:, j * c : end, :end], scale, softcap))
    return jnp.concatenate(parts, axis=3)


def causal_blocks(t: int, *, smallest: int = 64, most: int = 8) -> int:
    """How many query blocks a whole sequence of length t is cut into: blocks of at least `smallest`, at most `most` of them."""
    n = most
    while n > 1 and (t % n or t // n < smallest):
        n -= 1
    return n
