"""The attention of an unrolled draft layer against one row of all steps' keys: values, gradients, packed rows, windows, sinks, blocks."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.ops.mask import Mask
from jaxllm.ops.unroll import unrolled_attention, unrolled_naive


def by_hand(query, keys, values, reads, segments):
    """The sentence of the module, index by index: keys of step 0 up to the query's index, and its own of later steps."""
    q, k, v = np.float64(query), np.float64(keys), np.float64(values)
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(q.shape[:3]):
        if reads[b, i]:
            seen = [(0, j) for j in range(i + 1) if segments[b, j] == reads[b, i]]
            seen += [(m, i) for m in range(1, len(k))]
            group = h // (q.shape[2] // k.shape[3])
            scores = 3.0 * np.tanh(np.array([0.4 * q[b, i, h] @ k[m, b, j, group] for m, j in seen]) / 3.0)
            w = np.exp(scores - scores.max())
            out[b, i, h] = w @ np.array([v[m, b, j, group] for m, j in seen]) / w.sum()
    return out


def test_the_unroll_is_attention_on_the_keys_of_all_steps():
    rng = np.random.default_rng(0)
    b, t, h, g, steps = 2, 11, 4, 2, 3
    segments = jnp.array([[1] * 11, [1] * 4 + [2] * 5 + [0] * 2])
    positions = jnp.array([range(11), [*range(4), *range(5), 0, 0]])
    reads = jnp.array(
        [[1] * 8 + [0] * 3, [1, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0]]
    )  # the token three later is of the document
    query = jnp.asarray(rng.standard_normal((b, t, h, 8)), jnp.float32)
    keys, values = (
        tuple(jnp.asarray(rng.standard_normal((b, t, g, 8)), jnp.float32) for _ in range(steps)) for _ in "kv"
    )
    sinks = jnp.asarray(rng.standard_normal(h), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((b, t, h, 8)), jnp.float32)

    def both(query, keys, values, sinks):
        out = []
        for mask, options in ((Mask(), {"softcap": 3.0}), (Mask(window=4), {"sinks": sinks})):
            args = (query, keys, values, positions, reads, segments, mask)
            out.append(unrolled_attention(*args, scale=0.4, block=4, **options))
            out.append(unrolled_naive(*args, scale=0.4, **options))
        return out

    def loss(which, *arrays):
        return sum(jnp.sum(weights * out) for out in both(*arrays)[which::2])

    arrays = (query, keys, values, sinks)
    outs, fast, slow = jax.jit(
        lambda *a: (both(*a), *(jax.grad(lambda *x, w=w: loss(w, *x), argnums=(0, 1, 2, 3))(*a) for w in (0, 1)))
    )(*arrays)
    np.testing.assert_allclose(outs[1], by_hand(query, keys, values, reads, segments), atol=1e-5)
    for one, two in zip(outs[::2], outs[1::2], strict=True):
        np.testing.assert_allclose(one, two, atol=2e-6)
        assert not np.asarray(one)[np.asarray(reads) == 0].any() and np.isfinite(one).all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), fast, slow)
    assert max(float(jnp.max(jnp.abs(x))) for x in fast[1][1:]) > 0.01  # its own outputs are seen
