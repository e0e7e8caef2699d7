"""Shapes, dtypes and variants of each layer, by chex; and the textbook formulas they must equal."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import ACTIVATIONS, MLP
from jaxllm.layers.norm import LayerNorm, RMSNorm
from jaxllm.layers.residual import Residual
from jaxllm.ops.glu import glu
from jaxllm.params import is_declared

B, T, D = 2, 6, 16


def run(layer, *args):
    """Parameters moved off their constants, in their boxes, and outputs. Drawn by numpy, since JAX compiles a generator a shape."""
    rng = np.random.default_rng(0)

    def drawn(box):
        value = box.init.draw(rng, box.value.shape) + np.float32(0.1)
        return box.replace(value=jax.device_put(value.astype(box.value.dtype)))

    boxes = jax.eval_shape(lambda: layer.init(jax.random.key(0), *args))
    params = jax.tree.map(drawn, boxes, is_leaf=is_declared)
    return params["params"], jax.jit(layer.apply)(params, *args)


def x_and_ctx(dtype=jnp.float32):
    x = jax.random.normal(jax.random.key(1), (B, T, D), dtype)
    return x, Context.whole(jnp.zeros((B, T), jnp.int32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kv,qk_norm,bias", [(None, False, False), (2, True, True), (1, False, True)])
def test_gqa(kv, qk_norm, bias, dtype):
    layer = GQA(d_model=D, num_heads=4, num_kv_heads=kv, qk_norm=qk_norm, qkv_bias=bias, out_bias=bias, dtype=dtype)
    x, ctx = x_and_ctx(dtype)
    params, (y, cache, shared, aux) = run(layer, x, ctx)
    chex.assert_shape(y, (B, T, D))
    chex.assert_type(y, dtype)
    assert cache is None and shared == {} and aux == {}
    g = kv or 4
    chex.assert_shape(
        jax.tree.map(lambda p: p.value, params, is_leaf=lambda p: hasattr(p, "names"))["k_proj"], (D, g, 4)
    )
    kv_cache = layer.init_cache(B, 8, dtype)
    chex.assert_shape([kv_cache.k, kv_cache.v], (B, 8, 4) if g == 1 else (B, g, 8, 4))


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"num_heads": 3}, "num_heads"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
        ({"num_heads": 16}, "even"),
    ],
)
def test_gqa_refuses_what_does_not_divide(fields, words):
    with pytest.raises(UserError, match=words):
        GQA(d_model=D, **fields)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("gated", [True, False])
def test_mlp_equals_its_formula(activation, gated):
    layer = MLP(d_model=D, d_ff=24, activation=activation, gated=gated)
    x, ctx = x_and_ctx()
    params, (y, aux) = run(layer, x, ctx)
    chex.assert_shape(y, (B, T, D))
    assert aux == {}
    p = jax.tree.map(lambda b: b.value, params, is_leaf=lambda b: hasattr(b, "names"))
    act = ACTIVATIONS[activation]
    hidden = act(x @ p["gate_proj"]) * (x @ p["up_proj"]) if gated else act(x @ p["up_proj"])
    np.testing.assert_allclose(y, hidden @ p["down_proj"], atol=1e-5)


@pytest.mark.parametrize("fields,kind", [({"activation": "situ"}, "situ"), ({"limit": 0.5}, "clamped")])
def test_mlp_with_a_bounded_gate_fused_or_not(fields, kind):
    layer = MLP(d_model=D, d_ff=24, **fields)
    x, ctx = x_and_ctx()
    params, (y, _) = run(layer, x, ctx)
    p = jax.tree.map(lambda b: b.value, params, is_leaf=lambda b: hasattr(b, "names"))
    hidden = glu(x @ p["gate_proj"], x @ p["up_proj"], kind, layer.limit)
    np.testing.assert_allclose(y, hidden @ p["down_proj"], atol=1e-5)
    np.testing.assert_allclose(layer.apply({"params": layer.prepare(p)}, x, ctx)[0], y, atol=1e-5)
    with pytest.raises(UserError, match="limit|gated"):
        MLP(d_model=D, gated=False, **fields)


def test_mlp_default_widths():
    assert MLP(d_model=160).width == 448 and MLP(d_model=160, gated=False).width == 640
    with pytest.raises(UserError, match="activation"):
        MLP(d_model=D, activation="silly")


def test_norms_equal_their_formulas_and_keep_fp32_statistics():
    x = 100 * jax.random.normal(jax.random.key(2), (B, T, D))
    rms = np.asarray(x) / np.sqrt(np.mean(np.asarray(x) ** 2, -1, keepdims=True) + 1e-6)
    _, y = run(RMSNorm(), x)
    np.testing.assert_allclose(y, rms * 1.1, rtol=1e-5)
    _, y = run(RMSNorm(zero_centred=True), x)
    np.testing.assert_allclose(y, rms * 1.1, rtol=1e-5)  # 1 + (0 + 0.1)
    np.testing.assert_allclose(RMSNorm(weightless=True).apply({}, x), rms, rtol=1e-5)
    _, y = run(LayerNorm(), x)
    mean, var = np.mean(x, -1, keepdims=True), np.var(x, -1, keepdims=True)
    np.testing.assert_allclose(y, (np.asarray(x) - mean) / np.sqrt(var + 1e-5) * 1.1 + 0.1, rtol=1e-4, atol=1e-5)
    big = jnp.full(
        (1, 512), 300.0, jnp.bfloat16
    )  # the sum of squares overflows nothing in fp32, and would lose bits in bf16
    chex.assert_type(RMSNorm(weightless=True).apply({}, big), jnp.bfloat16)
    np.testing.assert_allclose(np.asarray(RMSNorm(weightless=True).apply({}, big), np.float32), 1.0, atol=1e-2)


def test_rounding_order_of_the_weight():
    x = jax.random.normal(jax.random.key(3), (1, 64), jnp.bfloat16)
    w = {"params": {"scale": jnp.full(64, 1.003)}}  # rounds to 1.0 in bf16
    first, last = RMSNorm().apply(w, x), RMSNorm(round_first=False).apply(w, x)
    u = x.astype(jnp.float32) * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2) + 1e-6)
    np.testing.assert_array_equal(first, u.astype(jnp.bfloat16))
    np.testing.assert_array_equal(last, (u * 1.003).astype(jnp.bfloat16))


def test_plain_residual_is_addition():
    scheme = Residual(site="mixer", d_model=D)
    x, y = jnp.ones((B, T, D)), jnp.full((B, T, D), 2.0)
    assert scheme.read(scheme.start(x)) is x
    np.testing.assert_array_equal(scheme.finish(scheme.write(x, y)), 3.0)
    np.testing.assert_array_equal(scheme.merge(*scheme.split(x)), x)
