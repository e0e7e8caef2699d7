"""Each operation with a backward of its own equals its naive twin under autodiff, forward and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.linear import (
    FEW_ROWS,
    Transposed,
    linear,
    linear_naive,
    rms,
    rms_naive,
    swiglu,
    swiglu_naive,
    times_transposed,
)


def draw(*shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def value_and_grads(fn, *args):
    out = jax.eval_shape(fn, *args)
    probe = jax.random.normal(jax.random.key(7), out.shape)
    return jax.value_and_grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32) * probe), argnums=tuple(range(len(args))))(
        *args
    )


def same(fast, naive, *args, tolerance=2e-5):
    for a, b in zip(
        jax.tree.leaves(value_and_grads(fast, *args)), jax.tree.leaves(value_and_grads(naive, *args)), strict=True
    ):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "x,w,inputs",
    [((2, 5, 8), (8, 12), 1), ((2, 5, 8), (8, 3, 4), 1), ((2, 5, 3, 4), (3, 4, 8), 2), ((7, 8), (8, 2), 1)],
)
def test_linear(x, w, inputs):
    x, w = draw(x, w)
    same(lambda x, w: linear(x, w, inputs), lambda x, w: linear_naive(x, w, inputs), x, w)


def test_swiglu():
    gate, up = draw((2, 5, 8), (2, 5, 8))
    same(swiglu, swiglu_naive, 4 * gate, up)
    grads = jax.grad(lambda g: jnp.sum(swiglu(g, up)))(jnp.full_like(gate, -300.0))
    assert np.isfinite(np.asarray(grads)).all()


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms(size):
    (x,) = draw((3, 4, 16))
    same(lambda x: rms(x, 1e-6) * size, lambda x: rms_naive(x, 1e-6) * size, x * size, tolerance=1e-4)
    assert rms(x.astype(jnp.bfloat16), 1e-6).dtype == jnp.float32


def test_bfloat16_gradients_come_back_in_bfloat16():
    x, w = draw((2, 5, 8), (8, 12), dtype=jnp.bfloat16)
    _, (dx, dw) = value_and_grads(lambda x, w: linear(x, w), x, w)
    assert dx.dtype == dw.dtype == jnp.bfloat16
    _, (want_x, want_w) = value_and_grads(lambda x, w: linear_naive(x, w), x.astype(jnp.float32), w.astype(jnp.float32))
    np.testing.assert_allclose(np.asarray(dx, np.float32), want_x, rtol=0.02, atol=0.05)
    np.testing.assert_allclose(np.asarray(dw, np.float32), want_w, rtol=0.02, atol=0.05)


def test_a_transposed_weight_gives_the_same_product():
    rng = np.random.default_rng(5)
    x, w = rng.standard_normal((2, 3, 4, 6), np.float32), rng.standard_normal((4, 6, 5), np.float32)
    held = Transposed.of(jnp.asarray(w))
    assert held.w.shape == (5, 24) and held.astype(jnp.bfloat16).w.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        linear(jnp.asarray(x), held, 2), linear_naive(jnp.asarray(x), jnp.asarray(w), 2), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rows", [1, 2, 5, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_few_rows_are_sums_in_fp32(rows, dtype):
    x, w = draw((1, rows, 40), (24, 40), dtype=dtype)
    y = times_transposed(x, w, jnp.float32)
    want = np.einsum("bri,oi->bro", np.asarray(x, np.float64), np.asarray(w, np.float64))
    assert y.dtype == jnp.float32 and times_transposed(x, w).dtype == dtype
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
