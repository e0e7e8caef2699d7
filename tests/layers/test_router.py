"""Routers against their formulas, written out in numpy, and the faults that others shipped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.moe import MoE
from jaxllm.layers.router import (
    HashRouter,
    HashTable,
    SigmoidRouter,
    SoftmaxRouter,
    SqrtSoftplusRouter,
    TopKSoftmaxRouter,
    sqrt_softplus,
)
from jaxllm.params import declare

D, E = 8, 8


def route(kind, z, params=None, ctx=None, top_k=2, **fields):
    """A router fed with logits: the kernel is the identity, so x is what comes out of it."""
    z = jnp.asarray(z, jnp.float32)[None]
    e = z.shape[-1]
    module = kind(num_experts=e, top_k=top_k, d_model=e, **fields)
    params = {"kernel": jnp.eye(e), **(params or {})}
    ctx = Context.whole(jnp.zeros(z.shape[:2], jnp.int32)) if ctx is None else ctx
    routing = module.apply({"params": params}, z, ctx)
    return jax.tree.map(lambda a: np.asarray(a[0]) if a.ndim == 3 else np.asarray(a), routing)


@pytest.fixture(scope="module")
def z():
    return np.random.default_rng(0).standard_normal((6, E)).astype(np.float32)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def best(choice, k=2):
    return np.argsort(-choice, axis=-1, kind="stable")[:, :k]


def check(routing, experts, weights):
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6, atol=1e-7)


def test_softmax_routers(z):
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    experts = best(p)
    w = np.take_along_axis(p, experts, -1)
    check(route(SoftmaxRouter, z), experts, w / w.sum(-1, keepdims=True))
    check(route(SoftmaxRouter, z, renormalise=False, scale=16.0), experts, 16 * w)  # DeepSeek-V2
    bias = np.linspace(-2, 2, E).astype(np.float32)
    biased = best(z + bias)
    chosen = np.exp(np.take_along_axis(z + bias, biased, -1))
    got = route(TopKSoftmaxRouter, z, {"logit_bias": bias}, logit_bias=True)
    check(got, biased, chosen / chosen.sum(-1, keepdims=True))  # gpt-oss


def test_groups_rank_by_their_best_or_their_two_best(z):
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    grouped = p.reshape(-1, 4, 2)
    keep = best(grouped.max(-1))
    inside = (keep[:, :, None] == np.arange(4)).any(1).repeat(2, -1)
    got = route(SoftmaxRouter, z, num_groups=4, top_groups=2)
    np.testing.assert_array_equal(got.experts, best(np.where(inside, p, -1)))
    bias = 3 * np.random.default_rng(1).standard_normal(E).astype(np.float32)
    biased = sigmoid(z) + bias
    two = np.sort(biased.reshape(-1, 2, 4), -1)[..., -2:].sum(-1)
    inside = (best(two, 1)[:, :, None] == np.arange(2)).any(1).repeat(4, -1)
    got = route(SigmoidRouter, z, {"bias": bias}, num_groups=2, top_groups=1)
    np.testing.assert_array_equal(got.experts, best(np.where(inside, biased, -np.inf)))


def test_a_bias_chooses_and_never_weighs():
    """Biased scores below 0 in the kept group must still win over the masked ones; weights are without the bias."""
    s = np.array([[0.8808, 0.7311, 0.0474, 0.0474]])
    z = np.log(s / (1 - s))
    got = route(SigmoidRouter, z, {"bias": jnp.array([-1.0, -1, -2, -2])}, num_groups=2, top_groups=1)
    np.testing.assert_array_equal(got.experts, [[0, 1]])
    np.testing.assert_allclose(got.weights, [[0.54645, 0.45355]], atol=2e-5)
    free = route(SigmoidRouter, np.log([[0.1 / 0.9, 0.04 / 0.96]]), renormalise=False, scale=16.0, use_bias=False)
    np.testing.assert_allclose(free.weights, [[1.6, 0.64]], rtol=1e-5)  # the factor applies without renormalising too


def test_sqrt_softplus_and_hash_routers(z):
    s = np.sqrt(np.log1p(np.exp(z)))
    bias = np.linspace(1, -1, E).astype(np.float32)
    experts = best(s + bias)
    w = np.take_along_axis(s, experts, -1)
    check(route(SqrtSoftplusRouter, z, {"bias": bias}, scale=1.5), experts, 1.5 * w / w.sum(-1, keepdims=True))
    table = np.array([[7, 1], [3, 0], [2, 5]], np.int32)
    tokens = np.array([0, 2, 1, 1, 0, 2])
    got = route(HashRouter, z, {"table": table}, Context.whole(tokens[None]), vocab_size=3, scale=1.5)
    w = np.take_along_axis(s, table[tokens], -1)
    check(got, table[tokens], 1.5 * w / w.sum(-1, keepdims=True))


def test_a_hash_table_gives_each_token_different_experts_and_each_expert_the_same_number_of_tokens():
    table = HashTable(8).draw(np.random.default_rng(0), (800, 3))
    assert all(len(set(row)) == 3 for row in table)
    np.testing.assert_array_equal(np.bincount(table.ravel()), 300)
    assert HashTable(8)(jax.random.key(0), (16, 2), jnp.int32).dtype == jnp.int32


ROUTERS = {
    "softmax": (SoftmaxRouter, {}),
    "top_k": (TopKSoftmaxRouter, {}),
    "sigmoid": (SigmoidRouter, {"bias": jnp.full(E, 5.0)}),
    "sqrt_softplus": (SqrtSoftplusRouter, {"bias": jnp.full(E, 5.0)}),
}


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("value", [-np.inf, -80.0, -30.0])
def test_hopeless_rows_are_finite_and_so_are_their_gradients(kind, value, monkeypatch):
    """All logits -inf (padding), or so low that scores nearly vanish beside a large bias."""
    router, more = ROUTERS[kind]
    module = router(num_experts=E, top_k=2, d_model=E)
    z = jnp.stack([jnp.full(E, value), jnp.arange(E) * 0.1])[None]
    ctx = Context.whole(jnp.zeros((1, 2), jnp.int32))

    def loss(shift):  # logits are z + shift: a kernel would make NaN of 0 * inf by itself
        monkeypatch.setattr(router, "_logits", lambda self, x: x + shift)
        r = module.apply({"params": more}, z, ctx)
        return jnp.sum(jnp.sin(r.weights)) + jnp.sum(r.scores**2), r

    (_, r), g = jax.value_and_grad(loss, has_aux=True)(jnp.zeros(E))
    for a in (r.weights, r.scores, g):
        assert np.isfinite(np.asarray(a)).all()
    if np.isinf(value):
        np.testing.assert_array_equal(np.asarray(r.weights)[0, 0], 0)


def test_sqrt_softplus_joins_its_two_branches():
    left, right = (jax.vmap(jax.value_and_grad(sqrt_softplus))(jnp.array([-40.0001 + i, -39.9999 + i])) for i in (0, 0))
    for a in left:
        np.testing.assert_allclose(a[0], a[1], rtol=3e-4)
    np.testing.assert_allclose(
        sqrt_softplus(jnp.array([-np.inf, 3.0])), [0.0, np.sqrt(np.log1p(np.exp(3.0)))], rtol=1e-6
    )


def test_logits_in_the_models_dtype_or_in_float32():
    x = jax.random.normal(jax.random.key(0), (1, 64, D), jnp.bfloat16)
    ctx, kernel = Context.whole(jnp.zeros((1, 64), jnp.int32)), jax.random.normal(jax.random.key(1), (D, E))

    def logits(dtype):
        module = SoftmaxRouter(num_experts=E, top_k=2, d_model=D, dtype=jnp.bfloat16, router_dtype=dtype)
        return np.asarray(module.apply({"params": {"kernel": kernel}}, x, ctx).logits)

    np.testing.assert_allclose(
        logits("float32"), np.asarray(x[0:], np.float32) @ np.asarray(kernel), rtol=1e-5, atol=1e-5
    )
    rounded = logits("compute")
    np.testing.assert_array_equal(rounded, rounded.astype(jnp.bfloat16))
    assert np.abs(rounded - logits("float32")).max() > 1e-3


def test_jitter_is_for_training_alone():
    x, kernel = jnp.ones((1, 4, D)), jax.random.normal(jax.random.key(1), (D, E))
    module = SoftmaxRouter(num_experts=E, top_k=2, d_model=D, jitter=0.3)

    def logits(train, seed=0):
        ctx = Context.whole(jnp.zeros((1, 4), jnp.int32), train=train)
        return module.apply({"params": {"kernel": kernel}}, x, ctx, rngs={"dropout": jax.random.key(seed)}).logits

    np.testing.assert_allclose(logits(False), x @ kernel, rtol=1e-5)
    assert float(jnp.abs(logits(True) - logits(False)).max()) > 0.05
    assert float(jnp.abs(logits(True) - logits(True, 1)).max()) > 0.05


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (
            functools.partial(SoftmaxRouter, num_groups=3, top_groups=1),
            "router.num_groups: 3 must divide num_experts=8",
        ),
        (functools.partial(SigmoidRouter, num_groups=8, top_groups=4), "num_groups: 8 must divide .* at least 2"),
        (functools.partial(SoftmaxRouter, num_groups=8, top_groups=1), "top_groups: 1 of 8 .* cannot give top_k=2"),
        (functools.partial(SoftmaxRouter, num_groups=4), "go together"),
        (functools.partial(SigmoidRouter, balance="median"), "balance: 'median' is not one of sign, quantile"),
        (functools.partial(SqrtSoftplusRouter, balance="quantile"), "balance: 'quantile' is not one of sign"),
        (functools.partial(SoftmaxRouter, router_dtype="half"), "router_dtype: 'half'"),
        (functools.partial(SoftmaxRouter, jitter=1.0), "jitter: 1.0"),
        (functools.partial(SoftmaxRouter, scale=0.0), "scale: 0.0"),
        (functools.partial(HashRouter, vocab_size=0), "vocab_size: 0"),
    ],
)
def test_a_router_that_cannot_be_is_refused_in_one_line(router, words):
    with pytest.raises(UserError, match=words):
        MoE(d_model=D, num_experts=8, top_k=2, d_expert=4, router=router, parent=None)


def test_a_hash_table_with_fewer_rows_than_the_model_has_ids_is_refused_before_anything_runs():
    made = compose(
        ["model=tiny", "track=none", "ffn@model.ffns.dense=moe_hash", "model.ffns.dense.router.vocab_size=100"]
    )
    with pytest.raises(
        UserError, match=r"the 100 token ids of its table, and model.vocab_size is 101; set .*router.vocab_size to 101"
    ):
        declare(made.build("model", vocab_size=101))
    assert declare(made.build("model", vocab_size=100))["g0"]["b0"]["ffn"]["router"]["table"].value.shape[-2:] == (
        100,
        2,
    )


def test_hash_routing_without_token_ids_is_refused():
    with pytest.raises(UserError, match="routes by token ids"):
        route(HashRouter, np.zeros((2, E)), {}, Context(None, None, jnp.ones((1, 2), jnp.int32)), vocab_size=3)
