import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.base import Context
from jaxllm.ops.attention import attend, attention_naive, causal_blocks
from jaxllm.ops.mask import visible


def inputs(t=32, b=2, h=4, g=2, k=8, v=6, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (b, t, h, k), (b, t, g, k), (b, t, g, v)
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def packed_mask(t=32):
    segments = jnp.stack(
        [jnp.ones(t, jnp.int32), jnp.concatenate([jnp.full(9, 1), jnp.full(t - 14, 2), jnp.zeros(5, jnp.int32)])]
    )
    ctx = Context.whole(jnp.zeros((2, t), jnp.int32), segments)
    return visible(ctx.positions, ctx.positions, ctx.segments, ctx.segments), segments


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_fast_equals_naive_forward_and_gradient(blocks, softcap):
    q, k, v = inputs()
    mask, _ = packed_mask()
    probe = jax.random.normal(jax.random.key(9), (2, 32, 4, 6))

    def loss(fn):
        return jax.value_and_grad(lambda q, k, v: jnp.sum(fn(q, k, v) * probe), argnums=(0, 1, 2))(q, k, v)

    want = loss(lambda q, k, v: attention_naive(q, k, v, mask, scale=0.3, softcap=softcap))
    got = loss(lambda q, k, v: attend(q, k, v, mask, scale=0.3, softcap=softcap, causal_blocks=blocks))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("fn", [attention_naive, attend])
def test_a_row_without_keys_is_exactly_zero_with_finite_gradients(fn):
    q, k, v = inputs()
    mask, segments = packed_mask()
    out = fn(q, k, v, mask, scale=0.3)
    assert (np.asarray(out)[np.asarray(segments) == 0] == 0).all()
    grads = jax.grad(lambda q, k, v: jnp.sum(fn(q, k, v, mask, scale=0.3) ** 2), argnums=(0, 1, 2))(q, k, v)
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)


def test_softcap_to_infinity_is_none_and_mqa_mha_agree():
    q, k, v = inputs(g=1)
    mask = jnp.tril(jnp.ones((2, 32, 32), bool))
    base = attend(q, k, v, mask, scale=0.3)
    np.testing.assert_allclose(attend(q, k, v, mask, scale=0.3, softcap=1e6), base, atol=1e-5)
    wide = attend(q, jnp.repeat(k, 4, 2), jnp.repeat(v, 4, 2), mask, scale=0.3)
    np.testing.assert_allclose(wide, base, atol=1e-6)


def test_large_scores_stay_finite():
    q, k, v = inputs()
    out = attend(q * 1e4, k * 1e4, v, jnp.tril(jnp.ones((2, 32, 32), bool)), scale=1.0)
    assert np.isfinite(np.asarray(out)).all()


def test_block_count_divides():
    assert [causal_blocks(t) for t in (12, 64, 100, 128, 256, 512, 4096)] == [1, 1, 1, 2, 4, 8, 8]
