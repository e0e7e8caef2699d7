"""Hyper-connections: transformers' DeepSeek-V4 modules as golden numbers, the invariants, and the contract around mixers with caches."""

import functools
from pathlib import Path

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from safetensors.numpy import load_file

from jaxllm.compose import component
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.hyper_connections import HyperConnections
from jaxllm.ops.hyper_connections import mix, mix_naive, sinkhorn, sinkhorn_naive, weigh, weigh_naive
from jaxllm.params import declare, init_params, is_declared, path_name

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "hyper_connections.safetensors")
MIXERS = {"kv": functools.partial(GQA, num_heads=4, num_kv_heads=2), "rec": toys.ToyRecurrent}
N = 4


def theirs(kind):
    """Parameters of a site or of the head, in our shapes: they flatten streams."""
    fn = GOLDEN[f"{kind}.fn"]
    return {
        "fn": fn.reshape(len(fn), N, -1),
        "base": GOLDEN[f"{kind}.base"],
        "gains": GOLDEN[f"{kind}.scale"],
    }


def scheme(site="mixer", **kwargs):
    return HyperConnections(site=site, d_model=GOLDEN["x"].shape[-1], norm_eps=1e-5, **kwargs)


def call(site, params, method, *args):
    return site.apply({"params": params}, *args, method=method)


def test_equals_transformers_forward_and_gradient():
    site, end, y = scheme(), scheme("out"), GOLDEN["y"]

    def outputs(params, x):
        return call(site, params, "read", x), call(site, params, "write", x, y), call(end, theirs("head"), "finish", x)

    got = jax.jit(outputs)(theirs("site"), GOLDEN["x"])
    for value, name in zip(got, ("collapsed", "written", "end"), strict=True):
        np.testing.assert_allclose(value, GOLDEN[name], rtol=1e-5, atol=1e-5, err_msg=name)

    def loss(params, x):
        return sum(jnp.sum(jnp.sin(v)) for v in outputs(params, x))

    params, x = jax.jit(jax.grad(loss, argnums=(0, 1)))(theirs("site"), jnp.asarray(GOLDEN["x"]))
    np.testing.assert_allclose(x, GOLDEN["grad_x"], rtol=1e-4, atol=1e-5)
    fn = GOLDEN["site.grad_fn"]
    np.testing.assert_allclose(params["fn"], fn.reshape(len(fn), N, -1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(params["base"], GOLDEN["site.grad_base"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(params["gains"], GOLDEN["site.grad_scale"], rtol=1e-4, atol=1e-4)


def test_sinkhorn_equals_its_twin_and_columns_sum_to_one():
    logits = 3 * jax.random.normal(jax.random.key(0), (N, N, 2, 5))
    got = jax.jit(sinkhorn, static_argnums=(1, 2))(logits, 20, 1e-6)
    np.testing.assert_allclose(got, jax.jit(sinkhorn_naive, static_argnums=(1, 2))(logits, 20, 1e-6), rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(got, axis=0), 1.0, atol=3e-6)
    np.testing.assert_allclose(jnp.sum(got, axis=1), 1.0, atol=0.1)  # rows only approximately

    def slope(f):
        return jax.jit(jax.grad(lambda a: jnp.sum(jnp.sin(f(a, 3, 1e-6)))))(logits)

    np.testing.assert_allclose(slope(sinkhorn), slope(sinkhorn_naive), atol=1e-5)
    kept = jax.tree.leaves(jax.vjp(lambda a: sinkhorn(a, 20, 1e-6), logits)[1])
    assert sum(a.size for a in kept) <= 2 * logits.size  # and not the 40 matrices between


def test_mixtures_equal_their_twins_forward_and_gradient():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 3, N, 5), (2, 3, 5), (N, 2, 3), (N, N, 2, 3))
    x, y, post, comb = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    for fast, naive, args in ((weigh, weigh_naive, (post, x)), (mix, mix_naive, (x, y, post, comb))):
        every = tuple(range(len(args)))
        got, want = (
            jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), argnums=every))(*args)
            for f in (fast, naive)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def forced(n):
    """Parameters that make stream 0 an ordinary residual network: pre = e_0, post = 1, C = I, whatever the streams hold."""
    pre = np.where(np.arange(n) == 0, 40.0, -40.0)
    base = np.concatenate([pre, np.zeros(n), (80.0 * np.eye(n)).ravel()])
    return {"base": jnp.asarray(base, jnp.float32), "pre": jnp.asarray(pre, jnp.float32)}


def test_one_stream_alone_is_an_ordinary_residual_network():
    kwargs = {"mixers": MIXERS, "layers": "2* kv/dense rec/dense"}
    model = contract.model_of(**kwargs, residual=functools.partial(HyperConnections, streams=3, hc_eps=1e-9))
    params = contract.randomised(model)
    for block in params["g0"].values():
        for site in ("residual_mixer", "residual_ffn"):
            fn = block[site]["fn"]
            block[site] = {
                "fn": jnp.zeros_like(fn),
                "base": jnp.tile(forced(3)["base"], (2, 1)),
                "gains": jnp.ones((2, 3)),
            }
    end = params["residual_out"]
    params["residual_out"] = {"fn": jnp.zeros_like(end["fn"]), "base": forced(3)["pre"], "gains": end["gains"]}
    plain = {k: v for k, v in params.items() if k != "residual_out"}
    plain["g0"] = {name: {k: v for k, v in block.items() if "residual" not in k} for name, block in plain["g0"].items()}
    ctx = Context.whole(jnp.arange(10)[None])

    def hidden(m, p):
        return jax.jit(lambda p: m.apply({"params": p}, ctx)[1].hidden)(p)

    np.testing.assert_allclose(hidden(model, params), hidden(contract.model_of(**kwargs), plain), atol=2e-5)


