"""Every path of the experts equals the naive one, whatever the routing: outputs and all gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.mesh import build_mesh, use_mesh
from jaxllm.ops import experts_parallel
from jaxllm.ops.dispatch import choose, dispatch
from jaxllm.ops.experts import Experts, Unit, experts_dense, experts_few
from jaxllm.ops.experts_ragged import experts_ragged
from jaxllm.ops.experts_sorted import blocks_of, capacity_of, experts_capacity, experts_sorted, make_plan
from jaxllm.ops.queues import count

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


KINDS = ("even", "random", "padding", "all_to_one", "one_for_all")


def routing(kind):
    """experts int32 `[N k]` and E; all of `KINDS` have k = 3 and E = 8, so that they share compiled programs."""
    rng = np.random.default_rng(0)
    some = np.stack([rng.permutation(8)[:3] for _ in range(N)])
    if kind == "even":
        chosen = (np.arange(N)[:, None] + np.arange(3)) % 8
    elif kind == "random":
        chosen = some
    elif kind == "padding":  # a third of the tokens choose nothing, others only some
        some[rng.random(some.shape) < 0.2] = 8
        some[::3] = 8
        chosen = some
    elif kind == "all_to_one":
        chosen = np.full((N, 3), [5, 8, -1])
    elif kind == "one_for_all":  # one expert in every token's choice, five never chosen
        chosen = np.stack([np.full(N, 3), np.arange(N) % 2, np.full(N, 8)], 1)
    elif kind == "single":
        return jnp.zeros((N, 1), jnp.int32), 1
    else:
        assert kind == "all"
        return jnp.asarray(np.stack([rng.permutation(4) for _ in range(N)]), jnp.int32), 4
    return jnp.asarray(chosen, jnp.int32), 8


def inputs(experts, e, bias=True):
    return numbers(N, D), experts, jnp.abs(numbers(*experts.shape, seed=7)) + 0.1, make_experts(e, bias)


GPT_OSS, SWIGLU = Unit("gpt_oss", 7.0), Unit("swiglu", None)


@functools.cache
def value_and_gradients(fn, unit=GPT_OSS):
    """One compiled call of x, experts, weights, w: the gradients to all but experts, and y."""

    def loss(x, experts, p, w):
        y = fn(x, experts, p, w, unit)
        return jnp.sum(jnp.sin(y) * (1 + jnp.arange(D))), y

    return jax.jit(jax.grad(loss, argnums=(0, 2, 3), has_aux=True))


def roomy(x, experts, p, w, unit):
    return experts_capacity(x, experts, p, w, unit, N)[0]


def looped(x, experts, p, w, unit):
    return experts_sorted(x, experts, p, w, unit, capacity=8)


def same(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize("kind", [*KINDS, "single", "all"])
def test_paths_agree(kind):
    given = inputs(*routing(kind))
    if kind == "random":
        assert np.bincount(np.asarray(given[1]).ravel()).min() > 8  # every expert of `looped` overflows
    want = value_and_gradients(experts_dense)(*given)
    assert float(jnp.abs(want[1]).max()) > 0.1
    for path in (experts_sorted, looped, experts_few, experts_ragged, roomy):
        same(value_and_gradients(path)(*given), want)


def test_queues_of_any_length_are_computed_once():
    """Beyond eight rows: nothing, one row, one and two small blocks, a large one half full, large and small ones."""
    assert blocks_of(1000, 8) == (64, 16)
    lengths = [0, 8, 9, 24, 25, 40, 41, 8 + 64, 8 + 64 + 18, 8 + 2 * 64 + 40]
    chosen = np.random.default_rng(0).permutation(np.repeat(np.arange(10), lengths))
    experts, n = jnp.asarray(chosen[:, None], jnp.int32), len(chosen)
    given = numbers(n, D), experts, jnp.abs(numbers(n, 1, seed=7)) + 0.1, make_experts(10)
    same(value_and_gradients(looped)(*given), value_and_gradients(experts_dense)(*given))


def test_experts_that_nobody_chose_have_a_gradient_of_exactly_zero():
    grads = value_and_gradients(experts_sorted)(*inputs(*routing("one_for_all")))[0][2]
    for g in grads:
        size = np.abs(np.asarray(g)).reshape(8, -1).max(1)
        assert (size[[0, 1, 3]] > 0).all() and (size[[2, 4, 5, 6, 7]] == 0).all()


def test_capacity_keeps_first_choices_before_second_ones_and_counts_what_it_drops():
    """Five tokens, all to expert 0, room for three: tokens 0 to 2 are computed, 3 and 4 get exactly 0."""
    w, unit = make_experts(2), SWIGLU
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
        numbers(200, D), jnp.zeros((200, 1), jnp.int32), jnp.ones((200, 1)), make_experts(2), SWIGLU, 256
    )
    assert float(dropped) == 0 and bool((jnp.abs(y).max(1) > 0).all())


@pytest.mark.parametrize("path", [experts_sorted, looped, roomy])
def test_a_choice_of_nobody_adds_zero_whatever_its_weight(path):
    x, experts, p, w = inputs(*routing("padding"))
    grads, y = value_and_gradients(path)(x, experts, jnp.where(experts >= 8, jnp.nan, p), w)
    np.testing.assert_array_equal(y[::3], 0)
    same((grads, y), value_and_gradients(experts_dense)(x, experts, p, w))


@pytest.mark.parametrize("path", [experts_sorted, looped, roomy])
def test_bfloat16_in_and_out_with_sums_in_float32(path):
    """Rounding moves a number by at most 2^-8 of it. Of a sum of n such terms that would be 2^-8 sqrt(n) if its steps were rounded too;
    as they are not, it stays near 2^-8: three roundings one after another (input, hidden layer, result), root mean square."""
    x, experts, p, w = inputs(*routing("random"))
    x, w, dy = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, w, numbers(N, D, seed=8)))

    def pulled(path, x, w, dy):
        y, pull = jax.vjp(lambda x, p, w: path(x, experts, p, w, SWIGLU), x, p, w)
        return y, *pull(dy)

    y, dx, dp, dw = got = jax.jit(functools.partial(pulled, path))(x, w, dy)
    assert {a.dtype for a in (dx, y, *dw)} == {jnp.dtype(jnp.bfloat16)} and dp.dtype == jnp.float32
    want = pulled(experts_dense, *jax.tree.map(lambda a: a.astype(jnp.float32), (x, w, dy)))
    for mine, true in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error = np.asarray(mine, np.float32) - np.asarray(true)
        assert np.sqrt(np.mean(error**2)) < 3 * 2**-8 * np.sqrt(np.mean(np.square(true)))


def test_counts_ignore_what_is_no_expert():
    np.testing.assert_array_equal(count(jnp.array([[0, 2], [2, 3], [-1, 3]]), 3), [1, 0, 2])


def test_rows_of_an_expert_follow_its_share_not_the_number_of_experts():
    for e in (8, 16, 64):
        assert 4096 <= e * capacity_of(2048, 4096, e) <= 1.25 * 4096
    assert capacity_of(12, 24, 8) == 12 and blocks_of(12, 12) == ()  # nothing can be left over: no loop


def over_devices(x, experts, p, w, unit, **kwargs):
    """`dispatch` on `[8 5 ..]`: 40 tokens in 8 rows."""
    rows = [a.reshape(8, 5, -1) for a in (x, experts, p)]
    y, dropped = dispatch("expert_parallel", *rows, w, unit, **kwargs)
    return y.reshape(N, D), dropped


MESHES = [{"expert": 8}, {"data": 2, "expert": 2, "tensor": 2}, {"fsdp": 4, "tensor": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=["expert", "mixed", "no_experts"])
def test_devices_that_share_the_experts_give_what_one_gives(axes):
    with use_mesh(build_mesh(axes)):
        shared = value_and_gradients(lambda *a: over_devices(*a)[0])
        got = {kind: shared(*inputs(*routing(kind))) for kind in KINDS}
    for kind in KINDS:
        same(got[kind], value_and_gradients(experts_dense)(*inputs(*routing(kind))))


def ragged_by_gathering(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`lax.ragged_all_to_all` by its definition, from gathers: CPUs have none."""
    del recv_sizes
    me = jax.lax.axis_index(axis_name)
    everyone = [jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)]
    row = jnp.arange(output.shape[0])
    for data, start, size, place in zip(*everyone, strict=True):
        inside = (row >= place[me]) & (row < place[me] + size[me])
        moved = jnp.take(data, row - place[me] + start[me], axis=0, mode="clip")
        output = jnp.where(inside.reshape(-1, *(1,) * (data.ndim - 1)), moved, output)
    return output


