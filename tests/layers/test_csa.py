"""Compressed attention against its equations in numpy; blocks against one piece; what must not depend on anything; settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.csa import CompressedAttention
from jaxllm.layers.rope import RoPE
from jaxllm.ops.compressed_attention import Far, Near, attend_compressed, compressed_naive
from jaxllm.ops.topk import top_k_naive
from jaxllm.params import is_declared

B, T, D = 1, 23, 24
ROPE = RoPE(interleaved=True, theta=100.0)
SIZES = {
    "num_heads": 4,
    "head_dim": 8,
    "rope_head_dim": 4,
    "q_lora_rank": 7,
    "window": 5,
    "out_groups": 2,
    "out_lora_rank": 6,
}
KINDS = {
    "window": {},
    "hca": {"compress_rate": 6},
    "csa": {"compress_rate": 3, "overlap": True, "top_k": 3, "index_heads": 16, "index_head_dim": 6},
}


def made(name, **kwargs):
    layer = CompressedAttention(d_model=D, rope=ROPE, **SIZES | KINDS[name] | kwargs)
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    boxes = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, whole()))["params"]
    rng = np.random.default_rng(0)
    shapes, tree = jax.tree.flatten(boxes, is_leaf=is_declared)
    leaves = [jnp.asarray(rng.standard_normal(s.value.shape) * s.value.shape[0] ** -0.5, jnp.float32) for s in shapes]
    return layer, jax.tree.unflatten(tree, leaves), x


def whole(**kwargs):
    return Context.whole(jnp.zeros((B, T), jnp.int32), **kwargs)


def rms(x, w=None):
    u = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return u if w is None else u * w["scale"]


def turn(x, position, sign=1):
    """The last 4 channels of `x [.., k]` by `position`, in pairs of neighbours, as complex numbers."""
    z = (x[..., -4::2] + 1j * x[..., -3::2]) * np.exp(sign * 1j * position * np.array([1.0, 0.1]))
    return np.concatenate([x[..., :-4], np.stack([z.real, z.imag], -1).reshape(*x.shape[:-1], 4)], -1)


def entries_by_hand(p, row, m, overlap):
    v, z = row @ p["kv_proj"], row @ p["gate_proj"]
    c = v.shape[1] // (2 if overlap else 1)
    out = []
    for w in range(len(row) // m):
        slots = [(w * m + j, j, slice(v.shape[1] - c, None)) for j in range(m)]
        if overlap and w:
            slots = [(w * m - m + j, j, slice(0, c)) for j in range(m)] + slots
        logits = np.stack([z[i, half] + p["bias"][j, half] for i, j, half in slots])
        a = np.exp(logits - logits.max(0))
        e = (a / a.sum(0) * np.stack([v[i, half] for i, _, half in slots])).sum(0)
        out.append(turn(rms(e, p["norm"]), w * m))
    return np.stack(out)


def equations(layer, params, x):
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    row, m = np.asarray(x[0], np.float64), layer.compress_rate
    c = rms(row @ p["q_a_proj"], p["q_a_norm"])
    q, kv = rms(np.einsum("tr,rhk->thk", c, p["q_b_proj"])), rms(row @ p["kv_proj"], p["kv_norm"])
    far = entries_by_hand(p["compress"], row, m, layer.overlap) if m else np.zeros((0, 8))
    y = np.zeros((T, D))
    for t in range(T):
        chosen = list(range((t + 1) // m)) if m else []
        if layer.top_k is not None:
            i = p["index"]
            keys = entries_by_hand(i["compress"], row, m, True)
            q_i = turn(np.einsum("r,rik->ik", c[t], i["q_proj"]), t)
            score = row[t] @ i["head_proj"] / 4 @ np.maximum(q_i @ keys.T / np.sqrt(6), 0)
            chosen = sorted(chosen, key=lambda w: -score[w])[: layer.top_k]
        near = range(max(0, t - 4), t + 1)
        key = np.stack([turn(kv[j], j) for j in near] + [far[w] for w in chosen])
        heads = []
        for h in range(4):
            s = np.append(key @ turn(q[t, h], t) / np.sqrt(8), p["sinks"][h])
            a = np.exp(s - s.max())
            heads.append(turn(a[:-1] / a.sum() @ key, t, -1))
        groups = np.stack(heads).reshape(2, 2, 8)
        y[t] = np.einsum("gr,grd->d", np.einsum("ghk,ghkr->gr", groups, p["o_a_proj"]), p["o_b_proj"])
    return y[None]


def test_captured_maps_stand_on_the_window_and_on_the_entries_that_were_chosen():
    """A row and its sink are one softmax: positive on what is met, 0 elsewhere, and less than 1 in all."""
    layer, params, x = made("csa")
    ctx = whole(capture=("attention", "selected"))
    aux = jax.jit(lambda p, x, c: layer.apply({"params": p}, x, c)[3])(params, x, ctx)
    near, far = np.asarray(aux["capture/attention"][0]), np.asarray(aux["capture/entries"][0])
    back = np.arange(T)[:, None] - np.arange(T)
    np.testing.assert_array_equal(near > 0, np.broadcast_to((back >= 0) & (back < 5), (4, T, T)))
    chosen = np.zeros((T, T // 3), bool)
    for row, places in zip(chosen, np.asarray(aux["capture/selected"][0]), strict=True):
        row[places[places < len(row)]] = True
    assert chosen[0].sum() == 0 and chosen[-1].sum() == 3
    np.testing.assert_array_equal(far > 0, np.broadcast_to(chosen, far.shape))
    total = near.sum(-1) + far.sum(-1)
    assert (total > 0).all() and (total < 1).all()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_whole_and_streaming_calls_equal_the_equations(name):
    """Whole, and in calls of 7, 7, 7, 1 and 1 tokens: windows of 3 and 6 close inside calls, at their ends, and between them."""
    layer, params, x = made(name)
    want = equations(layer, params, x)
    np.testing.assert_allclose(
        jax.jit(lambda p, x: layer.apply({"params": p}, x, whole())[0])(params, x), want, atol=2e-5
    )
    step = jax.jit(lambda p, x, c, cache: layer.apply({"params": p}, x, c, cache)[:2])
    cache, start, outs = layer.init_cache(B, 24, jnp.float32), 0, []
    for n in (7, 7, 7, 1, 1):
        y, cache = step(params, x[:, start : start + n], Context.step(np.zeros((B, n)), np.full(B, start)), cache)
        outs, start = [*outs, y], start + n
    np.testing.assert_allclose(np.concatenate(outs, 1), want, atol=2e-5)


@pytest.mark.parametrize("kind", ["all", "masked", "gathered"])
def test_blocks_of_queries_equal_one_piece_with_their_gradients(kind, monkeypatch):
    b, t, h, k, e, window = 2, 11, 3, 4, 5, 3
    keys = jax.random.split(jax.random.key(0), 6)
    q, kv, far, pull = (
        jax.random.normal(key, s)
        for key, s in zip(keys, ((b, t, h, k), (b, t + 2, k), (b, e, k), (b, t, h, k)), strict=False)
    )
    sinks = jnp.array([0.3, -1.0, 2.0])
    segments = jnp.array([[1] * 6 + [2] * 5, [1] * 8 + [0] * 3])
    ctx = Context.whole(jnp.zeros((b, t), jnp.int32), segments)
    ahead = ((0, 0), (2, 0))
    reach = jnp.broadcast_to(jnp.arange(1, t + 1) // 2, (b, t))
    docs = segments, jnp.array([[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]])
    seen = (jnp.arange(e) < reach[..., None]) & (docs[0][:, :, None] == docs[1][:, None]) & (docs[1] > 0)[:, None]
    index = None if kind == "all" else top_k_naive(jax.random.normal(keys[5], (b, t, e)), seen, 2)

    def run(f, q, kv, far, sinks):
        near = Near(kv, jnp.pad(ctx.positions, ahead), jnp.pad(segments, ahead))
        return f(q, near, Far(far, reach, docs, index, kind == "gathered"), sinks, window=window, scale=0.5)

    def both(f):
        def loss(*x):
            out = f(*x)
            return jnp.sum(out * pull), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(q, kv, far, sinks)

    (_, want), grads = both(lambda *x: run(compressed_naive, *x))
    monkeypatch.setattr("jaxllm.ops.compressed_attention.MOST", 4)
    (_, got), more = both(lambda *x: run(attend_compressed, *x)[0])
    np.testing.assert_allclose(got, want, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), more, grads)


def test_with_as_many_entries_as_there_are_the_indexer_does_not_matter():
    layer, params, x = made("csa", top_k=7)
    other = {**params, "index": jax.tree.map(lambda a: -a, params["index"])}
    run = jax.jit(lambda p: layer.apply({"params": p}, x, whole())[0])
    np.testing.assert_array_equal(run(params), run(other))


def test_only_relative_positions_count_as_the_output_is_turned_back():
    """All positions 48 later: queries, window, entries and output turn together."""
    layer, params, x = made("hca")
    run = jax.jit(lambda p, c: layer.apply({"params": p}, x, c)[0])
    here, there = whole(), whole(positions=48 + jnp.arange(T)[None])
    np.testing.assert_allclose(run(params, here), run(params, there), atol=2e-5)


def test_an_entry_of_one_token_without_gate_is_that_token():
    """Rate 1: every entry is a normed, turned key of its own, so only the far branch's weights tell it from plain multi-query attention."""
    layer, params, x = made("hca", compress_rate=1, window=1)
    params["compress"] |= {
        "kv_proj": params["kv_proj"],
        "norm": params["kv_norm"],
        "bias": params["compress"]["bias"] * 0,
    }
    params["compress"]["gate_proj"] *= 0
    near, _, _ = made("window", window=T)
    # The query's own key counts twice, once exactly and once as an entry: a sink of its logit makes up for the second.
    got = layer.apply({"params": params}, x[:, :1], Context.whole(jnp.zeros((1, 1), jnp.int32)))[0]
    rest = {name: value for name, value in params.items() if name != "compress"} | {
        "sinks": params["sinks"] - np.log(2)
    }
    want = near.apply({"params": rest}, x[:, :1], Context.whole(jnp.zeros((1, 1), jnp.int32)))[0]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_the_indexers_loss_moves_nothing_but_the_indexer():
    layer, params, x = made("csa")
    grad = jax.grad(lambda p, x: layer.apply({"params": p}, x, whole(train=True))[3]["loss/indexer"], argnums=(0, 1))
    of_params, of_x = jax.jit(grad)(params, x)
    assert all(np.abs(np.asarray(g)).max() > 0 for g in jax.tree.leaves(of_params.pop("index")))
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves((of_params, of_x)))


