"""Tracking never stops or slows training, keeps every step through a resume, and says what would leave the machine."""

import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.measure.jsonl import JsonlTracker, read_metrics
from jaxllm.measure.trackers import Background, NoTracker, Tee, Wandb, make_tracker
from jaxllm.measure.wandb_tracker import WandbTracker, choose_mode


class FakeRun:
    """W&B's rule: its own counter never goes back, and a smaller explicit step is refused."""

    def __init__(self, server):
        self.server, self.summary, self.url = server, {}, "https://example.invalid/run"

    def define_metric(self, name, step_metric=None, summary=None):
        self.server.axes[name] = step_metric
        self.server.kept[name] = summary

    def log(self, row, step=None):
        if step is not None and step < self.server.counter:
            raise ValueError(f"step {step} is less than the current step {self.server.counter}")
        self.server.counter += 1
        self.server.rows.append(dict(row))

    def finish(self):
        self.server.finished = True


class FakeWandb:
    """Stands in for the wandb package and its server; a second init with the same id continues the run."""

    def __init__(self, unreachable=False):
        self.unreachable, self.rows, self.axes, self.counter, self.inits = unreachable, [], {}, 0, []
        self.kept: dict[str, str | None] = {}
        self.held = None  # a failed start keeps the id until the service ends
        self.Settings = lambda **fields: types.SimpleNamespace(**fields)
        self.Table = lambda columns, data: ("table", columns, data)
        self.Histogram = lambda np_histogram: ("histogram", *np_histogram)

    def init(self, **arguments):
        if arguments["id"] == self.held:
            raise RuntimeError("run ID is in use")
        self.held = arguments["id"] if self.unreachable else None
        self.inits.append(arguments)
        if self.unreachable and arguments["mode"] == "online":
            raise ConnectionError("no route")
        return FakeRun(self)

    def teardown(self):
        self.held = None


def train(tracker, steps, value):
    for step in steps:
        tracker.log(step, {"train/loss": value + step, "train/mfu": "n/a"})
        if step % 3 == 0:
            tracker.log(step, {"val/loss": value - step})


def test_no_step_is_dropped_after_a_crash_and_a_resume(tmp_path):
    server = FakeWandb()

    def open_tracker(resume):
        return WandbTracker(tmp_path, {}, "run1", "offline", print, resume=resume, module=server)

    train(open_tracker(False), range(1, 9), 0)  # crashes at 8: never closed
    again = open_tracker(True)
    train(again, range(6, 11), 100)
    again.close()
    assert server.axes["step"] is None and server.axes["*"] == "step", "the step is a declared axis"
    assert server.inits[1]["resume"] == "allow" and server.inits[1]["id"] == server.inits[0]["id"] == "run1"
    final: dict[int, dict] = {}
    for row in server.rows:
        final.setdefault(row["step"], {}).update(row)
    assert {step: row["train/loss"] for step, row in final.items()} == {
        **{step: step for step in range(1, 6)}, **{step: 100 + step for step in range(6, 11)},
    }  # fmt: skip
    assert {s: row["eval/loss"] for s, row in final.items() if "eval/loss" in row} == {3: -3, 6: 94, 9: 91}
    assert server.kept["eval/loss"] == "min,last" and server.axes["eval/loss"] == "step", "what a sweep is sorted by"
    steps = [row["step"] for row in server.rows]
    assert steps == [*range(1, 8), *range(6, 11)], "one call a step, training and validation together"


def test_another_clock_gets_its_own_axis(tmp_path):
    server = FakeWandb()
    tracker = WandbTracker(tmp_path, {}, "run1", "offline", print, module=server)
    tracker.log(1, {"train/loss": 1.0})
    tracker.log(500, {"serve/ttft_s": 0.1}, axis="serve/request")
    tracker.log(2, {"train/loss": 2.0})
    tracker.close()
    assert server.axes["infer/*"] == "infer/request"
    assert server.rows[1] == {"infer/request": 500, "infer/ttft_s": 0.1}
    assert [row.get("step") for row in server.rows] == [1, None, 2] and server.finished


