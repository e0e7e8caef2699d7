"""MLA against its equations written out in numpy, in all its variants; cached calls against whole ones; its settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import component
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.mla import MLA
from jaxllm.layers.rope import DynamicNTKRoPE, NTKRoPE, RoPE, YaRN
from jaxllm.params import is_declared

B, T, D = 2, 9, 24
SIZES = {"num_heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
YARN = YaRN(factor=40.0, original_max_position=4, mscale=0.707, mscale_all_dim=0.707)
VARIANTS = {
    "direct": {"rope": RoPE(interleaved=True)},
    "low_rank": {
        "rope": YARN,
        "q_lora_rank": 7,
        "kernel": "blockwise",
        "qkv_bias": True,
        "out_bias": True,
        "latent_norm_eps": 1e-3,
    },
    "gated_nope": {"rope": None, "gate": True},
}


def made(name, **kwargs):
    layer = MLA(d_model=D, **SIZES, **VARIANTS[name], **kwargs)
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    boxes = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, ctx()))["params"]
    rng = np.random.default_rng(0)
    shapes, tree = jax.tree.flatten(boxes, is_leaf=is_declared)
    leaves = [jnp.asarray(rng.standard_normal(s.value.shape) * s.value.shape[0] ** -0.5, jnp.float32) for s in shapes]
    return layer, jax.tree.unflatten(tree, leaves), x


def ctx(segments=None):
    return Context.whole(jnp.zeros((B, T), jnp.int32), segments)


def rms(x, w, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def turn(x, rope, positions):
    """Rotate `x [.., t, o]` pair by pair with complex numbers."""
    if rope is None:
        return x
    angle = positions[:, None] * rope.frequencies(x.shape[-1], 1).astype(np.float64)
    half = x.shape[-1] // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if rope.interleaved else (x[..., :half], x[..., half:])
    z = (a + 1j * b) * np.exp(1j * angle) * rope.magnitude
    return np.stack([z.real, z.imag], -1).reshape(x.shape) if rope.interleaved else np.concatenate([z.real, z.imag], -1)


def equations(layer, params, x):
    """Section 2.1 of the paper, one row, one head at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    n, o, r = (SIZES[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    eps, positions = layer.latent_norm_eps or layer.norm_eps, np.arange(T)
    scale = (n + o) ** -0.5 * (1.5896261 if layer.rope is YARN else 1.0)  # (0.0707 ln 40 + 1)^2
    out = np.zeros((B, T, D))
    for i, row in enumerate(np.asarray(x, np.float64)):
        if layer.q_lora_rank is None:
            q = np.einsum("td,dhk->htk", row, p["q_proj"])
        else:
            a = rms(row @ p["q_a_proj"] + p.get("q_a_bias", 0), p["q_a_norm"]["scale"], eps)
            q = np.einsum("tr,rhk->htk", a, p["q_b_proj"])
        both = row @ p["kv_a_proj"] + p.get("kv_a_bias", 0)
        c = rms(both[:, :r], p["kv_a_norm"]["scale"], eps)
        k_r = turn(both[:, r:], layer.rope, positions)
        for h in range(SIZES["num_heads"]):
            q_h = np.concatenate([q[h][:, :n], turn(q[h][:, n:], layer.rope, positions)], -1)
            k_h = np.concatenate([c @ p["k_b_proj"][:, h], k_r], -1)
            scores = np.where(np.tri(T, dtype=bool), scale * q_h @ k_h.T, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            o_h = weights / weights.sum(-1, keepdims=True) @ (c @ p["v_b_proj"][:, h])
            if layer.gate:
                o_h = o_h / (1 + np.exp(-(row @ p["gate_proj"][:, h])))
            out[i] += o_h @ p["o_proj"][h]
    return out + p.get("o_bias", 0)


def decode(layer, params, x, ends, dtype=jnp.float32):
    """Outputs of calls with a cache that end at `ends`, joined, and the cache."""
    cache, outs, start = layer.init_cache(B, 12, dtype), [], 0
    for end in ends:
        step = Context.step(jnp.zeros((B, end - start), jnp.int32), jnp.full(B, start))
        y, cache, _, _ = layer.apply({"params": params}, x[:, start:end], step, cache)
        outs, start = [*outs, y], end
    return jnp.concatenate(outs, axis=1), cache


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_whole_and_cached_calls_equal_the_equations(name):
    """Whole; then a chunk of 7 (expanded from the cache) and two single tokens (absorbed); prepared parameters and bare ones."""
    layer, params, x = made(name)
    want = equations(layer, params, x)

    @jax.jit
    def run(params, x):
        prepared = layer.prepare(params)
        whole = [layer.apply({"params": p}, x, ctx())[0] for p in (params, prepared)]
        return whole, decode(layer, prepared, x, (7, 8, 9))[0], decode(layer, params, x[:, :4], (3, 4))[0]

    whole, cached, bare = run(params, x)
    for got in (*whole, cached):
        np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(bare, want[:, :4], atol=1e-5)


def test_bfloat16_decoding_stays_within_its_rounding_and_caches_latent_and_turned_key():
    layer, params, x = made("direct", dtype=jnp.bfloat16)
    want = equations(layer, params, x)

    @jax.jit
    def run(params, x):
        cached, cache = decode(layer, layer.prepare(params), x, (7, 8, 9), jnp.bfloat16)
        return layer.apply({"params": params}, x, ctx())[0], cached, cache

    whole, cached, cache = run(params, x.astype(jnp.bfloat16))

    def error(got):
        return np.abs(np.asarray(got, np.float64) - want).max()

    assert 0 < error(whole) < 0.05 * np.abs(want).max()
    assert error(cached) < 2 * error(whole)
    assert cache.latent.shape == (B, 12, 10) and cache.key.shape == (B, 12, 4) and cache.latent.dtype == jnp.bfloat16
    both = np.asarray(x, np.float64) @ np.asarray(params["kv_a_proj"])
    latent = rms(both[..., :10], np.asarray(params["kv_a_norm"]["scale"]), 1e-6)
    np.testing.assert_allclose(np.asarray(cache.latent, np.float64)[:, :T], latent, atol=0.03)
    np.testing.assert_allclose(
        np.asarray(cache.key, np.float64)[:, :T], turn(both[..., 10:], layer.rope, np.arange(T)), atol=0.03
    )


def test_sizes_follow_the_model_where_they_are_not_given():
    layer = component("mixer", "mla")(d_model=1024)
    cost = layer.cost(1, 1, 4096, jnp.bfloat16)
    assert cost.cache_per_token == 2 * (512 + 64)
    assert cost.cache_read == 4096 * 2 * (2 * 512 + 64)  # absorbed: the latents twice
    weights = cost.params - 512  # all but the latents' norm
    assert cost.flops == 2 * weights + 2 * 4096 * 8 * (2 * 512 + 64)
    whole = layer.cost(1, 4096, 2048.5, jnp.bfloat16)
    assert whole.flops == 2 * 4096 * (weights + 2048.5 * 8 * (128 + 64 + 128))
    chunk = layer.cost(1, 512, 4096, jnp.bfloat16)
    assert chunk.flops == 2 * (512 * weights + 512 * 4096 * 8 * 320 + (4096 - 512) * 512 * 8 * 256)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_heads": 5}, "num_heads: 5 does not divide"),
        ({"num_heads": 4, "kv_lora_rank": 0}, "kv_lora_rank: 0"),
        ({"num_heads": 4, "q_lora_rank": 0}, "q_lora_rank: 0"),
        ({"num_heads": 4, "qk_rope_head_dim": 3}, "qk_rope_head_dim: 3"),
        ({"num_heads": 4, "qk_rope_head_dim": 2, "rope": NTKRoPE(factor=2.0)}, "qk_rope_head_dim: 2"),
    ],
)
def test_wrong_settings_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        MLA(d_model=D, **fields)


def test_caches_that_cannot_be_right_are_refused():
    layer = MLA(d_model=D, num_heads=4, qk_rope_head_dim=4, rope=DynamicNTKRoPE(factor=2.0, max_position=8))
    with pytest.raises(UserError, match="rope.length"):
        layer.init_cache(1, 16, jnp.float32)
