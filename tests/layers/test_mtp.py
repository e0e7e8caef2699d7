"""MTP heads: the right hidden state and the right token, labels within documents, both kinds, aux, counts and mistakes."""

import functools
import json
import shutil

import contract
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from golden_models import GOLDEN
from safetensors.numpy import load_file, save_file

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.layers.base import Context, Cost, Layer
from jaxllm.layers.gqa import GQA
from jaxllm.layers.hyper_connections import HyperConnections
from jaxllm.layers.mtp import ChainedMTP, ParallelMTP, StreamsMTP
from jaxllm.layers.residual import Residual
from jaxllm.params import declare, is_declared, path_name
from jaxllm.training.losses import backbone
from jaxllm.training.objectives import Forward, MultiToken
from jaxllm.weights.load import build, read_model
from jaxllm.weights.open import open_tensors

SEGMENTS = np.array([[1] * 5 + [2] * 4 + [3] + [0] * 2])
TOKENS = np.arange(12)[None] * 5 % 16


class Nothing(Layer, kw_only=True):
    """A mixer and an ffn that write zero: what is left of a block is the stream."""

    @nn.compact
    def __call__(self, x, ctx, cache=None, shared=None):
        return (0 * x, {}) if shared is None else (0 * x, cache, shared, {})

    def cost(self, batch, t, s, dtype):
        return Cost()


def hollow(kind=ChainedMTP, **fields):
    mtp = functools.partial(kind, mixer="m", ffn="f", **fields)
    kwargs = {"d_model": 16, "vocab_size": 16, "vocab_multiple": 1, "tie_embeddings": False, "norm_eps": 0.0}
    model = contract.model_of({"m": Nothing}, "m/f", {"f": Nothing}, mtp=mtp, **kwargs)
    return model, contract.randomised(model)


def heads(model, params, ctx=None):
    ctx = Context.whole(TOKENS, SEGMENTS, capture=("mtp",)) if ctx is None else ctx
    return backbone(model, params, ctx).capture["mtp"]


def rms(x, w):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True)) * np.asarray(w["scale"])


@pytest.mark.parametrize("hidden", ["post_norm", "pre_norm"])
def test_a_chain_joins_the_next_embedding_with_the_last_hidden_state(hidden):
    model, params = hollow(depth=2, hidden=hidden)
    got = heads(model, params)
    e = np.asarray(params["embed"])[TOKENS]
    h = rms(e, params["final_norm"]) if hidden == "post_norm" else e
    for k in (1, 2):
        own = params["mtp"][f"d{k}"]
        later = np.asarray(params["embed"])[np.pad(TOKENS[:, k:], ((0, 0), (0, k)))]
        m = np.asarray(own["eh_proj"])
        stream = rms(later, own["enorm"]) @ m[0] + rms(h, own["hnorm"]) @ m[1]
        want = rms(stream, own["norm"])
        inside = np.r_[np.arange(5 - k), np.arange(5, 9 - k)]  # positions whose token k later is of their document
        np.testing.assert_allclose(got[k - 1][:, inside], want[:, inside], rtol=1e-4, atol=1e-5)
        h = want if hidden == "post_norm" else stream


def counting(halves):
    """A model that knows that token v is followed by v + 1, and a module that looks at one half alone."""
    model, params = hollow()
    eye = np.eye(16, dtype=np.float32)
    ones = {"scale": np.ones(16, np.float32)}
    own = params["mtp"]["d1"] | {"enorm": ones, "hnorm": ones, "norm": ones}
    own["eh_proj"] = np.stack([halves[0] * eye, halves[1] * eye])
    head = np.roll(eye, 1, axis=1)  # embedding v gives logit v + 1
    return model, {**params, "embed": eye, "lm_head": head, "final_norm": ones, "mtp": {"d1": own}}


def test_acceptance_is_one_by_construction_and_swapped_halves_are_caught():
    tokens = (3 + np.arange(12))[None] % 16
    ctx = Context.whole(tokens, capture=("mtp",))
    for halves, accepted in (((1, 0), 1.0), ((0, 1), 0.0)):
        model, params = counting(halves)
        guess = model.apply({"params": params}, heads(model, params, ctx)[0], method="head").argmax(-1)
        trunk = model.apply({"params": params}, ctx)[1].logits.argmax(-1)
        assert np.mean(guess[:, :-1] == trunk[:, 1:]) == accepted  # the guess at i is of what the trunk says at i + 1


