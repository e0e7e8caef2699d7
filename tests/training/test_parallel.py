"""Training on a mesh: the same losses as on one device, shards where they belong, the collectives that theory says."""

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.kda import KDA
from jaxllm.mesh import build_mesh, param_shardings, use_mesh
from jaxllm.params import declare, is_declared
from jaxllm.training.feed import place
from jaxllm.training.loop import batch_shards
from jaxllm.training.state import abstract_state, leaves_by_path, new_state
from jaxllm.training.step import compile_step, make_train_step

LAYERS = 2


def model_of(tiny, **fields):
    # even sizes, so that every axis divides by two and eight rows by four
    return tiny.model(
        mixer="gqa", ffn="mlp", layers=f"{LAYERS}* global/dense", vocab_size=30, vocab_multiple=8, **fields
    )


def collectives(text):
    """`{"all-reduce": n, ...}` of a compiled program's text; the two halves of an asynchronous one count once."""
    found = re.findall(r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    return Counter(found)


def trained(tiny, axes, steps, accumulate=1, model=None):
    """Losses of some steps on a mesh, and the final state."""
    model, optimiser = model or model_of(tiny), tiny.optimiser()
    mesh = build_mesh(axes)
    state = new_state(model, optimiser, 0, mesh=mesh)
    shards = batch_shards(mesh, None)
    step = make_train_step(model, tiny.objectives, optimiser, accumulate=accumulate, shards=shards)
    losses = []
    with use_mesh(mesh):
        batches = [place(tiny.batch(rows=8, vocab=30, seed=i), mesh) for i in range(steps)]
        compiled, _ = compile_step(step, state, batches[0], mesh)
        for batch in batches:
            state, metrics = compiled(state, batch, np.int32(10))
            losses.append(float(metrics["loss"]))
    return np.array(losses), state, compiled


@pytest.fixture(scope="module")
def alone(tiny):
    return trained(tiny, {}, 10)[0]


def test_eight_devices_in_a_cube_give_the_losses_of_one(tiny, alone, devices):
    losses, state, _ = trained(tiny, {"data": 2, "fsdp": 2, "tensor": 2}, 10)
    np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0]
    for name, leaf in leaves_by_path(state).items():
        if name.endswith(
            "mixer/q_proj"
        ):  # parameters and both moments alike: [layers, embed / fsdp, heads / tensor, head]
            assert leaf.sharding.shard_shape(leaf.shape) == (LAYERS, 8, 2, 4), name
    assert len(state.params["embed"].sharding.device_set) == 8


def test_data_parallel_micro_batches_give_the_same_losses_and_reduce_gradients(tiny, alone, devices):
    losses, _, compiled = trained(tiny, {"data": 2}, 3, accumulate=2)
    np.testing.assert_allclose(losses, alone[:3], rtol=0, atol=1e-5)
    found = collectives(compiled.as_text())
    assert found["all-reduce"] >= 1 and "all-gather" not in found, found


def test_devices_that_split_rows_train_a_hybrid_as_one_does(tiny, devices):
    """Three tokens a device: a recurrence composes its states, attention gathers its keys; documents and padding lie across."""
    mixers = {
        "linear": functools.partial(KDA, num_heads=4, chunk_size=4),
        "global": functools.partial(GQA, num_heads=4),
    }
    model = model_of(tiny).clone(layers="linear/dense | global/dense", mixers=mixers)
    one, split = (trained(tiny, axes, 2, model=model)[0] for axes in ({}, {"data": 2, "context": 4}))
    np.testing.assert_allclose(split, one, rtol=0, atol=1e-5)


def test_a_state_is_described_as_it_is_made(tiny, devices):
    mesh = build_mesh({"fsdp": 2, "tensor": 2})
    model, optimiser = model_of(tiny), tiny.optimiser()
    state, described = new_state(model, optimiser, 0, mesh=mesh), abstract_state(model, optimiser, mesh=mesh)
    for (name, leaf), want in zip(leaves_by_path(state).items(), jax.tree.leaves(described), strict=True):
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype), name
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim), name


def lowered_forward(tiny, axes):
    model, mesh = model_of(tiny, scan=False), build_mesh(axes)
    shapes = jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.value.shape, d.value.dtype, sharding=s),
        declare(model),
        param_shardings(declare(model), mesh),
        is_leaf=is_declared,
    )

    def forward(params, batch):
        ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"])
        return model.apply({"params": params}, ctx, method="backbone")[1].hidden

    with use_mesh(mesh):
        return collectives(jax.jit(forward).lower(shapes, place(tiny.batch(rows=8), mesh)).compile().as_text())


def test_tensor_parallelism_reduces_once_a_half_block(tiny, devices):
    # column split, then row split: one sum after attention and one after the ffn, and one for the split embedding table
    found = lowered_forward(tiny, {"tensor": 2})
    assert found["all-reduce"] == 2 * LAYERS + 1
    assert set(found) <= {"all-reduce"}, found


def test_fsdp_gathers_weights_and_data_parallelism_nothing(tiny, devices):
    assert lowered_forward(tiny, {"data": 2}) == {}
    assert lowered_forward(tiny, {"fsdp": 2})["all-gather"] >= 1


def test_what_does_not_divide_is_refused_before_compiling(tiny, devices):
    with pytest.raises(
        UserError, match=r"parameter g0/b0/mixer/k_proj: axis 'kv_heads' of size 2 .* 'tensor' of size 4"
    ):
        new_state(model_of(tiny), tiny.optimiser(), 0, mesh=build_mesh({"tensor": 4}))
