"""The study of predicted decode times: what is fitted is exact, and what is predicted is judged."""

import importlib.util

import pytest

from jaxllm.measure.chips import Chip
from jaxllm.measure.roofline import Work
from jaxllm.measure.timing import Timing
from jaxllm.tasks.timing_subjects import Subject


@pytest.fixture
def module(root):
    file = root / "experiments" / "decode_prediction" / "predict.py"
    spec = importlib.util.spec_from_file_location("decode_prediction", file)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_one_constant_is_fitted_and_the_others_are_judged_by_it(module, monkeypatch):
    """Models of 1, 2 and 4 layers of 10 MB at 1 GB/s, measured as 10 ms + 5 ms a layer; one of them is twice as slow as that."""
    layers = {"fit": 2, "short": 1, "odd": 4}
    works = {n: [Work("head", 0.0, 0.0), Work("a", 1.0, 1e7, repeats=k, layers=1)] for n, k in layers.items()}
    monkeypatch.setattr(
        module, "subject", lambda name, context: Subject(lambda: None, 0.0, None, works[name], "float32")
    )
    chip, facts = Chip(name="cpu", matmul={"float32": 1e12}, bandwidth=1e9), {"bandwidth": 1e9}
    monkeypatch.setattr(module, "measured_chip", lambda: (chip, facts))
    taken = {"fit": 30.0, "short": 15.0, "odd": 120.0}
    monkeypatch.setattr(module, "time_calls", lambda calls, repeats: {n: Timing(0.0, (taken[n],)) for n in calls})
    result = module.study(["short", "odd"], 64, 3)
    assert result["layer_overhead_s"] == pytest.approx(5e-3)
    ratios = {row["model"]: row["ratio"] for row in result["rows"]}
    assert ratios == {"fit": pytest.approx(1), "short": pytest.approx(1), "odd": pytest.approx(0.5)}
    assert not result["ok"] and [row["ok"] for row in result["rows"]] == [True, True, False]
    assert module.study(["short"], 64, 3)["ok"]
