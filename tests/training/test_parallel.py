"""Training on a mesh: the same losses as on one device, shards where they belong, the collectives that theory says."""

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.draft import Eagle3
from jaxllm.layers.gqa import GQA
from jaxllm.layers.kda import KDA
from jaxllm.layers.mtp import ChainedMTP
from jaxllm.mesh import build_mesh, param_shardings, use_mesh
from jaxllm.params import declare, init_params, is_declared
from jaxllm.training.feed import place
from jaxllm.training.loop import batch_shards
from jaxllm.training.objectives import Distill, Draft, MultiToken, NextToken
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


def trained(tiny, axes, steps, **options):
    """Losses of some steps on a mesh, and the final state."""
    metrics, state, compiled = stepped(tiny, axes, steps, **options)
    return np.array([float(m["loss"]) for m in metrics]), state, compiled


def stepped(tiny, axes, steps, accumulate=1, model=None, objectives=None, teacher=None):
    """Metrics of some steps on a mesh, and the final state. teacher: a model, whose parameters lie on the mesh as its own would."""
    model, optimiser = model or model_of(tiny), tiny.optimiser()
    mesh = build_mesh(axes)
    state = new_state(model, optimiser, 0, mesh=mesh)
    teachers = {} if teacher is None else {"t": teacher}
    frozen = {name: init_params(m, jax.random.key(7), mesh=mesh) for name, m in teachers.items()}
    options = {"accumulate": accumulate, "shards": batch_shards(mesh, None), "teachers": teachers}
    step = make_train_step(model, objectives or tiny.objectives, optimiser, **options)
    found = []
    with use_mesh(mesh):
        batches = [place(tiny.batch(rows=8, vocab=30, seed=i) | soft(objectives), mesh) for i in range(steps)]
        compiled, _ = compile_step(step, state, batches[0], mesh, frozen)
        for batch in batches:
            state, metrics = compiled(state, batch, np.int32(10), *([frozen] if frozen else []))
            found.append(jax.device_get(metrics))
    return found, state, compiled


def soft(objectives):
    """A teacher's four likeliest ids and the rest, as they come from disk, for the objective that reads them."""
    if objectives is None or not any(getattr(o, "labels", None) for o in objectives.values()):
        return {}
    logits = np.random.default_rng(5).standard_normal((8, 12, 30)) * 3
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-p, axis=-1)[..., :4]
    top = np.take_along_axis(p, ids, -1)
    logp = np.log(np.concatenate([top, 1 - top.sum(-1, keepdims=True)], -1))
    return {"soft_ids": ids.astype(np.int32), "soft_logp": logp.astype(np.float32)}


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


CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
TERMS = {
    "next_token": NextToken(chunk=24),
    "mtp_1": MultiToken(weight=0.3, chunk=24),
    "distill": Distill(teacher="t", temperature=2.0, chunk=24),
    "top": Distill(teacher="t", top_k=3, direction="reverse", chunk=24),
    "kept": Distill(labels="l", temperature=1.5, top_k=3, chunk=24),
}
MTP = functools.partial(ChainedMTP, mixer="global", ffn="dense")
EAGLE = functools.partial(Eagle3, mixer="global", ffn="dense", unroll=2, vocab=16)


@pytest.mark.parametrize("kind", ["mtp and distillation", "draft"])
def test_every_objective_is_the_same_in_a_cube_of_eight_with_micro_batches_and_remat(tiny, devices, kind):
    """Each term and each of its metrics, the teacher split like any model; and what a draft head's trunk is."""
    drafts = kind == "draft"
    objectives = {"draft": Draft(steps=2, chunk=24)} if drafts else TERMS
    teacher = None if drafts else model_of(tiny, d_model=24)
    runs = []
    for axes, accumulate, remat in (({}, 1, "none"), (CUBE, 2, "full")):
        model = model_of(tiny, remat=remat, **({"draft": EAGLE} if drafts else {"mtp": MTP}))
        options = {"accumulate": accumulate, "model": model, "objectives": objectives, "teacher": teacher}
        runs.append(stepped(tiny, axes, 2, **options))
    (one, _, _), (cube, state, _) = runs
    names = {"loss"} | {name for name in one[0] if name.split("/")[0] in objectives}
    assert {name.split("/")[0] for name in names} == {"loss", *objectives} and len(names) > 3
    for a, b in zip(one, cube, strict=True):
        for name in names:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5, err_msg=name)
    if drafts:
        start = leaves_by_path(new_state(model_of(tiny, draft=EAGLE), tiny.optimiser(), 0).params)
        for name, leaf in leaves_by_path(state.params).items():
            assert np.array_equal(leaf, start[name]) == (not name.startswith("draft/") or name == "draft/ids"), name


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
