"""Arithmetic of manifold-constrained hyper-connections: see `jaxllm.layers.hyper_connections` for the equations.

Streams are `[b t n d]`. The small matrices lie as `[n n b t]`: an axis as short as n (4) in the last place would leave vector lanes
empty. All functions keep their arguments alone for the backward pass and make the rest again: the iterates of Sinkhorn's algorithm
are 40 matrices a token, and fp32 copies of the streams twice what the streams are.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import Array, lax

# Forward and backward are separate loops wherever layers are scanned, so nothing has to be kept from being merged.
_remade = functools.partial(jax.checkpoint, prevent_cse=False)


def sinkhorn_naive(logits: Array, iterations: int, eps: float) -> Array:
    """The truth: a softmax over rows plus eps; then columns are normalised `iterations` times, and rows in between."""
    m = jax.nn.softmax(logits, axis=1) + eps
    m = m / (jnp.sum(m, axis=0, keepdims=True) + eps)
    for _ in range(iterations - 1):
        m = m / (jnp.sum(m, axis=1, keepdims=True) + eps)
        m = m / (jnp.sum(m, axis=0, keepdims=True) + eps)
    return m


@functools.partial(_remade, static_argnums=(1, 2))
def sinkhorn(logits: Array, iterations: int = 20, eps: float = 1e-6) -> Array:
    """`[n n ..] fp32 -> [n n ..]`: a matrix whose columns (first axis) sum to 1 up to eps and whose rows (second axis) nearly do.

    Sinkhorn and Knopp 1967. Begins and ends on columns after the softmax over rows, as DeepSeek-V4's code does.
    """

    def columns(m: Array) -> Array:
        return m / (jnp.sum(m, axis=0, keepdims=True) + eps)

    def alternate(m: Array, _: None) -> tuple[Array, None]:
        return columns(m / (jnp.sum(m, axis=1, keepdims=True) + eps)), None

    m = columns(jax.nn.softmax(logits, axis=1) + eps)
    return lax.scan(alternate, m, None, length=iterations - 1)[0]


def _project(streams: Array, fn: Array, norm_eps: float) -> Array:
    """`RMS(flatten X) F`, `[m b t]` fp32. The norm is one number a token, so it may follow the product."""
    x = streams.astype(jnp.float32)
    r = lax.rsqrt(jnp.mean(x * x, axis=(2, 3)) + norm_eps)
    h = jnp.einsum("btnd,ndm->btm", x, fn.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(h * r[..., None], -1, 0)


def _affine(h: Array, scale: Array, base: Array) -> Array:
    return h * scale.astype(jnp.float32) + base.astype(jnp.float32)[:, None, None]


@functools.partial(_remade, static_argnums=(4, 5))
def collapse(streams: Array, fn: Array, base: Array, scale: Array, eps: float, norm_eps: float) -> Array:
    """`sum_i pre_i X_i`, `[b t d]`, from the columns of F for `pre`: fn `[n d n]`, base `[n]`, scale a scalar."""
    pre = jax.nn.sigmoid(_affine(_project(streams, fn, norm_eps), scale, base)) + eps
    mixed = functools.reduce(operator.add, (w[..., None] * streams[:, :, i] for i, w in enumerate(pre)))
    return mixed.astype(streams.dtype)


@functools.partial(_remade, static_argnums=(5, 6, 7))
def expand(
    streams: Array, y: Array, fn: Array, base: Array, scales: Array, iterations: int, eps: float, norm_eps: float
) -> Array:
    """`X'_k = post_k y + sum_j C_jk X_j`, from the columns of F for `post` and C: fn `[n d n + n n]`, scales `[2]`."""
    n = streams.shape[2]
    h = _project(streams, fn, norm_eps)
    post = 2 * jax.nn.sigmoid(_affine(h[:n], scales[0], base[:n]))
    mix = sinkhorn(_affine(h[n:], scales[1], base[n:]).reshape(n, n, *h.shape[1:]), iterations, eps)
    post, mix = (
        jnp.moveaxis(w, -3, -1)[..., None].astype(streams.dtype) for w in (post, mix)
    )  # [b t k 1], [j b t k 1]
    return functools.reduce(operator.add, (mix[j] * streams[:, :, j, None] for j in range(n)), post * y[:, :, None])
