"""metrics.jsonl: append, flush, torn lines, last value wins."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.measure.jsonl import JsonlTracker, as_histogram, read_metrics


def test_every_line_is_on_disk_at_once_and_is_strict_json(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(1, {"train/loss": jnp.float32(2.5), "train/skipped": np.int64(0), "train/mfu": "n/a"})
    tracker.log(2, {"train/loss": float("nan"), "train/lr": float("inf")})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["train/loss"] == 2.5 and lines[0]["train/skipped"] == 0 and lines[0]["train/mfu"] == "n/a"
    assert lines[0]["time"] > 1.6e9
    rows = read_metrics(tmp_path)
    assert math.isnan(rows[1]["train/loss"]) and rows[1]["train/lr"] == math.inf and rows[0]["train/mfu"] == "n/a"


def test_a_resumed_run_logs_steps_again_and_the_last_value_wins(tmp_path):
    first = JsonlTracker(tmp_path)
    for step in range(1, 9):
        first.log(step, {"train/loss": step})
        if step % 3 == 0:
            first.log(step, {"val/loss": 10 * step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/lo')  # killed while writing
    second = JsonlTracker(tmp_path)
    for step in range(6, 11):
        second.log(step, {"train/loss": 100 + step})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["train/loss"] for row in rows] == [1, 2, 3, 4, 5, 106, 107, 108, 109, 110]
    assert {row["step"]: row["val/loss"] for row in rows if "val/loss" in row} == {3: 30, 6: 60}


def test_another_clock_does_not_mix_with_steps(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.log(7, {"train/loss": 1.0})
    tracker.log(7, {"serve/ttft_s": 0.2}, axis="serve/request")
    assert [set(row) for row in read_metrics(tmp_path)] == [{"step", "time", "train/loss"}]
    (row,) = read_metrics(tmp_path, axis="serve/request")
    assert row["serve/ttft_s"] == 0.2 and "step" not in row


def test_tables_histograms_and_summary(tmp_path):
    tracker = JsonlTracker(tmp_path)
    tracker.table(5, "samples", ["prompt", "text"], [["def", "def f():\n  ü"], ["a", "b"]])
    tracker.table(5, "../escape", ["x"], [[1]])
    tracker.histogram(5, "w", np.array([0.0, 1.0, np.nan, np.inf]))
    tracker.summary({"loss": 2.0})
    tracker.summary({"bpb": 1.0})
    tracker.close()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert samples[0] == {"step": 5, "prompt": "def", "text": "def f():\n  ü"}
    assert not (tmp_path.parent / "escape.jsonl").exists()
    histogram = json.loads((tmp_path / "histograms.jsonl").read_text())
    assert sum(histogram["counts"]) == 2 and len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": 2.0, "bpb": 1.0}


def test_no_file_and_nothing_finite(tmp_path):
    assert read_metrics(tmp_path / "nowhere") == []
    assert as_histogram([np.nan]).counts == [0]
    with pytest.raises(ValueError):
        JsonlTracker(tmp_path).log(1, {"vector": np.ones(3)})
