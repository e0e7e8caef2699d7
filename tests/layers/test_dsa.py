"""Sparse attention against its equations in numpy; sharing the choice; what the indexer learns and what it must not touch; settings."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.cache import EMPTY
from jaxllm.compose import component
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.dsa import DSA
from jaxllm.layers.indexer import Indexer
from jaxllm.layers.mla import MLA
from jaxllm.layers.mlp import MLP
from jaxllm.layers.rope import RoPE
from jaxllm.layers.sparse_gqa import SparseGQA
from jaxllm.model import LanguageModel
from jaxllm.params import declare, init_params, is_declared, unstack
from jaxllm.training.stages import override

B, T, D, TOP = 2, 13, 24, 4
SIZES = {
    "num_heads": 3,
    "q_lora_rank": 7,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
INDEX = {"top_k": TOP, "index_heads": 16, "index_head_dim": 8}
GQA_SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "sinks": True}


def ctx(segments=None, train=False):
    return Context.whole(jnp.zeros((B, T), jnp.int32), segments, train=train)


def parameters(layer, shared=None, seed=0):
    x = jax.random.normal(jax.random.key(1), (B, T, D))
    boxes = jax.eval_shape(lambda: layer.init(jax.random.key(0), x, ctx(), None, shared))["params"]
    rng = np.random.default_rng(seed)
    shapes, tree = jax.tree.flatten(boxes, is_leaf=is_declared)
    leaves = [jnp.asarray(rng.standard_normal(s.value.shape) * s.value.shape[0] ** -0.5, jnp.float32) for s in shapes]
    return jax.tree.unflatten(tree, leaves), x


def turned(x, positions, interleaved):
    """The first 4 channels of `x [t h k]`, in complex numbers."""
    z = np.exp(1j * positions[:, None, None] * np.array([1.0, 0.01]))
    a, b = (x[..., 0:4:2], x[..., 1:4:2]) if interleaved else (x[..., :2], x[..., 2:4])
    y = (a + 1j * b) * z
    pairs = (
        np.stack([y.real, y.imag], -1).reshape(*x.shape[:-1], 4)
        if interleaved
        else np.concatenate([y.real, y.imag], -1)
    )
    return np.concatenate([pairs, x[..., 4:]], -1)


def index_by_hand(p, row, latent, interleaved):
    """I[t, s] of one row, in float64."""
    at = np.arange(len(row))
    q = turned(np.einsum("tr,rhk->thk", latent, p["q_proj"]), at, interleaved)
    k = row @ p["k_proj"]
    k = k - k.mean(-1, keepdims=True)
    k = k / np.sqrt((k * k).mean(-1, keepdims=True) + 1e-6) * p["k_norm"]["scale"] + p["k_norm"]["bias"]
    k = turned(k[:, None], at, interleaved)[:, 0]
    w = row @ p["head_proj"] / np.sqrt(q.shape[1])
    return np.einsum("th,ths->ts", w, np.maximum(np.einsum("thk,sk->ths", q, k) / np.sqrt(q.shape[2]), 0))


def dsa_by_hand(layer, params, x):
    """MLA whose softmax runs over the top_k of I."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    n, r = 6, 10

    def norm(y, w):
        return y / np.sqrt(np.mean(y * y, -1, keepdims=True) + 1e-6) * w["scale"]

    out = np.zeros((B, T, D))
    for i, row in enumerate(np.asarray(x, np.float64)):
        latent = norm(row @ p["q_a_proj"], p["q_a_norm"])
        q, both = np.einsum("tr,rhk->thk", latent, p["q_b_proj"]), row @ p["kv_a_proj"]
        c, k_r = norm(both[:, :r], p["kv_a_norm"]), turned(both[:, None, r:], np.arange(T), True)[:, 0]
        index = index_by_hand(p["index"], row, latent, layer.index_interleaved)
        for t in range(T):
            chosen = sorted(range(t + 1), key=lambda s, t=t: -index[t, s])[:TOP]
            q_r = turned(q[t : t + 1, :, n:], np.array([t]), True)[0]
            for h in range(3):
                s = (c[chosen] @ p["k_b_proj"][:, h] @ q[t, h, :n] + k_r[chosen] @ q_r[h]) / np.sqrt(10)
                weights = np.exp(s - s.max())
                out[i, t] += (weights / weights.sum() @ (c[chosen] @ p["v_b_proj"][:, h])) @ p["o_proj"][h]
    return out


