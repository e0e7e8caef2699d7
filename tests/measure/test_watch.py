"""What a run is told of: slow input, a function compiled again, parameters that move unlike the rest."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compose import compose
from jaxllm.measure.watch import Recompiled, SlowInput, outliers
from jaxllm.params import declare, is_declared
from jaxllm.training.state import trained
from jaxllm.training.step import by_parameter


def test_slow_input_is_said_once_and_only_when_the_device_waits():
    lines = []
    slow = SlowInput(lines.append, steps=4)
    for _ in range(10):
        slow.add(0.01, 1.0)
    assert lines == []
    for _ in range(10):
        slow.add(0.5, 1.0)
    assert len(lines) == 1 and "train.prefetch" in lines[0]


def test_a_parameter_that_moves_unlike_the_rest_is_named_by_its_repeat():
    ratios = {
        "g0/b0/mixer/q_proj": np.array([1e-3, 2e-3]),
        "embed": np.array(1e-3),
        "g0/b0/ffn/up": np.array([1e-3, 1.0]),
        "frozen": np.array(0.0),
    }
    lines = outliers(ratios)
    assert len(lines) == 1 and lines[0].startswith(
        "g0/b0/ffn/up, repeat 1: its update is 1.0e+00 of its size, 1000 times the median"
    )
    slow = outliers({"a": 1e-3, "b": 1e-3, "c": 1e-6, "d": np.inf, "e": 1e-3})
    assert len(slow) == 1 and slow[0].startswith("c: ") and "1 / 1000 of the median" in slow[0]
    assert outliers({"a": 1.0, "b": 1e-9}) == []


def test_the_argument_that_made_a_function_compile_again_is_named():
    lines = []
    traced = []
    function = Recompiled(
        jax.jit(lambda batch, n: traced.append(1) or jnp.sum(batch["tokens"]) * n), "evaluation", lines.append
    )
    for batch, n in (((2, 3), 1), ((2, 3), 7), ((2, 5), 1)):
        function({"tokens": jnp.zeros(batch, jnp.int32)}, n)
    assert len(traced) == 2  # what XLA did, and what was said of it
    assert lines == ["evaluation: compiled again (2 times now): argument [0]['tokens'] int32[2,3] -> int32[2,5]"]
    function({"tokens": jnp.zeros((2, 5), jnp.float32)}, 1)
    function({"tokens": jnp.zeros((2, 3), jnp.int32)}, 1)
    assert len(traced) == 3 and len(lines) == 2 and "int32[2,5] -> float32[2,5]" in lines[1]


def test_norms_are_of_each_parameter_and_each_repeat():
    declared = declare(compose(["model=tiny", "model.vocab_size=64"]).build("model"))
    params = jax.tree.map(lambda box: np.full(box.value.shape, 2.0, np.float32), declared, is_leaf=is_declared)
    updates = jax.tree.map(lambda p: 0.01 * p, params)
    updates["g0"]["b0"]["ffn"]["up_proj"][1] *= 100
    got = by_parameter(declared, jax.tree.map(np.ones_like, params), updates, params)
    np.testing.assert_allclose(got["watch/grad_norm/embed"], 64.0)  # of 64 x 64 ones
    np.testing.assert_allclose(got["watch/update_ratio/g0/b0/ffn/up_proj"], [0.01, 1.0], rtol=1e-5)
    paths = {name.split("/", 2)[2] for name in got}
    assert len(paths) == len(jax.tree.leaves(trained(declared))) == len(got) // 2
    head = "watch/update_ratio/"
    lines = outliers({name.removeprefix(head): x for name, x in got.items() if name.startswith(head)})
    assert len(lines) == 1 and lines[0].startswith("g0/b0/ffn/up_proj, repeat 1")
