"""Validation: token-weighted whatever the batches, bits per byte by hand."""

import math

import jax
import numpy as np
import pytest

from jaxllm.data.loader import Loader
from jaxllm.data.store import TokenStore
from jaxllm.layers.base import Context
from jaxllm.params import init_params
from jaxllm.training.evaluation import Evaluator, by_position, ranges
from jaxllm.training.losses import bits_per_byte, perplexity
from jaxllm.training.objectives import NextToken

RNG = np.random.default_rng(1)
DOCUMENTS = [RNG.integers(0, 31, n).tolist() for n in (7, 12, 3, 9, 12)]


def test_perplexity_is_the_exponential_of_the_mean_loss():
    assert round(perplexity(2.0), 3) == 7.389 and perplexity(1e6) == math.inf
    np.testing.assert_allclose(bits_per_byte(8 * math.log(2), 4), 2.0)
    assert math.isnan(bits_per_byte(1.0, 0))


def test_the_result_does_not_depend_on_the_batch_size_and_counts_every_token(tiny):
    model = tiny.model(mixer="gqa", ffn="mlp", logit_softcap=3.0)
    params = init_params(model, jax.random.key(0))
    widths = np.arange(31, dtype=np.int32)
    evaluate = Evaluator(model, widths)
    store = TokenStore.of(DOCUMENTS)
    results = [evaluate(params, Loader(store, b, 12, shuffle=False).epoch()) for b in (1, 3, 8)]
    for result in results[1:]:
        np.testing.assert_allclose([result[k] for k in results[0]], list(results[0].values()), rtol=1e-6)
    # by hand: all logits at once, in double precision
    nll = size = 0.0
    for batch in Loader(store, 8, 12, shuffle=False).epoch():
        ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"])
        logits = np.asarray(model.apply({"params": params}, ctx)[1].logits, np.float64)[..., :31]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll -= (np.take_along_axis(log_p, batch["labels"][..., None], -1)[..., 0] * batch["weights"]).sum()
        size += (widths[batch["labels"]] * batch["weights"]).sum()
    tokens = sum(len(d) - 1 for d in DOCUMENTS)
    assert results[0]["tokens"] == tokens
    np.testing.assert_allclose(results[0]["loss"], nll / tokens, rtol=1e-5)
    np.testing.assert_allclose(results[0]["bpb"], nll / math.log(2) / size, rtol=1e-5)
    some = evaluate(params, Loader(store, 1, 12, shuffle=False).epoch(), limit=1)
    assert some["tokens"] < tokens


def test_sums_by_position():
    assert ranges(12) == [(0, 12)] and ranges(50) == [(0, 16), (16, 32), (32, 50)]
    positions = np.array([[*range(30), *range(20)]])  # two documents in a row
    nll, weights = RNG.random((1, 50)), (RNG.random((1, 50)) > 0.3).astype(np.float32)
    batch = {"tokens": positions, "positions": positions, "weights": weights}
    got = by_position(nll, batch)
    for i, (low, high) in enumerate([(0, 16), (16, 32), (32, 50)]):
        inside = (positions >= low) & (positions < high)
        np.testing.assert_allclose(got["position/weight"][i], weights[inside].sum())
        np.testing.assert_allclose(got["position/nll"][i], (weights * nll)[inside].sum(), rtol=1e-5)


def test_the_end_of_a_document_is_trained_even_where_padding_has_its_id(tiny):
    end = 30
    tokens = np.array([[5, 6, end, end, end]])  # a document of 3 tokens, padded with the same id
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": np.array([[1.0, 1, 0, 0]], np.float32)}
    batch |= {"positions": np.array([[0, 1, 0, 0]]), "segments": np.array([[1, 1, 0, 0]])}
    batch = {k: v.astype(np.float32 if k == "weights" else np.int32) for k, v in batch.items()}
    assert float(NextToken().count(batch)) == 2.0
    _, (metrics,) = tiny.run(tiny.model(), [batch])
    assert metrics["trained_tokens"] == 2.0 and metrics["tokens"] == 2
    moved = {**batch, "labels": batch["labels"].copy()}
    moved["labels"][0, 1] = 7  # the ending token is one of the two that count
    _, (other,) = tiny.run(tiny.model(), [moved])
    assert abs(other["loss"] - metrics["loss"]) > 1e-3
    moved["labels"][0] = [6, end, 3, 4]  # labels of padding count for nothing
    _, (third,) = tiny.run(tiny.model(), [moved])
    assert third["loss"] == metrics["loss"]


def test_no_bytes_no_bits(tiny):
    model = tiny.model()
    params = init_params(model, jax.random.key(0))
    result = Evaluator(model)(params, [tiny.batch()])
    assert math.isnan(result["bpb"]) and result["loss"] > 0
    assert math.isnan(Evaluator(model)(params, [])["loss"])


@pytest.mark.parametrize("bad", ["parameter", "stream", "head", "gradient", "none"])
def test_the_first_number_that_is_not_finite_is_named(tiny, bad):
    from jaxllm.measure.debug import first_nonfinite

    model = tiny.model(mixer="gqa", ffn="mlp", layers="1* global/dense | 2* global/dense", tie_embeddings=False)
    params = jax.tree.map(np.array, init_params(model, jax.random.key(0)))
    want = None
    if bad == "parameter":
        params["g1"]["b0"]["ffn"]["up_proj"][1, 2, 3] = np.nan
        want = "parameter g1/b0/ffn/up_proj: 1 of 1024 numbers are not finite, first nan at (1, 2, 3)"
    elif bad == "stream":  # finite weights whose product overflows in the second of three layers
        params["g1"]["b0"]["ffn"]["up_proj"][0] = 1e25
        params["g1"]["b0"]["ffn"]["gate_proj"][0] = 1e25
        want = "output of layer 1 of 3, global/dense (g1/b0, repeat 0):"
    elif bad == "head":
        params["lm_head"][:] = 3e38
        want = "loss of the head"
    elif bad == "gradient":
        # tiny states times a huge head: finite logits, but a slope as huge as the head
        params["embed"] *= 1e-20
        params["lm_head"] *= 1e36
        want = "gradient of "
    got = first_nonfinite(model, params, tiny.batch())
    assert (got is None) if want is None else got.startswith(want), got