def decode(layer, params, x, ends, room=16):
    """Outputs of calls with a cache that end at `ends`, joined; one compilation for each length of a call."""
    step = jax.jit(lambda p, x, c, cache: layer.apply({"params": p}, x, c, cache)[:2])
    cache, outs, start = layer.init_cache(B, room, jnp.float32), [], 0
    for end in ends:
        y, cache = step(params, x[:, start:end], Context.step(np.zeros((B, end - start)), np.full(B, start)), cache)
        outs, start = [*outs, y], end
    return np.concatenate(outs, axis=1)


@pytest.mark.parametrize("gather", [True, False])
def test_whole_and_cached_calls_equal_the_equations_gathered_and_masked(gather):
    layer = DSA(d_model=D, **SIZES, **INDEX, gather=gather)
    params, x = parameters(layer)
    want = dsa_by_hand(layer, params, x)
    whole = jax.jit(lambda p, x: layer.apply({"params": p}, x, ctx())[0])(params, x)
    np.testing.assert_allclose(whole, want, atol=1e-5)
    np.testing.assert_allclose(decode(layer, params, x, (6, 12, 13)), want, atol=1e-5)


def test_index_heads_turn_half_split_or_in_neighbouring_pairs():
    """Position 1, a key of (1, 0, 0, 0), the first frequency: (cos 1, 0, sin 1, 0) or (cos 1, sin 1, 0, 0)."""
    x = jnp.array([[[1.0, 0.0, 0.0, 0.0]]])
    angles = RoPE().angles(jnp.ones((1, 1), jnp.int32), 4)
    for interleaved, want in ((False, [np.cos(1), 0, np.sin(1), 0]), (True, [np.cos(1), np.sin(1), 0, 0])):
        turn = Indexer(num_heads=1, head_dim=4, interleaved=interleaved)._turn
        np.testing.assert_allclose(turn(x[:, :, None], angles)[0, 0, 0], want, atol=1e-6)


@pytest.mark.parametrize("kind", [DSA, SparseGQA])
def test_with_as_many_keys_as_there_are_it_is_the_dense_layer(kind):
    sizes = SIZES if kind is DSA else GQA_SIZES
    sparse = kind(d_model=D, **sizes, **INDEX | {"top_k": T - 1})
    params, x = parameters(sparse)
    dense = MLA(d_model=D, **sizes) if kind is DSA else kind.__mro__[2](d_model=D, **sizes)
    rest = {name: value for name, value in params.items() if name != "index"}
    want = jax.jit(lambda p, x: dense.apply({"params": p}, x, ctx())[0])(rest, x)
    layers = (sparse.clone(top_k=T), sparse, sparse.clone(gather=True))
    outs = jax.jit(lambda p, x: [layer.apply({"params": p}, x, ctx())[0] for layer in layers])(params, x)
    for got in outs:
        np.testing.assert_allclose(got[:, : T - 1], want[:, : T - 1], atol=1e-5)  # the last query leaves one key out
    assert np.abs(np.asarray(got - want))[:, T - 1].max() > 1e-4


def test_ties_fall_the_same_way_in_prefill_chunk_and_decode():
    """Two index heads: a large share of the scores is exactly 0."""
    layer = SparseGQA(d_model=D, **GQA_SIZES, **INDEX | {"index_heads": 2, "index_head_dim": 6})
    params, x = parameters(layer)
    q, w, k, _ = Indexer(num_heads=2, head_dim=6).apply(
        {"params": params["index"]}, x, None, RoPE().angles(ctx().positions, 6)
    )
    dots = jnp.einsum("bthk,bsk->bhts", q, k)
    assert ((np.asarray(dots) <= 0).all(1) & np.tri(T, dtype=bool)).sum() > B * T  # scores that are 0
    whole = jax.jit(lambda p, x: layer.apply({"params": p}, x, ctx())[0])(params, x)
    for ends in (range(1, T + 1), (5, 9, 13)):
        np.testing.assert_allclose(decode(layer, params, x, ends), whole, atol=1e-5)


