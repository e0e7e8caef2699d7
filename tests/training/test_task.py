"""`task=train` and `task=eval` as a whole: what lies in the run folder, what the card says, what a kill costs."""

import dataclasses
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints, read_meta
from jaxllm.compose import compose
from jaxllm.data.soft_labels import SoftLabels
from jaxllm.data.tokenizer import load_tokenizer
from jaxllm.errors import UserError
from jaxllm.measure.jsonl import read_metrics
from jaxllm.tasks import Stop, TaskIO, evaluate, label, train
from jaxllm.tasks.card import origin_of
from jaxllm.tasks.source import open_source

SMALL = ["+experiment=smoke", "data=synthetic", "data.documents=300", "data.length=4"]
SMALL += ["train.batch_size=2", "train.seq_len=16", "train.eval_batches=null", "mesh=single"]


class StopAt(Stop):
    """Asks to stop at the n-th poll, as a signal in that step would."""

    def __init__(self, polls):
        super().__init__()
        self.left = polls

    def is_set(self):
        self.left -= 1
        return self.left <= 0


def run(folder, *overrides, task=train, resume=False, stop=None):
    """The JSON fields and what was said on stderr."""
    folder.mkdir(exist_ok=True, parents=True)
    err = io.StringIO()
    cfg = compose([*(SMALL if task is train else ["mesh=single"]), *overrides]).replace(
        {"run_dir": str(folder), "resume": resume}
    )
    context = TaskIO(run_dir=folder, resume=resume, out=io.StringIO(), err=err, stop=stop or Stop())
    return task.run(cfg, context), err.getvalue()


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "my run"
    return folder, *run(folder, "train.steps=6", "train.ema=0.9")


def test_a_run_leaves_everything_in_its_folder(done):
    folder, fields, said = done
    assert {"loss", "val_bpb", "tokens", "tokens_per_s", "steps", "checkpoint", "skipped_steps"} <= set(fields)
    json.dumps(fields, allow_nan=False)
    assert fields["steps"] == 6 and fields["tokens"] <= 6 * 32 and fields["skipped_steps"] == 0
    assert Checkpoints(folder / "checkpoints").steps() == [2, 4, 6]
    assert fields["checkpoint"] == str(folder / "checkpoints/6")
    meta = read_meta(fields["checkpoint"])
    assert meta["step"] == 6 and meta["tokens"] == fields["tokens"] and "train:" in meta["config"]
    assert {"sha256", "documents"} <= set(meta["data"]) and meta["environment"]["versions"]["jax"]
    assert load_tokenizer(folder / "tokenizer").vocab_size == 258 and meta["tokenizer"]
    rows = {r["step"]: r for r in read_metrics(folder)}
    wanted = "loss grad_norm param_norm update_norm lr tokens tokens_per_s step_ms mfu skipped".split()
    assert sorted(rows) == list(range(1, 7)) and all(f"train/{k}" in rows[s] for s in rows for k in wanted)
    assert rows[1]["train/compile_s"] > 0 and "train/compile_s" not in rows[2] and rows[2]["train/mfu"] == "n/a"
    assert (
        rows[6]["val/bpb"] == pytest.approx(fields["val_bpb"]) and "val/loss" in rows[2] and "val/loss" not in rows[3]
    )
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in samples} == {6} and isinstance(samples[0]["text"], str)
    assert (folder / "plots/loss.png").stat().st_size > 1000
    assert said.index("tracking: ") < said.index("compiling")  # what could leave the machine is said first


def test_the_card_gives_commands_that_a_shell_takes(done):
    folder, _, said = done
    card = said[said.rindex("done\n") :]
    commands = [shlex.split(line) for line in card.splitlines() if "python -m jaxllm.run" in line]
    words = [c[3:] for c in commands]
    assert words[0] == ["task=generate", f"source={folder}", "prompt=def "]
    assert words[1] == [f"run_dir={folder}", "resume=true", "train.steps=12"]
    assert words[2][:2] == ["-m", "+experiment=smoke"] and {"data=synthetic", "mesh=single"} <= set(words[2])
    assert words[2][-1] == "optim.lr=0.0005,0.001,0.002" and "data.documents=300" in words[2]
    compose([w for w in words[2][1:-1]])  # every part of it is a valid override
    for path in (folder, folder / "checkpoints/6", folder / "plots/loss.png"):
        assert shlex.quote(str(path)) in card


