"""Distillation in the train step: nothing to learn from oneself, any split and remat alike, the teacher stays out of the state."""

import jax
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.params import init_params
from jaxllm.training.feed import place
from jaxllm.training.objectives import Distill, NextToken
from jaxllm.training.schedules import Cosine
from jaxllm.training.state import new_state
from jaxllm.training.step import make_train_step

OWN = {"next_token": NextToken(chunk=24, weight=0.5)}
KD = Distill(teacher="t", temperature=2.0, weight=0.5, chunk=24)


def train(tiny, teacher, objectives, batches, state=None, model=None, params=None, **options):
    """Steps of a student of one layer; the metrics of each."""
    model, optimiser = model or tiny.model("gqa", "mlp", "1* global/dense"), tiny.optimiser()
    step = jax.jit(make_train_step(model, objectives, optimiser, teachers={"t": teacher}, **options))
    state = new_state(model, optimiser, 0) if state is None else state
    frozen = {"t": init_params(teacher, jax.random.key(7)) if params is None else params}
    out = []
    for batch in batches:
        state, metrics = step(state, place(batch), np.int32(10), frozen)
        out.append(jax.device_get(metrics))
    return state, out


def test_a_student_learns_from_a_teacher_of_another_shape(tiny):
    """Another width, depth and mixer; accumulated, rematerialised and whole alike."""
    teacher = tiny.model("past", "mlp", "2* global/dense", d_model=24)
    batches = [tiny.batch(seed=n % 2) for n in range(6)]
    objectives = OWN | {"distill": KD}
    state, metrics = train(tiny, teacher, objectives, batches)
    student = tiny.model("gqa", "mlp", "1* global/dense", remat="full")
    _, split = train(tiny, teacher, objectives, batches, model=student, accumulate=2)
    for one, two in zip(metrics, split, strict=True):
        for name in ("loss", "distill", "next_token", "distill/agreement"):
            np.testing.assert_allclose(one[name], two[name], rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(one["loss"], 0.5 * one["next_token"] + 0.5 * one["distill"], rtol=1e-5)
    assert metrics[-1]["distill"] < metrics[0]["distill"]
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) <= 2 * size + 1  # moments of the student alone


def test_nothing_is_to_be_learned_from_oneself(tiny):
    model = tiny.model("gqa", "mlp", "1* global/dense")
    state = new_state(model, tiny.optimiser(), 0)
    _, (metrics,) = train(tiny, model, {"distill": KD}, [tiny.batch()], params=state.params)
    assert abs(metrics["distill"]) < 1e-5 and metrics["distill/agreement"] == 1.0 and metrics["grad_norm"] < 1e-5


def test_fields():
    kd = Distill(teacher="t", weight=2.0, schedule=Cosine(final=0.1))
    assert float(kd.weight_at(0, 10)) == 2.0 and abs(float(kd.weight_at(9, 10)) - 0.2) < 1e-6
    for fields, message in (
        ({"teacher": ""}, "teacher: missing"),
        ({"temperature": 0.0}, "temperature: 0.0 must be above 0"),
        ({"top_k": 0}, "top_k=0 at least 1"),
        ({"direction": "both"}, "direction: 'both' is not forward or reverse"),
    ):
        with pytest.raises(UserError, match=message):
            Distill(**({"teacher": "t"} | fields))
