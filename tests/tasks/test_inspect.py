"""`task=inspect`: the pictures show what the layers computed, on one page that anybody's tokens cannot break."""

import functools
import json
from unittest import mock

import jax
import numpy as np
import pytest
from pages import check_self_contained, seen

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.data.tokenizer import Bytes
from jaxllm.errors import UserError
from jaxllm.inference.sampling import SamplingParams
from jaxllm.layers.base import Context
from jaxllm.params import init_params
from jaxllm.tasks import TaskIO, inspect
from jaxllm.tasks.source import build_model, pack_tokenizer

PROMPT = "<script>x</script>\n"
MODEL = [
    "model=kimi_k3_tiny", "residual@model.residual=plain", "model.d_model=32", "model.layers=linear/moe global/dense | full/dense",
    "+mixer@model.mixers.full=sparse_gqa", "model.mixers.full.num_heads=2", "model.mixers.full.top_k=4", "model.mixers.linear.num_heads=2",
    "model.mixers.linear.head_dim=16", "model.mixers.global.num_heads=2", "model.ffns.moe.d_expert=16", "model.ffns.dense.d_ff=32",
    "+mtp@model.mtp=parallel", "model.mtp.depth=2", "track=none",
]  # fmt: skip


@functools.cache
def asked():
    return compose(["task=inspect", "track=none"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(result, folder, model, what `look` saw): the task run once on random weights of every kind of layer."""
    folder = tmp_path_factory.mktemp("inspect")
    cfg = compose(MODEL)
    model = build_model(cfg, Bytes())
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    params = init_params(model, jax.random.key(0))
    checkpoints.save(3, {"params": params}, {"config": cfg.to_yaml(), "tokenizer": pack_tokenizer(Bytes()), "step": 3})
    checkpoints.close()
    (folder / "out").mkdir()
    keys = {"source": str(folder / "run"), "prompt": PROMPT, "top_k": 3}
    kept = {}

    def look(*arguments):
        kept["seen"] = real(*arguments)
        return kept["seen"]

    real = inspect.look
    with mock.patch.object(inspect, "look", look):
        result = inspect.run(asked().replace(keys), TaskIO(run_dir=folder / "out", level="error"))
    return result, folder / "out", model, kept["seen"], params


def test_the_page_has_every_part_and_shows_tokens_as_text(made):
    result, folder, _, _, _ = made
    page = check_self_contained((folder / "inspect.html").read_text())
    for part in (
        "What comes next", "What each layer would say", "Heads that look further ahead", "Attention", "Keys that were chosen", "Experts",
        "Decay and writing", "2 tokens ahead", "3 tokens ahead", "layer 2, full/dense",
    ):  # fmt: skip
        assert part in page.shown, part
    assert not page.all("script") and "<" in page.shown
    assert result["layers"] == 3 and result["tokens"] == len(PROMPT) + 1  # the one that begins a document
    assert json.loads(json.dumps(result))["html"].endswith("inspect.html")


def test_maps_are_weights_of_what_may_be_seen(made):
    _, _, model, look, _ = made
    latent, sparse = inspect.layers_of(model, look["capture"])[1:]
    t = len(PROMPT) + 1
    for layer in (latent, sparse):
        np.testing.assert_allclose(layer.attention.sum(axis=-1), 1, atol=1e-5)
        assert (layer.attention[:, ~np.tri(t, dtype=bool)] == 0).all()
    assert (latent.attention[:, np.tri(t, dtype=bool)] > 0).all() and latent.selected is None
    np.testing.assert_array_equal(sparse.selected.sum(axis=1), np.minimum(np.arange(t) + 1, 4))
    np.testing.assert_array_equal(sparse.attention[0] > 0, sparse.selected)


def test_a_map_goes_on_where_a_softmax_also_runs_over_entries():
    tokens, half = ["a", "b", "c"], np.full((2, 3, 3), 0.25)
    layer = inspect.insides.Layer("layer 0, csa/moe", attention=half, entries=half[..., :1])
    text = inspect.insides.attention(tokens, layer)
    assert "layer 0, csa/moe: entries" in text and "25% of the weight goes to 1 entries of compressed tokens" in text
    assert set(inspect.insides.pictures([layer])) == {"attn/layer_00", "attn/entries/layer_00"}


def test_experts_and_decay_are_those_of_each_token(made):
    _, _, model, look, _ = made
    layer, *others = inspect.layers_of(model, look["capture"])
    t = len(PROMPT) + 1
    assert layer.experts.shape == layer.weights.shape == (t, 2) and layer.number == 8
    np.testing.assert_allclose(np.sort(np.unique(layer.experts)), np.unique(layer.experts))
    grid = inspect.insides.by_expert(layer)
    assert ((grid > 0).sum(axis=0) == 2).all() and grid[layer.experts[5, 0], 5] == layer.weights[5, 0]
    assert layer.decay.shape == layer.beta.shape == (t, 2)
    assert ((0 < layer.decay) & (layer.decay < 1)).all() and ((0 < layer.beta) & (layer.beta < 1)).all()
    assert all(other.decay is None and other.experts is None for other in others)


def test_the_last_row_of_the_lens_is_the_models_own_word(made):
    _, _, model, look, params = made
    ids, sure = look["lens"]
    logits = look["logits"][:, : model.vocab_size].astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    assert len(ids) == model.num_layers + 1
    np.testing.assert_array_equal(ids[-1], logits.argmax(-1))
    np.testing.assert_allclose(sure[-1], p.max(-1), rtol=1e-4)
    assert all((abs(sure[k] - sure[-1]) > 1e-3).any() for k in range(model.num_layers))  # earlier rows are other words
    assert look["further"][0].shape == (2, len(PROMPT) + 1)


def test_captures_are_only_made_when_asked_for(made):
    _, _, model, _, params = made
    out = jax.eval_shape(
        lambda p: model.apply({"params": p}, Context.whole(np.zeros((1, 8), np.int32)), method="backbone")[1], params
    )
    assert out.capture == {}


def test_sampling_is_softmax_over_t_and_its_cut(made):
    logits = np.array([2.0, 1.0, 0.0, -1.0, 1.0], np.float32)
    s = inspect.sampling(logits, SamplingParams(top_k=2), None)
    assert s.texts == ["<0>", "<1>", "<4>", "<2>", "<3>"] and s.cut == "top_k 2"
    for t in (0.5, 1.0, 2.0):
        at = int(np.argmin(abs(s.temperatures - t)))
        p = np.exp(logits.astype(np.float64) / t)
        p = (p / p.sum())[[0, 1, 4, 2, 3]]
        np.testing.assert_allclose(s.before[at], p, rtol=1e-5)
        np.testing.assert_allclose(s.after[at], [p[0] / p[:2].sum(), p[1] / p[:2].sum(), 0, 0, 0], rtol=1e-5)
        assert s.kept[at] == 2
    assert s.temperatures[0] == 0 and s.temperatures[-1] == 2
    np.testing.assert_array_equal(s.before[0], [1, 0, 0, 0, 0])
    assert inspect.sampling(logits, SamplingParams(), None).cut.endswith("as an example")


def test_images_go_to_the_tracker_and_the_folder(made):
    result, folder, _, _, _ = made
    lines = [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]
    names = {line["name"] for line in lines}
    assert {
        "attn/layer_01",
        "attn/selected/layer_02",
        "moe/layer_00",
        "attn/decay/layer_00",
        "attn/write/layer_00",
    } <= names
    assert {line["step"] for line in lines} == {3}
    for path in result["images"]:
        data = (folder / "images" / path.rsplit("/", 1)[1]).read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) < 100_000


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"prompt": None}, "give either prompt=TEXT or prompt_ids"),
        ({"prompt_ids": [1]}, "give either prompt=TEXT or prompt_ids"),
        ({"prompt": "x" * 300}, "at most 256 can be looked at"),
        ({"prompt": None, "prompt_ids": [999]}, "prompt_ids: 999 is outside the vocabulary"),
        ({"prompt": None, "prompt_ids": []}, "prompt_ids: is empty"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"source": None}, "source: missing"),
    ],
)
def test_mistakes_are_one_line(made, keys, words):
    folder = made[1]
    base = {"source": str(folder.parent / "run"), "prompt": "a", "out": str(folder / "never.html")}
    with pytest.raises(UserError, match=words) as error:
        inspect.run(asked().replace(base | keys), TaskIO(level="error"))
    assert "\n" not in str(error.value) and not (folder / "never.html").exists()


def test_in_a_browser_on_a_phone(made, tmp_path):
    found = seen(made[1] / "inspect.html", tmp_path)
    assert found["scroll"] <= found["width"] and found["pictures"] and found["bad"] == []
