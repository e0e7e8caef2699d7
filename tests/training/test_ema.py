"""Running averages of the parameters: the rule by hand, bad steps, half precision, what a checkpoint gives back."""

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.errors import UserError
from jaxllm.training.settings import TrainSettings
from jaxllm.training.state import abstract_state, leaves_by_path, new_state


def test_averages_by_hand_and_from_a_checkpoint(tiny, tmp_path):
    model, optimiser = tiny.model(ffn="counted"), tiny.optimiser()
    state = want = new_state(model, optimiser, 0, ema=True)
    want = leaves_by_path(want.params)
    for n in range(3):
        state, _ = tiny.run(model, [tiny.batch(seed=n)], state=state, optimiser=optimiser, ema=0.15)
        d = min(0.15, (1 + n) / (10 + n))
        now = leaves_by_path(state.params)
        want = {name: d * np.asarray(want[name]) + (1 - d) * np.asarray(now[name]) for name in want}
    got, now = leaves_by_path(state.averaged), leaves_by_path(state.params)
    assert set(leaves_by_path(state.ema)) == set(now) - {"g0/b0/ffn/bias"}  # what has no gradient is no average
    for name, leaf in got.items():
        np.testing.assert_allclose(leaf, now[name] if name.endswith("bias") else want[name], rtol=1e-6, atol=1e-7)
    bad = tiny.batch()
    bad["weights"][0, 0] = np.inf
    after, (metrics,) = tiny.run(model, [bad], state=state, optimiser=optimiser, ema=0.15)
    assert not metrics["finite"]
    tiny.same(after.ema, state.ema)

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    checkpoints.close()
    tiny.same(checkpoints.restore(abstract_state(model, optimiser, ema=True))[0], state)
    opened, raw = (leaves_by_path(checkpoints.restore_params(averaged=flag)[0]) for flag in (True, False))
    for name in now:
        np.testing.assert_array_equal(opened[name], got[name])
        np.testing.assert_array_equal(raw[name], now[name])
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed, _, _ = checkpoints.restore_params(shardings=jax.tree.map(lambda _: sharding, state.params))
    tiny.same(placed, state.averaged)


def test_averages_of_bfloat16_parameters_are_float32(tiny):
    model = tiny.model(param_dtype="bfloat16", layers="1* global/dense")
    state = new_state(model, tiny.optimiser(), 0, ema=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.ema)} == {np.dtype("float32")}
    assert state.averaged["embed"].dtype == state.params["embed"].dtype
    plain = new_state(model, tiny.optimiser(), 0)
    assert plain.ema is None and plain.averaged is plain.params
    with pytest.raises(UserError, match="ema: 1.0 must be above 0 and below 1"):
        TrainSettings(ema=1.0)
