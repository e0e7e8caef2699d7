"""Attention residuals: golden numbers of a torch twin written from the equations, the invariants, groups, scan, memory, and mistakes."""

import functools
from pathlib import Path

import contract
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from safetensors.numpy import load_file

from jaxllm.compose import component
from jaxllm.errors import UserError
from jaxllm.layers.attention_residuals import AttentionResiduals
from jaxllm.layers.base import Context, Cost, Layer, fan_in, param
from jaxllm.layers.gqa import GQA
from jaxllm.ops.depth_attention import depth_attention, depth_attention_naive
from jaxllm.params import declare, is_declared, path_name

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "attention_residuals.safetensors")
MIXERS = {"kv": functools.partial(GQA, num_heads=4, num_kv_heads=2), "rec": toys.ToyRecurrent}
BLOCKS = "2* m/f | 2* m/f | m/f"  # five layers in blocks of two


class Twin(Layer, kw_only=True):
    """The toy layers of the golden file: `act(rms(x) W)`, tanh as a mixer and sin as an ffn."""

    @nn.compact
    def __call__(self, x, ctx, cache=None, shared=None):
        w = param(self, "proj", fan_in(self.d_model), (self.d_model, self.d_model), ("embed", None))
        u = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) @ w
        return (jnp.sin(u), {}) if shared is None else (jnp.tanh(u), cache, shared, {})

    def cost(self, batch, t, s, dtype):
        return Cost()


class Nothing(nn.Module, kw_only=True):
    eps: float = 0.0
    param_dtype: object = None

    def __call__(self, x):
        return x


def twin(mode):
    e = GOLDEN[f"{mode}.e"]
    residual = functools.partial(AttentionResiduals, mode=mode, **({"block_size": 2} if mode == "block" else {}))
    kwargs = {"d_model": e.shape[-1], "vocab_size": 6, "vocab_multiple": 1, "norm_eps": 1e-5, "pre_norms": False}
    model = contract.model_of({"m": Twin}, BLOCKS, {"f": Twin}, residual=residual, norm=Nothing, **kwargs)

    def layer(i):
        sites = [{name: GOLDEN[f"{mode}.{name}"][2 * i + half] for name in ("query", "norm")} for half in (0, 1)]
        block = {"mixer": {"proj": GOLDEN[f"{mode}.a"][i]}, "ffn": {"proj": GOLDEN[f"{mode}.b"][i]}}
        return {"b0": block | {"residual_mixer": sites[0], "residual_ffn": sites[1]}}

    pairs = [(0, 1), (2, 3), (4,)]
    groups = {f"g{i}": jax.tree.map(lambda *a: np.stack(a), *(layer(n) for n in some)) for i, some in enumerate(pairs)}
    end = {name: GOLDEN[f"{mode}.{name}"][-1] for name in ("query", "norm")}
    return model, {"embed": e.reshape(6, -1), "residual_out": end, **groups}


