"""Index keys of pools of tokens: what transformers computes, what the indexer learns, and what is refused."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm.cache import cache_bytes
from jaxllm.checkpoint_files import nest
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.dsa import DSA
from jaxllm.layers.sparse_gqa import SparseGQA
from jaxllm.ops import index_loss
from jaxllm.ops.compress import pools_of, tokens_of, whole_windows
from jaxllm.weights.families.deepseek_sparse import RULES
from jaxllm.weights.family import leaves

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "dsa_pooled.safetensors")
D, M, TOP, SHORT = 24, 4, 12, 25
INDEX = {"top_k": TOP, "index_pool": M, "index_heads": 16, "index_head_dim": 8}
LAYER = DSA(
    d_model=D,
    num_heads=3,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=0,
    v_head_dim=5,
    rope=None,
    norm_eps=1e-5,
    **INDEX,
)


@pytest.fixture(scope="module")
def params():
    """The released tensors, by the rules of the families with an indexer, and the two of its pools."""
    ctx = Context.whole(np.zeros(GOLDEN["x"].shape[:2], np.int32))
    boxes = leaves(jax.eval_shape(lambda: LAYER.init(jax.random.key(0), GOLDEN["x"], ctx))["params"])
    out = {
        "index/pool_gate": GOLDEN["indexer.index_kpool_compress_gate"].T,
        "index/pool_bias": GOLDEN["indexer.index_kpool_compress_ape"],
    }
    for rule in RULES:
        ours = [path.removeprefix("mixer/") for path in rule.ours]
        theirs = rule.theirs.removeprefix("model.layers.{i}.self_attn.")
        if theirs in GOLDEN:
            parts = rule.form.split(GOLDEN[theirs], [boxes[path].value.shape for path in ours])
            out |= dict(zip(ours, parts, strict=True))
    assert {path: value.shape for path, value in out.items()} == {k: box.value.shape for k, box in boxes.items()}
    return nest({tuple(path.split("/")): value for path, value in out.items()})


def equal(y, atol=1e-5):
    for row, end in ((0, None), (1, SHORT)):
        np.testing.assert_allclose(y[row, :end], GOLDEN["y"][row, :end], atol=atol, rtol=0)


@pytest.mark.parametrize("gather", [True, False])
def test_whole_calls_are_those_of_transformers(params, gather):
    """Also behind padding: pools begin at the first valid token."""
    layer, x = LAYER.clone(gather=gather), GOLDEN["x"]
    valid = np.ones(x.shape[:2], np.int32)
    valid[1, SHORT:] = 0
    call = jax.jit(lambda x, valid: layer.apply({"params": params}, x, Context.whole(valid, valid))[0])
    equal(call(x, valid))
    moved, ahead = np.roll(x, x.shape[1] - SHORT, axis=1), valid[1, ::-1]
    y = call(moved, np.stack([ahead, ahead]))
    np.testing.assert_allclose(y[1, -SHORT:], GOLDEN["y"][1, :SHORT], atol=1e-5, rtol=0)


def test_calls_with_a_cache_are_those_of_transformers(params):
    """Calls of 7 tokens close pools inside, at their ends and between; of each, up to 3 are wrong and come again."""
    x, draft = GOLDEN["x"], 3
    layer = LAYER.clone(gather=True)
    step = jax.jit(lambda x, ctx, cache: layer.apply({"params": params}, x, ctx, cache)[:2])
    cache, y, rng = layer.init_cache(2, 32, jnp.float32, draft=draft), np.zeros_like(x), np.random.default_rng(0)
    lengths, accepted, wrong = np.zeros(2, np.int32), np.zeros(2, np.int32), 0
    while (lengths + accepted < (30, SHORT)).any():
        lengths = lengths + accepted
        new = np.minimum(7, (30, SHORT) - lengths)
        tentative = np.minimum(draft, new)
        accepted = np.where(lengths + new < (30, SHORT), rng.integers(0, tentative + 1), tentative)
        feed, good = np.zeros((2, 7, D), np.float32), new - tentative + accepted
        for r in range(2):
            feed[r, : new[r]] = x[r, lengths[r] : lengths[r] + new[r]]
            feed[r, good[r] : new[r]] *= -1
        out, cache = step(feed, Context.step(np.zeros((2, 7)), lengths, new, tentative=tentative), cache)
        for r in range(2):
            y[r, lengths[r] : lengths[r] + good[r]] = out[r, : good[r]]
        lengths, wrong = lengths + new - tentative, wrong + int((accepted < tentative).sum())
    assert wrong >= 4
    equal(y)


def test_a_cache_holds_one_index_key_a_pool_and_a_ring():
    held = DSA(d_model=D, num_heads=3, **INDEX).init_cache(1, 40, jnp.float32, draft=2)
    assert held.index.shape == (1, 40 // M, 8) and held.recent.shape == (1, M - 1 + 2, 16)
    assert cache_bytes(held.recent) == 4 * 5 * 16


def losses_by_hand(p, x, dense):
    """Loss of every query of one document `x [t d]`, in float64: KL of the pools' attention from the softmax of their scores."""

    def rms(y, w):
        return y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-5) * w["scale"]

    latent, c = rms(x @ p["q_a_proj"], p["q_a_norm"]), rms(x @ p["kv_a_proj"], p["kv_a_norm"])
    q, k = (np.einsum("tr,rhn->htn", a, p[w]) for a, w in ((latent, "q_b_proj"), (c, "k_b_proj")))
    i = p["index"]
    key = x @ i["k_proj"]
    key = key - key.mean(-1, keepdims=True)
    key = key / np.sqrt((key * key).mean(-1, keepdims=True) + 1e-6) * i["k_norm"]["scale"] + i["k_norm"]["bias"]
    logits = (x @ i["pool_gate"])[: len(x) // M * M].reshape(-1, M, 8) + i["pool_bias"]
    a = np.exp(logits - logits.max(1, keepdims=True))
    pools = (a / a.sum(1, keepdims=True) * key[: len(x) // M * M].reshape(-1, M, 8)).sum(1)
    dots = np.maximum(np.einsum("tr,rhk,wk->htw", latent, i["q_proj"], pools) / np.sqrt(8), 0)
    scores = np.einsum("th,htw->tw", x @ i["head_proj"] / 4, dots)
    out = []
    for t in range(len(x)):
        best = sorted(range((t + 1) // M), key=lambda w, t=t: -scores[t, w])[: None if dense else TOP // M]
        tokens = [w * M + j for w in best for j in range(M)] + list(range((t + 1) // M * M, t + 1))
        s = np.einsum("hn,hsn->hs", q[:, t], k[:, tokens]) / np.sqrt(6)
        mass = np.exp(s - s.max(1, keepdims=True))
        mass = (mass / mass.sum(1, keepdims=True)).sum(0)[: len(best) * M].reshape(-1, M).sum(1)
        log = scores[t, best] - np.log(np.exp(scores[t, best]).sum()) if best else np.zeros(0)
        out.append(float((mass / mass.sum() * (np.log(mass / mass.sum()) - log)).sum()) if best else 0.0)
    return np.array(out)


@pytest.mark.parametrize("attend", ["dense", "sparse"])
def test_the_indexer_learns_the_attention_of_pools_and_only_it_learns(params, attend, monkeypatch):
    """Two documents in a row, after padding: the second's pools lie across the first's. Queries in three blocks, as of long rows."""
    monkeypatch.setattr(index_loss, "causal_blocks", lambda t: 3)
    layer, x = LAYER.clone(attend=attend, recall_queries=30), GOLDEN["x"][:1]
    segments = np.array([[0] * 2 + [1] * 9 + [2] * 19])
    ctx = Context.whole(segments, segments, train=True)
    grads = jax.value_and_grad(
        lambda p: (lambda aux: (aux["loss/indexer"], aux))(layer.apply({"params": p}, x, ctx)[3]), has_aux=True
    )
    (loss, aux), grads = jax.jit(grads)(params)
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    parts = [losses_by_hand(p, np.asarray(x[0, a:b], np.float64), attend == "dense") for a, b in ((2, 11), (11, 30))]
    np.testing.assert_allclose(loss, sum(part.sum() for part in parts), rtol=1e-5)
    index = grads.pop("index")
    assert all(np.abs(np.asarray(g)).max() > 0 for g in jax.tree.leaves(index))
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))
    dense = jax.jit(lambda p: layer.clone(attend="dense").apply({"params": p}, x, ctx)[3]["metric/recall"])(params)
    assert 0.3 < dense < 1 and float(aux["metric/recall"]) == pytest.approx(float(dense), rel=1e-5)


def test_a_layer_that_shares_pools_attends_as_the_one_that_chose_and_teaches_it(params):
    shared, x = LAYER.clone(indexer="shared"), GOLDEN["x"]
    spec = {k: jnp.zeros(s.shape, s.dtype) for k, s in shared.shared_spec(2, 30, True, jnp.float32).items()}
    assert spec["topk"].shape == (2, 30, TOP + M - 1) and spec["index_k"].shape == (2, 30 // M, 8)
    ctx = Context.whole(np.zeros((2, 30)), train=True)
    rest = {k: v for k, v in params.items() if k != "index"}

    @jax.jit
    def both(x):
        y, _, handed, own = LAYER.apply({"params": params}, x, ctx, None, spec)
        z, _, left, more = shared.apply({"params": rest}, x, ctx, None, handed)
        return y, z, own["loss/indexer"], more["loss/indexer"], left["index_loss"]

    y, z, own, more, left = both(x)
    np.testing.assert_allclose(y, z, atol=1e-6)
    np.testing.assert_allclose(left, [2 * own, 2], rtol=1e-6)  # an equal layer's loss moves the mean of both by nothing
    np.testing.assert_allclose(more, 0, atol=1e-6 * own)


def test_tokens_of_pools_and_back():
    segments = jnp.array([[1, 1, 1, 0, 2, 2, 2, 2, 2]])
    ctx = Context.whole(segments, segments)
    windows, reach = whole_windows(ctx.positions, segments, 2)
    np.testing.assert_array_equal(windows.last[0, :3], [1, 5, 7])
    chosen = jnp.full((1, 9, 1), 2**30).at[0, 8, 0].set(2)
    tokens = tokens_of(chosen, 2, jnp.arange(9)[None], ctx.positions, segments > 0, windows.last)
    np.testing.assert_array_equal(tokens[0, 8], [6, 7, 8])
    np.testing.assert_array_equal(tokens[0, 2:4, 2], [2, 2**30])  # an own pool not complete; padding
    np.testing.assert_array_equal(pools_of(tokens[..., :2:2], reach), chosen)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"index_pool": 0}, "index_pool: 0 must be at least 1"),
        ({"top_k": 10}, "top_k: 10 is not a multiple of index_pool=4"),
        ({"index_interleaved": True}, "index_interleaved: true turns nothing"),
    ],
)
def test_wrong_settings_are_refused(fields, words):
    for kind in (DSA, SparseGQA):
        with pytest.raises(UserError, match=words):
            kind(d_model=D, num_heads=3, **INDEX | fields)
    with pytest.raises(UserError, match="qk_rope_head_dim: 0"):
        DSA(d_model=D, num_heads=3, qk_rope_head_dim=0, **INDEX)
