"""The softmax attention core (Vaswani et al. 2017, arXiv 1706.03762), grouped-query form.

    o_h = softmax(scale q_h K_g^T + mask) V_g,    query head h reads kv head g = h // (heads / kv_heads)

Visible keys are decided by absolute positions and document ids (`jaxllm.ops.mask`), never by indices. Softmax statistics are fp32. A
query without any visible key (padding) gives exactly 0 and finite gradients, where an additive -inf mask would give NaN.

A sink (gpt-oss) is one more key per head, of logit `sink_h`, neither scaled, capped nor masked, and of value 0:
o = o_without * Z / (Z + e^(sink - m)).

Shapes: `q [b t h k]`, `k [b s g k]`, `v [b s g v]`, `sinks [h]`, output `[b t h v]`. Here one score matrix exists for each block of
queries, which is fast for the lengths of training; `jaxllm.ops.blockwise` serves long sequences.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

_MASKED = -1e30  # below any score; exp(x - max) is then exactly 0 without producing inf - inf
LOWEST = 0.1 * _MASKED  # the least maximum of a row: masked scores stay far below it


def attention_naive(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """The truth: one score matrix per head, `mask [b t s]`."""
    weights = attention_weights(q, k, mask, scale=scale, softcap=softcap, sinks=sinks)
    return jnp.einsum("bhts,bshv->bthv", weights.astype(v.dtype), jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))


def attention_weights(
    q: Array, k: Array, mask: Array, *, scale: float, softcap: float | None = None, sinks: Array | None = None
) -> Array:
    """fp32 `[b h t s]`, what `attention_naive` sums values with and what inspection shows. With sinks a row sums to less than 1."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None], scores, _MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    sink = None if sinks is None else sinks.astype(jnp.float32)[:, None, None]
    top = top if sink is None else jnp.maximum(top, sink)
    weights = jnp.where(mask[:, None], jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sink is None else total + jnp.exp(sink - top)
    return weights / jnp.where(total > 0, total, 1.0)


def normalised(scores: Array, sinks: Array | None, axis: int = -1) -> tuple[Array, Array, Array]:
    """Of masked scores over `axis`: weights before their division, their sum, and the maximum; a row without any key gives zeros."""
    top = jnp.maximum(jnp.max(scores, axis=axis, keepdims=True), LOWEST if sinks is None else sinks)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=axis, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    return weights, jnp.where(total > 0, total, 1.0), top


Static = tuple[float, float | None, int, int | None]  # scale, softcap, causal blocks, span


def per_head(product: str, a: Array, kv: Array) -> Array:
    """`product` for each row and kv head: `a [b g . .]` with `kv [b g . .]`, or `[b . .]` where there is one kv head. fp32.

    An axis of size 1 between rows and keys lets XLA choose another layout for a cache and copy it there and back at every token.
    """
    left, right, out = product.replace("->", ",").split(",")
    if kv.ndim == 4:
        return jnp.einsum(f"bg{left},bg{right}->bg{out}", a, kv, preferred_element_type=jnp.float32)
    return jnp.einsum(f"b{left},b{right}->b{out}", a[:, 0], kv, preferred_element_type=jnp.float32)[:, None]


def scores_under(q: Array, k: Array, mask: Array, scale: float, softcap: float | None) -> tuple[Array, Array]:
    """Masked scores and the capped ones under the mask, fp32 `[b g r t s]`.

    Heads of a group and their queries form one axis of the product: with two axes XLA transposes k first, which in decoding is a
    copy of the whole cache.
    """
    b, g, r, t, _ = q.shape
    scores = per_head("nk,sk->ns", _rows(q), k) * scale
    scores = scores.reshape(b, g, r, t, -1)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return jnp.where(mask[:, None, None], scores, _MASKED), scores


def _block(
    q: Array, k: Array, v: Array, mask: Array, sinks: Array | None, scale: float, softcap: float | None
) -> tuple[Array, Array]:
    """Output `[b g r t v]` and log-sum-exp `[b g r t 1]` of queries `q [b g r t k]` on `k [b g s k]`, `v [b g s v]`, `mask [b t s]`,
    `sinks [g r 1 1]`.

    The sum of the weights is divided out after the product with v: t x v divisions instead of t x s.
    """
    b, g, r, t, _ = q.shape
    scores, _ = scores_under(q, k, mask, scale, softcap)
    weights, total, top = normalised(scores, sinks)
    out = per_head("ns,sv->nv", _rows(weights).astype(v.dtype), v)
    return (out.reshape(b, g, r, t, -1) / total).astype(v.dtype), top + jnp.log(total)


def _cuts(q: Array, k: Array, blocks: int, span: int | None) -> list[tuple[slice, slice]]:
    """(queries, keys) of each causal block."""
    t = q.shape[3]
    if blocks <= 1 or t % blocks or k.shape[2] != t:
        return [(slice(0, t), slice(0, k.shape[2]))]
    c = t // blocks
    first = [0 if span is None else max(0, j * c - span + 1) for j in range(blocks)]
    return [(slice(j * c, (j + 1) * c), slice(first[j], (j + 1) * c)) for j in range(blocks)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q: Array, k: Array, v: Array, mask: Array, sinks: Array | None, static: Static) -> Array:
    return _forward(q, k, v, mask, sinks, static)[0]


def _forward(
    q: Array, k: Array, v: Array, mask: Array, sinks: Array | None, static: Static
) -> tuple[Array, tuple[Any, ...]]:
    scale, softcap, blocks, span = static
    parts = [
        _block(q[:, :, :, rows], k[:, :, keys], v[:, :, keys], mask[:, rows, keys], sinks, scale, softcap)
        for rows, keys in _cuts(q, k, blocks, span)
    ]
    out, norm = (jnp.concatenate(piece, axis=3) if len(parts) > 1 else piece[0] for piece in zip(*parts, strict=True))
    return out, (q, k, v, mask, sinks, out, norm)


def pull_back(
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    norm: Array,
    delta: Array,
    d_out: Array,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array, Array]:
    """Of one block of queries on one block of keys: `d_q [b g r c k]`, `d_k [b g s k]`, `d_v [b g s v]`, fp32. Weights are made again
    from the scores and their log-sum-exp `norm` (FlashAttention, Dao et al. 2022, arXiv 2205.14135, section 3.1), `delta = sum(do o)`:

    p = exp(s - lse);  dv = p^T do;  ds = p (do v^T - delta);  dq = ds k;  dk = ds^T q
    """
    d_rows = _rows(d_out)
    scores, capped = scores_under(q, k, seen, scale, softcap)
    weights = jnp.exp(scores - norm)
    d_scores = weights * (per_head("nv,sv->ns", d_rows, v).reshape(weights.shape) - delta)
    if softcap is not None:
        d_scores = d_scores * (1 - jnp.square(capped / softcap))
    d_scores = _rows((d_scores * scale).astype(q.dtype))
    d_q = per_head("ns,sk->nk", d_scores, k).reshape(q.shape)
    return d_q, per_head("ns,nk->sk", d_scores, _rows(q)), per_head("ns,nv->sv", _rows(weights).astype(v.dtype), d_rows)


def _rows(x: Array) -> Array:
    """`[b g r t .]` to `[b g rt .]`: heads of a group and their queries as one axis."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def sink_gradient(sinks: Array, norm: Array, delta: Array) -> Array:
    """Of sinks `[g r 1 1]`: one takes the share e^(sink - lse) of the softmax and gives the value 0 for it."""
    return -jnp.sum(jnp.exp(sinks - norm) * delta, axis=(0, 3), keepdims=True)[0]


def _backward(static: Static, saved: tuple[Any, ...], d_out: Array) -> tuple[Array, Array, Array, None, Array | None]:
    scale, softcap, blocks, span = static
    q, k, v, mask, sinks, out, norm = saved
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    d_q, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for rows, keys in _cuts(q, k, blocks, span):
        part, at = (slice(None), slice(None), slice(None), rows), (slice(None), slice(None), keys)
        more_q, more_k, more_v = pull_back(
            q[part], k[at], v[at], mask[:, rows, keys], norm[part], delta[part], d_out[part], scale, softcap
        )
        d_q.append(more_q)
        d_k, d_v = d_k.at[at].add(more_k), d_v.at[at].add(more_v)
    d_sinks = None if sinks is None else sink_gradient(sinks, norm, delta)
    return jnp.concatenate(d_q, axis=3).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None, d_sinks


_attend.defvjp(_forward, _backward)


def per_group(sinks: Array | None, g: int) -> Array | None:
    """Sinks `[h]` as fp32 `[g r 1 1]`."""
    return None if sinks is None else sinks.astype(jnp.float32).reshape(g, -1, 1, 1)


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    causal_blocks: int = 1,
    span: int | None = None,
) -> Array:
    """Fast path. `causal_blocks` = n > 1 promises that row i sees no key beyond index i (whole sequences): queries are then cut
    into n blocks and block j meets only the first (j + 1)/n of the keys, which leaves (n + 1)/(2n) of the arithmetic. `span`
    promises that it sees none before index i - span + 1.

    The backward keeps q, k, v, the output and one number a query, never the weights.
    """
    b, t, h, _ = q.shape
    g = k.shape[2]
    q = q.reshape(b, t, g, h // g, -1).transpose(0, 2, 3, 1, 4)
    static = (scale, softcap, causal_blocks, span)
    out = _attend(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), mask, per_group(sinks, g), static)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)


def attend_cache(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """`attend` on keys and values as a cache holds them: `[b g s k]` and `[b g s v]`, without g where it is 1.

    `q [b g r t k]` -> `[b g r t v]`.
    """
    return _block(q, k, v, mask, per_group(sinks, q.shape[1]), scale, softcap)[0]


def causal_blocks(t: int, *, smallest: int = 64, most: int = 8) -> int:
    """How many query blocks a whole sequence of length t is cut into: blocks of at least `smallest`, at most `most` of them."""
    n = most
    while n > 1 and (t % n or t // n < smallest):
        n -= 1
    return n