@pytest.mark.parametrize("ends", [(T,), (6, 12, 13)])
def test_narrow_index_keys_are_cached_so_and_chosen_by_and_attention_stays_as_it_is(ends):
    """The choice is that of rounded queries and keys, whose products are summed in float32; no other array is narrow."""
    layer = SparseGQA(d_model=D, **GQA_SIZES, **INDEX, index_dtype="bfloat16")
    params, x = parameters(layer, seed=33)
    index = Indexer(num_heads=16, head_dim=8)
    q, w, k, _ = index.apply({"params": params["index"]}, x, None, RoPE().angles(ctx().positions, 6))
    q_narrow, k_narrow = (a.astype(jnp.bfloat16) for a in (q, k))

    def best(q, k):
        dots = np.einsum("bthk,bsk->bths", np.asarray(q, np.float64), np.asarray(k, np.float64))
        scores = np.einsum("bth,bths->bts", w, np.maximum(dots, 0))
        order = np.argsort(np.where(np.tri(T, dtype=bool), -scores, np.inf), axis=-1, kind="stable")[..., :TOP]
        return jnp.asarray(np.sort(np.where(order <= np.arange(T)[:, None], order, EMPTY)), jnp.int32)

    places = best(q_narrow, k_narrow)
    for other in (best(q, k), best(q, k_narrow)):  # what a wide key, or a wide query, would choose
        assert (other != places).any()
    wide = layer.clone(index_dtype=None, indexer="shared")
    rest = {name: value for name, value in params.items() if name != "index"}
    want = jax.jit(lambda p, x: wide.apply({"params": p}, x, ctx(), None, {"topk": places})[0])(rest, x)
    whole, _, handed, _ = jax.jit(lambda p, x: layer.apply({"params": p}, x, ctx(), None, {"topk": 0 * places}))(
        params, x
    )
    np.testing.assert_array_equal(np.sort(handed["topk"]), places)
    np.testing.assert_allclose(whole, want, atol=1e-5)
    np.testing.assert_allclose(decode(layer, params, x, ends), want, atol=1e-5)
    cache = layer.init_cache(3, 20, jnp.float32)
    assert (cache.index.dtype, cache.held.k.dtype, cache.held.v.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    cost, more = (layer.clone(index_dtype=name).cost(1, 1, 64, "float32") for name in ("bfloat16", None))
    assert more.cache_read - cost.cache_read == 64 * 8 * 2 and more.flops == cost.flops


@pytest.mark.parametrize("kind", ["dsa", "dsa_pooled", "sparse_gqa"])
def test_narrow_index_keys_keep_the_contract(kind):
    """Every split, drafts that are rejected, pages; parameters and bytes are what is counted."""
    layer = component("mixer", kind, index_dtype="bfloat16")
    s = contract.Subject(contract.model_of({"m": layer}, "2* m/dense"))
    for check in (contract.check_splits, contract.check_paged, contract.check_cost):
        check(s)


def test_layers_that_share_narrow_keys_learn_as_from_rounded_ones():
    """The gradient is that of float32 at rounded queries and keys, whoever shares them; two roundings of 2^-9 on its way are all."""

    def grads(own, use):
        spec = start(use, True)
        params, x = parameters(own, spec)

        def loss(params):
            _, _, handed, aux = own.apply({"params": params}, x, ctx(train=True), None, spec)
            assert handed["index_q"].dtype == handed["index_k"].dtype == jnp.float32  # what gradients are summed in
            rest = {name: value for name, value in params.items() if name != "index"}
            more = use.apply({"params": rest}, x, ctx(train=True), None, handed)[3]
            return aux["loss/indexer"] + more["loss/indexer"]

        return jax.jit(jax.grad(loss))(params)["index"]

    narrow, wide = grads(*pair(index_dtype="bfloat16")), grads(*pair())
    for name in wide:
        for got, want in zip(jax.tree.leaves(narrow[name]), jax.tree.leaves(wide[name]), strict=True):
            np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max(), err_msg=name)


def pair(**fields):
    """A layer with an indexer and one that shares it; their parameters."""
    full, shared = (DSA(d_model=D, **SIZES, **INDEX, indexer=kind, **fields) for kind in ("full", "shared"))
    return full, shared


def start(layer, train):
    return {k: jnp.zeros(s.shape, s.dtype) for k, s in layer.shared_spec(B, T, train, jnp.float32).items()}