@pytest.mark.parametrize("mode", ["block", "full"])
def test_equals_the_twin_forward_and_gradient(mode):
    model, params = twin(mode)
    model = model.clone(remat="full")

    def loss(params):
        out = model.apply({"params": params}, Context.whole(jnp.arange(6).reshape(2, 3)), method="backbone")[1].hidden
        return jnp.sum(jnp.sin(out)), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(out, GOLDEN[f"{mode}.out"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads["embed"], GOLDEN[f"{mode}.grad_e"].reshape(6, -1), rtol=1e-4, atol=1e-5)
    for name in ("query", "norm"):
        want = GOLDEN[f"{mode}.grad_{name}"]
        for half, site in enumerate(("residual_mixer", "residual_ffn")):
            got = np.concatenate([grads[f"g{i}"]["b0"][site][name] for i in range(3)])
            np.testing.assert_allclose(got, want[half:-1:2], rtol=1e-4, atol=1e-5, err_msg=f"{site} {name}")
        np.testing.assert_allclose(grads["residual_out"][name], want[-1], rtol=1e-4, atol=1e-5)
    assert (np.asarray(grads["g0"]["b0"]["residual_mixer"]["query"][0]) == 0).all()  # one source leaves no choice


def test_the_operation_equals_its_twin_and_keeps_its_arguments_alone():
    *sources, query = jax.random.normal(jax.random.key(0), (4, 2, 3, 8))
    query = query[0, 0]
    for last in (True, False):
        got, want = (
            jax.value_and_grad(lambda v, q, f=f, flag=flag: jnp.sum(jnp.sin(f(v, q, flag, 1e-5))), argnums=(0, 1))(
                tuple(sources), query
            )
            for f, flag in ((depth_attention, jnp.array(last)), (depth_attention_naive, (True, True, last)))
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
    half = tuple(source.astype(jnp.bfloat16) for source in sources)
    kept = jax.tree.leaves(jax.vjp(lambda v, q: depth_attention(v, q, True, 1e-5), half, query)[1])
    assert sum(a.nbytes for a in kept) <= sum(a.nbytes for a in half) + 2 * query.nbytes


def test_a_zero_query_is_the_mean_and_one_source_is_itself():
    e, y = jax.random.normal(jax.random.key(0), (2, 2, 3, 8))
    site = AttentionResiduals(site="mixer", d_model=8)
    params = {"params": {"query": jnp.zeros(8), "norm": jnp.ones(8)}}
    R = site.start(e)
    np.testing.assert_allclose(site.apply(params, R, method="read"), e, rtol=1e-6)
    R = site.write(site.boundary(site.write(R, y), 1), 3 * y)
    np.testing.assert_allclose(site.apply(params, R, method="read"), (e + y + 3 * y) / 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(site.view(R), e + 4 * y, rtol=1e-5, atol=1e-6)


def test_one_block_with_zero_queries_ends_in_the_mean_of_embedding_and_prefix():
    model, params = twin("block")
    model = model.clone(layers="2* m/f", residual=functools.partial(AttentionResiduals, block_size=7))
    params = {name: params[name] for name in ("embed", "g0", "residual_out")}
    zero = {"query": jnp.zeros_like(params["residual_out"]["query"]), "norm": params["residual_out"]["norm"]}
    ctx = Context.whole(jnp.arange(6)[None], capture=("stream",))
    out = model.apply({"params": {**params, "residual_out": zero}}, ctx, method="backbone")[1]
    e = params["embed"][None]
    prefix = out.capture["stream"][-1] - e  # the stream is the sum of all sources
    np.testing.assert_allclose(out.hidden, (e + prefix) / 2, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module", params=["attnres", "attnres_full"])
def subject(request):
    return contract.Subject(
        contract.model_of(MIXERS, "kv/dense | 2* rec/dense", residual=component("residual", request.param))
    )


def test_contract(subject):
    contract.check_splits(subject)
    contract.check_sharded(subject)


def test_both_layouts_and_the_capture_agree(subject):
    ctx = Context.whole(subject.tokens(), capture=("stream",))
    stacked = subject.model.apply({"params": subject.params}, ctx)[1]
    flat = subject.decoder.apply({"params": subject.flat}, ctx)[1]
    contract.close(flat.logits, stacked.logits)
    contract.close(flat.capture["stream"], stacked.capture["stream"], 1e-4)
    assert stacked.capture["stream"].shape[0] == subject.model.num_layers + 1


def test_parameters_are_declared_and_counted(subject):
    boxes = jax.tree_util.tree_leaves_with_path(declare(subject.model), is_leaf=is_declared)
    boxes = {path_name(p): box for p, box in boxes if "residual" in path_name(p)}
    assert boxes["g1/b0/residual_mixer/query"].names == ("layers", "norm")
    plain = subject.model.clone(residual=component("residual", "plain")).cost(2, 3, 8, "float32")
    cost = subject.model.cost(2, 3, 8, "float32")
    assert cost.params - plain.params == sum(box.value.size for box in boxes.values())
    full = subject.model.residual.keywords["mode"] == "full"
    # block: 1 + 2 in the first layer, then 2 + 3 and 3 + 3 in the second block, and 3 at the end
    sources = sum(range(1, 8)) if full else 3 + 5 + 6 + 3
    assert cost.flops - plain.flops == 2 * 3 * 4 * contract.D * sources
    assert cost.cache_constant == plain.cache_constant


def test_full_mode_draws_its_own_dropout_in_every_repeat():
    kwargs = {"residual": component("residual", "attnres_full"), "dropout": 0.5}
    model = contract.model_of({"m": Twin}, "2* m/f", {"f": Twin}, **kwargs)
    params = contract.randomised(model)
    params["g0"] = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), params["g0"])  # equal layers
    ctx = Context.whole(jnp.arange(10)[None], train=True, capture=("stream",))

    def steps(key):
        stream = model.apply({"params": params}, ctx, method="backbone", rngs={"dropout": key})[1].capture["stream"]
        return np.asarray(stream[1:] - stream[:-1]) == 0  # where both of a layer's outputs are dropped

    a, b = steps(jax.random.key(0)), steps(jax.random.key(1))
    assert 0.1 < a.mean() < 0.4 and (a[0] != a[1]).any() and (a != b).any()


def test_finished_blocks_are_kept_once_and_not_once_a_layer():
    def kept(name):
        kwargs = {"residual": component("residual", name), "remat": "full", "d_model": 128}
        model = contract.model_of({"m": Twin}, "8* m/f | 8* m/f | 8* m/f", {"f": Twin}, **kwargs)
        ctx = Context.whole(jnp.zeros((2, 64), jnp.int32))
        params = jax.tree.map(lambda box: box.value, declare(model), is_leaf=is_declared)
        loss = jax.grad(lambda p: jnp.sum(model.apply({"params": p}, ctx, method="backbone")[1].hidden ** 2))
        return jax.jit(loss).lower(params).compile().memory_analysis().temp_size_in_bytes

    stream = 2 * 64 * 128 * 4
    # A few copies of each of three blocks; carried through the scans they would be saved 8 x (1 + 2 + 3) times.
    assert kept("attnres") - kept("plain") < 16 * stream


def test_a_block_must_end_where_a_group_ends():
    block = functools.partial(AttentionResiduals, block_size=2)
    with pytest.raises(UserError, match="block_size=2 a group must end after layer 4.*after 2, 5, 6"):
        contract.model_of(MIXERS, "2* kv/dense | 3* kv/dense | kv/dense", residual=block)
    contract.model_of(MIXERS, "2* kv/dense | kv/dense | kv/dense | kv/dense", residual=block)


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"mode": "half"}, "residual.mode"),
        ({"mode": "full", "block_size": 2}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"scale": 2.0}, "scale"),
    ],
)
def test_mistakes_are_one_line(fields, words):
    with pytest.raises(UserError, match=words):
        AttentionResiduals(site="mixer", d_model=8, **fields)
