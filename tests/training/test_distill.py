"""Distillation in the train step: nothing to learn from oneself, labels on disk as good as the teacher, who stays out of the state."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxllm.data.loader import Loader
from jaxllm.data.plan import make_plan
from jaxllm.data.soft_labels import SoftLabels, Writer, description
from jaxllm.data.store import TokenStore
from jaxllm.data.tokenizer import Bytes
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.ops.divergence import Head, top_and_rest
from jaxllm.params import init_params
from jaxllm.tasks.teachers import check_vocabulary
from jaxllm.training.feed import place
from jaxllm.training.losses import backbone
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
    """Another width, depth and mixer. That any split gives the same is in test_parallel."""
    teacher = tiny.model("past", "mlp", "2* global/dense", d_model=24)
    batches = [tiny.batch(seed=n % 2) for n in range(6)]
    objectives = OWN | {"distill": KD}
    state, metrics = train(tiny, teacher, objectives, batches)
    for one in metrics:
        np.testing.assert_allclose(one["loss"], 0.5 * one["next_token"] + 0.5 * one["distill"], rtol=1e-5)
    assert metrics[-1]["distill"] < metrics[0]["distill"]
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) <= 2 * size + 1  # moments of the student alone


def test_nothing_is_to_be_learned_from_oneself(tiny):
    model = tiny.model("gqa", "mlp", "1* global/dense")
    state = new_state(model, tiny.optimiser(), 0)
    _, (metrics,) = train(tiny, model, {"distill": KD}, [tiny.batch()], params=state.params)
    assert abs(metrics["distill"]) < 1e-5 and metrics["distill/agreement"] == 1.0 and metrics["grad_norm"] < 1e-5


@pytest.mark.parametrize("dtype, tolerance", [("<f4", 1e-5), ("<f2", 2e-3)])
def test_labels_on_disk_stand_for_the_teacher(tiny, tmp_path, dtype, tolerance):
    """The same rows, live and from disk, over the end of an epoch; fewer ids than are labelled; float16 to its precision."""
    teacher = tiny.model("gqa", "mlp", "1* global/dense")
    params = init_params(teacher, jax.random.key(7))
    store = TokenStore.of(np.split(np.random.default_rng(0).integers(1, 31, 90), [7, 20, 50, 55]))
    plan = make_plan(store, 12, 1, 0, 0, shuffle=False)
    meta = description({}, store, 12) | {"top_k": 6, "vocab_size": 31, "temperature": 2.0, "ids": "<u2", "logp": dtype}
    tokenizer = Bytes().fit([], tmp_path)
    writer = Writer(tmp_path / "l", meta, tokenizer, "out", 1e9)

    @jax.jit
    def said(batch):
        hidden = backbone(teacher, params, Context.whole(batch["tokens"], batch["segments"], batch["positions"])).hidden
        return top_and_rest(Head(hidden, teacher.head_weight(params)), 31, 6, 2.0, chunk=10)

    writer.put(*said(place(plan.gather(np.arange(8), 0))))
    writer.flush()
    labels = SoftLabels.open(tmp_path / "l", "labels")
    cfg, reads = SimpleNamespace(path=tmp_path.joinpath), {"kd": dataclasses.replace(KD, teacher=None, labels="l")}
    check_vocabulary(cfg, reads, 31)
    with pytest.raises(UserError, match="objective.kd.labels=l: name ids below 31, the student has 30; make them anew"):
        check_vocabulary(cfg, reads, 30)
    with_labels = Loader(store, 4, 12, seed=3, labels=labels)
    batches = [with_labels.batch(n) for n in (1, 2)]
    assert {"soft_ids", "soft_logp"} <= batches[0].keys()
    for top_k in (4,) if dtype == "<f4" else (None,):
        live = dataclasses.replace(KD, top_k=top_k or 6, direction="reverse" if top_k else "forward")
        kept = dataclasses.replace(live, teacher=None, labels="l", top_k=top_k)
        _, one = train(tiny, teacher, {"distill": live}, batches, params=params)
        _, two = train(tiny, teacher, {"distill": kept}, batches, params=params)
        for a, b in zip(one, two, strict=True):
            for name in ("distill", "grad_norm", "distill/agreement"):
                np.testing.assert_allclose(a[name], b[name], rtol=tolerance, err_msg=name)


def test_fields():
    kd = Distill(teacher="t", weight=2.0, schedule=Cosine(final=0.1))
    assert float(kd.weight_at(0, 10)) == 2.0 and abs(float(kd.weight_at(9, 10)) - 0.2) < 1e-6
    for fields, message in (
        ({"teacher": None}, "teacher: missing"),
        ({"labels": "folder"}, "one of them is learned from"),
        ({"temperature": 0.0}, "temperature: 0.0 must be above 0"),
        ({"top_k": 0}, "top_k=0 at least 1"),
        ({"direction": "both"}, "direction: 'both' is not forward or reverse"),
    ):
        with pytest.raises(UserError, match=message):
            Distill(**({"teacher": "t"} | fields))
