"""The measures of the train step at toy scale: what they count, and what they say."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import pytest
from contract import dot_flops

from jaxllm.compose import compose
from jaxllm.params import declare
from jaxllm.training.state import new_state

FOLDER = Path(__file__).parents[2] / "experiments" / "train_speed"
SMALL = [
    "model.layers=2* global/dense",
    "model.d_model=32",
    "model.vocab_size=64",
    "model.mixers.global.num_heads=2",
    "model.ffns.dense.d_ff=48",
]


@pytest.fixture(scope="module")
def load():
    def one(name):
        sys.path.insert(0, str(FOLDER))
        try:
            spec = importlib.util.spec_from_file_location(f"train_speed_{name}", FOLDER / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(str(FOLDER))
        return module

    return one


def test_newton_schulz_flops_are_those_of_the_update(load):
    study = load("muon")
    cfg = compose(["model=llama_24m", "optim=muon", *SMALL])
    model, optimiser = cfg.build("model"), cfg.build("optim")
    params = new_state(model, optimiser, 0).params
    tx = optimiser.transform(declare(model))
    jaxpr = jax.make_jaxpr(lambda p: tx.update(p, tx.init(p), p))(params)
    shapes = study.matrices(model, optimiser.per_head)
    assert study.newton_schulz_flops(shapes, optimiser.ns_steps) == dot_flops(jaxpr.jaxpr)
    assert sorted(shapes) == [(2, 32, 32)] * 4 + [(2, 32, 48)] * 3


def test_a_module_is_timed_beside_the_plain_step_and_the_head(load, capsys):
    study = load("ahead")
    study.ROWS, study.LENGTH = 2, 16
    study.main(1, SMALL)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["layers"] == 2 and said["budget"] == 1.75 and said["rounds"] == 1
    times = said["median_ms"]
    assert said["share"] == pytest.approx((times["ahead"] - times["head"]) / times["plain"], rel=0.2)
    assert said["met"] == (said["share"] <= 1.75)


def test_muon_is_timed_beside_its_products_and_a_step(load, capsys):
    study = load("muon")
    study.ROWS, study.PROBE = (1,), 32
    study.main(1, SMALL)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(said["median_ms"]) == ["probe", "products", "adamw", "muon", "step_256"]
    for kind in ("rate", "own_rate"):  # of a single round
        assert said["spread"][kind] == [said["over"][kind]] * 2
    assert list(said["overhead"]) == ["256"]
    assert said["met"] == (said["over"]["rate"] <= 1.3)
