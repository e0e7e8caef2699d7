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
    b, t, n, d = streams.shape
    x = streams.reshape(b * t, n * d).astype(jnp.float32)
    r = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm_eps)
    # Outputs first, so that the weight's gradient is a product without a transposed wide operand.
    h = jnp.einsum("tc,mc->tm", x, fn.reshape(-1, n * d).astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return (h * r).T.reshape(-1, b, t)


def weigh_naive(w: Array, streams: Array) -> Array:
    """The truth: `sum_i w_i X_i`."""
    return jnp.einsum("nbt,btnd->btd", w, streams.astype(jnp.float32)).astype(streams.dtype)


@jax.custom_vjp
def weigh(w: Array, streams: Array) -> Array:
    """`weigh_naive`; autodiff would pad every stream's gradient to the size of all of them."""
    return functools.reduce(operator.add, (wi[..., None] * streams[:, :, i] for i, wi in enumerate(w))).astype(
        streams.dtype
    )


def _weigh_backward(saved: tuple[Array, Array], dx: Array) -> tuple[Array, Array]:
    w, streams = saved
    dw = jnp.einsum("btd,btnd->nbt", dx, streams, preferred_element_type=jnp.float32)
    return dw, (jnp.moveaxis(w, 0, -1)[..., None] * dx[:, :, None]).astype(streams.dtype)


weigh.defvjp(lambda w, streams: (weigh(w, streams), (w, streams)), _weigh_backward)


def mix_naive(streams: Array, y: Array, post: Array, comb: Array) -> Array:
    """The truth: `X'_k = post_k y + sum_j C_jk X_j`, with the weights rounded to the streams' dtype."""
    post, comb = post.astype(streams.dtype), comb.astype(streams.dtype)
    return jnp.einsum("kbt,btd->btkd", post, y) + jnp.einsum("jkbt,btjd->btkd", comb, streams)


def _over(w: Array, streams: Array) -> Array:
    """`sum_j W_jk X_j` by n fused additions: n x n products of a token each would be called one by one."""
    w = jnp.moveaxis(w, (0, 1), (2, 3))[..., None].astype(streams.dtype)  # [b t j k 1]
    return functools.reduce(operator.add, (w[:, :, j] * streams[:, :, j, None] for j in range(streams.shape[2])))


@jax.custom_vjp
def mix(streams: Array, y: Array, post: Array, comb: Array) -> Array:
    """`mix_naive`: streams `[b t n d]`, y `[b t d]`, post `[n b t]` and comb `[n n b t]` fp32."""
    return jnp.moveaxis(post, 0, -1)[..., None].astype(streams.dtype) * y[:, :, None] + _over(comb, streams)


def _mix_backward(saved: tuple[Array, Array, Array, Array], dx: Array) -> tuple[Array, Array, Array, Array]:
    streams, y, post, comb = saved
    dpost = jnp.einsum("btd,btkd->kbt", y, dx, preferred_element_type=jnp.float32)
    dcomb = jnp.einsum("btjd,btkd->jkbt", streams, dx, preferred_element_type=jnp.float32)
    return _over(comb.swapaxes(0, 1), dx), weigh(post, dx).astype(y.dtype), dpost, dcomb


mix.defvjp(lambda *args: (mix(*args), args), _mix_backward)


def _affine(h: Array, scale: Array, base: Array) -> Array:
    return h * scale.astype(jnp.float32) + base.astype(jnp.float32)[:, None, None]


@functools.partial(_remade, static_argnums=(4, 5))
def collapse(streams: Array, fn: Array, base: Array, scale: Array, eps: float, norm_eps: float) -> Array:
    """`sum_i pre_i X_i`, `[b t d]`, from the columns of F for `pre`: fn `[n n d]`, base `[n]`, scale a scalar."""
    pre = jax.nn.sigmoid(_affine(_project(streams, fn, norm_eps), scale, base)) + eps
    return weigh(pre, streams)


@functools.partial(_remade, static_argnums=(5, 6, 7))
def expand(
    streams: Array, y: Array, fn: Array, base: Array, scales: Array, iterations: int, eps: float, norm_eps: float
) -> Array:
    """`X'_k = post_k y + sum_j C_jk X_j`, from the columns of F for `post` and C: fn `[n + n n, n, d]`, scales `[2]`."""
    n = streams.shape[2]
    h = _project(streams, fn, norm_eps)
    post = 2 * jax.nn.sigmoid(_affine(h[:n], scales[0], base[:n]))
    comb = sinkhorn(_affine(h[n:], scales[1], base[n:]).reshape(n, n, *h.shape[1:]), iterations, eps)
    return mix(streams, y, post, comb)