def test_permuting_the_streams_and_their_weights_permutes_what_is_written():
    order = np.array([2, 0, 3, 1])
    entries = np.arange(N * N).reshape(N, N)[order][:, order].ravel()
    m = np.concatenate([order, N + order, 2 * N + entries])
    params = theirs("site")
    moved = {"fn": params["fn"][m][:, order], "base": params["base"][m], "gains": params["gains"]}
    x, y = GOLDEN["x"], GOLDEN["y"]
    np.testing.assert_allclose(
        call(scheme(), moved, "read", x[:, :, order]), call(scheme(), params, "read", x), atol=1e-5
    )
    written = call(scheme(), params, "write", x, y)
    np.testing.assert_allclose(call(scheme(), moved, "write", x[:, :, order], y), written[:, :, order], atol=1e-5)
    assert np.abs(written[:, :, order] - written).max() > 0.1


@pytest.fixture(scope="module")
def subject():
    return contract.Subject(contract.model_of(MIXERS, "kv/dense | 2* rec/dense", residual=component("residual", "mhc")))


@pytest.mark.parametrize("check", ["splits", "sharded"])
def test_contract(subject, check):
    getattr(contract, f"check_{check}")(subject)


def test_the_unstacked_layout_gives_the_same(subject):
    tokens = subject.tokens()
    logits = jax.jit(lambda p: subject.decoder.apply({"params": p}, Context.whole(tokens))[1].logits)(subject.flat)
    contract.close(logits, subject.full(tokens))


@pytest.fixture(scope="module")
def small():
    """One block, since compiling gradients is what these tests cost, and its gradient of a fixed function."""
    s = contract.Subject(contract.model_of(MIXERS, "2* kv/dense", residual=component("residual", "mhc")))
    target = jax.random.normal(jax.random.key(5), (2, contract.T, contract.D))

    def grad(model):
        ctx = Context.whole(s.tokens())
        return jax.jit(jax.grad(lambda p: jnp.sum(model.apply({"params": p}, ctx)[1].hidden * target)))

    return s, grad, grad(s.model)


def test_bf16_gradients_are_finite_and_reach_every_parameter(small):
    contract.check_bf16_gradients(small[0])


def test_remat_changes_no_gradient(small):
    s, grad, kept = small
    got = grad(s.model.clone(remat="full"))(s.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, kept(s.params))


def test_starts_as_an_ordinary_network_whose_streams_can_part(small):
    s, _, grad = small
    plain = contract.model_of(MIXERS, "2* kv/dense")
    params, other = (init_params(m, jax.random.key(0)) for m in (s.model, plain))
    ctx = Context.whole(s.tokens())
    hidden, ordinary = (m.apply({"params": p}, ctx)[1].hidden for m, p in ((s.model, params), (plain, other)))
    np.testing.assert_allclose(hidden, ordinary, atol=0.05)
    mixing = grad(params)["g0"]["b0"]["residual_ffn"]["base"][:, 2 * N :]
    assert np.abs(mixing).max() > 1e-5  # equal streams would leave C without a gradient


def test_parameters_are_declared_and_counted(subject):
    declared = declare(subject.model)
    boxes = {path_name(p): b for p, b in jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_declared)}
    sites = {name: box for name, box in boxes.items() if "residual" in name}
    assert sites["g1/b0/residual_ffn/fn"].value.shape == (2, N * (2 + N), N, contract.D)
    assert sites["g1/b0/residual_ffn/fn"].names == ("layers", None, None, "embed")
    total = sum(box.value.size for box in sites.values())
    plain = subject.model.clone(residual=component("residual", "plain")).cost(2, 3, 8, "float32")
    cost = subject.model.cost(2, 3, 8, "float32")
    assert cost.params - plain.params == total and cost.cache_per_token == plain.cache_per_token
    # 6 sites of 24 projected rows, 4 read and 4 + 16 written ones; the end has 4 and 4: multiply-adds a channel, 2 x 3 tokens
    assert cost.flops - plain.flops == 2 * 6 * contract.D * (6 * (96 + 8 + 16) + 16 + 4)
    mean = component("residual", "mhc").keywords | {"ends": "mean"}
    assert "residual_out" not in declare(subject.model.clone(residual=functools.partial(HyperConnections, **mean)))


@pytest.mark.parametrize(
    "fields,words", [({"streams": 0}, "streams=0"), ({"ends": "sum"}, "residual.ends"), ({"scale": 0.5}, "scale")]
)
def test_mistakes_are_one_line(fields, words):
    with pytest.raises(UserError, match=words):
        scheme(**fields)
