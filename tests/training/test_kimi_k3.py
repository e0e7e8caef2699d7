"""The recipe of Kimi K3 in small: all its mechanisms in one model that trains, decodes as it reads, and is counted at full size."""

import contract
import jax
import numpy as np
import pytest

from jaxllm.compose import compose
from jaxllm.params import declare, init_params, is_declared, path_name


def build(name, *overrides):
    return compose([f"model={name}", *overrides]).build("model")


SMALL = ("model.vocab_size=61", "model.vocab_multiple=4", "model.d_model=64", "model.dtype=float32")


@pytest.fixture(scope="module")
def model():
    """One layer of a kind a period, since compiling is what these tests cost."""
    return build("kimi_k3_tiny", *SMALL, "model.layers=linear/dense | 2* linear/moe global/moe")


def test_every_mechanism_is_there():
    model = build("kimi_k3_tiny", *SMALL)
    names = {path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(declare(model), is_leaf=is_declared)}
    kda, mla = "g1/b2/mixer", "g1/b3/mixer"  # three to one
    for part in (f"{kda}/A_log", f"{kda}/g_proj", f"{mla}/q_a_proj", f"{mla}/gate_proj", "g1/b0/residual_ffn/query"):
        assert part in names, f"{part} of {sorted(names)}"
    for part in ("ffn/latent_norm/scale", "ffn/router/bias", "ffn/shared/up_proj", "residual_mixer/norm"):
        assert f"g1/b3/{part}" in names
    assert "residual_out/query" in names and "g0/b0/ffn/up_proj" in names
    assert model.mixer("linear").gate_form == "bounded" and model.mixer("global").rope is None
    assert model.ffn("moe").glu == "situ" == model.ffn("dense").activation


def test_prefill_chunks_and_decode_equal_the_full_forward(model):
    subject = contract.Subject(model)
    contract.check_splits(subject)
    contract.check_draft_verify(subject)


def test_it_trains_with_every_mechanism_on(model, tiny):
    batches = [tiny.batch(rows=4, length=24, vocab=61, seed=seed % 2) for seed in range(8)]
    state, metrics = tiny.run(model, batches, optimiser=tiny.optimiser(lr=3e-3))
    losses = [m["next_token"] for m in metrics]
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.5, losses
    start = init_params(model, jax.random.key(0))
    still = ["g0/b0/residual_mixer/norm", "g0/b0/residual_mixer/query"]  # the first site has one source, and no choice
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), start, state.params)
    moved = {path_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(moved)}
    assert sorted(name for name, value in moved.items() if not 0 < value < np.inf) == still


def test_the_published_model_is_counted():
    cost = build("kimi_k3").cost(1, 1, 2**20, "bfloat16")
    np.testing.assert_allclose(cost.params, 2.78e12, rtol=0.005)
    np.testing.assert_allclose(cost.params_active, 104.2e9, rtol=0.005)
    assert cost.cache_per_token == 24 * 576 * 2  # bytes
    assert cost.cache_constant == 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2)
    # at a million tokens latent attention is what costs: 24 layers, 96 heads, (576 + 512) multiply-adds a key
    np.testing.assert_allclose(cost.flops, 2 * 104.2e9 + 24 * 2 * 96 * 1088 * 2**20, rtol=0.01)
    linear = build("kimi_linear").cost(1, 1, 2**20, "bfloat16")
    np.testing.assert_allclose([linear.params, linear.params_active], [48e9, 3e9], rtol=0.05)
    assert linear.cache_per_token == 7 * 576 * 2


def test_what_is_counted_is_what_is_declared(model):
    boxes = jax.tree_util.tree_leaves_with_path(declare(model), is_leaf=is_declared)
    sizes = {path_name(path): box.value.size for path, box in boxes}
    norms = sum(
        size
        for name, size in sizes.items()
        if name.endswith(("norm_mixer/scale", "norm_ffn/scale", "final_norm/scale"))
    )
    assert norms and model.cost().params == sum(sizes.values()) - norms
