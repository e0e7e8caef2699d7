"""Names on dashboards, and the tracker without an account."""

import contextlib
import json
import sqlite3
import sys
import types

import pytest

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.measure.panels import PANELS, SUMMARIES, panel
from jaxllm.measure.trackio_tracker import ELSEWHERE, TrackioTracker, trackio_module

NAMES = {
    "train/loss": "train/loss",
    "train/next_token/nll": "train/next_token/nll",
    "train/watch/grad_norm/embed": "train/watch/grad_norm/embed",
    "train/tokens": "train/tokens",
    "train/tokens_per_s": "time/tokens_per_s",
    "train/mfu": "time/mfu",
    "val/bpb": "eval/bpb",
    "samples": "eval/samples",
    "params/embed": "train/params/embed",
    "train/metric/g1/b0/ffn/load/3/max": "moe/load/g1/b0/3/max",
    "train/metric/g0/b2/mixer/recall/0": "attn/recall/g0/b2/0",
    "train/metric/mtp/b0/ffn/entropy": "moe/entropy/mtp/b0",
    "time/decode/model_b1_float32/mfu": "time/decode/model_b1_float32/mfu",
    "attn/layer_00": "attn/layer_00",
    "bench/throughput": "infer/throughput",
    "loss": "train/loss",
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_its_panel(name):
    assert panel(name) == NAMES[name]
    assert panel(name).partition("/")[0] in PANELS and panel(panel(name)) == panel(name)


def test_summaries_are_of_names_as_they_are_shown():
    assert all(panel(name) == name for name in SUMMARIES)


class FakeTrackio(types.ModuleType):
    """What the tracker uses of trackio: its run, and its noise on stdout."""

    def __init__(self):
        super().__init__("trackio")
        self.rows, self.inits, self.finished = [], [], 0
        self.Table = lambda columns, data: ("table", columns, data)
        self.Histogram = lambda np_histogram: "histogram"
        self.Image = lambda path: ("image", path)

    def init(self, **arguments):
        print("* noise")
        self.inits.append(arguments)
        return self

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        print("* noise")
        self.finished += 1


def test_trackio_gets_the_same_names_and_stdout_stays_clean(tmp_path, monkeypatch, capsys):
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    for name in ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    lines = []
    settings = compose(["track=trackio", "track.group=sweep"]).build("track")
    tracker = settings.open(tmp_path, {"optim": {"lr": 0.1}}, log=lines.append)
    tracker.log(3, {"train/loss": 1.0, "val/loss": 2.0, "train/mfu": "n/a"})
    tracker.table(3, "samples", ["text", "ms"], [["x", "n/a"]])
    tracker.histogram(3, "w", [1.0, 2.0])
    tracker.image(3, "attn/layer_00", tmp_path / "a.png")
    tracker.summary({"result/loss": 1.0, "result/checkpoint": "somewhere"})
    tracker.close()
    (start,) = fake.inits
    assert (start["name"], start["group"], start["resume"]) == (tracker.id, "sweep", "allow")
    assert start["config"] == {"optim": {"lr": 0.1}} and not {"space_id", "server_url"} & set(start)
    assert fake.rows == [
        (3, {"train/loss": 1.0, "eval/loss": 2.0}),
        (3, {"eval/samples": ("table", ["text", "ms"], [["x", None]])}),
        (3, {"train/w": "histogram"}),
        (3, {"attn/layer_00": ("image", str(tmp_path / "a.png"))}),
        (3, {"result/loss": 1.0}),
    ]
    assert fake.finished == 1 and capsys.readouterr().out == ""
    assert any("trackio show --project jaxllm" in line for line in lines) and (tmp_path / "metrics.jsonl").is_file()
    resumed = settings.open(tmp_path, {}, resume_id=tracker.id, log=lines.append)
    assert resumed.id == tracker.id == fake.inits[-1]["name"]


def test_trackio_that_is_missing_or_would_upload_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"trackio is not installed; pip install .jaxllm\[trackio\]"):
        trackio_module({})
    with pytest.raises(UserError, match="TRACKIO_SPACE_ID would send the run away"):
        trackio_module({"TRACKIO_SPACE_ID": "me/space"})


def test_trackio_itself_keeps_a_run_and_goes_on_with_it(tmp_path, monkeypatch, capsys):
    """With the real package, where it is installed; it reads its folder from the environment when it is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    for start in (0, 2):
        tracker = TrackioTracker({"a": 1}, "abcd1234", "p", module=trackio)
        for step in (start + 1, start + 2):
            tracker.log(step, {"val/loss": float(step)})
        tracker.close()
    with contextlib.closing(sqlite3.connect(next(tmp_path.rglob("p.db")))) as base:
        rows = base.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step, json.loads(text)) for name, step, text in rows] == [
        ("abcd1234", step, {"eval/loss": float(step)}) for step in (1, 2, 3, 4)
    ]
    assert capsys.readouterr().out == ""