def test_a_sweep_starts_from_every_choice_that_was_typed():
    typed = ["+experiment=smoke", "data/tokenizer=bytes", "mixer@model.mixers.global=mqa", "ffn@model.ffns.dense=gelu"]
    cfg = compose([*typed, "train.steps=3", "optim.lr=0.1"])
    assert origin_of(cfg) == [*typed, "train.steps=3"]


def test_eval_gives_the_loss_that_training_saw(done, tmp_path):
    folder, fields, _ = done
    result, _ = run(tmp_path / "e", f"source={folder}", "task=eval", task=evaluate)
    assert result["loss"] == pytest.approx(fields["val_loss"], rel=1e-6)
    assert result["bpb"] == pytest.approx(fields["val_bpb"], rel=1e-6) and result["step"] == 6
    other = tmp_path / "text.txt"
    other.write_text("1234 abcd " * 30)
    result, _ = run(tmp_path / "f", f"source={folder}", "task=eval", "data=text", f"data.path={other}", task=evaluate)
    assert result["tokens"] > 250  # all of a foreign text, in the model's own tokens
    with pytest.raises(UserError, match="source: missing"):
        run(tmp_path / "g", "task=eval", task=evaluate)


def test_a_teacher_is_asked_once_and_a_stopped_pass_goes_on(done, tmp_path):
    folder, *_ = done
    how = [f"source={folder}", f"out={tmp_path / 'labels'}", "label.top_k=3", "label.temperature=2.0"]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", *how, task=label, stop=StopAt(2))
    student = ["objective=distill", f"objective.distill.labels={tmp_path / 'labels'}", "train.steps=2"]
    with pytest.raises(UserError, match="only 4 of .* rows are labelled; run the same task=label again to finish"):
        run(tmp_path / "s", *student)
    result, said = run(tmp_path / "a", *how, task=label)
    assert "goes on behind row 4" in said and 0 < result["kept"] < 1 and result["top_k"] == 3
    assert result["bytes"] == pytest.approx(result["rows"] * 16 * (3 * 2 + 4 * 2), abs=2000)
    with pytest.raises(UserError, match="holds labels with top_k 3, not 2; name another folder"):
        run(tmp_path / "a", *how, "label.top_k=2", task=label)
    with pytest.raises(UserError, match="label.max_gb=1e-06: .* tokens with 3 labels each take"):
        run(tmp_path / "a", *how, f"out={tmp_path / 'other'}", "label.max_gb=1e-6", task=label)
    with pytest.raises(UserError, match="taken at temperature 2, the objective has 1"):
        run(tmp_path / "s", *student, "objective.distill.temperature=1.0")
    with pytest.raises(UserError, match="labels of rows of another length: seq_len 16, here 8"):
        run(tmp_path / "s8", *student, "train.seq_len=8")
    with pytest.raises(UserError, match="labels of another text"):
        run(tmp_path / "st", *student, "data.seed=3")
    with pytest.raises(UserError, match="labels=.*: no labels there"):
        run(tmp_path / "sn", *student, f"objective.distill.labels={tmp_path}")
    same_when_stopped(tmp_path, *student[:-1])


def same_when_stopped(folder, *words):
    """Four steps, at once and in twos, end in the same loss and the same bits."""
    straight, _ = run(folder / "one", *words, "train.steps=4")
    run(folder / "two", *words, "train.steps=4", stop=StopAt(2))
    resumed, said = run(folder / "two", *words, "train.steps=4", resume=True)
    assert "resume: from step 2" in said and resumed["loss"] == straight["loss"]
    a, b = (Checkpoints(folder / name / "checkpoints").restore_params()[0] for name in ("one", "two"))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_modules_that_predict_further_go_on_as_if_nothing_had_happened(tmp_path):
    same_when_stopped(tmp_path, "+mtp@model.mtp=chained", "objective=mtp")