def test_labels_never_cross_documents_and_the_loss_is_plain_cross_entropy_on_shifted_data():
    model, params = hollow(depth=2)
    batch = {
        "tokens": TOKENS,
        "labels": (TOKENS + 3) % 16,
        "segments": SEGMENTS,
        "weights": (SEGMENTS > 0).astype(np.float32),
    }
    batch["weights"][0, 3] = 0.0  # one token that is not trained
    ctx = Context.whole(TOKENS, SEGMENTS, capture=("mtp",))
    out = backbone(model, params, ctx)
    for depth, positions in ((1, [0, 1, 3, 5, 6, 7]), (2, [0, 2, 5, 6])):
        objective = MultiToken(depth=depth)
        total, sums = objective(Forward(model, params, batch, ctx, out, 1, None))
        logits = model.apply({"params": params}, out.capture["mtp"][depth - 1], method="head")[0]
        labels = np.array([batch["labels"][0, i + depth] for i in positions])
        picked = jax.nn.log_softmax(logits)[np.array(positions), labels]
        assert float(objective.count(batch)) == len(positions)
        np.testing.assert_allclose(total, -picked.sum(), rtol=1e-5)
        np.testing.assert_allclose(sums["accuracy"], np.sum(np.argmax(logits, -1)[np.array(positions)] == labels))
    with pytest.raises(UserError, match="depth: 3, but the model has 2 MTP modules"):
        MultiToken(depth=3)(Forward(model, params, batch, ctx, out, 1, None))


def test_parallel_heads_are_blocks_on_the_trunk_alone():
    model, params = hollow(ParallelMTP, depth=2)
    e = np.asarray(params["embed"])[TOKENS]
    want = [rms(e, params["mtp"][f"d{k}"]["norm"]) for k in (1, 2)]
    np.testing.assert_allclose(heads(model, params), want, rtol=1e-4, atol=1e-5)
    assert set(params["mtp"]["d1"]) == {"block", "norm"}


@pytest.fixture(scope="module")
def real():
    mixers = {"kv": functools.partial(GQA, num_heads=4, num_kv_heads=2)}
    mtp = functools.partial(ChainedMTP, mixer="kv", ffn="biased")
    model = contract.model_of(mixers, "2* kv/biased", {"biased": toys.ToyBiased}, mtp=mtp)
    return model, contract.randomised(model)


def test_a_module_reports_under_its_parameters_and_counts_only_what_its_document_holds(real):
    model, params = real
    ctx = Context.whole(TOKENS, SEGMENTS, capture=("mtp",))
    plain = model.apply({"params": params}, Context.whole(TOKENS, SEGMENTS), method="backbone")[1]
    out = model.apply({"params": params}, ctx, method="backbone")[1]
    names = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(declare(model), is_leaf=is_declared)}
    assert "mtp/d1/block/ffn/bias" in names and "state/mtp/d1/block/ffn/bias" in out.aux
    assert not any("mtp" in key for key in plain.aux) and "mtp" not in plain.capture
    assert out.aux["loss/toy"] > plain.aux["loss/toy"]
    other = np.where(SEGMENTS > 0, TOKENS, 7)  # padding reaches nothing
    changed = Context.whole(other, SEGMENTS, capture=("mtp",))
    again = model.apply({"params": params}, changed, method="backbone")[1]
    np.testing.assert_array_equal(
        again.capture["mtp"][0, 0, [0, 1, 2, 3, 5, 6, 7]], out.capture["mtp"][0, 0, [0, 1, 2, 3, 5, 6, 7]]
    )
    assert again.aux["state/mtp/d1/block/ffn/bias"].sum() == out.aux["state/mtp/d1/block/ffn/bias"].sum()
    np.testing.assert_array_equal(out.hidden, plain.hidden)


def test_documents_do_not_see_each_other(real):
    model, params = real
    ctx = Context.whole(TOKENS, SEGMENTS, capture=("mtp",))
    packed = heads(model, params, ctx)
    alone = heads(
        model,
        params,
        Context.whole(np.pad(TOKENS[:, 5:9], ((0, 0), (0, 8))), np.array([[1] * 4 + [0] * 8]), capture=("mtp",)),
    )
    contract.close(packed[0, :, 5:8], alone[0, :, :3])


