"""MTP in the train step: the heads learn, weights count, generation does not notice, agreement by hand."""

import functools

import jax
import numpy as np

from jaxllm.layers.base import Context
from jaxllm.layers.mtp import ChainedMTP
from jaxllm.params import init_params, unstack
from jaxllm.training.evaluation import Evaluator
from jaxllm.training.losses import backbone
from jaxllm.training.objectives import MultiToken, NextToken

MTP = functools.partial(ChainedMTP, mixer="global", ffn="dense", depth=2)


def objectives(weight=0.3):
    return {"next_token": NextToken(chunk=24)} | {f"mtp_{k}": MultiToken(weight=weight, depth=k) for k in (1, 2)}


def test_the_heads_learn_and_their_terms_add_up(tiny):
    """That any split gives the same is in test_parallel."""
    batches = [tiny.batch(rows=4, length=16, seed=seed % 2) for seed in range(6)]
    _, metrics = tiny.run(tiny.model(mtp=MTP), batches, objectives())
    for one in metrics:
        terms = one["next_token"] + 0.3 * (one["mtp_1"] + one["mtp_2"]) + one["aux_balance"]
        np.testing.assert_allclose(one["loss"], terms, rtol=1e-5)
    assert metrics[-1]["mtp_1"] < metrics[0]["mtp_1"] and metrics[-1]["mtp_2"] < metrics[0]["mtp_2"]


def test_a_cache_and_a_plain_call_ignore_the_heads(tiny):
    with_heads, without = tiny.model("gqa", mtp=MTP), tiny.model("gqa")
    params = init_params(with_heads, jax.random.key(0))
    plain = {name: value for name, value in params.items() if name != "mtp"}
    tokens = np.arange(8)[None]
    want = without.apply({"params": plain}, Context.whole(tokens))[1].logits
    np.testing.assert_array_equal(with_heads.apply({"params": params}, Context.whole(tokens))[1].logits, want)
    decoder = with_heads.unrolled()
    flat = decoder.prepare(unstack(with_heads, params))
    step = Context.step(tokens, np.zeros(1), capture=("mtp",))
    _, out = decoder.apply({"params": flat}, step, decoder.init_cache(1, 16))
    np.testing.assert_allclose(out.logits, want, atol=1e-5)


def test_agreement_with_the_trunk_by_hand(tiny):
    """Module k at i against the trunk at i + k, both by whole logits; packed documents, one of them too short for depth 2."""
    model = tiny.model(mtp=MTP)
    params = init_params(model, jax.random.key(2))
    batch = {name: np.asarray(value) for name, value in tiny.batch(rows=2, length=16, seed=1).items()}
    got = Evaluator(model)(params, [batch])
    ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"], capture=("mtp",))
    out = backbone(model, params, ctx)

    def choices(hidden):
        return np.asarray(model.apply({"params": params}, hidden, method="head")).argmax(-1)

    trunk, heads = choices(out.hidden), [choices(h) for h in out.capture["mtp"]]
    segments, weights = batch["segments"], batch["weights"]
    judged = [
        [(r, i) for r, i in np.ndindex(2, 16 - k) if segments[r, i] == segments[r, i + k] > 0 and weights[r, i + k]]
        for k in (1, 2)
    ]
    agree = {(k, r, i): heads[k - 1][r, i] == trunk[r, i + k] for k in (1, 2) for r, i in judged[k - 1]}
    for k in (1, 2):
        np.testing.assert_allclose(
            got[f"mtp_{k}/agreement"], np.mean([agree[k, r, i] for r, i in judged[k - 1]]), rtol=1e-6
        )
    both = [agree[1, r, i] and agree[2, r, i] for r, i in judged[1]]
    np.testing.assert_allclose(got["mtp_2/accepted"], np.mean(both), rtol=1e-6)
    assert 0 < got["mtp_1/agreement"] < 1 and got["mtp_1/accepted"] == got["mtp_1/agreement"]
    assert got["mtp_2/loss"] > 0 and got["tokens"] == weights.sum()
