"""Attention on chosen keys, gathered and masked, against a loop; the indexer's loss against its definition."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache import EMPTY
from jaxllm.ops.attention import attention_naive
from jaxllm.ops.index_loss import Keys, Queries, divergence, imitate_all, imitate_chosen
from jaxllm.ops.sparse_attention import attend_gathered, attend_masked, chosen_mask
from jaxllm.ops.topk import index_scores

B, T, H, K, V, N = 2, 16, 4, 6, 5, 3


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((B, T, H, K), (B, T, K), (B, T, V)))
    index = np.full((B, T, N), EMPTY)
    for b in range(B):
        for t in range(1, T):  # the first query has no key at all
            some = rng.permutation(t + 1)[: rng.integers(1, N + 1)]
            index[b, t, : len(some)] = some
    return q, k, v, jnp.asarray(index, jnp.int32)


def test_gathered_and_masked_are_attention_on_the_chosen_keys_with_their_gradients_in_any_blocks():
    q, k, v, index = arrays()
    sinks = jnp.array([0.5, -1.0, 0.0, 2.0])
    options = {"scale": 0.7, "softcap": 3.0}
    pull = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, H, V)), jnp.float32)

    def naive(q, k, v):
        out = attention_naive(q, k[:, :, None], v[:, :, None], chosen_mask(index, T), sinks=sinks, **options)
        return out, None

    def gathered(q, k, v, size):
        parts = (q[..., :2], q[..., 2:]), (k[..., :2], k[..., 2:])
        own = sinks.reshape(1, 1, 1, H)
        return attend_gathered(*parts, v, index, sinks=own, want_mass=True, size=size, **options)

    def masked(q, k, v, causal):
        own = sinks.reshape(1, H, 1, 1)
        k, v = k[:, None], v[:, None]
        return attend_masked(q, k, v, index, sinks=own, want_mass=True, causal=causal, size=B * H * T * 3, **options)

    def both(way, *x):
        (_, (out, mass)), grads = jax.value_and_grad(
            lambda *x: (jnp.sum(way(*x)[0] * pull), way(*x)), (0, 1, 2), has_aux=True
        )(*x)
        return out, mass, grads

    ways = [lambda *x: gathered(*x, 900), lambda *x: masked(*x, True), lambda *x: masked(*x, False)]
    want, *got = jax.jit(lambda *x: [both(way, *x) for way in (naive, *ways)])(q, k, v)
    for out, mass, grads in got:
        np.testing.assert_allclose(out, want[0], atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, want[2])
        np.testing.assert_allclose(mass, got[0][1], atol=1e-6)
    assert np.all(np.asarray(want[0])[:, 0] == 0)
    assert 0 < float(jnp.max(got[0][1])) < H  # sinks take their share


def test_values_may_be_the_first_keys_as_in_absorbed_latent_attention():
    q, k, _, index = arrays()
    first = attend_gathered((q[..., :2], q[..., 2:]), (k[..., :2], k[..., 2:]), None, index, scale=1.0)[0]
    second = attend_gathered((q,), (k,), k[..., :2], index, scale=1.0)[0]
    np.testing.assert_allclose(first, second, atol=1e-6)
    none = q[..., :0], k[..., :0]  # latents without turned channels, in blocks of queries
    third = attend_gathered((q, none[0]), (k, none[1]), k[..., :2], index, scale=1.0, size=900)[0]
    np.testing.assert_allclose(third, second, atol=1e-6)


def test_the_gradient_of_the_divergence_is_softmax_minus_target_and_nothing_for_the_target():
    rng = np.random.default_rng(3)
    scores, mass = (
        jnp.asarray(rng.standard_normal((1, 3, 7)), jnp.float32),
        jnp.asarray(rng.random((1, 3, 7)), jnp.float32),
    )
    seen = jnp.asarray([[[1] * 7, [1, 1, 0, 1, 0, 0, 0], [0] * 7]], bool)
    loss = divergence(scores, mass, seen)
    d_scores, d_mass = jax.grad(lambda *x: jnp.sum(divergence(*x, seen)), argnums=(0, 1))(scores, mass)
    assert np.all(np.asarray(d_mass) == 0) and float(loss[0, 2]) == 0
    for t, places in ((0, list(range(7))), (1, [0, 1, 3])):
        i, p = np.asarray(scores, np.float64)[0, t, places], np.asarray(mass, np.float64)[0, t, places]
        soft, p = np.exp(i) / np.exp(i).sum(), p / p.sum()
        np.testing.assert_allclose(loss[0, t], np.sum(p * np.log(p / soft)), rtol=1e-5)
        want = np.zeros(7)
        want[places] = soft - p
        np.testing.assert_allclose(d_scores[0, t], want, atol=1e-6)


def test_imitation_of_all_and_of_the_chosen_follow_their_definitions():
    """On all keys: KL and recall from whole matrices. On the chosen: the same numbers where all visible keys are chosen."""
    q, k, _, _ = arrays()
    rng = np.random.default_rng(5)
    scorer = tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((B, T, 3, 4), (B, T, 3), (B, T, 4)))
    seen = jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T))
    places, docs = jnp.broadcast_to(jnp.arange(T), (B, T)), jnp.ones((B, T), jnp.int32)

    def imitated(scorer, size):
        who = Queries(places, docs), Keys(places, docs)
        loss, *rest = imitate_all(scorer, (q, k[:, None]), *who, N, index_scale=0.5, scale=0.4, size=size)
        return jnp.sum(loss), (loss, *rest)

    learn = jax.jit(lambda s: [jax.value_and_grad(imitated, has_aux=True)(s, size) for size in (10**6, B * H * T * 3)])
    ((_, (loss, recall, free)), _), (_, _) = same = learn(scorer)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *same
    )  # blocks of 3 queries, and all at once
    scores = np.asarray(index_scores(*scorer, 0.5), np.float64)
    weights = np.where(seen[:, None], np.exp(0.4 * np.einsum("bthk,bsk->bhts", q, k)), 0)
    p = (weights / weights.sum(-1, keepdims=True)).mean(1)
    soft = np.where(seen, np.exp(scores), 0)
    soft /= soft.sum(-1, keepdims=True)
    want = np.where(seen, p * np.log(np.where(seen, p / np.where(seen, soft, 1), 1)), 0).sum(-1)
    np.testing.assert_allclose(loss, want, atol=1e-5)
    assert not np.asarray(free)[:, :N].any() and np.asarray(free)[:, N:].all()
    t = 9
    top = np.argsort(-scores[1, t, : t + 1])[:N]
    np.testing.assert_allclose(recall[1, t], p[1, t, top].sum() / np.sort(p[1, t])[-N:].sum(), rtol=1e-4)

    index = jnp.where(seen, jnp.arange(T), EMPTY)
    chosen = imitate_chosen(*scorer, index, jnp.asarray(p, jnp.float32), scale=0.5, size=1000)
    np.testing.assert_allclose(chosen, want, atol=1e-5)


def test_imitation_of_all_takes_memory_that_grows_as_the_length():
    """Some 2^16 tokens, forward and backward: a mask of all pairs alone would take 4 GiB, one block of scores takes 16 MiB."""
    t = 2 * (2**15 + 1)  # two causal blocks to compile, not eight
    floats = [(1, t, 2, 4), (1, t, 2), (1, t, 4), (1, t, 1, 4), (1, 1, t, 4)]
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in floats]
    places = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def loss(q_i, w, k_i, q, k, places):
        who = Queries(places, places), Keys(places, places)
        return jnp.sum(imitate_all((q_i, w, k_i), (q, k), *who, N, index_scale=1.0, scale=1.0)[0])

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, places).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**27 + t * 1000 < 2**28
