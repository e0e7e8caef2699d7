"""The layer of experts: against dense layers it must equal, what it reports, what it costs, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.mlp import MLP
from jaxllm.layers.moe import MoE
from jaxllm.layers.router import HashRouter, SigmoidRouter, SoftmaxRouter, TopKSoftmaxRouter
from jaxllm.mesh import build_mesh, param_shardings
from jaxllm.params import is_declared

D, F, B, T = 16, 24, 2, 10


def layer(**fields):
    return MoE(**{"d_model": D, "num_experts": 8, "top_k": 2, "d_expert": F} | fields)


def declared(moe):
    ctx = Context.whole(jnp.zeros((1, 2), jnp.int32))
    return jax.eval_shape(lambda: moe.init(jax.random.key(0), jnp.zeros((1, 2, D)), ctx))["params"]


def draw(moe, seed=0):
    """Random numbers in the shape of the layer's parameters, biases included."""
    rng = np.random.default_rng(seed)

    def one(box):
        if box.value.dtype == jnp.int32:
            return jnp.asarray(box.init.draw(rng, box.value.shape), jnp.int32)
        return jnp.asarray(0.3 * rng.standard_normal(box.value.shape), jnp.float32)

    return jax.tree.map(one, declared(moe), is_leaf=is_declared)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (B, T, D))


WHOLE = Context.whole(jnp.arange(B * T).reshape(B, T) % 7, train=True)


def close(a, b, tolerance=2e-6):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "glu", [{}, {"glu": "clamped", "glu_limit": 0.5}, {"glu": "situ"}], ids=["swiglu", "clamped", "situ"]
)
def test_one_expert_is_the_dense_layer_and_so_is_the_shared_one(x, glu):
    one = layer(num_experts=1, top_k=1, **glu)
    params = draw(one)
    names = ("gate_proj", "up_proj", "down_proj")
    kind = {"activation": "situ"} if glu.get("glu") == "situ" else {"limit": glu.get("glu_limit")}
    mlp = MLP(d_model=D, d_ff=F, **kind)
    want, _ = mlp.apply({"params": {name: params[name][0] for name in names}}, x, WHOLE)
    close(one.apply({"params": params}, x, WHOLE)[0], want)
    both = layer(num_experts=1, top_k=1, shared_experts=1, **glu)
    shared = {"shared": {name: params[name][0] for name in names}}
    close(both.apply({"params": params | shared}, x, WHOLE)[0], 2 * want)
    gated = both.clone(shared_gate=True)
    gate = jax.random.normal(jax.random.key(2), (D, 1))
    got = gated.apply({"params": params | shared | {"shared_gate": gate}}, x, WHOLE)[0]
    close(got, want * (1 + jax.nn.sigmoid(x @ gate)))


def test_latent_experts_work_between_two_projections(x):
    moe = layer(latent_dim=6, shared_experts=1)
    params = draw(moe)
    assert params["gate_proj"].shape == (8, 6, F) and params["router"]["kernel"].shape == (D, 8)
    y, _ = moe.apply({"params": params}, x, WHOLE)
    inner = MoE(
        d_model=6, num_experts=8, top_k=2, d_expert=F, router=functools.partial(Fixed, x @ params["router"]["kernel"])
    )
    z = inner.apply(
        {"params": {n: params[n] for n in ("gate_proj", "up_proj", "down_proj")}}, x @ params["latent_down_proj"], WHOLE
    )[0]
    z = z / np.sqrt(np.mean(z**2, -1, keepdims=True) + 1e-6) * params["latent_norm"]["scale"]
    shared, _ = MLP(d_model=D, d_ff=F).apply({"params": params["shared"]}, x, WHOLE)
    close(y, z @ params["latent_up_proj"] + shared, 5e-6)


class Fixed(SoftmaxRouter):
    """A SoftmaxRouter of given logits."""

    def __new__(cls, logits, **kwargs):
        router = SoftmaxRouter(**kwargs)
        object.__setattr__(router, "_logits", lambda x: logits)
        return router