def test_tables_and_histograms_share_the_row_of_their_step(tmp_path):
    server = FakeWandb()
    tracker = WandbTracker(tmp_path, {}, "run1", "offline", print, module=server)
    tracker.log(4, {"train/loss": 1.0})
    tracker.table(4, "samples", ["text"], [["x"]])
    tracker.histogram(4, "w", np.arange(4.0))
    tracker.summary({"loss": 1.5})
    (row,) = server.rows
    assert set(row) == {"step", "train/loss", "eval/samples", "train/w"}
    assert row["eval/samples"] == ("table", ["text"], [["x"]])


def test_an_unreachable_server_falls_back_to_offline(tmp_path):
    server, said = FakeWandb(unreachable=True), []
    tracker = WandbTracker(tmp_path, {}, "run1", "online", said.append, module=server)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert [arguments["mode"] for arguments in server.inits] == ["online", "offline"]
    assert len(said) == 1 and "offline" in said[0] and server.rows == [{"step": 1, "train/loss": 1.0}]


class Raises:
    id, histograms = "x", True

    def __getattr__(self, name):
        def fail(*arguments):
            raise RuntimeError("boom")

        return fail


class Hangs(Raises):
    def __init__(self):
        self.release = threading.Event()

    def log(self, *arguments):
        self.release.wait()


def test_a_raising_tracker_stops_nothing_and_is_named_once(tmp_path):
    said: list[str] = []
    tracker = Tee([Raises(), Background(Raises, "x", "remote", said.append), JsonlTracker(tmp_path)], said.append)
    train(tracker, range(1, 11), 0)
    tracker.table(1, "samples", ["text"], [["x"]])
    tracker.histogram(1, "w", np.ones(3))
    tracker.log(11, {"broken": np.ones(3)})
    tracker.summary({"loss": 1.0})
    tracker.close(5)
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == list(range(1, 11))
    assert sum("Raises failed" in line for line in said) == 1
    assert sum("a call failed" in line for line in said) == 1
    assert sum("could not be read" in line for line in said) == 1


def test_a_tracker_that_cannot_start_is_named(tmp_path):
    def refuse():
        raise OSError("no socket")

    said: list[str] = []
    tracker = Tee([Background(refuse, "x", "remote", said.append), JsonlTracker(tmp_path)], said.append)
    train(tracker, range(1, 4), 0)
    tracker.close(5)
    assert len(read_metrics(tmp_path)) == 3
    assert len(said) == 1 and "could not start" in said[0] and "no socket" in said[0]


def test_a_hanging_tracker_costs_no_time_and_close_has_a_limit(tmp_path):
    hanging, said = Hangs(), []
    remote = Background(lambda: hanging, "x", "remote", said.append, capacity=8)
    tracker = Tee([remote, JsonlTracker(tmp_path)], said.append)
    start = time.monotonic()
    for step in range(200):
        tracker.log(step, {"train/loss": step})
    assert time.monotonic() - start < 2
    assert remote.dropped >= 190 and sum("does not keep up" in line for line in said) == 1
    tracker.close(0.2)
    assert time.monotonic() - start < 4
    assert sum("left behind" in line for line in said) == 1
    assert len(read_metrics(tmp_path)) == 200
    hanging.release.set()


def test_device_values_are_read_before_their_buffers_may_be_donated(tmp_path):
    seen, gate = [], threading.Event()

    class Slow(Raises):
        def log(self, step, metrics, axis):
            gate.wait()
            seen.append(metrics["x"])

        def close(self, *arguments): ...

    tracker = Tee([Background(Slow, "x", "remote", print)], print)
    value = jnp.float32(3.0)
    tracker.log(1, {"x": value})
    value.delete()
    gate.set()
    tracker.close(5)
    assert seen == [3.0]


# --- choosing and saying --------------------------------------------------------------------------------------------


