"""The curves show what was logged: labelled axes, validation, a spike that flattens nothing, compilation apart."""

import numpy as np
import pytest

from jaxllm.measure import plots
from jaxllm.measure.jsonl import JsonlTracker, read_metrics


@pytest.fixture
def run(tmp_path):
    tracker = JsonlTracker(tmp_path)
    for step in range(1, 61):
        row = {"train/loss": 2 + 4 / step, "train/tokens_per_s": 1000.0 + step % 3}
        if step == 1:
            row |= {"train/compile_s": 12.5, "train/tokens_per_s": 10.0}
        if step == 30:
            row["train/loss"] = 1e6
        if step == 31:
            row["train/loss"] = float("nan")
        tracker.log(step, row)
        if step % 20 == 0:
            tracker.log(step, {"val/loss": 2.5 + 4 / step, "val/bpb": 1.25})
    return tmp_path


def test_both_pictures_are_written(run):
    assert plots.curves(run) == [run / "plots" / "loss.png", run / "plots" / "throughput.png"]
    for path in (run / "plots").iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


def texts(axes):
    return " | ".join([t.get_text() for t in axes.get_legend().get_texts()] + [t.get_text() for t in axes.texts])


def test_loss_shows_train_and_validation_and_survives_a_spike(run):
    (axes,) = plots.loss(read_metrics(run), "my run").axes
    assert "nats" in axes.get_ylabel() and axes.get_xlabel() == "step"
    assert axes.get_title(loc="left") and axes.get_title(loc="right") == "my run"
    raw, smooth, val = axes.lines
    assert len(raw.get_xdata()) == 59 and list(val.get_xdata()) == [20, 40, 60]
    assert max(smooth.get_ydata()) < 10 and axes.get_ylim()[1] < 10
    assert "1.250 bits per byte" in texts(axes) and "not drawn: 1" in texts(axes)


def test_compilation_is_not_part_of_the_throughput(run):
    rows = read_metrics(run)
    assert plots.compile_seconds(rows) == {1: 12.5}
    (axes,) = plots.throughput(rows).axes
    assert min(axes.lines[0].get_ydata()) >= 1000 and 1 not in axes.lines[0].get_xdata()
    assert "compilation: 12.5 s" in texts(axes) and "median 1,001" in texts(axes)
    assert axes.get_ylim()[0] == 0


def test_compile_seconds_repeated_on_every_row_count_once():
    rows = [{"step": step, "train/compile_s": 3.0 if step < 5 else 4.0} for step in range(1, 9)]
    assert plots.compile_seconds(rows) == {1: 3.0, 5: 4.0}


def test_smoothing_has_no_lag_and_no_outliers():
    steps = np.arange(5000)
    line = 10 - steps / 1000
    noisy = line + np.random.default_rng(0).normal(size=5000) * 0.3
    noisy[::500] = 1e9
    x, y = plots.smoothed(steps, noisy)
    assert len(x) <= 1000 and np.abs(y - (10 - x / 1000)).max() < 0.25
    assert plots.smoothed(steps[:3], line[:3])[1].tolist() == line[:3].tolist()


def test_an_empty_or_text_only_run_draws_nothing(tmp_path):
    assert plots.curves(tmp_path) == []
    JsonlTracker(tmp_path).log(1, {"train/loss": "n/a"})
    assert plots.curves(tmp_path) == [] and not (tmp_path / "plots").exists()
