"""Draft heads: the unroll is what drafting does, nothing flows into the trunk, right features and tokens, acceptance by construction."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import component
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.draft import Eagle3, ModuleDraft, reading
from jaxllm.layers.gqa import GQA
from jaxllm.layers.kda import KDA
from jaxllm.layers.mla import MLA
from jaxllm.layers.mlp import MLP
from jaxllm.params import unstack
from jaxllm.training.losses import trained_tokens
from jaxllm.training.objectives import Draft, Forward

SEGMENTS = np.array([[1] * 7 + [2] * 5, [1] * 10 + [0] * 2])
TOKENS = np.random.default_rng(3).integers(0, contract.VOCAB, (2, 12))
WINDOW = functools.partial(GQA, num_heads=4, num_kv_heads=2, window=3, sinks=True, gate=True)
LATENT = functools.partial(MLA, num_heads=4, qk_nope_head_dim=8, qk_rope_head_dim=4, kv_lora_rank=8)


def model_of(kind, mixer, **fields):
    draft = functools.partial(kind, mixer="m", ffn="f", **{"unroll": 3} | fields)
    return contract.model_of({"m": mixer}, "3* m/f", {"f": functools.partial(MLP, d_ff=32)}, draft=draft)


@pytest.mark.parametrize("kind, mixer", [(Eagle3, WINDOW), (ModuleDraft, LATENT)])
def test_step_j_of_the_unroll_is_j_steps_of_drafting(kind, mixer):
    """Features of the trunk up to some token, then the head's own outputs and the text's tokens, with the head's own cache."""
    model = model_of(kind, mixer, vocab=12)
    params = contract.randomised(model)
    params["draft"]["ids"] = jnp.arange(12) * 2  # random numbers are no ids
    ctx = Context.whole(TOKENS[:, :7], capture=("draft", "features"))
    out = jax.jit(lambda p: model.apply({"params": p}, ctx, method="backbone")[1])(params)
    decoder, n, steps = model.unrolled(), 4, 3
    flat = decoder.prepare(unstack(model, params))

    @jax.jit
    def drafted(flat, g):
        cache, found = decoder.init_draft_cache(2, 8, draft=2), []
        step = Context.step(TOKENS[:, 1 : n + 1], np.zeros(2))
        cache, logits, own = decoder.apply({"params": flat}, g[:, :n], step, cache, method="draft_step")
        found.append(logits[:, -1])
        for j in range(1, steps):
            step = Context.step(TOKENS[:, n + j : n + j + 1], np.full(2, n + j - 1))
            cache, logits, own = decoder.apply({"params": flat}, own[:, -1:], step, cache, method="draft_step")
            found.append(logits[:, -1])
        return jnp.stack(found)

    want = (out.capture["draft"] @ model.draft_head_weight(params))[:, :, n - 1]
    np.testing.assert_allclose(drafted(flat, out.capture["features"])[..., ::2][..., :12], want, atol=2e-5)


def batch_of():
    labels = np.roll(TOKENS, -1, axis=1)
    follows = (SEGMENTS == np.pad(SEGMENTS[:, 1:], ((0, 0), (0, 1)))) & (SEGMENTS > 0)
    return {"tokens": TOKENS, "labels": labels, "segments": SEGMENTS, "weights": follows.astype(np.float32)}


def test_nothing_flows_into_the_trunk_documents_stay_apart_and_the_loss_is_soft_cross_entropy():
    model = model_of(Eagle3, WINDOW, features=(0, 2, 3))
    params = contract.randomised(model)
    batch, objective = batch_of(), Draft(steps=3, decay=0.5)

    def loss(params, tokens):
        ctx = Context.whole(tokens, SEGMENTS, train=True, capture=("draft",))
        out = model.apply({"params": params}, ctx, method="backbone")[1]
        total, sums = objective(Forward(model, params, batch, ctx, out, 1, None))
        return jnp.sum(total / objective.count(batch)), (out, sums)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, (out, sums)), grads = step(params, TOKENS)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(grads["draft"]))
    assert not any(np.any(leaf) for name, grad in grads.items() if name != "draft" for leaf in jax.tree.leaves(grad))

    w = np.asarray(model.head_weight(params))[:, : model.vocab_size]
    trunk = np.asarray(out.hidden) @ w
    total, count, agree = [], [], []
    for j, drafts in enumerate(np.asarray(out.capture["draft"]) @ w):
        at = [(r, i) for r in range(2) for i in range(11 - j) if SEGMENTS[r, i] == SEGMENTS[r, i + j + 1] > 0]
        at = [(r, i) for r, i in at if batch["weights"][r, i + j + 1]]
        p = [jax.nn.softmax(trunk[r, i + j + 1]) for r, i in at]
        total.append(-sum(np.sum(p * jax.nn.log_softmax(drafts[r, i])) for p, (r, i) in zip(p, at, strict=True)))
        agree.append(sum(drafts[r, i].argmax() == trunk[r, i + j + 1].argmax() for r, i in at))
        count.append(len(at))
    assert objective.count(batch).tolist() == count and count[0] < trained_tokens(batch)
    np.testing.assert_allclose(sums["loss"], total, rtol=1e-5)
    np.testing.assert_allclose(sums["agreement"], agree)
    want = sum(0.5**j * a / c for j, (a, c) in enumerate(zip(total, count, strict=True)))
    np.testing.assert_allclose(value, want, rtol=1e-5)

    other = np.where((SEGMENTS == 2) | (SEGMENTS == 0), (TOKENS + 1) % contract.VOCAB, TOKENS)
    again = step(params, other)[0][1][0].capture["draft"]
    for j in range(3):
        np.testing.assert_array_equal(again[j, 0, : 6 - j], out.capture["draft"][j, 0, : 6 - j])
        np.testing.assert_array_equal(again[j, 1, : 9 - j], out.capture["draft"][j, 1, : 9 - j])