def test_online_only_with_a_key_and_wandb_mode_wins(tmp_path):
    bare = {"HOME": str(tmp_path)}
    assert choose_mode(None, bare) == ("offline", "no key is configured")
    assert choose_mode(None, {**bare, "WANDB_API_KEY": "k"}) == ("online", "key from WANDB_API_KEY")
    assert choose_mode("offline", {**bare, "WANDB_API_KEY": "k"})[0] == "offline"
    assert choose_mode("online", {**bare, "WANDB_MODE": "offline", "WANDB_API_KEY": "k"})[0] == "offline"
    assert choose_mode("offline", {**bare, "WANDB_MODE": "online"})[0] == "online"
    assert choose_mode(None, {**bare, "WANDB_MODE": "disabled"}) == ("disabled", "WANDB_MODE=disabled")
    with pytest.raises(UserError, match="WANDB_MODE=of"):
        choose_mode(None, {"WANDB_MODE": "of"})
    keys = tmp_path / ".netrc"
    keys.write_text("machine api.wandb.ai login user password secret\n")
    keys.chmod(0o600)
    assert choose_mode(None, bare) == ("online", f"key from {keys}")
    assert choose_mode(None, {**bare, "WANDB_BASE_URL": "https://wandb.example.org"})[0] == "offline", "another server"
    assert choose_mode(None, {"NETRC": str(keys)})[0] == "online"


@pytest.fixture
def no_wandb(monkeypatch):
    """Settings open no real run: the thread meets a tracker that swallows everything."""

    class Null(Raises):
        def __getattr__(self, name):
            return lambda *arguments: None

    opened = []
    monkeypatch.setattr("jaxllm.measure.trackers.WandbTracker", lambda *a, **k: opened.append((a, k)) or Null())
    return opened


def test_what_would_leave_the_machine_is_said_first(tmp_path, monkeypatch, no_wandb):
    offline = Wandb().open(tmp_path)
    text = offline.describe()
    for part in ("offline", "Nothing leaves this machine", "wandb leet", "wandb sync", str(tmp_path), "metrics.jsonl"):
        assert part in text
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    online = Wandb(project="p").open(tmp_path)
    for part in ("online", "config", "metrics", "git commit", "versions", "sampled text", "host name", "track=none"):
        assert part in online.describe()
    assert "not-a-key" not in online.describe()
    alone = NoTracker().open(tmp_path)
    assert "W&B" not in alone.describe() and "metrics.jsonl" in alone.describe() and alone.id is None
    for tracker in (offline, online, alone):
        tracker.close(5)


def test_the_id_is_known_at_once_and_is_kept_by_a_resume(tmp_path, no_wandb):
    first = Wandb(group="g", tags=("a",)).open(tmp_path, {"lr": 1})
    assert first.id and len(first.id) == 8
    again = make_tracker("wandb", tmp_path, resume_id=first.id)
    strange = make_tracker("wandb", tmp_path, resume_id="../../etc")
    assert again.id == first.id and strange.id not in (None, "../../etc")
    for tracker in (first, again, strange):
        tracker.close(5)
    assert [fields["resume"] for _, fields in no_wandb] == [False, True, False]
    assert no_wandb[0][1]["group"] == "g" and no_wandb[0][1]["tags"] == ("a",)


def test_off_without_wandb_still_keeps_jsonl(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said: list[str] = []
    tracker = make_tracker("wandb", tmp_path, log=said.append)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close()
    assert tracker.id is None and "WANDB_MODE=disabled" in said[0] and len(read_metrics(tmp_path)) == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_mode(None, {}) == ("disabled", "the package wandb is not installed")


def test_wrong_settings_are_named(tmp_path):
    with pytest.raises(UserError, match="track.mode='of'"):
        Wandb(mode="of")
    with pytest.raises(UserError, match="track=tensorboard"):
        make_tracker("tensorboard", tmp_path)


def test_only_process_0_tracks(tmp_path, monkeypatch, no_wandb):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    for settings in (Wandb(), NoTracker()):
        tracker = settings.open(tmp_path / "run")
        tracker.log(1, {"train/loss": 1.0})
        tracker.close()
        assert tracker.id is None
    assert not (tmp_path / "run").exists() and not no_wandb
