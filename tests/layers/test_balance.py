"""Balancing: values of the losses, the rules of the bias, and each of them at work on a router that collapses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.balance import (
    BINS,
    QuantileStep,
    SignStep,
    document_bounds,
    histogram_range,
    quantile_histogram,
    sequence_loss,
    switch_loss,
    z_loss,
)
from jaxllm.layers.base import Context
from jaxllm.layers.moe import MoE
from jaxllm.layers.router import SigmoidRouter
from jaxllm.ops.queues import count

E = 8


def test_the_switch_loss_is_one_a_token_at_balance_and_e_at_collapse():
    valid = jnp.arange(16) < 12
    even = jnp.full((1, 16, 4), 0.25)
    experts = jnp.where(valid[:, None], (jnp.arange(16)[:, None] + jnp.arange(2)) % 4, 4)
    np.testing.assert_allclose(switch_loss(even, count(experts, 4), valid[None]), 12, rtol=1e-6)
    one = jnp.zeros((1, 16, 4)).at[..., 2].set(1.0)
    np.testing.assert_allclose(switch_loss(one, count(jnp.full(12, 2), 4), valid[None]), 4 * 12, rtol=1e-6)


def test_the_sequence_loss_is_that_of_each_document_times_its_tokens():
    rng = np.random.default_rng(0)
    scores, experts = rng.random((2, 10, E)), np.argsort(rng.random((2, 10, E)), -1)[..., :2]
    segments = np.array([[1] * 4 + [2] * 6, [0] * 2 + [1] * 5 + [0] * 3])
    want = 0.0
    for row, sl in ((0, slice(0, 4)), (0, slice(4, 10)), (1, slice(2, 7))):
        s, x = scores[row, sl], experts[row, sl]
        t = len(x)
        f = E / (2 * t) * np.bincount(x.ravel(), minlength=E)
        want += t * np.sum(f * np.mean(s / s.sum(-1, keepdims=True), 0))
    got = sequence_loss(jnp.asarray(scores, jnp.float32), jnp.asarray(experts), jnp.asarray(segments))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    first, last = document_bounds(jnp.asarray(segments))
    np.testing.assert_array_equal(first[0], [0] * 4 + [4] * 6)
    np.testing.assert_array_equal(last[1], [1] * 2 + [6] * 5 + [9] * 3)


def test_the_z_loss_squares_the_log_of_the_sum_and_skips_padding():
    z = jnp.array([[[1.0, 2.0, 3.0], [-jnp.inf] * 3]])
    valid = jnp.array([[True, False]])
    want = np.log(np.sum(np.exp([1.0, 2.0, 3.0]))) ** 2
    value, grad = jax.value_and_grad(z_loss)(z, valid)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert np.isfinite(np.asarray(grad)).all()


def test_the_sign_rule_pushes_towards_the_mean():
    np.testing.assert_allclose(SignStep(0.1)(jnp.zeros(3), jnp.array([5.0, 1.0, 3.0])), [-0.1, 0.1, 0.0], atol=1e-8)


def test_the_quantile_rule_finds_the_quantile_and_adds_up():
    """Against numpy's quantile, from histograms of two halves of the tokens."""
    rng = np.random.default_rng(0)
    s = jnp.asarray(1 / (1 + np.exp(-rng.standard_normal((2, 400, E)) - np.linspace(-2, 2, E))), jnp.float32)
    bias = jnp.linspace(-0.2, 0.3, E)
    valid = jnp.ones((1, 400), bool)
    halves = sum(quantile_histogram(s[i : i + 1], bias, valid, 2) for i in range(2))
    np.testing.assert_array_equal(halves, quantile_histogram(s, bias, jnp.ones((2, 400), bool), 2))
    alpha = np.sort(np.asarray(s + bias).reshape(-1, E), -1)[:, -3]
    want = np.quantile(alpha[:, None] - np.asarray(s).reshape(-1, E), 2 / E, axis=0)
    low, high = histogram_range(bias)
    got = QuantileStep(2 / E)(bias, halves)
    np.testing.assert_allclose(got, want - want.mean(), atol=2 * float(high - low) / BINS)
    np.testing.assert_array_equal(QuantileStep(0.25)(bias, jnp.zeros((E, BINS))), bias)  # no token, no step


# ---- at work ---------------------------------------------------------------------------------------------------

D, ROWS, LENGTH = 16, 8, 64
SIGMOID = functools.partial(SigmoidRouter, bias_rate=0.003)
METHODS = {
    "none": {},
    "switch": {"switch_loss": 0.5},
    "sequence": {"sequence_loss": 0.5},
    "sign": {"router": SIGMOID},
    "quantile": {"router": functools.partial(SIGMOID, balance="quantile")},
}


def train(fields, steps=300):
    """Load of a router on tokens with a common part, which its first experts like: before and after some steps."""
    layer = MoE(d_model=D, num_experts=E, top_k=2, d_expert=4, dispatch="dense", **fields)
    key = jax.random.key(0)
    x = jax.random.normal(key, (ROWS, LENGTH, D)) + 2.0 * jnp.ones(D)
    ctx = Context.whole(jnp.zeros((ROWS, LENGTH), jnp.int32), train=True)
    target = jnp.sin(3 * x)
    boxes = layer.init(key, x, ctx)["params"]
    tree = jax.tree.map(lambda box: box.value, boxes, is_leaf=lambda b: hasattr(b, "names"))
    tree["router"]["kernel"] = tree["router"]["kernel"] + 0.12 * jnp.eye(1, E)[0] + 0.1 * jnp.eye(1, E, 1)[0]
    update = boxes["router"]["bias"].update if "bias" in boxes["router"] else None

    def loss(tree):
        y, aux = layer.apply({"params": tree}, x, ctx)
        extra = sum(v for k, v in aux.items() if k.startswith("loss/")) / (ROWS * LENGTH)
        return jnp.mean((y - target) ** 2) + extra, aux

    def step(tree, _):
        grads, aux = jax.grad(loss, has_aux=True)(tree)
        new = jax.tree.map(lambda p, g: p - 0.05 * g, tree, grads)
        if update is not None:
            new["router"]["bias"] = update(tree["router"]["bias"], aux["state/router/bias"])
        return new, aux["metric/load_max"]

    loads = jax.jit(lambda tree: jax.lax.scan(step, tree, None, length=steps)[1])(tree)
    return np.asarray(loads)


@pytest.mark.parametrize("method", METHODS)
def test_a_router_that_collapses_is_brought_back(method):
    loads = train(METHODS[method])
    assert loads[0] > 3
    if method == "none":
        assert loads[-1] > 2.5
    else:
        assert loads[-10:].max() < 1.3