def test_padding_is_neither_routed_nor_counted(x):
    moe = layer(switch_loss=1.0, sequence_loss=1.0, z_loss=1.0, router=SigmoidRouter)
    params = draw(moe)
    y, aux = moe.apply({"params": params}, x, WHOLE)
    longer = jnp.pad(x, ((0, 0), (0, 5), (0, 0)), constant_values=3.0)
    ctx = Context.whole(
        jnp.zeros((B, T + 5), jnp.int32), jnp.pad(jnp.ones((B, T), jnp.int32), ((0, 0), (0, 5))), train=True
    )
    more, padded = moe.apply({"params": params}, longer, ctx)
    close(more[:, :T], y)
    np.testing.assert_array_equal(more[:, T:], 0)
    assert {name for name in aux if name[0] != "m"} == {
        "loss/switch",
        "loss/sequence",
        "loss/router_z",
        "state/router/bias",
    }
    for name, value in aux.items():
        np.testing.assert_allclose(padded[name], value, rtol=1e-5, err_msg=name)
    assert float(jnp.sum(aux["state/router/bias"])) == B * T * 2
    np.testing.assert_allclose(jnp.mean(aux["metric/load"]), 1.0, rtol=1e-6)


def test_coefficients_scale_the_losses_and_zero_takes_them_away(x):
    params = draw(layer())
    one, two = (
        layer(switch_loss=c, sequence_loss=c, z_loss=c).apply({"params": params}, x, WHOLE)[1] for c in (0.1, 0.2)
    )
    for name in ("loss/switch", "loss/sequence", "loss/router_z"):
        np.testing.assert_allclose(two[name], 2 * one[name], rtol=1e-6)
    assert not any(name.startswith("loss/") for name in layer().apply({"params": params}, x, WHOLE)[1])


def test_unchosen_experts_have_no_gradient_and_the_router_has_one(x):
    moe = layer(num_experts=16)
    params = draw(moe)
    token = x[:1, :1]
    ctx = Context.whole(jnp.zeros((1, 1), jnp.int32), capture=("routing",), train=True)

    def loss(params):
        y, aux = moe.apply({"params": params}, token, ctx)
        return jnp.sum(y**2), aux["capture/experts"]

    grads, chosen = jax.grad(loss, has_aux=True)(params)
    mask = np.isin(np.arange(16), np.asarray(chosen))
    for name in ("gate_proj", "up_proj", "down_proj"):
        size = np.abs(np.asarray(grads[name])).reshape(16, -1).max(1)
        assert (size[mask] > 0).all() and (size[~mask] == 0).all(), name
    column = np.abs(np.asarray(grads["router"]["kernel"])).max(0)
    assert mask.sum() == 2 and (column[mask] > 1e-6).all()


def test_capacity_reports_what_it_drops(x):
    moe = layer(num_experts=2, top_k=1, dispatch="capacity", capacity_factor=1.2)
    params = draw(moe)
    params["router"]["kernel"] = jnp.zeros((D, 2)).at[:, 0].set(jnp.sign(x[0, 0]))
    same = jnp.broadcast_to(x[:1, :1], (1, 5, D))  # all five to expert 0, room for 1.2 x 5 / 2 = 3
    ctx = Context.whole(jnp.zeros((1, 5), jnp.int32))
    y, aux = moe.apply({"params": params}, same, ctx)
    np.testing.assert_array_equal(y[0, 3:], 0)
    np.testing.assert_allclose(aux["metric/dropped"], 0.4, rtol=1e-6)
    free, _ = moe.clone(dispatch="auto", capacity_factor=None).apply({"params": params}, same, ctx)
    close(y[:, :3], free[:, :3])


def test_top_k_may_be_lowered_for_a_trained_model(x):
    params = draw(layer(top_k=4))
    few, many = (layer(top_k=k).apply({"params": params}, x, WHOLE)[0] for k in (1, 4))
    assert few.shape == many.shape and float(jnp.abs(few - many).max()) > 1e-3


