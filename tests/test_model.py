"""The model as a whole: layouts, remat, aux, shared values, residual schemes, capture, head, depth."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.model import LanguageModel
from jaxllm.params import declare, init_params, is_declared, path_name, restack, unstack

MIXERS = {
    "kv": functools.partial(GQA, num_heads=4, num_kv_heads=2),
    "rec": toys.ToyRecurrent,
    "own": toys.ToyShare,
    "use": functools.partial(toys.ToyShare, owner=False),
}
FFNS = {"dense": functools.partial(MLP, d_ff=48), "biased": toys.ToyBiased}
LAYERS = "own/dense | 2* rec/biased kv/dense use/biased | kv/dense"  # every kind; gradients take a smaller one
SMALL = "own/dense | 2* kv/biased use/dense"


def build(**kwargs):
    return contract.model_of(MIXERS, kwargs.pop("layers", LAYERS), FFNS, **kwargs)


@pytest.fixture(scope="module")
def base():
    return example(build())


@pytest.fixture(scope="module")
def small():
    return example(build(layers=SMALL))


def example(model):
    params = contract.randomised(model)
    ctx = Context.whole(
        jax.random.randint(jax.random.key(1), (2, 12), 0, contract.VOCAB),
        jnp.array([[1] * 12, [1] * 5 + [2] * 4 + [0] * 3]),
        train=True,
    )
    return model, params, ctx


def losses(model, params, ctx):
    def loss(params):
        out = model.apply({"params": params}, ctx)[1]
        valid = (ctx.segments > 0)[..., None]
        return jnp.sum(jnp.where(valid, jax.nn.log_softmax(out.logits), 0.0)[..., :3]) + out.aux["loss/toy"], out.aux

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def test_different_mixers_with_different_caches_keep_the_contract():
    s = contract.Subject(build())
    contract.check_splits(s)
    contract.check_draft_verify(s)
    contract.check_packed(s)


@pytest.mark.parametrize("scheme", [toys.TwoStreams, toys.GrowingBlocks])
def test_residual_schemes_wrap_any_mixer_in_both_layouts(scheme):
    s = contract.Subject(build(residual=scheme))
    contract.check_causal(s)
    contract.check_splits(s)
    got = jax.jit(lambda p: s.decoder.apply({"params": p}, Context.whole(s.tokens()))[1].logits)(s.flat)
    contract.close(got, s.full(s.tokens()))


@pytest.fixture(scope="module")
def kept(small):
    """Loss, aux and gradients without remat."""
    return losses(*small)


@pytest.mark.parametrize("remat", ["full", "dots_no_batch"])
def test_remat_changes_neither_loss_nor_gradient_nor_aux(small, kept, remat):
    model, params, ctx = small
    (want, aux), grads = kept
    (got, aux2), grads2 = losses(model.clone(remat=remat), params, ctx)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), (grads, aux), (grads2, aux2))


def test_scan_equals_unrolled_with_the_same_aux_keys(small, kept):
    model, params, ctx = small
    (want, aux), _ = kept
    (got, aux2), _ = losses(model.unrolled(), unstack(model, params), ctx)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert aux.keys() == aux2.keys()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), aux, aux2)


def test_aux_losses_are_sums_metrics_per_layer_and_states_follow_the_parameters(base):
    model, params, ctx = base
    aux = losses(model, params, ctx)[0][1]
    assert aux["loss/toy"].shape == ()
    assert aux["metric/g1/b0/ffn/on"].shape == (2,)
    declared = {
        path_name(p): box for p, box in jax.tree_util.tree_leaves_with_path(declare(model), is_leaf=is_declared)
    }
    states = {key.removeprefix("state/"): value for key, value in aux.items() if key.startswith("state/")}
    assert sorted(states) == ["g1/b0/ffn/bias", "g1/b2/ffn/bias"]
    for path, value in states.items():
        box = declared[path]
        assert not box.trainable and box.update is not None
        assert value.shape == box.value.shape == (2, contract.D)
        moved = box.update(jnp.zeros(box.value.shape), value)
        assert set(np.unique(np.asarray(moved))) <= {-0.125, 0.0, 0.125}
    assert all(box.trainable for path, box in declared.items() if not path.endswith("ffn/bias"))
    padded = losses(model, params, ctx.replace(tokens=ctx.tokens.at[1, 9:].set(5)))[0][1]
    jax.tree.map(np.testing.assert_array_equal, padded, aux)  # padding is never counted


def test_unstack_and_restack_are_inverse(base):
    model, params, _ = base
    flat = unstack(model, params)
    assert set(flat) == {"embed", "final_norm", "g0_0", "g1_0", "g1_1", "g2_0"}
    back = restack(model, flat)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_declared_axes_cover_every_parameter(base):
    model, params, _ = base
    for path, box in jax.tree_util.tree_leaves_with_path(declare(model), is_leaf=is_declared):
        assert is_declared(box), f"{path_name(path)} was declared without logical axes"
        assert len(box.names) == len(box.value.shape)
        if path_name(path)[0] == "g":
            assert box.names[0] == "layers"
    assert jax.tree.map(lambda b: b.value.shape, declare(model), is_leaf=is_declared) == jax.tree.map(
        lambda a: a.shape, params
    )


def test_capture_stream_is_the_residual_after_k_blocks(base):
    model, params, ctx = base
    ctx = Context.whole(ctx.tokens, capture=("stream",))
    out = model.apply({"params": params}, ctx)[1]
    stream = out.capture["stream"]
    assert stream.shape == (model.num_layers + 1, 2, 12, contract.D)
    np.testing.assert_allclose(stream[0], params["embed"][ctx.tokens], rtol=1e-6)
    final = model.clone(layers="own/dense").apply(
        {"params": {k: params[k] for k in ("embed", "final_norm", "g0")}}, ctx
    )[1]
    np.testing.assert_allclose(final.capture["stream"][-1], stream[1], atol=1e-5)
    assert "stream" not in model.apply({"params": params}, Context.whole(ctx.tokens))[1].capture
    unrolled = model.unrolled().apply({"params": unstack(model, params)}, ctx)[1]
    np.testing.assert_allclose(unrolled.capture["stream"], stream, atol=1e-5)


def test_backbone_and_head_are_the_two_halves(base):
    model, params, ctx = base
    full = model.apply({"params": params}, ctx)[1]
    half = model.apply({"params": params}, ctx, method="backbone")[1]
    assert half.logits is None
    np.testing.assert_array_equal(half.hidden, full.hidden)
    np.testing.assert_array_equal(model.apply({"params": params}, half.hidden, method="head"), full.logits)
    np.testing.assert_allclose(
        (half.hidden @ model.head_weight(params))[..., : model.vocab_size],
        full.logits[..., : model.vocab_size],
        atol=1e-5,
    )


@pytest.mark.parametrize("tie", [True, False])
def test_head_options(tie):
    model = build(layers="kv/dense", tie_embeddings=tie, logit_softcap=0.5, embed_scale=4.0)
    params = contract.randomised(model)
    assert ("lm_head" in params) != tie
    logits = np.asarray(model.apply({"params": params}, Context.whole(jnp.arange(6)[None]))[1].logits)
    assert logits.dtype == np.float32 and np.abs(logits[..., :61]).max() <= 0.5
    assert (logits[..., 61:] < -1e29).all() and logits.shape[-1] == 64


def test_dropout_differs_by_key_and_layer_and_is_off_outside_training():
    model = build(layers="2* kv/dense", dropout=0.5)
    params = contract.randomised(model)
    tokens = jnp.arange(8)[None]

    def run(key):
        ctx = Context.whole(tokens, train=True)
        return model.apply({"params": params}, ctx, rngs={"dropout": jax.random.key(key)})[1].logits

    a, b = run(0), run(1)
    assert np.abs(np.asarray(a - b)[..., :61]).max() > 1e-3
    np.testing.assert_array_equal(a, run(0))
    off = model.apply({"params": params}, Context.whole(tokens))[1].logits
    np.testing.assert_array_equal(
        off, model.clone(dropout=0.0).apply({"params": params}, Context.whole(tokens))[1].logits
    )


def test_compiled_size_does_not_grow_with_depth():
    def lines(n):
        model = build(layers=f"{n}* kv/dense")
        abstract = jax.tree.map(lambda b: b.value, declare(model), is_leaf=is_declared)

        def loss(p):
            return jnp.sum(model.apply({"params": p}, Context.whole(jnp.zeros((2, 12), jnp.int32)))[1].hidden)

        return len(jax.jit(jax.grad(loss)).lower(abstract).compile().as_text().splitlines())

    assert abs(lines(24) / lines(4) - 1) < 0.1


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match="model.remat"):
        build(remat="some")
    with pytest.raises(UserError, match="_partial_: true"):
        contract.model_of({"m": GQA(d_model=32, num_heads=4)}, "m/dense")
    with pytest.raises(UserError, match="max_seq_len"):
        model = build(layers="kv/dense", max_seq_len=4)
        model.apply({"params": init_params(model, jax.random.key(0))}, Context.whole(jnp.zeros((1, 5), jnp.int32)))
    with pytest.raises(UserError, match="model.dtype"):
        build(dtype="fp8")


@pytest.mark.parametrize("kwargs", [{}, {"residual": toys.GrowingBlocks, "tie_embeddings": False}])
def test_a_declaration_is_what_init_declares_though_each_kind_is_traced_once(kwargs, monkeypatch):
    model, traced = build(**kwargs), []
    for m in (model, model.unrolled()):
        ran = jax.eval_shape(lambda m=m: m.init(jax.random.key(0), Context.whole(jnp.zeros((1, 2), jnp.int32))))
        flat, tree = jax.tree_util.tree_flatten(ran["params"], is_leaf=is_declared)
        got, same = jax.tree_util.tree_flatten(declare(m), is_leaf=is_declared)
        assert same == tree
        for a, b in zip(got, flat, strict=True):
            facts = [(x.value.shape, x.value.dtype, x.names, x.trainable, x.init, x.update is None) for x in (a, b)]
            assert facts[0] == facts[1]
    real = LanguageModel.mixer

    def counted(m, role, **kw):
        traced.extend([role] * ("name" in kw))  # named: inside a block that is run
        return real(m, role, **kw)

    monkeypatch.setattr(LanguageModel, "mixer", counted)
    declare(model.clone(layers="9* rec/biased kv/dense rec/biased | kv/dense | 30* kv/dense rec/biased"))
    assert sorted(traced) == ["kv", "rec"]


def test_init_by_running_the_model_has_the_declared_scale():
    model = build(layers="2* kv/dense")
    ran = model.init(jax.random.key(0), Context.whole(jnp.zeros((1, 2), jnp.int32)))["params"]
    drawn = init_params(model, jax.random.key(0))
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(ran, is_leaf=is_declared),
        jax.tree_util.tree_leaves_with_path(drawn),
        strict=True,
    ):
        assert a.value.shape == b.shape and a.value.dtype == b.dtype
        np.testing.assert_allclose(np.std(a.value), np.std(b), rtol=0.15, atol=1e-7, err_msg=path_name(path))
