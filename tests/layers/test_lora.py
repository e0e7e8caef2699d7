"""Low-rank adapters: what gets one, the base to the last bit at the start, merged = unmerged, in scans, experts and whole models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.layers.added import own, without
from jaxllm.layers.base import Context
from jaxllm.layers.lora import LoRA
from jaxllm.ops.low_rank import low_rank_sum
from jaxllm.params import declare, init_params, is_declared, path_name, plain

EXPERTS = ("ffn@model.ffns.dense=moe", "model.ffns.dense.num_experts=4", "model.ffns.dense.d_expert=16")
TOKENS = np.arange(10, dtype=np.int32)[None] % 7


def build(name, more=(), **lora):
    model = compose([f"model={name}", "model.dtype=float32", *more]).build("model", vocab_size=31)
    return model, model.clone(lora=LoRA(**lora))


def by_path(tree, **kw):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, **kw)[0]}


def trained_ones(params, seed=0):
    """Adapters after some training: B is no longer zero."""
    rng = np.random.default_rng(seed)

    def one(path, leaf):
        moved = path_name(path).endswith("_lora_b")
        return 0.1 * rng.standard_normal(leaf.shape, np.float32) if moved else np.asarray(leaf)

    return jax.tree_util.tree_map_with_path(one, params)


def test_the_sum_over_any_sides():
    rng = np.random.default_rng(0)
    w, a, b = (rng.standard_normal(s) for s in ((2, 3, 4, 5, 6), (2, 3, 4, 7), (2, 7, 5, 6)))
    want = w + np.array([1.0, 2.0])[:, None, None, None, None] * np.einsum("Lijr,Lrhk->Lijhk", a, b)
    got = low_rank_sum(*map(jnp.float32, (w, a, b)), jnp.array([1.0, 2.0]), (0,), (1, 2), (3, 4))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("more", [(), EXPERTS], ids=["dense", "experts"])
def test_the_base_at_the_start_and_merged_is_unmerged(more):
    """Two scanned layers of grouped queries, with a dense ffn and with experts."""
    base, model = build("tiny", more, rank=3, targets=("*_proj",))
    start = jax.tree.map(np.asarray, init_params(model, jax.random.key(0)))
    fixed = jax.tree.map(np.asarray, init_params(base, jax.random.key(0)))
    jax.tree.map(np.testing.assert_array_equal, without(start), fixed)
    bare, adapted = (
        jax.jit(lambda p, m=m: m.apply({"params": p}, Context.whole(TOKENS))[1].logits) for m in (base, model)
    )
    want = bare(fixed)
    np.testing.assert_array_equal(adapted(start), want)  # B = 0: nothing has changed
    moved = trained_ones(start)
    plain_model, merged = plain(model, moved)
    assert plain_model.lora is None and jax.tree.structure(merged) == jax.tree.structure(fixed)
    got, logits = adapted(moved), bare(merged)
    assert np.abs(got - want).max() > 0.1
    np.testing.assert_allclose(got, logits, atol=2e-4 * np.abs(logits).max())


def test_what_is_declared_and_what_is_frozen():
    base, model = build(
        "kimi_k3_tiny",
        rank=3,
        alpha=6.0,
        targets=("*/b3/mixer/o_proj", "g1/b0/ffn/up_proj"),
        also=("*norm_mixer/scale",),
    )
    boxes = by_path(declare(model), is_leaf=is_declared)
    added = {name: (box.value.shape, box.names, box.trainable) for name, box in boxes.items() if "_lora_" in name}
    assert added == {  # two repeats; heads and head are one side; every expert has its own
        "g1/b3/mixer/o_proj_lora_a": ((2, 4, 32, 3), ("layers", "heads", "head", None), True),
        "g1/b3/mixer/o_proj_lora_b": ((2, 3, 128), ("layers", None, "embed"), True),
        "g1/b3/mixer/o_proj_lora_scale": ((2,), ("layers",), False),
        "g1/b0/ffn/up_proj_lora_a": ((2, 8, 64, 3), ("layers", "expert", "latent", None), True),
        "g1/b0/ffn/up_proj_lora_b": ((2, 8, 3, 96), ("layers", "expert", None, "mlp"), True),
        "g1/b0/ffn/up_proj_lora_scale": ((2,), ("layers",), False),
    }
    assert not any(box.update for box in boxes.values())
    free = {name for name, box in boxes.items() if box.trainable}
    assert free == {n for n in added if not n.endswith("scale")} | {n for n in boxes if n.endswith("norm_mixer/scale")}
    params = init_params(model, jax.random.key(1))
    assert np.all(np.asarray(params["g1"]["b0"]["ffn"]["up_proj_lora_scale"]) == 2.0)
    assert {name for name, kept in by_path(own(declare(model))).items() if kept} == free | set(added)
    assert set(by_path(without(params))) == set(by_path(declare(base), is_leaf=is_declared))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"targets": ("*/mixer/q_porj",)}, "model.lora.targets: '.*q_porj' names no matrix that can be adapted; nearest: .*q_proj"),
        ({"targets": ("embed",)}, "model.lora.targets: 'embed' names no matrix"),
        ({"targets": ("*norm_mixer/scale",)}, "names no matrix"),
        ({"also": ("nothing",)}, "model.lora.also: 'nothing' names no parameter that is left"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"alpha": 0.0}, "alpha=0.0 above 0"),
        ({"targets": ()}, "name at least one matrix"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted(fields, message):
    with pytest.raises(UserError, match=message):
        declare(build("tiny", **fields)[1])


def test_a_bfloat16_base_keeps_float32_adapters():
    base, _ = build("tiny")
    model = base.clone(param_dtype="bfloat16", lora=LoRA(targets=("*/mixer/q_proj",)))
    params = trained_ones(init_params(model, jax.random.key(0)))
    mixer = params["g0"]["b0"]["mixer"]
    assert mixer["q_proj"].dtype == jnp.bfloat16 and mixer["q_proj_lora_b"].dtype == np.float32
    call = jax.jit(functools.partial(model.apply, method="backbone"))
    hidden = call({"params": params}, Context.whole(TOKENS))[1].hidden
    merged = plain(model, params)[1]
    assert merged["g0"]["b0"]["mixer"]["q_proj"].dtype == jnp.bfloat16
    again = (
        base.clone(param_dtype="bfloat16").apply({"params": merged}, Context.whole(TOKENS), method="backbone")[1].hidden
    )
    np.testing.assert_allclose(hidden, again, atol=0.05 * np.abs(hidden).max())  # bfloat16 has 8 bits
