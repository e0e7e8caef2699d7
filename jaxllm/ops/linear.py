"""Matrix products with weights, the gated activation, the norm: the arithmetic of dense layers, with backward passes of their own.

Why not leave them to autodiff: for `y = x w` JAX writes the weight's gradient as `(dy^T x)^T`, so XLA transposes dy, the wider operand
in an up-projection, together with the whole elementwise chain that makes it; and gate, sigmoid and product are all kept for the
backward. Written out, `dw = x^T dy` transposes x once for all projections of the same x, and only gate and up are kept.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# From 2 to so many rows a product with a matrix `[out, in]` is written as a sum on CPU.
FEW_ROWS = 16


def linear_naive(x: Array, w: Array, inputs: int = 1) -> Array:
    """The truth: contract the last `inputs` axes of x with the first ones of w."""
    return jnp.tensordot(x, w, axes=inputs)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("w",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A weight `[in.., out]` held as the matrix `[out, in]`, which XLA on CPU multiplies faster by two rows or more. See `linear`."""

    w: Array

    @classmethod
    def of(cls, w: Array) -> "Transposed":
        return cls(jnp.asarray(w).reshape(-1, w.shape[-1]).T)

    def astype(self, dtype: Any) -> "Transposed":
        return self if self.w.dtype == dtype else Transposed(self.w.astype(dtype))


def times_transposed(x: Array, w: Array, dtype: Any = None) -> Array:
    """`y[.., o] = sum_i x[.., i] w[o, i]`, accumulated in fp32, as `dtype` (default: that of x).

    XLA's CPU library packs the matrix anew for every product, which for a few rows takes longer than the arithmetic. Written as a sum, with
    all rows in one vector, it runs near the speed of memory: `experiments/decode_speed` has both.
    """
    dtype = x.dtype if dtype is None else dtype
    rows = math.prod(x.shape[:-1])
    if not 2 <= rows <= FEW_ROWS or jax.default_backend() != "cpu":
        return jnp.einsum("...i,oi->...o", x, w, preferred_element_type=jnp.float32).astype(dtype)
    columns = x.reshape(rows, -1).T.astype(jnp.float32)
    y = jnp.sum(w.astype(jnp.float32)[:, :, None] * columns[None], axis=1)
    return y.T.reshape(*x.shape[:-1], -1).astype(dtype)


def linear(x: Array, w: Array | Transposed, inputs: int = 1) -> Array:
    """`y[.., o] = sum_i x[.., i] w[i, o]` with i the last `inputs` axes of x: `[b t d] x [d h k] -> [b t h k]`.

    dx = dy w^T and dw = x^T dy, accumulated in fp32 and returned in the dtypes of x and w. A `Transposed` weight is for inference.
    """
    if isinstance(w, Transposed):
        return times_transposed(x.reshape(*x.shape[: x.ndim - inputs], -1), w.w)
    return _linear(x, w, inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _linear(x: Array, w: Array, inputs: int) -> Array:
    return linear_naive(x, w, inputs)


def _linear_forward(x: Array, w: Array, inputs: int) -> tuple[Array, tuple[Array, Array]]:
    return linear_naive(x, w, inputs), (x, w)


def _linear_backward(inputs: int, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    batch = x.ndim - inputs
    out = tuple(range(batch, dy.ndim))
    dx = lax.dot_general(dy, w, ((out, tuple(range(inputs, w.ndim))), ((), ())), preferred_element_type=jnp.float32)
    rows = tuple(range(batch))
    dw = lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_linear.defvjp(_linear_forward, _linear_backward)


def swiglu_naive(gate: Array, up: Array) -> Array:
    """The truth: `silu(gate) * up`."""
    return jax.nn.silu(gate) * up


@jax.custom_vjp
def swiglu(gate: Array, up: Array) -> Array:
    """`silu(gate) * up`, keeping gate and up alone for the backward; the sigmoid is cheaper made again than stored."""
    return swiglu_naive(gate, up)


def _swiglu_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    gate, up = saved
    s = jax.nn.sigmoid(gate)
    silu = gate * s
    return dy * up * (s + silu * (1 - s)), dy * silu


swiglu.defvjp(lambda gate, up: (swiglu_naive(gate, up), (gate, up)), _swiglu_backward)


def rms_naive(x: Array, eps: float) -> Array:
    """The truth: `x / sqrt(mean(x^2) + eps)` over the last axis, fp32."""
    u = x.astype(jnp.float32)
    return u * lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def rms(x: Array, eps: float) -> Array:
    """`rms_naive`, keeping x and one number a row: with `r = 1/sqrt(mean(x^2) + eps)` and `u = x r`, `dx = r (du - u mean(u du))`."""
    return rms_naive(x, eps)


def _rms_forward(x: Array, eps: float) -> tuple[Array, tuple[Array, Array]]:
    u = x.astype(jnp.float32)
    r = lax.rsqrt(jnp.mean(u * u, axis=-1, keepdims=True) + eps)
    return u * r, (x, r)


def _rms_backward(eps: float, saved: tuple[Array, Array], du: Array) -> tuple[Array]:
    del eps
    x, r = saved
    u = x.astype(jnp.float32) * r
    return ((r * (du - u * jnp.mean(u * du, axis=-1, keepdims=True))).astype(x.dtype),)


rms.defvjp(_rms_forward, _rms_backward)