def test_a_decode_step_reads_the_chosen_experts_alone():
    """Scratch of a step is a few experts, not all of them."""
    moe = layer(num_experts=64, d_model=128, d_expert=128)
    x, ctx = jnp.zeros((1, 1, 128)), Context.step(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1))
    shapes = jax.tree.map(
        lambda b: b.value, jax.eval_shape(lambda: moe.init(jax.random.key(0), x, ctx))["params"], is_leaf=is_declared
    )
    compiled = jax.jit(lambda p, x: moe.apply({"params": p}, x, ctx)[0]).lower(shapes, x).compile()
    one = 3 * 128 * 128 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * one < 64 * one


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"router": SigmoidRouter, "shared_experts": 2, "shared_gate": True},
        {
            "router": functools.partial(TopKSoftmaxRouter, logit_bias=True),
            "glu": "gpt_oss",
            "glu_limit": 7.0,
            "expert_bias": True,
        },
        {"latent_dim": 6, "shared_experts": 1, "d_shared": 40},
    ],
    ids=["plain", "shared", "biases", "latent"],
)
def test_costs_hold_all_experts_and_use_k(fields):
    boxes = declared(layer(**fields))
    total = sum(b.value.size for b in jax.tree.leaves(boxes, is_leaf=is_declared))
    cost = layer(**fields).cost(1, 1, 1, "float32")
    assert cost.params == total
    expert = sum(b.value.size for n, b in boxes.items() if n.split("_")[0] in ("gate", "up", "down")) // 8
    assert cost.params_active == total - 6 * expert
    double = layer(**fields, **{}).clone(num_experts=16).cost(1, 1, 1, "float32")
    assert double.flops - cost.flops == 2 * D * 8  # twice the experts cost a wider router, nothing else


def test_a_hash_table_counts_a_row_a_token():
    cost = layer(router=functools.partial(HashRouter, vocab_size=100)).cost(1, 1, 1, "float32")
    plain = layer().cost(1, 1, 1, "float32")
    assert cost.params - plain.params == 200 and cost.params_active - plain.params_active == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 9}, "top_k: 9 is more than num_experts=8"),
        ({"top_k": 0}, "top_k: 0 must be at least 1"),
        ({"d_shared": 8}, "d_shared: 8 means nothing without shared_experts"),
        ({"shared_gate": True}, "shared_gate: True means nothing"),
        ({"glu": "clamped"}, "clamped needs a positive limit"),
        ({"glu": "gpt_oss", "glu_limit": 7.0, "shared_experts": 1}, "gpt_oss has no shared expert"),
        ({"dispatch": "fast"}, "dispatch: 'fast' is not one of auto, dense"),
        ({"dispatch": "capacity"}, "capacity_factor: null, but dispatch=capacity"),
        ({"capacity_factor": 1.0}, "means nothing under dispatch=auto"),
        ({"dispatch": "capacity", "capacity_factor": 0.0}, "capacity_factor: 0.0 must be > 0"),
        ({"exchange": "lossy"}, "exchange: 'lossy' is not one of padded, ragged"),
        ({"z_loss": -1.0}, "z_loss: -1.0"),
        ({"latent_dim": 0}, "latent_dim: 0"),
    ],
)
def test_a_layer_that_cannot_be_is_refused_in_one_line(fields, words):
    with pytest.raises(UserError, match=words) as error:
        layer(**fields, parent=None)
    assert "\n" not in str(error.value)


def test_a_mesh_axis_that_does_not_divide_the_experts_is_named():
    boxes = declared(layer(num_experts=6))
    with pytest.raises(
        UserError, match="down_proj: axis 'expert' of size 6 does not divide by mesh axis 'expert' of size 4"
    ):
        param_shardings(boxes, build_mesh({"expert": 4}))
