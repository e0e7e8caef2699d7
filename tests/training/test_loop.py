"""The loop: restarts that leave no trace, saving on request, bad steps, stages, one record a step."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.data.loader import Loader
from jaxllm.data.store import TokenStore
from jaxllm.errors import UserError
from jaxllm.measure.debug import first_nonfinite
from jaxllm.training.guard import read_dump
from jaxllm.training.loop import Data, Loop, Outside
from jaxllm.training.schedules import Cosine
from jaxllm.training.settings import StageSettings, TrainSettings
from jaxllm.training.stages import plan
from jaxllm.training.state import abstract_state, new_state

RNG = np.random.default_rng(0)
STORE = TokenStore.of([RNG.integers(0, 31, RNG.integers(3, 30)) for _ in range(40)])
HELD = TokenStore.of([RNG.integers(0, 31, 9) for _ in range(3)])


class Recorder:
    """A tracker that refuses to go back within one session, as some do, and keeps every record."""

    id, histograms = "recorder", False

    def __init__(self):
        self.rows, self.sessions = {}, [[]]

    def log(self, step, metrics, axis="step"):
        keys = {k.split("/")[0] for k in metrics}
        assert len(keys) == 1
        if self.sessions[-1] and step < self.sessions[-1][-1][0]:
            raise AssertionError(f"step {step} after {self.sessions[-1][-1]}")
        assert (step, *keys) not in self.sessions[-1], "two records of one step"
        self.sessions[-1].append((step, *keys))
        self.rows.setdefault(step, {}).update(metrics)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Poisoned(Loader):
    """A loader whose batches at some steps train with an infinite weight."""

    bad = ()

    def batch(self, step):
        batch = super().batch(step)
        if step in self.bad:
            batch["weights"][1, 2] = np.inf
        return batch


@pytest.fixture
def bench(tiny, tmp_path):
    """`bench(folder, stop_at=..., bad=..., entries=..., **settings)` runs a loop there, resuming what it holds."""
    tracker = Recorder()
    lines = []

    def go(name, stop_at=None, bad=(), entries=(), resume=True, **fields):
        defaults = {"steps": 10, "batch_size": 4, "seq_len": 12, "eval_every": 3, "save_every": 4, "sample_every": 5}
        settings = TrainSettings(**{**defaults, **fields})
        optimiser = tiny.optimiser(schedule=Cosine(warmup_steps=4))
        model = tiny.model(dropout=0.1, layers="1* global/dense")
        stages = plan(settings, entries, model, optimiser, tiny.objectives)
        folder = tmp_path / name
        checkpoints = Checkpoints(folder / "checkpoints", 5, 1, warn=lines.append)
        tokens = 0
        if resume and checkpoints.latest() is not None:
            state, meta, _ = checkpoints.restore(abstract_state(model, optimiser))
            tokens = meta["tokens"]
        else:
            state = new_state(model, optimiser, seed=3)
        seen = []
        tracker.sessions.append([])

        def data(stage):
            loader = Poisoned(STORE, stage.batch_size, stage.seq_len, seed=stage.index)
            loader.bad = bad
            return Data(loader, Loader(HELD, 2, 12, shuffle=False).epoch, np.ones(31, np.int32))

        outside = Outside(
            tracker=tracker,
            checkpoints=checkpoints,
            log=lines.append,
            progress=lambda text: seen.append(text),
            stop=lambda: stop_at is not None and sum("loss" in s for s in seen) >= stop_at - 1,
            sample=lambda model, params, step: lines.append(f"sampled at {step}"),
            meta={"config": "x"},
            run_dir=folder,
        )
        try:
            return Loop(stages, settings, data, outside, before={"tokens": tokens}).run(state)
        finally:
            checkpoints.close()

    go.tracker, go.lines, go.folder = tracker, lines, tmp_path
    return go


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(bench, tiny):
    straight = bench("straight")
    want = dict(bench.tracker.rows)
    bench.tracker.rows.clear()
    for stop in (3, 4):  # twice: 3 steps, 4 more, then the rest
        half = bench("halves", stop_at=stop)
        assert half.interrupted
    assert half.step == 7
    resumed = bench("halves")
    assert (resumed.step, resumed.interrupted, straight.interrupted) == (10, False, False)
    tiny.same(straight.state, resumed.state)
    assert resumed.tokens == straight.tokens and resumed.val == straight.val and resumed.loss == straight.loss
    for step in range(1, 11):  # every step once in the end, with the same loss and the same rate
        for key in ("train/loss", "train/lr", "train/grad_norm", "train/tokens"):
            assert bench.tracker.rows[step][key] == want[step][key], (step, key)
    rates = [want[s]["train/lr"] for s in range(1, 11)]
    np.testing.assert_allclose(rates[:4], [0.0025, 0.005, 0.0075, 0.01], rtol=1e-6)
    assert straight.val["bpb"] > 0 and "sampled at 5" in bench.lines and "sampled at 10" in bench.lines


def test_going_back_to_an_older_checkpoint_repeats_steps_in_a_new_session(bench, tiny):
    straight = bench("straight")
    rows = {s: r["train/loss"] for s, r in bench.tracker.rows.items()}
    # a crash at 7 of a run that saved at 4: the tracker has 5..7 already and gets them again
    bench("crashed", stop_at=7)
    (bench.folder / "crashed/checkpoints/7/commit_success.txt").unlink()
    resumed = bench("crashed")
    assert bench.tracker.sessions[-1][0] == (5, "train")
    tiny.same(straight.state, resumed.state)
    assert {s: r["train/loss"] for s, r in bench.tracker.rows.items()} == rows
    assert any("checkpoint 7" in line and "using step 4" in line for line in bench.lines)


def test_a_checkpoint_holds_the_state_of_its_step(bench, tiny):
    # saving is asynchronous and the state is donated to the next step: what is written must be a copy
    bench("run", save_every=2)
    short = bench("short", stop_at=4)
    assert short.step == 4
    tiny.same(Checkpoints(bench.folder / "run/checkpoints").restore_params(step=4)[0], short.state.params)


def test_a_finished_run_started_again_trains_nothing(bench, tiny):
    first = bench("run")
    again = bench("run")
    assert again.step == 10 and again.tokens == first.tokens and again.val == first.val
    tiny.same(first.state, again.state)


def test_bad_steps_are_skipped_counted_and_reported(bench):
    result = bench("run", bad=(2, 5))
    assert (result.skipped, result.step, int(result.state.updates)) == (2, 10, 8)
    rows = bench.tracker.rows
    assert not np.isfinite(rows[3]["train/loss"]) and rows[8]["train/skipped"] == 2
    assert rows[4]["train/lr"] == rows[3]["train/lr"]  # the schedule did not advance
    assert np.isfinite(result.loss) and sum("not finite" in line for line in bench.lines) == 2


def test_stop_ends_the_run_with_its_state_saved(bench, tiny):
    # Step 6 is read when step 7 is already on its way: what is saved holds step 7, its tokens too.
    with pytest.raises(UserError, match="step 6: not finite .*train.nonfinite=stop"):
        bench("run", bad=(6,), nonfinite="stop")
    resumed = bench("run", bad=(6,), nonfinite="skip")
    other = bench("other", bad=(6,))
    tiny.same(resumed.state, other.state)
    assert resumed.skipped == 1 and resumed.tokens == other.tokens


def test_a_diverged_run_ends_by_itself(bench):
    with pytest.raises(UserError, match="3 steps in a row .*train.max_skipped"):
        bench("run", bad=tuple(range(2, 10)), max_skipped=3)


def test_a_dump_can_be_replayed(bench, tiny):
    result = bench("run", bad=(2,), nonfinite="dump", stop_at=4)
    assert result.skipped == 1 and result.interrupted
    folder = bench.folder / "run/nonfinite"
    step, batch = read_dump(folder / "step_00000002.npz")
    assert step == 2 and np.isinf(batch["weights"][1, 2])
    note = json.loads((folder / "step_00000002.json").read_text())
    model = tiny.model(dropout=0.1, layers="1* global/dense")
    params = jax.tree.map(np.asarray, result.state.params)
    assert note["first_nonfinite"] == first_nonfinite(model, params, batch)
    assert note["first_nonfinite"].startswith("batch weights: 1 of 48 numbers are not finite, first inf at (1, 2)")
    batch["weights"][1, 2] = 1.0
    assert first_nonfinite(model, params, batch) is None


STAGES = (
    StageSettings(steps=4),
    StageSettings(steps=3, freeze=("g0/*/mixer/*",), seq_len=6, lr=5e-3),
    StageSettings(weights={"next_token": 0.5}),
)


def test_stages_restart_cleanly_at_and_inside_their_borders(bench, tiny):
    straight = bench("straight", entries=STAGES)
    rows = {step: dict(row) for step, row in bench.tracker.rows.items()}
    for stop in (4, 1):  # at the border, then inside the second stage
        bench("parts", entries=STAGES, stop_at=stop)
    resumed = bench("parts", entries=STAGES)
    tiny.same(straight.state, resumed.state)
    for step in range(1, 11):
        assert bench.tracker.rows[step]["train/loss"] == rows[step]["train/loss"], step
    np.testing.assert_allclose(rows[5]["train/lr"], 5e-3 / 4, rtol=1e-6)  # its own warm-up
    assert [rows[s]["train/stage"] for s in (4, 5, 7, 8)] == [0, 1, 1, 2]
    assert rows[5]["train/tokens"] - rows[4]["train/tokens"] <= 4 * 6
    np.testing.assert_allclose(
        rows[9]["train/loss"], 0.5 * rows[9]["train/next_token"] + rows[9]["train/aux_balance"], rtol=1e-5
    )
    at = {n: Checkpoints(bench.folder / "straight/checkpoints").restore_params(step=n)[0] for n in (4, 7)}
    np.testing.assert_array_equal(at[4]["g0"]["b0"]["mixer"]["proj"], at[7]["g0"]["b0"]["mixer"]["proj"])
    assert np.any(at[4]["g0"]["b0"]["ffn"]["up"] != at[7]["g0"]["b0"]["ffn"]["up"])


def test_a_full_disk_ends_the_run_cleanly(bench, tiny, monkeypatch):
    def full(self, step, state, meta, metric=None):
        if step > 4:
            raise UserError(f"checkpoint {step}: no space left")
        return save(self, step, state, meta, metric)

    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(UserError, match="checkpoint 8: no space left"):
        bench("run")
    monkeypatch.undo()
    assert bench("run").step == 10  # from step 4 on


def test_settings_refuse_what_cannot_work():
    for fields, message in (
        ({"steps": 0}, "steps: 0"),
        ({"batch_size": 4, "accumulate": 3}, "accumulate: 3 does not divide batch_size=4"),
        ({"save_every": -1}, "save_every: -1"),
        ({"eval_batches": 0}, "eval_batches: 0"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(TrainSettings(), **fields)