def test_a_shared_layer_owns_no_indexer_and_attends_to_the_choice_it_is_given():
    full, shared = pair()
    params, x = parameters(full)
    spec = start(shared, False)
    y, _, handed, _ = jax.jit(lambda p, x: full.apply({"params": p}, x, ctx(), None, spec))(params, x)
    rest = {name: value for name, value in params.items() if name != "index"}
    again, _, kept, _ = jax.jit(lambda p, x: shared.apply({"params": p}, x, ctx(), None, handed))(rest, x)
    np.testing.assert_allclose(again, y, atol=1e-6)
    np.testing.assert_array_equal(kept["topk"], handed["topk"])
    assert parameters(shared, spec)[0].keys() == rest.keys()
    sizes = [sum(a.size for a in jax.tree.leaves(layer.init_cache(1, 10, jnp.float32))) for layer in pair()]
    assert sizes[0] - sizes[1] == 10 * 8
    assert set(handed) == {"topk"} and start(full, True) == {}  # nothing rides along that nobody asked for


def test_the_loss_of_all_served_layers_reaches_the_indexer_and_nothing_else():
    """The choice has no gradient: neither the loss of the indexer moves the trunk, nor that of the tokens the indexer."""
    segments = jnp.array([[1] * 6 + [2] * 7, [1] * 9 + [0] * 4])
    for attend in ("sparse", "dense"):
        full, shared = pair(attend=attend)
        params, x = parameters(full)
        rest, _ = parameters(shared, start(shared, True), seed=1)

        def losses(params, rest, x, full=full, shared=shared):
            c = ctx(segments, train=True)
            y, _, handed, one = full.apply({"params": params}, x, c, None, start(shared, True))
            z, _, _, two = shared.apply({"params": rest}, x + 0.1 * y, c, None, handed)
            return one["loss/indexer"], two["loss/indexer"], jnp.sum(z**2)

        own, served, tokens = jax.jit(jax.jacrev(losses, argnums=(0, 1, 2)))(params, rest, x)
        for of_full, of_shared, of_x in (own, served):
            assert all(np.abs(np.asarray(g)).max() > 0 for g in jax.tree.leaves(of_full.pop("index")))
            assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves((of_full, of_shared, of_x)))
        assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(tokens[0].pop("index")))
        assert all(np.abs(np.asarray(g)).max() > 0 for g in jax.tree.leaves(tokens))


def test_layers_that_share_an_indexer_report_the_mean_of_their_losses():
    """However many follow, and from the next layer with an indexer on anew."""
    full, shared = pair()
    params, x = parameters(full)
    rest, _ = parameters(shared, start(shared, True), seed=1)

    @jax.jit
    def losses(params, rest, x):
        seen, alone, told = start(shared, True), [], []
        for layer, p, scale in ((full, params, 1), (shared, rest, 2), (shared, rest, 3), (full, params, 2)):
            c = ctx(train=True)
            for given, kept in ((seen | {"index_loss": jnp.zeros(2)}, alone), (seen, told)):
                _, _, after, aux = layer.apply({"params": p}, scale * x, c, None, given)
                kept.append(aux["loss/indexer"])
            seen = after
        return jnp.stack(alone), jnp.stack(told)

    alone, told = losses(params, rest, x)
    np.testing.assert_allclose(jnp.cumsum(told)[:3], jnp.cumsum(alone)[:3] / np.arange(1, 4), rtol=1e-5)
    np.testing.assert_allclose(told[3], alone[3], rtol=1e-6)


def test_padding_and_short_documents_count_nothing():
    """The loss is a sum over valid tokens: of a packed row, that of its documents alone."""
    full, _ = pair(attend="sparse")
    params, x = parameters(full)
    segments = jnp.array([[1] * 6 + [2] * 7, [1] * 9 + [0] * 4])

    def loss(layer):
        return jax.jit(lambda p, x, c: layer.apply({"params": p}, x, c)[3]["loss/indexer"])

    whole, loss, alone = loss(full)(params, x, ctx(segments, train=True)), loss(full), 0.0
    for row, a, b in ((0, 0, 6), (0, 6, 13), (1, 0, 9)):
        moved = jnp.zeros_like(x).at[0, : b - a].set(x[row, a:b])
        mask = jnp.zeros((B, T), jnp.int32).at[0, : b - a].set(1)
        alone += loss(params, moved, ctx(mask, train=True))
    np.testing.assert_allclose(whole, alone, rtol=1e-5)


