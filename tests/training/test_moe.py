"""Training with experts: losses and statistics count once, however a step is cut, repeated or laid out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.layers.base import Context
from jaxllm.mesh import build_mesh, param_shardings, use_mesh
from jaxllm.params import declare, unstack
from jaxllm.training.optimisers import Optax
from jaxllm.training.schedules import Constant
from jaxllm.training.state import leaves_by_path, new_state

SGD = Optax(optimizer=optax.sgd, lr=1.0, clip_norm=None, schedule=Constant())
RATE = 0.01  # of the bias, in the model of the fixture


def batch_of(tiny):
    """Four equal rows: any split into micro-batches has the same balance, which is no linear function of a batch."""
    return {name: np.repeat(a[:1], 4, 0) for name, a in tiny.batch(rows=1).items()}


@pytest.fixture(scope="module")
def base(tiny):
    return tiny.run(tiny.model(ffn="moe"), [batch_of(tiny)], optimiser=SGD)


NAMES = ("loss", "aux_switch", "aux_router_z", "grad_norm")


def same_step(got, want, tolerance=1e-6):
    (state, (metrics,)), (base_state, (base_metrics,)) = got, want
    for name in NAMES:
        np.testing.assert_allclose(metrics[name], base_metrics[name], rtol=3e-6, err_msg=name)
    a, b = leaves_by_path(state.params), leaves_by_path(base_state.params)
    for path in b:
        np.testing.assert_allclose(a[path], b[path], rtol=0, atol=tolerance, err_msg=path)
    np.testing.assert_allclose(metrics["metric/g0/b0/ffn/load"], base_metrics["metric/g0/b0/ffn/load"], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "options"),
    [({}, {"accumulate": 4}), ({"remat": "full"}, {"accumulate": 2})],
    ids=["accumulated", "accumulated_remat"],
)
def test_a_step_is_the_same_however_it_is_cut(tiny, base, fields, options):
    same_step(tiny.run(tiny.model(ffn="moe", **fields), [batch_of(tiny)], optimiser=SGD, **options), base)


def test_the_bias_takes_one_sign_step_from_the_counts_of_the_whole_step(tiny, base):
    state, (metrics,) = base
    load = metrics["metric/g0/b0/ffn/load"]
    assert load.shape == (2, 4) and np.abs(load - 1).max() > 0.1
    np.testing.assert_allclose(state.params["g0"]["b0"]["ffn"]["router"]["bias"], RATE * np.sign(1 - load), atol=1e-8)


def test_unrolled_layers_report_what_scanned_ones_do(tiny):
    model, batch = tiny.model(ffn="moe"), batch_of(tiny)
    params = new_state(model, SGD, 0).params
    ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"], train=True)
    scanned = jax.jit(lambda p: model.apply({"params": p}, ctx)[1].aux)(params)
    unrolled = jax.jit(lambda p: model.unrolled().apply({"params": p}, ctx)[1].aux)(unstack(model, params))
    assert set(scanned) == set(unrolled) and "state/g0/b0/ffn/router/bias" in scanned
    for name in scanned:
        np.testing.assert_allclose(scanned[name], unrolled[name], rtol=2e-6, atol=1e-7, err_msg=name)


def test_statistics_of_a_mesh_are_those_of_all_its_shards(tiny):
    """Rows differ from device to device; counts and losses are global, and experts live on two devices each."""
    model, batch = tiny.model(ffn="moe"), tiny.batch(rows=4)
    params = new_state(model, SGD, 0).params
    ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"], train=True)

    def total(p):
        out = model.apply({"params": p}, ctx)[1]
        return jnp.sum(out.logits[..., 0]) + sum(v for k, v in out.aux.items() if k.startswith("loss/")), out.aux

    both = jax.grad(total, has_aux=True)
    grads, aux = jax.jit(both)(params)
    mesh = build_mesh({"data": 2, "expert": 2, "tensor": 2})
    shardings = param_shardings(declare(model), mesh)
    with use_mesh(mesh):
        got_grads, got = jax.jit(both)(jax.device_put(params, shardings))
    for name in aux:
        np.testing.assert_allclose(got[name], aux[name], rtol=1e-5, err_msg=name)
    for path, g in leaves_by_path(grads).items():
        np.testing.assert_allclose(
            leaves_by_path(got_grads)[path], g, atol=1e-5 * max(1, float(jnp.abs(g).max())), err_msg=path
        )
