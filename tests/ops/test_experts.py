"""Every path of the experts equals the naive one, whatever the routing: outputs and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.experts import Experts, Unit, count, experts_dense, experts_few
from jaxllm.ops.experts_sorted import capacity_of, experts_capacity, experts_sorted, make_plan

N, D, F = 40, 16, 24


def numbers(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def make_experts(e, bias=True):
    w = (
        numbers(e, D, F, seed=1, scale=0.25),
        numbers(e, D, F, seed=2, scale=0.25),
        numbers(e, F, D, seed=3, scale=0.2),
    )
    return Experts(*w, *((numbers(e, F, seed=4), numbers(e, F, seed=5), numbers(e, D, seed=6)) if bias else ()))


def routing(kind):
    """experts `[N k]` and E."""
    rng = np.random.default_rng(0)

    def some(e, k):
        return np.stack([rng.permutation(e)[:k] for _ in range(N)])

    if kind == "even":
        return (np.arange(N)[:, None] + np.arange(2)) % 8, 8
    if kind == "random":
        return some(8, 3), 8
    if kind == "padding":  # a third of the tokens choose nothing, others only some
        chosen = some(8, 3)
        chosen[rng.random(chosen.shape) < 0.2] = 8
        chosen[::3] = 8
        return chosen, 8
    if kind == "all_to_one":
        return np.full((N, 1), 5), 8
    if kind == "one_for_all":  # one expert in every token's choice, many never chosen
        return np.stack([np.full(N, 3), np.arange(N) % 2], 1), 8
    if kind == "single":
        return np.zeros((N, 1), int), 1
    assert kind == "all"
    return some(4, 4), 4


def value_and_gradients(fn, experts, unit):
    """One compiled call: y and the gradients to x, weights and experts' weights."""

    def loss(x, p, w):
        y = fn(x, experts, p, w, unit)
        return jnp.sum(jnp.sin(y) * (1 + jnp.arange(D))), y

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def same(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize("kind", ["even", "random", "padding", "all_to_one", "one_for_all", "single", "all"])
def test_paths_agree(kind):
    experts, e = routing(kind)
    experts, w, unit = jnp.asarray(experts, jnp.int32), make_experts(e), Unit("gpt_oss", 7.0)
    x, p = numbers(N, D), jnp.abs(numbers(*experts.shape, seed=7)) + 0.1
    want = value_and_gradients(experts_dense, experts, unit)(x, p, w)
    assert float(jnp.abs(want[1]).max()) > 0.1
    same(value_and_gradients(experts_sorted, experts, unit)(x, p, w), want)
    same(value_and_gradients(experts_few, experts, unit)(x, p, w), want)
    plenty = value_and_gradients(lambda *a: experts_capacity(*a, capacity=N)[0], experts, unit)
    same(plenty(x, p, w), want)


def test_what_is_beyond_the_rows_of_an_expert_is_done_by_the_loop():
    experts, e = routing("random")
    experts, w, unit = jnp.asarray(experts, jnp.int32), make_experts(e, bias=False), Unit("swiglu", None)
    x, p = numbers(N, D), jnp.abs(numbers(*experts.shape, seed=7))
    want = value_and_gradients(experts_dense, experts, unit)(x, p, w)
    tight = value_and_gradients(lambda *a: experts_sorted(*a, capacity=8), experts, unit)
    assert np.bincount(np.asarray(experts).ravel()).min() > 8  # every expert overflows
    same(tight(x, p, w), want)


def test_experts_that_nobody_chose_have_a_gradient_of_exactly_zero():
    experts, e = routing("one_for_all")
    unit = Unit("swiglu", None)
    grads = value_and_gradients(experts_sorted, jnp.asarray(experts, jnp.int32), unit)(
        numbers(N, D), jnp.ones(experts.shape), make_experts(e)
    )[0][2]
    for g in grads:
        size = np.abs(np.asarray(g)).reshape(e, -1).max(1)
        assert (size[[0, 1, 3]] > 0).all() and (size[[2, 4, 5, 6, 7]] == 0).all()


def test_capacity_keeps_first_choices_before_second_ones_and_counts_what_it_drops():
    """Five tokens, all to expert 0, room for three: tokens 0 to 2 are computed, 3 and 4 get exactly 0."""
    w, unit = make_experts(2), Unit("swiglu", None)
    x, one = numbers(5, D), jnp.ones((5, 1))
    y, dropped = experts_capacity(x, jnp.zeros((5, 1), jnp.int32), one, w, unit, 3)
    np.testing.assert_array_equal(y[3:], 0)
    same(y[:3], experts_dense(x[:3], jnp.zeros((3, 1), jnp.int32), one[:3], w, unit))
    assert float(dropped) == 2
    # Second choices of tokens 0 and 1 come before the first choices of 2 and 3 in the sequence, and after them in the queue.
    chosen = jnp.array([[0, 1], [0, 1], [1, 0], [1, 0]], jnp.int32)
    plan = make_plan(chosen, 2, 3, by_choice=True)
    kept = np.asarray(plan.slot < 6)
    np.testing.assert_array_equal(kept, [[True, True], [True, False], [True, True], [True, False]])


def test_a_queue_longer_than_small_integers_drops_nothing():
    """A count in int8 would wrap at 128."""
    y, dropped = experts_capacity(
        numbers(200, D), jnp.zeros((200, 1), jnp.int32), jnp.ones((200, 1)), make_experts(2), Unit("swiglu", None), 256
    )
    assert float(dropped) == 0 and bool((jnp.abs(y).max(1) > 0).all())


def test_counts_ignore_what_is_no_expert():
    np.testing.assert_array_equal(count(jnp.array([[0, 2], [2, 3], [-1, 3]]), 3), [1, 0, 2])


def test_rows_of_an_expert_follow_its_share_not_the_number_of_experts():
    for e in (8, 16, 64):
        assert 4096 <= e * capacity_of(4096, e) <= 1.25 * 4096
