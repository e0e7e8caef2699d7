"""Optimisers: what decays, what is trained, and that any optax optimiser fits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.layers.base import Declared
from jaxllm.layers.gqa import GQA
from jaxllm.params import declare, is_declared
from jaxllm.training.optimisers import AdamW, Muon, Optax, is_matrix, matrices, muon_axes
from jaxllm.training.schedules import Constant
from jaxllm.training.state import leaves_by_path, owner, pick, trained

DENSE = "mixer/k_proj mixer/o_proj mixer/q_proj mixer/v_proj ffn/down_proj ffn/gate_proj ffn/up_proj"
EXPERTS = "ffn/latent_down_proj ffn/latent_up_proj ffn/shared/down_proj ffn/shared/gate_proj ffn/shared/up_proj"
KDA = "mixer/b_proj mixer/f_a_proj mixer/f_b_proj mixer/g_proj"
LATENT = "mixer/gate_proj mixer/k_b_proj mixer/kv_a_proj mixer/q_a_proj mixer/q_b_proj mixer/v_b_proj"
# By file of conf/model, without group and block. Never embeddings, router, convolutions, A_log, norms or residual schemes.
FROZEN = {
    "tiny": DENSE,
    "llama_24m": DENSE,
    "quickstart": DENSE,
    "kimi_k3_tiny": f"{DENSE} {EXPERTS} {KDA} {LATENT}",
}


def test_only_matrices_are_matrices(tiny):
    model = tiny.model(ffn="mlp", tie_embeddings=False)
    model = model.clone(
        mixers={"global": functools.partial(GQA, num_heads=4, qkv_bias=True, out_bias=True, qk_norm=True)}
    )
    kind = {n: is_matrix(d) for n, d in leaves_by_path(declare(model), is_leaf=is_declared).items()}
    yes = {name for name, matrix in kind.items() if matrix}
    block = "g0/b0"
    assert yes == {"embed", "lm_head"} | {f"{block}/mixer/{n}_proj" for n in "qkvo"} | {
        f"{block}/ffn/{n}_proj" for n in ("gate", "up", "down")
    }
    assert not kind[f"{block}/mixer/q_bias"]  # two axes, [heads, head], but no matrix


def test_expert_stacks_count_as_matrices_and_their_biases_do_not():
    def box(*names):
        return Declared(jax.ShapeDtypeStruct((4,) * len(names), jnp.float32), names=names)

    assert is_matrix(box("layers", "expert", "embed", "mlp")) and is_matrix(box("layers", "embed", "expert"))
    assert not is_matrix(box("layers", "expert", "mlp")) and not is_matrix(box("layers", "conv", "mlp"))


def test_without_a_gradient_only_matrices_shrink(tiny):
    declared = declare(tiny.model(ffn="mlp", mixer="gqa"))
    params = jax.tree.map(lambda d: jnp.ones(d.value.shape), declared, is_leaf=is_declared)
    tx = AdamW(weight_decay=0.1).transform(declared)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)
    mask = leaves_by_path(matrices(declared))
    for name, update in leaves_by_path(updates).items():
        np.testing.assert_allclose(update, -0.1 if mask[name] else 0.0, err_msg=name)


def test_adamw_is_adam_with_decoupled_decay(tiny):
    declared = declare(tiny.model())
    mask = trained(declared)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda d: jnp.asarray(rng.normal(size=d.value.shape), jnp.float32), declared, is_leaf=is_declared
    )
    ours, theirs = AdamW(weight_decay=0.2).transform(declared), optax.adamw(1.0, 0.9, 0.95, weight_decay=0.2)
    part = pick(params, mask)
    state, other = ours.init(part), theirs.init(part)
    for _ in range(3):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), part)
        a, state = ours.update(grads, state, part)
        b, other = theirs.update(grads, other, part)
    decayed = {n for n, m in leaves_by_path(matrices(declared)).items() if m}
    a, b = leaves_by_path(a), leaves_by_path(b)
    assert {n for n in a if np.allclose(a[n], b[n], rtol=1e-5, atol=1e-7)} == decayed
    assert "g0/b0/ffn/bias" not in a  # never trained


def box(shape, *names):
    return Declared(jax.ShapeDtypeStruct(shape, jnp.float32), names=names)


def test_muon_takes_inputs_and_outputs_from_the_logical_axes():
    q, o = ("layers", "embed", "heads", "head"), ("layers", "heads", "head", "embed")
    assert muon_axes(box((2, 4, 3, 5), *q)) == MuonDimensionNumbers((1,), (2, 3))
    assert muon_axes(box((2, 4, 3, 5), *q), per_head=True) == MuonDimensionNumbers((1,), (3,))
    assert muon_axes(box((2, 3, 5, 4), *o), per_head=True) == MuonDimensionNumbers((1, 2), (3,))
    assert muon_axes(box((2, 8, 4, 6), "layers", "expert", "embed", "mlp")) == MuonDimensionNumbers((2,), (3,))
    for other in (
        ("vocab", "embed"),
        ("embed", "vocab"),
        ("layers", "conv", "heads", "head"),
        ("layers", "norm"),
        ("layers", "heads", "head"),
        ("layers", "embed", "expert"),
    ):
        assert muon_axes(box((3,) * len(other), *other)) is None, other


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_the_split_between_muon_and_adamw_is_frozen(name):
    """What a model hands to Muon changes only on purpose: group, inputs and outputs by declared path."""
    model = compose([f"model={name}", "model.vocab_size=64"]).build("model")
    boxes = leaves_by_path(declare(model), is_leaf=is_declared)
    chosen = {path.split("/", 2)[-1] for path, d in boxes.items() if muon_axes(d) is not None}
    assert chosen == set(FROZEN[name].split())


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adam(tiny):
    declared = declare(tiny.model("gqa"))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(
        lambda d: jnp.asarray(rng.normal(size=d.value.shape), jnp.float32), declared, is_leaf=is_declared
    )
    part = pick(drawn, trained(declared))
    tx, adam = Muon(weight_decay=0.0).transform(declared), AdamW(weight_decay=0.0).transform(declared)
    updates, other = (leaves_by_path(jax.jit(t.update)(part, t.init(part), part)[0]) for t in (tx, adam))
    matrix = np.asarray(updates["g0/b0/mixer/q_proj"]).reshape(2, 16, 16)
    for layer in matrix:  # each of the two layers is a matrix of its own; five steps leave singular values near 1
        values = np.linalg.svd(layer / (0.2 * 16**0.5), compute_uv=False)
        assert 0.5 < values.min() and values.max() < 1.4, values
    np.testing.assert_allclose(np.sqrt(np.mean(matrix**2)), 0.2, rtol=0.25)
    for name in ("embed", "final_norm/scale", "g0/b0/norm_mixer/scale"):
        np.testing.assert_allclose(updates[name], other[name], rtol=1e-6)
    assert "g0/b0/ffn/bias" not in updates


def test_muon_trains_and_its_state_follows_the_parameters(tiny):
    optimiser = Muon(lr=1e-2, schedule=Constant())
    model = tiny.model("gqa", "mlp", layers="1* global/dense")
    state, metrics = tiny.run(model, [tiny.batch()] * 4, optimiser=optimiser)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    names = set(leaves_by_path(declare(model), is_leaf=is_declared))
    assert {owner(path, names) for path in leaves_by_path(state.opt_state)} >= names
    with pytest.raises(UserError, match="beta: 1.0"):
        Muon(beta=1.0)


def test_any_optax_optimiser_trains(tiny):
    optimiser = Optax(optimizer=functools.partial(optax.lion, b1=0.8), lr=1e-2, schedule=Constant())
    model = tiny.model(layers="1* global/dense", ffn="mlp")
    state, metrics = tiny.run(model, [tiny.batch()] * 4, optimiser=optimiser)
    assert metrics[-1]["loss"] < metrics[0]["loss"] and metrics[0]["lr"] == np.float32(1e-2)


def test_optax_keeps_decay_on_matrices(tiny):
    declared = declare(tiny.model(ffn="mlp"))
    params = jax.tree.map(lambda d: jnp.ones(d.value.shape), declared, is_leaf=is_declared)
    tx = Optax(optimizer=functools.partial(optax.adamw, weight_decay=0.5)).transform(declared)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    mask = leaves_by_path(matrices(declared))
    for name, update in leaves_by_path(updates).items():
        np.testing.assert_allclose(update, -0.5 if mask[name] else 0.0, err_msg=name)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: AdamW(lr=0.0), "lr: 0.0"),
        (lambda: AdamW(lr=1e39), "finite in float32"),
        (lambda: AdamW(b2=1.0), "b2: 1.0"),
        (lambda: AdamW(clip_norm=-1.0), "clip_norm"),
        (lambda: Optax(optimizer=functools.partial(optax.sgd, learning_rate=1.0)).transform({}), "learning_rate"),
        (lambda: Optax(optimizer=optax.clip).transform({}), "learning_rate"),
    ],
)
def test_wrong_fields_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