def test_a_teacher_names_no_ids_behind_the_tokenizers(done, tmp_path, monkeypatch):
    """Heads are often padded to a round number of rows; a student has no such ids."""
    folder, *_ = done
    source = open_source(folder)
    most = source.tokenizer.vocab_size
    assert source.model.tie_embeddings and source.model.padded_vocab == most
    params = source.params | {"embed": np.pad(source.params["embed"], ((0, 6), (0, 0)))}
    padded = dataclasses.replace(source, model=source.model.clone(vocab_size=most + 6), params=params)
    monkeypatch.setattr(label, "open_source", lambda *a, **k: padded)
    result, _ = run(tmp_path / "a", f"source={folder}", f"out={tmp_path / 'l'}", "label.top_k=9999", task=label)
    assert result["top_k"] == most and SoftLabels.open(tmp_path / "l", "labels").meta["vocab_size"] == most


def test_eval_by_position_by_domain_and_by_probe(done, tmp_path):
    folder, _, _ = done
    for name, text in (("digits", "1234 " * 60), ("letters", "abcd " * 60)):
        (tmp_path / f"{name}.txt").write_text(text)
    line = {"prompt": "a1b2?a", "choices": ["1", "2"], "answer": 0}
    (tmp_path / "q.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line | {"answer": 1}) + "\n")
    suites = [f"eval.domains.{name}={tmp_path / name}.txt" for name in ("digits", "letters")]
    suites += [
        "eval.recall.short={length:3,documents:4}",
        f"eval.choices.q={tmp_path / 'q.jsonl'}",
        "train.batch_size=4",
    ]
    suites += ["eval.needle=[96]", "eval.needle_depths=2", "eval.needle_count=4", "track=none"]
    folder_out = tmp_path / "e"
    result, said = run(folder_out, f"source={folder}", "task=eval", *suites, task=evaluate)
    json.dumps(result, allow_nan=False)
    rows = result["by_position"]
    assert rows[0]["from"] == 0 and sum(row["tokens"] for row in rows) == result["tokens"]
    mean = sum(row["loss"] * row["tokens"] for row in rows) / result["tokens"]
    assert mean == pytest.approx(result["loss"], rel=1e-5)
    assert set(result["domains"]) == {"digits", "letters"}
    assert all(row["bpb"] > 0 and row["tokens"] >= 300 for row in result["domains"].values())
    assert result["recall"]["short"]["tokens"] == 4 * 2  # an answer, and the end of the document
    assert result["choices"]["q"]["acc"] == 0.5 == result["choices"]["q"]["chance"]  # both answers to one question
    assert [(row["length"], row["depth"]) for row in result["needle"]] == [(96, 0.0), (96, 1.0)]
    assert all(row["tokens"] == 4 * 5 for row in result["needle"])
    assert "needle: 96, 0" in said
    with pytest.raises(UserError, match="eval.recall.short: got an unexpected keyword argument 'lenght'"):
        run(tmp_path / "f", f"source={folder}", "task=eval", "eval.recall.short={lenght:3}", task=evaluate)


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(done, tmp_path):
    folder, fields, _ = done
    first, said = run(tmp_path / "run", "train.steps=6", "train.ema=0.9", stop=StopAt(3))
    assert first["steps"] == 3 and "interrupted; everything up to here is saved" in said
    second, said = run(tmp_path / "run", "train.steps=6", "train.ema=0.9", resume=True)
    assert "resume: from step 3" in said
    for name in ("loss", "val_bpb", "tokens", "steps"):
        assert second[name] == fields[name], name
    a, b = (Checkpoints(p / "checkpoints").restore_params()[0] for p in (folder, tmp_path / "run"))
    np.testing.assert_array_equal(a["embed"], b["embed"])
    raw = Checkpoints(folder / "checkpoints").restore_params(averaged=False)[0]
    assert not np.array_equal(a["embed"], raw["embed"])  # averages are kept, and are what is opened


def test_a_finished_run_that_is_started_again_says_what_it_came_to(tmp_path):
    small = ["train.steps=2", "train.sample_tokens=0"]
    first, _ = run(tmp_path / "run", *small)
    again, _ = run(tmp_path / "run", *small, resume=True)
    for name in ("loss", "val_bpb", "tokens", "tokens_per_s", "steps", "skipped_steps"):
        assert again[name] == pytest.approx(first[name], abs=0.1) and again[name] is not None, name
    assert not again["interrupted"]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("optim.lr=0", "lr: 0.0 must be above 0"),
        ("model.layers=2* global/dens", "role 'dens'"),
        ("train.accumulate=3", "accumulate"),
        ("mesh.axes.data=8", "batch"),
        (
            "+objective.kd={_target_: jaxllm.training.objectives.Distill, teacher: gone}",
            "^objective.kd.teacher=gone: no such folder",
        ),
    ],
)
def test_a_mistake_leaves_nothing_but_the_configuration(tmp_path, mistake, words):
    with pytest.raises(UserError, match=words.replace("*", "[*]")):
        run(tmp_path / "run", "train.steps=2", mistake)
    assert list((tmp_path / "run").iterdir()) == []  # the command line's own files are not written here