@pytest.mark.parametrize("kind", [DSA, SparseGQA])
def test_recall_goes_on_while_attention_is_sparse(kind):
    """Of all queries it is what dense attention reports; of two, the mean of theirs."""
    sizes = SIZES if kind is DSA else GQA_SIZES
    layer = kind(d_model=D, **sizes, **INDEX)
    params, x = parameters(layer)
    segments = jnp.array([[1] * 6 + [2] * 7, [1] * 10 + [0] * 3])
    layers = [layer.clone(attend="dense")]
    layers += [layer.clone(gather=gather, recall_queries=n) for gather, n in ((True, 99), (False, 2))]

    @jax.jit
    def aux(p, x):
        return [each.apply({"params": p}, x, ctx(segments, train=True))[3]["metric/recall"] for each in layers]

    dense, every, two = (float(value) for value in aux(params, x))
    assert 0.2 < dense < 0.99 and every == pytest.approx(dense, rel=1e-5)
    assert 0.1 < two <= 1 and abs(two - dense) > 1e-3


def model(layers="own/dense | 2* use/dense", **fields):
    mixers = {"own": functools.partial(DSA, **SIZES, **INDEX, **fields)}
    mixers["use"] = functools.partial(DSA, **SIZES, **INDEX | {"top_k": fields.get("top_k", TOP)}, indexer="shared")
    return LanguageModel(
        vocab_size=17, d_model=D, layers=layers, mixers=mixers, ffns={"dense": functools.partial(MLP, d_ff=16)}
    )


def test_the_budget_is_a_mode_of_a_built_model():
    """k = 4, 8, 13 on the same parameters; the larger, the nearer to attention to all keys."""
    own = model(layers="own/dense")
    params = init_params(own, jax.random.key(0))
    c = Context.whole(jax.random.randint(jax.random.key(2), (2, T), 0, 17))
    modes = [{"mixers.own.attend": "dense"}, *({"mixers.own.top_k": k} for k in (4, 8, 13))]
    models = [override(own, mode, "stages.0.model") for mode in modes]
    dense, *outs = jax.jit(lambda p: [m.apply({"params": p}, c)[1].logits for m in models])(params)
    gaps = [float(jnp.abs(out - dense).mean()) for out in outs]
    assert gaps[0] > gaps[1] > 1e-5 and gaps[2] < 1e-6


def test_what_is_selected_can_be_captured_by_layer():
    own = model()
    flat = unstack(own, init_params(own, jax.random.key(0)))
    c = Context.whole(jnp.arange(T)[None] % 17, capture=("selected",))
    capture = jax.jit(lambda p: own.unrolled().apply({"params": p}, c)[1].capture)(flat)
    first, rest = capture["g0/b0/mixer/selected"], capture["g1/b0/mixer/selected"]
    assert first.shape == (1, 1, T, TOP) and rest.shape == (2, 1, T, TOP)
    np.testing.assert_array_equal(rest[1], first[0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 0}, "top_k: 0 must be at least 1"),
        ({"index_heads": 0}, "index_heads: 0"),
        ({"index_head_dim": 2}, "index_head_dim: 2 must be at least 4, the channels that turn"),
        ({"indexer": "half"}, "indexer: 'half' is not one of full, shared"),
        ({"attend": "some"}, "attend: 'some' is not one of sparse, dense"),
        ({"index_dtype": "float8"}, "index_dtype: 'float8' is not bfloat16 or float32"),
        ({"recall_queries": -1}, "recall_queries: -1 must be 0"),
    ],
)
def test_wrong_settings_are_refused(fields, words):
    with pytest.raises(UserError, match=words):
        DSA(d_model=D, **SIZES, **INDEX | fields)
    with pytest.raises(UserError, match="an indexer chooses among all keys"):
        SparseGQA(d_model=D, num_heads=4, window=4, top_k=2)


def test_a_shared_layer_needs_one_that_chooses_before_it_with_the_same_budget():
    with pytest.raises(UserError, match="'use' takes 'topk' from a layer before it"):
        declare(model(layers="use/dense | own/dense"))
    wrong = model()
    mixers = {**wrong.mixers, "use": functools.partial(wrong.mixers["use"], top_k=TOP + 1)}
    with pytest.raises(UserError, match="top_k: 4 here, 5 in a layer that shares it"):
        declare(wrong.clone(mixers=mixers))