def test_features_are_the_trunk_s_streams_and_acceptance_is_one_by_construction():
    """A trunk of layers switched off, in which token v is followed by v + 1: a head that keeps the embedding alone says the same."""
    model = model_of(ModuleDraft, functools.partial(GQA, num_heads=4), features=(0, 2, 3), hidden="pre_norm")
    model = model.clone(vocab_size=contract.D, tie_embeddings=False, norm_eps=0.0)
    params = contract.randomised(model)
    ctx = Context.whole(TOKENS % contract.D, capture=("draft", "features", "stream"))

    def run(params):
        return model.apply({"params": params}, ctx, method="backbone")[1]

    out = jax.jit(run)(params)
    stream, fuse = np.asarray(out.capture["stream"]), np.asarray(params["draft"]["fuse"])
    want = sum(stream[k] @ fuse[n] for n, k in enumerate((0, 2, 3)))
    np.testing.assert_allclose(out.capture["features"], want, rtol=1e-4, atol=1e-4)

    eye = np.eye(contract.D, dtype=np.float32)

    def still(tree):
        return {
            k: still(v) if isinstance(v, dict) else np.zeros_like(v) if k in ("o_proj", "down_proj") else v
            for k, v in tree.items()
        }

    plain = still(params)
    ones = {"scale": np.ones(contract.D, np.float32)}
    module = plain["draft"]["module"] | {"enorm": ones, "hnorm": ones, "norm": ones}
    for halves, accepted in (((1, 0), 1.0), ((0, 1), 0.0)):
        module["eh_proj"] = np.stack([halves[0] * eye, halves[1] * eye])
        draft = plain["draft"] | {"module": module}
        built = plain | {"embed": eye, "lm_head": np.roll(eye, 1, axis=1), "final_norm": ones, "draft": draft}
        out = jax.jit(run)(built)
        said = (np.asarray(out.capture["draft"]) @ built["lm_head"]).argmax(-1)
        trunk = (np.asarray(out.hidden) @ built["lm_head"]).argmax(-1)
        for j in range(3):
            agree = said[j, :, : 11 - j] == trunk[:, j + 1 :]
            assert agree.all() if accepted else agree.mean() < 0.5, j


def test_the_last_feature_is_what_the_final_norm_reads_whatever_the_residual_scheme():
    """Attention residuals end with a sum of their own, which is not the last layer's stream."""
    model = model_of(ModuleDraft, functools.partial(GQA, num_heads=4), features=(3,), hidden="pre_norm")
    model = model.clone(residual=component("residual", "attnres"))
    params = contract.randomised(model)
    params["draft"]["fuse"] = np.eye(contract.D, dtype=np.float32)[None]
    ctx = Context.whole(TOKENS, capture=("features", "stream"))
    out = jax.jit(lambda p: model.apply({"params": p}, ctx, method="backbone")[1])(params)
    g = np.asarray(out.capture["features"])
    normed = g / np.sqrt((g * g).mean(-1, keepdims=True) + model.norm_eps) * params["final_norm"]["scale"]
    np.testing.assert_allclose(normed, out.hidden, atol=1e-4)
    assert not np.allclose(g, out.capture["stream"][3], atol=1e-2)


def test_a_token_behind_the_end_of_a_document_is_read_by_nobody():
    ctx = Context.whole(TOKENS, SEGMENTS)
    one, three = (reading(ctx, k) for k in (1, 3))
    np.testing.assert_array_equal(one.segments, [[1] * 6 + [0] + [2] * 4 + [0], [1] * 9 + [0] * 3])
    np.testing.assert_array_equal(three.segments, [[1] * 4 + [0] * 3 + [2] * 2 + [0] * 3, [1] * 7 + [0] * 5])
    np.testing.assert_array_equal(three.tokens[:, :7], TOKENS[:, 3:10])
    np.testing.assert_array_equal(three.positions, ctx.positions + 2)


def test_roles_that_cannot_draft_are_refused_in_one_line():
    kda = functools.partial(KDA, num_heads=4)
    for kind, mixer, message in (
        (Eagle3, LATENT, "draft.mixer: 'm' is no plain GQA, which Eagle3 needs"),
        (ModuleDraft, kda, "draft.mixer: 'm' cannot be unrolled; take a role of GQA or MLA"),
    ):
        with pytest.raises(UserError, match=message):
            model_of(kind, mixer)
    model = model_of(Eagle3, WINDOW)
    assert model.cost().params > model.clone(draft=None).cost().params
    assert (model.cost().flops, model.cost().params_active) == (
        model.clone(draft=None).cost().flops,
        model.clone(draft=None).cost().params_active,
    )