def test_a_ragged_exchange_moves_what_the_padded_one_moves(monkeypatch):
    monkeypatch.setattr(experts_parallel.lax, "ragged_all_to_all", ragged_by_gathering)
    given = inputs(*routing("padding"))
    with use_mesh(build_mesh({"expert": 4}, devices=jax.devices()[:4])):
        got = value_and_gradients(lambda *a: over_devices(*a, exchange="ragged")[0])(*given)
    same(got, value_and_gradients(experts_dense)(*given))


def test_an_exchange_with_little_room_drops_and_counts():
    """All 40 tokens of 4 devices want the expert of the first device; it has room for 3 of each device's 10."""
    w, unit, x = make_experts(4), SWIGLU, numbers(N, D)
    experts, one = jnp.zeros((N, 1), jnp.int32), jnp.ones((N, 1))
    with use_mesh(build_mesh({"expert": 4}, devices=jax.devices()[:4])):
        y, dropped = jax.jit(lambda x: over_devices(x, experts, one, w, unit, capacity_factor=1.2))(x)
    assert float(dropped) == 28
    kept = np.arange(N) % 10 < 3
    np.testing.assert_array_equal(np.asarray(y)[~kept], 0)
    same(y[kept], experts_dense(x, experts, one, w, unit)[kept])


def test_each_platform_has_its_path():
    assert choose("auto", 4096, 16, platform="cpu") == "sorted"
    assert choose("auto", 4, 16, platform="cpu") == "few"
    assert choose("auto", 4096, 16, platform="gpu") == choose("expert_parallel", 4, 16, platform="tpu") == "ragged"
    assert choose("sorted", 4, 16, platform="gpu") == "sorted"


def sizes(jaxpr):
    """Elements of every array that a jaxpr makes, in its inner ones too."""
    for eqn in jaxpr.eqns:
        yield from (math.prod(out.aval.shape) for out in eqn.outvars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from sizes(inner)


@pytest.mark.parametrize("path", ["sorted", "capacity"])
def test_no_array_has_tokens_times_experts_times_room(path):
    """The one-hot dispatch of GShard: forward and backward are traced, nothing is compiled."""
    n, e, room = 512, 16, 80

    def loss(x, p, w):
        if path == "sorted":
            return jnp.sum(experts_sorted(x, experts, p, w, SWIGLU))
        return jnp.sum(experts_capacity(x, experts, p, w, SWIGLU, room)[0])

    experts = jnp.asarray(np.arange(2 * n).reshape(n, 2) % e, jnp.int32)
    made = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(
        numbers(n, D), jnp.ones((n, 2)), make_experts(e, bias=False)
    )
    assert max(sizes(made.jaxpr)) <= 2 * max(n * 2, e * room) * F < n * e * room / 8
