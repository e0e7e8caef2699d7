import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.mesh import RULES, batch_sharding, build_mesh, check_batch, param_shardings, partition_spec, shard, use_mesh
from jaxllm.model import LanguageModel
from jaxllm.params import declare, init_params


def model(heads=4, kv=2, d_ff=64, vocab=64, layers="2* g/d", **kwargs):
    mixers = {"g": functools.partial(GQA, num_heads=heads, num_kv_heads=kv)}
    return LanguageModel(
        vocab_size=vocab,
        d_model=32,
        layers=layers,
        mixers=mixers,
        ffns={"d": functools.partial(MLP, d_ff=d_ff)},
        **kwargs,
    )


def test_one_size_may_be_what_is_left():
    mesh = build_mesh({"data": -1, "tensor": 2})
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    assert dict(build_mesh().shape) == {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


@pytest.mark.parametrize(
    "axes,words",
    [
        ({"data": 16}, "16 devices, 8 are present"),
        ({"data": -1, "fsdp": -1}, "at most once"),
        ({"data": -1, "tensor": 3}, "does not divide"),
        ({"data": 0}, "at least 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(axes, words):
    with pytest.raises(UserError, match=words):
        build_mesh(axes)


def test_a_dimension_that_does_not_divide_names_parameter_axis_and_sizes():
    mesh = build_mesh({"tensor": 4})
    with pytest.raises(
        UserError, match=r"parameter g0/b0/mixer/k_proj: axis 'kv_heads' of size 2 .* 'tensor' of size 4"
    ):
        param_shardings(declare(model()), mesh)
    with pytest.raises(UserError, match="parameter embed: axis 'vocab' of size 62"):
        param_shardings(declare(model(kv=4, vocab=62)), mesh)


def test_two_logical_axes_on_one_mesh_axis_are_refused():
    mesh = build_mesh({"tensor": 2})
    with pytest.raises(
        UserError, match="parameter .*'embed' and 'heads' both map to mesh axis 'tensor'|'vocab' and 'embed' both map"
    ):
        param_shardings(declare(model()), mesh, {"embed": "tensor"})
    with pytest.raises(UserError, match="no rule"):
        partition_spec(("nonsense",), mesh, RULES)


def test_batch_must_divide():
    mesh = build_mesh({"data": 2, "fsdp": 2})
    assert batch_sharding(mesh).spec == P(("data", "fsdp"), None)
    check_batch(8, 5, mesh)
    with pytest.raises(UserError, match="train.batch_size: 6"):
        check_batch(6, 8, mesh)
    mesh = build_mesh({"data": 2, "context": 4})
    assert batch_sharding(mesh).spec == P("data", "context")
    check_batch(2, 12, mesh)
    with pytest.raises(
        UserError, match="train.seq_len: 6 tokens of a row do not divide by mesh axes context of size 4"
    ):
        check_batch(2, 6, mesh)


def test_shard_does_nothing_without_a_mesh_and_constrains_under_one():
    x = jnp.ones((4, 8, 32))
    assert shard(x, "batch", "length", "act_embed") is x
    mesh = build_mesh({"data": 2, "tensor": 4})
    with use_mesh(mesh):
        y = jax.jit(lambda x: shard(x, "batch", "length", "act_mlp"))(x)
    assert y.sharding.spec == P("data", None, "tensor")


def test_parameters_are_born_sharded_and_equal_on_every_mesh():
    m = model()
    one = init_params(m, jax.random.key(3))
    for axes in ({"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}):
        mesh = build_mesh(axes)
        many = init_params(m, jax.random.key(3), mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, one, many)
        w = many["g0"]["b0"]["ffn"]["up_proj"]
        assert w.sharding.shard_shape(w.shape)[1] == 32 // axes["fsdp"]
    other = init_params(m, jax.random.key(4))
    assert not np.array_equal(one["embed"], other["embed"])
    layers = np.asarray(one["g0"]["b0"]["ffn"]["up_proj"])
    assert not np.array_equal(layers[0], layers[1]), "each repeat draws its own numbers"


@pytest.mark.parametrize("axis_type", ["auto"])
def test_axis_types_are_chosen_here(axis_type):
    mesh = build_mesh({"data": 2}, axis_type=axis_type)
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    with pytest.raises(UserError, match="mesh.axis_type"):
        build_mesh(axis_type="manual")


def count(text: str, kind: str) -> int:
    return sum(f" {kind}(" in line or f" {kind}-start(" in line for line in text.splitlines())


def forward_hlo(axes, layers="a/d a/d a/d"):
    """Compiled forward of an unrolled model: HLO counts a scan's body once."""
    m = LanguageModel(
        vocab_size=64,
        d_model=32,
        layers="3* g/d",
        mixers={"g": functools.partial(GQA, num_heads=4)},
        ffns={"d": functools.partial(MLP, d_ff=64)},
        scan=False,
    )
    mesh = build_mesh(axes)
    params = init_params(m, jax.random.key(0), mesh=mesh)
    ctx = jax.device_put(Context.whole(jnp.zeros((8, 16), jnp.int32)), batch_sharding(mesh))
    with use_mesh(mesh):
        return (
            jax.jit(lambda p, ctx: m.apply({"params": p}, ctx, method="backbone")[1].hidden)
            .lower(params, ctx)
            .compile()
            .as_text()
        )


def test_tensor_parallelism_is_one_all_reduce_per_half_block():
    text = forward_hlo({"tensor": 2})
    # six half blocks, and one for the embedding table split over the vocabulary
    assert count(text, "all-reduce") == 2 * 3 + 1
    assert count(text, "all-gather") == 0


def test_data_parallelism_needs_nothing_in_the_forward_and_fsdp_gathers():
    text = forward_hlo({"data": 4})
    assert count(text, "all-reduce") == count(text, "all-gather") == 0
    assert count(forward_hlo({"fsdp": 4}), "all-gather") >= 7 * 3  # seven matrices a layer
