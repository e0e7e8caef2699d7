"""The train step: what it divides by, what it leaves alone, what it never lets through."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.errors import UserError
from jaxllm.params import declare
from jaxllm.training.losses import mean
from jaxllm.training.objectives import Aux, NextToken
from jaxllm.training.optimisers import Optax
from jaxllm.training.schedules import Constant, Cosine
from jaxllm.training.settings import StageSettings
from jaxllm.training.stages import free_parameters
from jaxllm.training.state import leaves_by_path, new_state

# At rate 1 and without clipping the change of the parameters is the gradient itself.
SGD = Optax(optimizer=optax.sgd, lr=1.0, clip_norm=None, schedule=Constant())
STILL = Optax(optimizer=optax.sgd, lr=1e-30, clip_norm=None, schedule=Constant())


def test_the_mean_is_over_tokens_not_over_micro_batches():
    # Three tokens of loss 1 in one micro-batch and one of loss 5 in the other: 2, not (1 + 5) / 2.
    losses, weights = jnp.array([[1.0, 1, 1], [5, 9, 9]]), jnp.array([[1.0, 1, 1], [1, 0, 0]])
    shares = [mean(jnp.sum(row * w), jnp.sum(weights)) for row, w in zip(losses, weights, strict=True)]
    assert float(sum(shares)) == 2.0
    assert float(mean(jnp.float32(0), jnp.float32(0))) == 0.0


def test_any_number_of_micro_batches_gives_the_same_step(tiny):
    model, batch = tiny.model(mixer="gqa"), tiny.batch(rows=4)
    assert len({float(r.sum()) for r in batch["weights"]}) > 1  # ragged
    base, (base_metrics,) = tiny.run(model, [batch], optimiser=SGD)
    for parts in (2, 4):
        state, (metrics,) = tiny.run(model, [batch], optimiser=SGD, accumulate=parts)
        got = leaves_by_path(state.params)
        for path, want in leaves_by_path(base.params).items():
            np.testing.assert_allclose(got[path], want, rtol=0, atol=1e-6, err_msg=path)
        for name in ("loss", "next_token", "next_token/nll", "aux_balance", "grad_norm", "tokens", "trained_tokens"):
            np.testing.assert_allclose(metrics[name], base_metrics[name], rtol=2e-6, err_msg=name)
        assert int(state.updates) == 1 and int(state.step) == 1  # one step is one update


def test_auxiliary_losses_count_with_their_weight_and_padding_does_not(tiny):
    batch, model = tiny.batch(), tiny.model()
    base, (one,) = tiny.run(model, [batch], optimiser=SGD)
    objectives = [{**tiny.objectives, "b": Aux(name="balance", weight=w)} for w in (0.0, 2.0)]
    (none, (zero,)), (double, (two,)) = (tiny.run(model, [batch], o, SGD) for o in objectives)
    np.testing.assert_allclose(one["loss"], one["next_token"] + one["aux_balance"], rtol=1e-6)
    np.testing.assert_allclose(two["loss"], two["next_token"] + 2 * two["b"], rtol=1e-6)
    assert zero["loss"] == zero["next_token"]
    for value in (zero["b"], two["b"]):
        np.testing.assert_allclose(value, one["aux_balance"], rtol=1e-6)
    up = [np.asarray(s.params["g0"]["b0"]["ffn"]["up"]) for s in (none, base, double)]
    assert np.abs(up[1] - up[0]).max() > 1e-4
    np.testing.assert_allclose(up[2] - up[0], 2 * (up[1] - up[0]), atol=1e-6)  # twice the weight, twice the gradient
    padded = {k: np.pad(v, ((0, 0), (0, 5))) for k, v in batch.items()}
    _, (more,) = tiny.run(model, [padded], optimiser=SGD)
    np.testing.assert_allclose(more["loss"], one["loss"], rtol=1e-6)


def test_a_loss_the_model_does_not_report_is_named(tiny):
    with pytest.raises(UserError, match="'balanc'; it reports balance"):
        tiny.run(tiny.model(), [tiny.batch()], {**tiny.objectives, "b": Aux(name="balanc")})


@pytest.mark.parametrize("parts", [1, 4])
def test_states_move_once_a_step_by_the_summed_statistic(tiny, parts):
    batch = tiny.batch()
    state, (metrics,) = tiny.run(tiny.model(mixer="gqa"), [batch], optimiser=SGD, accumulate=parts)
    valid = batch["segments"] > 0
    even = int(((batch["tokens"] % 2 == 0) & valid).sum())
    odd = int(valid.sum()) - even
    assert even != odd
    bias = state.params["g0"]["b0"]["ffn"]["bias"]  # one sign() step for the whole batch, in each layer
    np.testing.assert_allclose(bias, np.tile(0.01 * np.sign([even - odd, 0]), (2, 1)), atol=1e-8)
    assert metrics["metric/g0/b0/ffn/load"].shape == (2,)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_that_is_not_finite_moves_nothing(tiny, parts):
    good, bad, model = tiny.batch(), tiny.batch(), tiny.model()
    bad["weights"][0, 0] = np.inf
    options = {"optimiser": tiny.optimiser(schedule=Cosine(warmup_steps=2)), "accumulate": parts}
    before, (first,) = tiny.run(model, [good], **options)
    after, (metrics,) = tiny.run(model, [bad], state=before, **options)
    assert not metrics["finite"] and metrics["skipped"] == 1 and int(after.skipped) == 1
    tiny.same((before.params, before.opt_state, before.updates), (after.params, after.opt_state, after.updates))
    assert int(after.step) == int(before.step) + 1  # but the data goes on
    # and the run goes on as if the batch had not been there: the same rate, the same parameters
    straight, (_, want) = tiny.run(model, [good, good], **options)
    resumed, (got,) = tiny.run(model, [good], state=after, **options)
    tiny.same((straight.params, straight.opt_state), (resumed.params, resumed.opt_state))
    assert want["lr"] == got["lr"] != first["lr"]


def test_frozen_parameters_do_not_move_and_keep_their_moments(tiny):
    model = tiny.model()
    options = {"optimiser": tiny.optimiser(schedule=Cosine(warmup_steps=2))}
    free = free_parameters(declare(model), StageSettings(freeze=("g0/*/mixer/*", "*bias")))
    warm, _ = tiny.run(model, [tiny.batch()], **options)
    state, (metrics,) = tiny.run(model, [tiny.batch(seed=1)], state=warm, free=free, **options)
    old, new = leaves_by_path(warm.params), leaves_by_path(state.params)
    for name in old:
        moved = not np.array_equal(old[name], new[name])
        assert moved == ("/mixer/" not in name and not name.endswith("bias")), name
    old, new = leaves_by_path(warm.opt_state), leaves_by_path(state.opt_state)
    assert not [n for n in old if "ffn/bias" in n]  # no moments at all for what has no gradient
    for name in old:
        assert np.array_equal(old[name], new[name]) == ("/mixer/" in name), name
    _, (unfrozen,) = tiny.run(model, [tiny.batch(seed=1)], state=warm, **options)
    assert metrics["grad_norm"] < unfrozen["grad_norm"]  # the frozen part is in no norm
    np.testing.assert_allclose(metrics["loss"], unfrozen["loss"], rtol=1e-6)


def test_a_step_leaves_its_state_as_bound_to_devices_as_it_was(tiny):
    """A program is compiled for arguments that are bound to a device, and another for those that are not."""
    end, _ = tiny.run(tiny.model(), [tiny.batch()], optimiser=SGD)
    bound = [[x.committed for x in jax.tree.leaves(state)] for state in (new_state(tiny.model(), SGD, 0), end)]
    assert bound[0] == bound[1] and len(set(bound[0])) == 1


def test_the_gradient_is_clipped_by_its_global_norm(tiny):
    model, batch = tiny.model(), tiny.batch()
    _, (free,) = tiny.run(model, [batch], optimiser=SGD)
    clip = Optax(optimizer=optax.sgd, lr=1.0, clip_norm=0.05, schedule=Constant())
    _, (clipped,) = tiny.run(model, [batch], optimiser=clip)
    assert free["grad_norm"] > 0.05
    np.testing.assert_allclose(free["grad_norm"], clipped["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(free["update_norm"], free["grad_norm"], rtol=1e-6)
    np.testing.assert_allclose(clipped["update_norm"], 0.05, rtol=1e-5)


def test_float32_masters_move_where_bfloat16_would_stand_still(tiny):
    # Adam-sized steps of 1e-3 on a weight of 1: bfloat16 rounds each of them away.
    model = tiny.model(param_dtype="bfloat16", dtype="bfloat16", layers="1* global/dense")
    optimiser = tiny.optimiser(lr=1e-3, weight_decay=0.0)
    state, _ = tiny.run(model, [tiny.batch(seed=i % 2) for i in range(20)], optimiser=optimiser, total_updates=20)
    scale, master = state.params["final_norm"]["scale"], leaves_by_path(state.master)["final_norm/scale"]
    assert scale.dtype == jnp.bfloat16 and master.dtype == jnp.float32
    assert np.abs(np.asarray(master) - 1.0).max() > 5e-3
    np.testing.assert_array_equal(master.astype(jnp.bfloat16), scale)
    assert np.any(np.asarray(scale, np.float32) != 1.0)
    plain = new_state(tiny.model(), optimiser, 0)
    assert jax.tree.leaves(plain.master) == []  # a float32 model pays nothing


def test_without_masters_small_updates_are_lost_and_the_loss_of_them_is_seen(tiny):
    model = tiny.model(param_dtype="bfloat16", dtype="bfloat16", layers="1* global/dense")
    optimiser = tiny.optimiser(lr=1e-3, weight_decay=0.0, master=False)
    state = new_state(model, optimiser, 0)
    assert jax.tree.leaves(state.master) == []
    assert {x.dtype for x in jax.tree.leaves(state.opt_state) if x.ndim} == {jnp.dtype("float32")}  # moments
    state, metrics = tiny.run(model, [tiny.batch()] * 3, optimiser=optimiser, state=state, watch=True)
    np.testing.assert_array_equal(state.params["final_norm"]["scale"], 1.0)  # 1e-3 is a quarter of its last bit
    assert state.params["final_norm"]["scale"].dtype == jnp.bfloat16
    for m in metrics:
        assert m["moved_norm"] > 0 and abs(m["moved_norm"] / m["update_norm"] - 1) > 1e-3
    _, (exact,) = tiny.run(tiny.model(layers="1* global/dense"), [tiny.batch()], optimiser=optimiser, watch=True)
    np.testing.assert_allclose(exact["moved_norm"], exact["update_norm"], rtol=1e-3)


def test_dropout_differs_by_step_and_micro_batch_and_repeats_on_resume(tiny):
    model = tiny.model(dropout=0.5, layers="1* global/dense")
    two, four = ({k: np.repeat(v[:1], n, axis=0) for k, v in tiny.batch().items()} for n in (2, 4))
    _, metrics = tiny.run(model, [two] * 3, optimiser=STILL)  # nothing moves: only the masks differ
    losses = [float(m["loss"]) for m in metrics]
    assert len(set(losses)) == 3
    middle, _ = tiny.run(model, [two], optimiser=STILL)
    _, again = tiny.run(model, [two] * 2, optimiser=STILL, state=middle)
    assert [float(m["loss"]) for m in again] == losses[1:]
    _, (split,) = tiny.run(model, [four], optimiser=STILL, accumulate=2)
    assert abs(float(split["loss"]) - losses[0]) > 1e-4  # equal masks in both halves would give the same loss


def test_weights_follow_their_schedule(tiny):
    objectives = {"next_token": NextToken(chunk=24, weight=3.0, schedule=Cosine(warmup_steps=4))}
    objectives["b"] = Aux(name="balance", weight=0.0)
    _, metrics = tiny.run(tiny.model(), [tiny.batch()] * 5, objectives)
    ratio = [float(m["loss"] / m["next_token"]) for m in metrics]
    np.testing.assert_allclose(ratio[:4], [0.75, 1.5, 2.25, 3.0], rtol=1e-5)
    assert ratio[4] < 3.0
