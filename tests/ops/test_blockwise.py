import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import EMPTY
from jaxllm.layers.base import Context
from jaxllm.ops.attention import attention_naive
from jaxllm.ops.blockwise import BLOCK, blockwise
from jaxllm.ops.blockwise_cache import Source, blockwise_sources
from jaxllm.ops.kernels import LONG, attention
from jaxllm.ops.mask import Mask, visible

T = 45  # no multiple of any block


def inputs(t=T, b=2, h=4, g=2, k=8, v=6):
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (b, t, h, k), (b, t, g, k), (b, t, g, v), (h,), (b, t, h, v)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def packed(t=T):
    """A whole row, and one with padding on both sides of three documents, the second longer than a block."""
    row = [0] * 3 + [1] * 5 + [2] * 20 + [3] * 12 + [0] * 5
    return Context.whole(jnp.zeros((2, t), jnp.int32), jnp.stack([jnp.ones(t, jnp.int32), jnp.array(row)]))


CASES = {  # mask, softcap, sinks, gradients too
    "causal": (Mask(), None, False, True),
    "window_global": (Mask(window=5, global_tokens=2), 2.0, True, True),
    "dilated": (Mask(window=3, dilation=4), None, True, False),
    "chunk": (Mask(chunk=10), None, False, False),
    "longer_than_half": (Mask(window=30), None, False, False),  # as many blocks as there are
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_naive_form(case):
    mask, softcap, with_sinks, gradients = CASES[case]
    q, k, v, sinks, probe = inputs()
    args = (q, k, v, sinks) if with_sinks else (q, k, v)
    ctx = packed()
    seen = visible(ctx.positions, ctx.positions, ctx.segments, ctx.segments, mask)

    def naive(q, k, v, sinks=None):
        return attention_naive(q, k, v, seen, scale=0.3, softcap=softcap, sinks=sinks)

    def blocks(q, k, v, sinks=None):
        index = ctx.positions, ctx.segments
        return blockwise(q, k, v, *index, mask, scale=0.3, softcap=softcap, sinks=sinks, block=16)

    def run(fn):
        if not gradients:
            return jax.jit(fn)(*args)

        def loss(*a):
            return (lambda out: (jnp.sum(out * probe), out))(fn(*a))

        grads, out = jax.jit(jax.grad(loss, argnums=tuple(range(len(args))), has_aux=True))(*args)
        return out, grads

    want, got = jax.tree.leaves(run(naive)), jax.tree.leaves(run(blocks))
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5)
    assert (np.asarray(got[0])[np.asarray(ctx.segments) == 0] == 0).all()  # padding sees nothing: exactly 0, never NaN


@functools.cache
def compiled(t, mask, backward, kernel="auto"):
    """The default kernel for one row of length t, compiled and not run; one head of 32."""
    array = jax.ShapeDtypeStruct((1, t, 1, 32), jnp.float32)
    index = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def fn(q, k, v, positions, segments):
        return attention(q, k, v, positions, segments, mask, scale=0.2, kernel=kernel)

    call = jax.grad(lambda *a: jnp.sum(fn(*a)), argnums=(0, 1, 2)) if backward else fn
    lowered = jax.jit(call).lower(array, array, array, index, index)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("mask", [Mask(), Mask(window=512)], ids=str)
def test_memory_is_linear_forward_and_backward(mask):
    n = 32768
    arrays = 4 * 32 * n  # bytes of one array [n, 32]
    for backward, most in ((False, 8), (True, 14)):
        whole = compiled(n, mask, backward)
        assert whole < most * arrays < n * n / 8, f"{whole / arrays:.1f} arrays of scratch"
    if mask.window:
        assert compiled(n, mask, True) < 2.15 * compiled(n // 2, mask, True)


def test_the_naive_form_would_not_fit():
    """The measure above can fail: one score matrix at 4k is larger than all scratch of 32k in blocks."""
    assert compiled(4096, Mask(), False, "naive") > compiled(32768, Mask(), True)


def flops(t, mask):
    array, index = jax.ShapeDtypeStruct((1, t, 1, 32), jnp.float32), jax.ShapeDtypeStruct((1, t), jnp.int32)

    def fn(q, k, v, p, s):
        return jnp.sum(attention(q, k, v, p, s, mask, scale=0.2))

    return contract.dot_flops(jax.make_jaxpr(jax.grad(fn, argnums=(0, 1, 2)))(array, array, array, index, index).jaxpr)


@pytest.mark.parametrize("mask", [Mask(window=512), Mask(window=512, global_tokens=16), Mask(chunk=512)], ids=str)
def test_a_window_costs_n_times_w(mask):
    n = 16384
    assert flops(n, mask) == 2 * flops(n // 2, mask)
    products = 7  # two forward; the scores again and four more backward
    met = mask.span + mask.global_tokens
    assert flops(n, mask) <= products * 2 * 32 * n * (met + 2 * BLOCK)
    assert n > LONG


def test_sources_equal_the_naive_form_wherever_keys_lie():
    """A shuffled ring, new keys beside the queries, and a cache in order; rows at different places, padded."""
    q, k, v, sinks, _ = map(np.asarray, inputs(t=30))
    old, t, lengths, new = 18, 12, np.array([18, 11]), np.array([12, 7])
    positions, valid = lengths[:, None] + np.arange(t), np.arange(t) < new[:, None]
    held = np.where(np.arange(old) < lengths[:, None], np.arange(old), EMPTY)
    beside = np.where(valid, positions, EMPTY)
    mask = Mask(window=7, global_tokens=2)
    order = np.random.default_rng(0).permutation(old)
    places = np.concatenate([held, beside], axis=1)
    in_order = [np.zeros((2, 2, 40, x.shape[-1]), np.float32) for x in (k, v)]
    for b, s in np.argwhere(places < EMPTY):
        for cache, x in zip(in_order, (k, v), strict=True):
            cache[b, :, places[b, s]] = x[b, s]

    def rows(x):
        return x.transpose(0, 2, 1, 3)

    ring = Source(rows(k[:, order]), rows(v[:, order]), held[:, order])
    fresh = Source(rows(k[:, old:]), rows(v[:, old:]), beside, local=True)
    cache = Source(*in_order, np.broadcast_to(np.arange(40), (2, 40)), ordered=True)

    @jax.jit
    def run(q, sources):
        scores = {"scale": 0.3, "softcap": 2.0, "sinks": sinks}
        seen = mask.sees(jnp.asarray(positions)[:, :, None], jnp.asarray(places)[:, None]) & valid[..., None]
        call = functools.partial(blockwise_sources, q, positions=positions, valid=valid, mask=mask, block=8, **scores)
        return attention_naive(q, k, v, seen, **scores), [call(sources=some) for some in sources]

    want, got = run(q[:, old:], ((ring, fresh), (cache,)))
    for each in got:
        np.testing.assert_allclose(each, want, atol=1e-5)