def test_heads_are_counted_as_held_and_not_as_used(real):
    model, _ = real
    with_heads, without = model.cost(), model.clone(mtp=None).cost()
    boxes = jax.tree.leaves(
        {k: v for k, v in declare(model)["mtp"]["d1"].items() if "norm" not in k}, is_leaf=is_declared
    )
    norms = 2 * contract.D  # of the block
    assert with_heads.params - without.params == sum(box.value.size for box in boxes) - norms
    assert (with_heads.flops, with_heads.params_active) == (without.flops, without.params_active)


def test_it_composes_and_mistakes_are_one_line():
    model = compose(["model=tiny", "model.vocab_size=61", "+mtp@model.mtp=parallel", "model.mtp.depth=2"]).build(
        "model"
    )
    assert set(declare(model)["mtp"]) == {"d1", "d2"}
    for fields, words in (({"depth": 0}, "mtp.depth"), ({"hidden": "raw"}, "mtp.hidden")):
        with pytest.raises(UserError, match=words):
            hollow(**fields)
    with pytest.raises(UserError, match="model.mtp: role 'moe'"):
        compose(["model=tiny", "model.vocab_size=61", "+mtp@model.mtp=chained", "model.mtp.ffn=moe"]).build("model")


def test_a_module_on_streams_is_deepseek_v4_s():
    """By hand, with layers that write nothing: the embedding joins every stream, hyper-connections mix and add them up; then the real one
    learns with the model that its yaml is for."""
    mhc = functools.partial(HyperConnections, streams=3)
    mtp = functools.partial(StreamsMTP, mixer="m", ffn="f", depth=2)
    kwargs = {"d_model": 16, "vocab_size": 16, "vocab_multiple": 1, "tie_embeddings": False, "residual": mhc}
    model = contract.model_of({"m": Nothing}, "m/f", {"f": Nothing}, mtp=mtp, **kwargs)
    params = contract.randomised(model)
    ctx = Context.whole(TOKENS, SEGMENTS, capture=("mtp",))
    embed, scheme = np.asarray(params["embed"]), mhc(site="mixer", d_model=16)

    @jax.jit
    def by_hand(params):
        def block(own, X):
            for site in ("residual_mixer", "residual_ffn"):
                y = jnp.zeros((*X.shape[:2], 16))
                X = scheme.apply({"params": own[site]}, X, y, method="write")
            return X

        first = jax.tree.map(lambda a: a[0], params["g0"]["b0"])
        X = block(first, scheme.start(jnp.asarray(embed[TOKENS])))
        out = []
        for k in (1, 2):
            own = params["mtp"][f"d{k}"]
            e = rms16(embed[np.pad(TOKENS[:, k:], ((0, 0), (0, k)))], own["enorm"]) @ own["e_proj"]
            X = block(own["block"], e[:, :, None] + rms16(X, own["hnorm"]) @ own["h_proj"])
            end = mhc(site="out", d_model=16).apply({"params": own["residual_out"]}, X, method="finish")
            out.append(rms16(end, own["norm"]))
        return jnp.stack(out)

    inside = np.r_[np.arange(3), np.arange(5, 7)]
    got = jax.jit(lambda p: heads(model, p, ctx))(params)
    np.testing.assert_allclose(got[:, :, inside], by_hand(params)[:, :, inside], rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="reads the streams of hyper-connections; set model.residual=mhc"):
        declare(model.clone(residual=Residual))
    tiny = compose(["model=deepseek_v4_tiny", "model.vocab_size=512", "+mtp@model.mtp=streams"]).build("model")
    assert {"e_proj", "h_proj", "residual_out", "block"} <= set(declare(tiny)["mtp"]["d1"])


def rms16(x, w):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["scale"]


def test_a_draft_layer_is_that_of_transformers(tmp_path):
    """Behind the trunk of a tiny DeepSeek-V3, tensors by their released names: hidden states of `MtpLayer` (tests/golden/make_draft.py)."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "deepseek_v3", folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(GOLDEN / "deepseek_v3_draft.safetensors")
    tokens, want = tensors.pop("tokens"), tensors.pop("hidden")
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
    node, params = read_model(open_tensors(folder))
    model = build(node)
    out = jax.jit(lambda p: model.apply({"params": p}, Context.whole(tokens, capture=("mtp",)), method="backbone")[1])(
        params
    )
    np.testing.assert_allclose(out.capture["mtp"][0, :, :-1], want, atol=1e-4)
