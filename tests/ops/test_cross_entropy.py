"""The chunked loss against its naive twin: values, gradients, padding, memory, sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.cross_entropy import chunked_cross_entropy, naive_cross_entropy


def inputs(b=3, t=10, d=8, v=24, valid=None, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(b, t, d)), dtype)
    w = jnp.asarray(rng.normal(size=(d, v)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, valid or v, (b, t)), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 3, (b, t)), jnp.float32)
    return hidden, w, labels, weights


@pytest.mark.parametrize(
    "chunk, options",
    [
        (1, {}),
        (7, {"softcap": 2.0}),
        (12, {"z_loss": 0.3}),
        (30, {"softcap": 2.0, "z_loss": 0.3}),
        (1000, {"softcap": 2.0}),
    ],
)
def test_chunked_equals_naive_in_value_and_gradient(chunk, options):
    hidden, w, labels, weights = inputs()

    def run(function, **kw):
        def scaled(hidden, w):
            loss, stats = function(hidden, w, labels, weights, valid_vocab=21, **options, **kw)
            return 0.7 * loss, stats

        return jax.jit(jax.value_and_grad(scaled, (0, 1), has_aux=True))(hidden, w)

    labels = jnp.minimum(labels, 20)
    (loss, stats), grads = run(chunked_cross_entropy, chunk=chunk)
    (ref, ref_stats), ref_grads = run(naive_cross_entropy)
    np.testing.assert_allclose(loss, ref, rtol=2e-6)
    for got, want in zip(jax.tree.leaves((stats, grads)), jax.tree.leaves((ref_stats, ref_grads)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_flat_tokens_are_accepted_and_the_forward_alone_agrees():
    hidden, w, labels, weights = inputs()
    loss, stats = chunked_cross_entropy(hidden, w, labels, weights, valid_vocab=24, chunk=6)
    flat, flat_stats = chunked_cross_entropy(
        hidden.reshape(30, 8), w, labels.ravel(), weights.ravel(), valid_vocab=24, chunk=6
    )
    np.testing.assert_allclose(loss, flat, rtol=1e-6)
    np.testing.assert_allclose(stats.nll_tokens.ravel(), flat_stats.nll_tokens.ravel(), rtol=1e-6)


def test_padded_vocabulary_is_outside_the_normaliser_and_gets_no_gradient():
    hidden, w, labels, weights = inputs(v=32, valid=27)
    w = w.at[:, 27:].set(50.0)  # padded columns would win every softmax

    def loss(hidden, w):
        return chunked_cross_entropy(hidden, w, labels, weights, valid_vocab=27, chunk=6)[0]

    value, (d_hidden, d_w) = jax.value_and_grad(loss, (0, 1))(hidden, w)
    want = naive_cross_entropy(hidden, w[:, :27], labels, weights, valid_vocab=27)[0]
    np.testing.assert_allclose(value, want, rtol=2e-6)
    assert np.all(np.asarray(d_w)[:, 27:] == 0) and np.isfinite(d_hidden).all()


def test_weight_zero_hides_any_label_even_a_padded_one():
    hidden, w, labels, weights = inputs(v=32, valid=27)
    weights = weights.at[0, 0].set(0.0)
    base = jax.value_and_grad(
        lambda h: chunked_cross_entropy(h, w, labels, weights, valid_vocab=27, chunk=6, z_loss=0.1)[0]
    )(hidden)
    moved = jax.value_and_grad(
        lambda h: chunked_cross_entropy(h, w, labels.at[0, 0].set(31), weights, valid_vocab=27, chunk=6, z_loss=0.1)[0]
    )(hidden)
    np.testing.assert_array_equal(base[0], moved[0])
    np.testing.assert_array_equal(base[1], moved[1])
    assert np.all(np.asarray(moved[1])[0, 0] == 0)


def test_the_statistics_of_a_perfect_model():
    w = 40.0 * jnp.eye(5)
    labels = jnp.array([[0, 3, 4, 1]])
    hidden = jax.nn.one_hot(labels, 5)
    loss, stats = chunked_cross_entropy(hidden, w, labels, jnp.array([[1.0, 1, 0, 1]]), valid_vocab=5, chunk=2)
    assert float(loss) < 1e-6 and float(stats.correct) == 3.0
    np.testing.assert_allclose(stats.z, 3 * 40.0**2, rtol=1e-5)


def test_bfloat16_states_keep_float32_sums():
    hidden, w, labels, weights = inputs(b=4, t=64, d=16, v=64, dtype=jnp.bfloat16)
    loss, _ = chunked_cross_entropy(hidden, w, labels, weights, valid_vocab=64, chunk=32)
    ref, _ = naive_cross_entropy(hidden.astype(jnp.float32), w, labels, weights, valid_vocab=64)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, ref, rtol=3e-3)
    grad = jax.grad(lambda w: chunked_cross_entropy(hidden, w, labels, weights, valid_vocab=64, chunk=32)[0])(w)
    assert grad.dtype == jnp.float32 and np.isfinite(grad).all()


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    d, v, chunk = 16, 4096, 64

    def temp(n):
        def loss(hidden, w):
            return chunked_cross_entropy(
                hidden, w, jnp.zeros((1, n), jnp.int32), jnp.ones((1, n)), valid_vocab=v, chunk=chunk
            )[0]

        args = jax.ShapeDtypeStruct((1, n, d), jnp.float32), jax.ShapeDtypeStruct((d, v), jnp.float32)
        stats = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile().memory_analysis()
        return stats.temp_size_in_bytes

    small, large = temp(512), temp(4096)
    logits = 4096 * v * 4
    assert large < logits / 8, (large, logits)
    assert large - small < 4 * (4096 - 512) * (4 * d + 16)  # only hidden-sized buffers may grow


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
def test_a_vocabulary_split_over_devices_gives_the_same_and_no_logits_travel():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    hidden, w, labels, weights = inputs(b=4, t=12, d=8, v=32, valid=30)

    def loss(hidden, w, labels, weights):
        return chunked_cross_entropy(hidden, w, labels, weights, valid_vocab=30, chunk=16)[0]

    want = jax.value_and_grad(loss, (0, 1))(hidden, w, labels, weights)
    spec = jax.sharding.PartitionSpec
    rows, columns = (jax.NamedSharding(mesh, s) for s in (spec("data"), spec(None, "tensor")))
    args = [
        jax.device_put(x, s) for x, s in zip((hidden, w, labels, weights), (rows, columns, rows, rows), strict=True)
    ]
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*args).compile()
    got = compiled(*args)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for g, r in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g, r, rtol=1e-5, atol=1e-5)
    text = compiled.as_text()
    assert "all-gather" not in text  # neither logits nor the head are collected on one device


def test_a_vocabulary_wider_than_the_head_is_refused():
    hidden, w, labels, weights = inputs()
    with pytest.raises(ValueError, match="valid_vocab=25"):
        chunked_cross_entropy(hidden, w, labels, weights, valid_vocab=25)