def test_recall_is_the_weight_on_the_chosen_entries_of_that_on_the_best(monkeypatch):
    """By hand from attention's weights on all entries, as the dense layer takes them, and the choice; packed rows and padding."""
    layer, params, x = made("csa", recall_queries=99)
    segments = jnp.array([[1] * 13 + [2] * 8 + [0] * 2])
    ctx = whole(segments=segments, train=True, capture=("selected",))
    kept = {}

    def spy(*args, **kwargs):
        out, mass = attend_compressed(*args, **kwargs)
        kept.setdefault("mass", mass)  # of the dense layer, which comes first
        return out, mass

    def aux(layer):
        return layer.apply({"params": params}, x, ctx)[3]

    monkeypatch.setattr("jaxllm.layers.csa.attend_compressed", spy)
    dense, sparse, mass = jax.jit(lambda: (aux(layer.clone(attend="dense")), aux(layer), kept["mass"][0]))()
    mass, chosen = np.asarray(mass, np.float64), np.asarray(sparse["capture/selected"][0])
    seen = np.asarray(dense["capture/selected"][0]) < mass.shape[1]
    ratios = [
        mass[t, chosen[t]].sum() / np.sort(mass[t][seen[t]])[-3:].sum() for t in range(T) if seen[t].sum() > layer.top_k
    ]
    assert 1 <= len(ratios) < T and min(ratios) < 0.95
    for each in (dense, sparse):
        np.testing.assert_allclose(each["metric/recall"], np.mean(ratios), rtol=1e-5)
    assert "metric/recall" not in jax.eval_shape(lambda: aux(layer.clone(recall_queries=0)))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 0, "compress_rate": 4}, "top_k: 0 must be at least 1"),
        ({"compress_rate": 0}, "compress_rate: 0 must be at least 1"),
        ({"overlap": True}, "compress_rate: null leaves no entries"),
        ({"out_groups": 3}, "out_groups: 3 must divide num_heads=4"),
        ({"rope_head_dim": 10}, "rope_head_dim: 10 must be even and at most head_dim=8"),
        ({"compress_rate": 4, "top_k": 2, "index_head_dim": 2}, "index_head_dim=2"),
        ({"window": 0}, "window: 0"),
        ({"rope": RoPE()}, "interleaved true"),
        ({"attend": "no"}, "attend: 'no'"),
        ({"recall_queries": -1}, "recall_queries: -1"),
    ],
)
def test_wrong_settings_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        CompressedAttention(d_model=D, **{"rope": ROPE} | SIZES | fields)
