"""Optimisers: what decays, what is trained, and that any optax optimiser fits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.errors import UserError
from jaxllm.layers.gqa import GQA
from jaxllm.params import declare, is_declared
from jaxllm.training.optimisers import AdamW, Optax, is_matrix, matrices
from jaxllm.training.schedules import Constant
from jaxllm.training.state import leaves_by_path, pick, trained


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
    from jaxllm.layers.base import Declared

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
