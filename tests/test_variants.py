"""Variants of the block and of the model's two ends, as published families need them, against the formulas written out in numpy."""

import functools

import contract
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import component, compose
from jaxllm.errors import UserError
from jaxllm.layers.base import Context, Cost, Layer
from jaxllm.layers.gqa import GQA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.norm import LayerNorm, RMSNorm
from jaxllm.layers.residual import Residual
from jaxllm.params import declare, init_params, is_declared
from jaxllm.training.losses import next_token


class Sine(Layer, kw_only=True):
    """A mixer and an ffn without parameters: what is left is the block around them."""

    @nn.compact
    def __call__(self, x, ctx, cache=None, shared=None):
        y = jnp.sin(x)
        return (y, {}) if shared is None else (y, cache, shared, {})

    def init_cache(self, batch, length, dtype, *, draft=0):
        return None

    def cost(self, batch, t, s, dtype):
        return Cost()


def hollow(**kwargs):
    model = contract.model_of({"m": Sine}, "2* m/f", {"f": Sine}, **kwargs)
    return model, contract.randomised(model)


def rms(x, w=1.0):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * w


def hidden(model, params, tokens):
    return np.asarray(model.apply({"params": params}, Context.whole(tokens))[1].hidden)


@pytest.mark.parametrize(("pre", "post", "scale"), [(True, False, 1.0), (True, True, 0.22), (False, True, 1.0)])
def test_norms_before_and_after_each_half_and_the_residual_multiplier(pre, post, scale):
    residual = functools.partial(Residual, scale=scale)
    model, params = hollow(pre_norms=pre, post_norms=post, residual=residual)
    tokens = np.arange(6)[None]
    x = np.asarray(params["embed"])[tokens]
    names = [f"norm_{half}{side}" for half in ("mixer", "ffn") for side in ([""] * pre + ["_out"] * post)]
    assert sorted(params["g0"]["b0"]) == sorted(names)
    for n in range(2):
        w = {name: np.asarray(params["g0"]["b0"][name]["scale"][n]) for name in names}
        for half in ("norm_mixer", "norm_ffn"):
            y = np.sin(rms(x, w[half]) if pre else x)
            x = x + scale * (rms(y, w[f"{half}_out"]) if post else y)
    want = rms(x, np.asarray(params["final_norm"]["scale"]))
    np.testing.assert_allclose(hidden(model, params, tokens), want, atol=2e-6)


def test_embedding_is_scaled_then_placed_then_normed():
    model, params = hollow(embed_scale=3.0, learned_positions=8, embed_norm=True)
    tokens = np.array([[5, 7, 5, 1]])
    ctx = Context.whole(tokens, jnp.array([[1, 1, 2, 2]]), capture=("stream",))
    stream = model.apply({"params": params}, ctx)[1].capture["stream"]
    e = 3.0 * np.asarray(params["embed"])[tokens] + np.asarray(params["positions"])[[0, 1, 0, 1]]
    np.testing.assert_allclose(stream[0], rms(e, np.asarray(params["norm_embed"]["scale"])), atol=2e-6)


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2's shape: learned positions, LayerNorm with biases, no rotation, biases everywhere, a tied head."""
    mixer = functools.partial(GQA, num_heads=4, rope=None, qkv_bias=True, out_bias=True)
    ffn = functools.partial(MLP, d_ff=48, activation="gelu_tanh", gated=False, bias=True)
    norm = functools.partial(LayerNorm)
    return contract.Subject(
        contract.model_of({"m": mixer}, "m/f", {"f": ffn}, norm=norm, learned_positions=contract.LENGTH)
    )


@pytest.mark.parametrize("check", ["packed", "splits"])
def test_learned_positions_follow_the_document_whole_and_cached(gpt2, check):
    getattr(contract, f"check_{check}")(gpt2)


def test_learned_positions_are_declared_counted_and_end_the_sequence(gpt2):
    box = declare(gpt2.model)["positions"]
    assert is_declared(box) and box.names == (None, "embed") and box.value.shape == (contract.LENGTH, contract.D)
    without = gpt2.model.clone(learned_positions=None)
    assert gpt2.model.cost().params - without.cost().params == box.value.size
    assert gpt2.model.max_seq_len == contract.LENGTH and without.max_seq_len == contract.LENGTH
    with pytest.raises(UserError, match="max_seq_len: a sequence of 41"):
        gpt2.model.apply({"params": gpt2.params}, Context.whole(jnp.zeros((1, contract.LENGTH + 1), jnp.int32)))
    with pytest.raises(UserError, match="learned_positions=8"):
        hollow(learned_positions=8, max_seq_len=9)


def test_logit_scale_comes_before_the_softcap_and_the_chunked_loss_agrees():
    model, params = hollow(logit_scale=3.0, logit_softcap=2.0)
    tokens = jax.random.randint(jax.random.key(2), (2, 6), 0, contract.VOCAB)
    out = model.apply({"params": params}, Context.whole(tokens))[1]
    want = 2.0 * np.tanh(3.0 * (np.asarray(out.hidden) @ np.asarray(params["embed"]).T) / 2.0)[..., : contract.VOCAB]
    np.testing.assert_allclose(out.logits[..., : contract.VOCAB], want, atol=1e-5)
    batch = {"labels": jnp.roll(tokens, -1, 1), "weights": jnp.ones((2, 6))}
    loss, _ = next_token(model, params, out.hidden, batch)
    picked = jnp.take_along_axis(jax.nn.log_softmax(out.logits), batch["labels"][..., None], -1)
    np.testing.assert_allclose(loss, -jnp.sum(picked), rtol=1e-5)


def test_norm_yamls_give_the_norms_they_name():
    x = 3.0 * jax.random.normal(jax.random.key(0), (2, contract.D))
    for name, want in {
        "rms": rms(np.asarray(x), 1.1),
        "rms_zero_centred": rms(np.asarray(x), 1.1),
        "rms_weightless": rms(np.asarray(x)),
        "layer": rms(np.asarray(x) - np.mean(x, -1, keepdims=True), 1.1) + 0.1,
    }.items():
        norm = component("norm", name)(eps=1e-6)
        params = jax.tree.map(lambda a: a + 0.1, norm.init(jax.random.key(0), x))
        np.testing.assert_allclose(norm.apply(params, x), want, rtol=1e-5, atol=1e-6, err_msg=name)
    assert RMSNorm(zero_centred=True).init(jax.random.key(0), x)["params"]["scale"].value.max() == 0


def test_a_model_is_composed_of_the_variants_by_keys_alone():
    cfg = compose(["model=tiny", "model.vocab_size=61", "norm@model.norm=rms_weightless", "model.embed_norm=true",
                   "ffn@model.ffns.dense=relu2", "model.residual.scale=0.5"])  # fmt: skip
    params = init_params(cfg.build("model"), jax.random.key(0))
    assert set(params) == {"embed", "g0"} and set(params["g0"]["b0"]) == {"mixer", "ffn"}
    with pytest.raises(UserError, match="model.norm.eps"):
        compose(["model=tiny", "model.norm.eps=1e-5"])