def test_stages_come_from_the_configuration(tmp_path):
    constant = "{_target_:jaxllm.training.schedules.Constant}"
    stages = f"stages=[{{steps:2,freeze:['g0/*']}},{{seq_len:8,lr:1e-4,schedule:{constant}}}]"
    fields, said = run(tmp_path / "run", "train.steps=4", "train.sample_tokens=0", stages)
    assert fields["steps"] == 4 and "stage stage1: steps 2 to 4" in said
    rows = {r["step"]: r for r in read_metrics(tmp_path / "run")}
    assert rows[3]["train/lr"] == pytest.approx(1e-4) and not (tmp_path / "run/samples.jsonl").exists()


def start(folder, root, cache, *overrides):
    """A training process that would run for hours."""
    command = [sys.executable, "-m", "jaxllm.run", *SMALL, f"run_dir={folder}", f"compile_cache={cache}", *overrides]
    command += ["train.save_every=10", "train.eval_every=0", "train.sample_tokens=0", "track=none"]
    env = {**os.environ, "PYTHONPATH": str(root)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder.parent, env=env, stdout=pipe, stderr=pipe, text=True)


def end(child, sign, folder, step):
    """Send the signal once `step` is saved; what was printed. A save that is on its way may or may not be whole then."""
    try:
        deadline = time.monotonic() + 180
        while not (folder / f"checkpoints/{step}/commit_success.txt").exists():
            assert time.monotonic() < deadline and child.poll() is None, child.stderr.read()[-2000:]
            time.sleep(0.02)
        child.send_signal(sign)
        return child.communicate(timeout=120)
    finally:
        child.kill()
        child.wait()


def programs(cache):
    """The compiled train steps in the cache. Access times lie beside them."""
    return sorted(path.name for path in cache.rglob("jit_step-*") if not path.name.endswith("-atime"))


def test_kill_9_and_sigterm_cost_at_most_the_steps_since_the_last_save(tmp_path, root):
    folder, cache = tmp_path / "run", tmp_path / "cache"
    end(start(folder, root, cache, "train.steps=100000"), signal.SIGKILL, folder, 20)
    reached = max(r["step"] for r in read_metrics(folder))
    kept = Checkpoints(folder / "checkpoints").latest()
    # one save may be on its way to the disk while the next ten steps run
    assert kept is not None and kept >= 20 and reached - kept <= 20
    compiled = programs(cache)
    assert compiled

    goal = kept // 10 * 10 + 20
    child = start(folder, root, cache, "train.steps=200000", "resume=true")
    out, said = end(child, signal.SIGTERM, folder, goal)
    result = json.loads(out.splitlines()[-1])
    assert child.returncode == 130 and result["interrupted"] and f"resume: from step {kept}" in said
    assert result["steps"] >= goal and result["checkpoint"] == str(folder / f"checkpoints/{result['steps']}")
    rows = [r["step"] for r in read_metrics(folder)]
    assert max(rows) == result["steps"] == Checkpoints(folder / "checkpoints").latest()  # nothing at all is lost
    assert read_meta(result["checkpoint"])["tokens"] == result["tokens"]
    assert programs(cache) == compiled  # neither the second start nor the longer run compiled the step again
