"""The command line's contract: exit codes, one JSON line, run folders, resume, sweeps, signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from jaxllm.backend import compile_cache_dir
from jaxllm.run import Session, main
from jaxllm.tasks import TASKS, WRITES, TaskIO

PROBE = ["task=probe", "+experiment=smoke"]


class Ran(NamedTuple):
    code: int
    lines: list[str]
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.lines[-1])


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs a command line in this process, in an empty folder, with the probe task known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, "probe", "probe_task")
    monkeypatch.setattr("jaxllm.run.WRITES", WRITES | {"probe"})

    def run(*arguments: str) -> Ran:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Ran(code, captured.out.splitlines(), captured.err)

    return run


# ---- results


def test_the_last_line_is_the_result(cli, tmp_path):
    ran = cli(*PROBE, "name=stray", "optim.lr=0.25")
    assert ran.code == 0
    assert ran.lines[0] == "some text" and len(ran.lines) == 2
    assert "stray text of some package" in ran.err
    result = ran.json
    assert list(result)[:3] == ["task", "run_dir", "seconds"]
    assert result["task"] == "probe" and result["loss"] is None and result["tokens"] == 3 and result["lr"] == 0.25
    folder = tmp_path / result["run_dir"]
    assert folder.parent == tmp_path / "runs" and folder.name.startswith("stray-20")
    assert json.loads((folder / "result.json").read_text()) == result
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["optim"]["lr"] == 0.25 and saved["run_dir"] == result["run_dir"] and saved["name"] == "stray"
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]  # no outputs/, no .hydra


def test_tasks_that_only_read_make_no_folder(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.run.WRITES", WRITES)
    ran = cli(*PROBE)
    assert ran.code == 0 and ran.json["run_dir"] is None
    assert list(tmp_path.iterdir()) == []
    assert cli(*PROBE, "run_dir=here").json["run_dir"] == "here"
    assert (tmp_path / "here" / "result.json").is_file()


def test_a_mistake_is_one_line_and_2(cli, tmp_path):
    ran = cli(*PROBE, "name=mistake")
    assert ran.code == 2 and ran.lines == []
    assert ran.err.strip().splitlines() == ["error: data.path=nowhere: no such file"]
    assert list((tmp_path / "runs").iterdir()) == []  # the folder went with the mistake
    assert (
        cli("data.path=").err.strip()
        == "error: data.path=: is empty (an unset variable?); give a value, or leave the key out"
    )
    for arguments in (["trian.steps=3"], ["model=tinny"], ["seed=(1"], ["--steps=3"], ["steps"], ["--config-dir"]):
        ran = cli(*arguments)
        assert ran.code == 2 and ran.lines == []
        assert len(ran.err.strip().splitlines()) == 1 and ran.err.startswith("error: ")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_our_fault_keeps_its_traceback_and_is_1(cli):
    ran = cli(*PROBE, "name=bug")
    assert ran.code == 1 and ran.lines == []
    assert "Traceback" in ran.err and "probe_task.py" in ran.err and "RuntimeError: boom" in ran.err


def test_a_full_disk_is_one_line(cli):
    ran = cli(*PROBE, "name=full")
    assert ran.code == 2
    assert ran.err.strip() == "error: no space left on the disk for tokens.bin; free some and resume"


def test_hydra_full_error_adds_the_traceback(cli, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    ran = cli(*PROBE, "name=mistake")
    assert ran.code == 2 and "Traceback" in ran.err and "error: data.path=nowhere: no such file" in ran.err


def test_free_text_needs_no_quoting(cli, tmp_path):
    prompt = "Hello, (world) ${x} 'y' \"z\" [1] a=b # %"
    ran = cli(*PROBE, f"prompt={prompt}", "run_dir=a, b (1)", "data.path=x,y.txt")
    assert ran.code == 0, ran.err
    saved = yaml.safe_load((tmp_path / "a, b (1)" / "config.yaml").read_text())
    assert saved["prompt"] == prompt and saved["data"]["path"] == "x,y.txt"


def test_help_is_short_and_lists_what_there_is(cli):
    ran = cli("--help")
    assert ran.code == 0 and len(ran.lines) <= 30 and all(len(line) < 130 for line in ran.lines)
    text = "\n".join(ran.lines)
    for word in ("generate", "quickstart", "smoke", "tiny", "resume=true", "-m", "Exit codes", "gqa"):
        assert word in text
    assert cli("--version").lines[0].startswith("jaxllm ")
    ran = cli("--cfg", "job", "model=tiny")
    assert ran.code == 0 and yaml.safe_load("\n".join(ran.lines))["model"]["d_model"] == 64


def test_a_folder_of_ones_own_yaml_is_searched(cli, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text("# @package _global_\nname: own\noptim: {lr: 0.125}\n")
    ran = cli("task=probe", "--config-dir", "mine", "experiment=own", "track=none")
    assert ran.code == 0 and ran.json["lr"] == 0.125


# ---- run folders and resume


def test_the_same_second_gives_two_folders(cli):
    folders = {cli(*PROBE).json["run_dir"] for _ in range(3)}
    assert len(folders) == 3


def test_a_finished_folder_is_refused_without_resume(cli, tmp_path):
    assert cli(*PROBE, "run_dir=x").code == 0
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "x").iterdir()}
    ran = cli(*PROBE, "run_dir=x", "seed=1")
    assert ran.code == 2 and "run_dir=x: already holds a run; add resume=true" in ran.err
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "x").iterdir()}


def test_resume_continues_the_saved_configuration(cli, tmp_path):
    assert cli(*PROBE, "run_dir=x", "optim.lr=0.5").json["resumed"] is False
    ran = cli("task=probe", "run_dir=x", "resume=true", "train.steps=9")
    assert ran.code == 0 and ran.json["resumed"] is True and ran.json["lr"] == 0.5
    saved = yaml.safe_load((tmp_path / "x" / "config.yaml").read_text())
    assert saved["train"]["steps"] == 9 and saved["train"]["seq_len"] == 32 and saved["name"] == "smoke"
    ran = cli(*PROBE, "run_dir=x", "resume=true", "optim.lr=0.75")  # groups chosen: composed anew, changes said
    assert ran.code == 0 and ran.json["lr"] == 0.75
    assert "resume: optim.lr 0.5 -> 0.75" in ran.err and "resume: train.steps 9 -> 4" in ran.err


def test_resume_of_nothing_is_refused(cli, tmp_path):
    assert "nothing to resume" in cli(*PROBE, "run_dir=x", "resume=true").err
    assert not (tmp_path / "x").exists()
    assert "run_dir=FOLDER" in cli(*PROBE, "resume=true").err


def test_a_strangers_run_folder_cannot_run_code(cli, tmp_path):
    assert cli(*PROBE, "run_dir=x").code == 0
    file = tmp_path / "x" / "config.yaml"
    evil = file.read_text().replace("jaxllm.training.schedules.Cosine", "os.system")
    file.write_text(evil)
    ran = cli("task=probe", "run_dir=x", "resume=true")
    assert ran.code == 2 and "optim.schedule._target_=os.system: a saved config may build only" in ran.err


# ---- sweeps


def test_a_sweep_gives_each_job_a_folder_and_a_line(cli, tmp_path):
    ran = cli("-m", *PROBE, "optim.lr=0.5,0.25", "hydra.sweep.dir=sweep")
    assert ran.code == 0 and len(ran.lines) == 2
    results = [json.loads(line) for line in ran.lines]
    assert [r["run_dir"] for r in results] == ["sweep/0", "sweep/1"] and [r["lr"] for r in results] == [0.5, 0.25]
    assert all(json.loads((tmp_path / r["run_dir"] / "result.json").read_text()) == r for r in results)
    assert cli("-m", *PROBE, "optim.lr=0.5").json["run_dir"].startswith("multirun/20")


def test_a_failed_job_fails_the_sweep_but_not_the_others(cli):
    ran = cli("-m", *PROBE, "name=bug,mistake,ok")
    assert ran.code == 1 and len(ran.lines) == 3
    bug, mistake, ok = (json.loads(line) for line in ran.lines)
    assert bug["exit_code"] == 1 and mistake["exit_code"] == 2
    assert mistake["error"] == "data.path=nowhere: no such file"
    assert ok["tokens"] == 3 and "error" not in ok
    assert cli("-m", *PROBE, "optim.lr=x,0.5").code == 2


def test_jobs_elsewhere_report_through_the_parent(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.run.Session._here", lambda self: False)
    ran = cli("-m", *PROBE, "name=ok,mistake", "hydra.sweep.dir=sweep")
    assert ran.code == 2 and len(ran.lines) == 2
    assert json.loads(ran.lines[0])["run_dir"] == "sweep/0"
    assert json.loads(ran.lines[1])["error"] == "data.path=nowhere: no such file"
    lost = cli("-m", *PROBE, "name=ok,trace", "hydra.sweep.dir=lost")
    assert lost.code == 0
    (tmp_path / "lost" / "1" / "result.json").unlink()
    session = Session(main_pid=0, cwd=tmp_path, sweep_dir=tmp_path / "lost")
    session.collect()
    assert session.codes == [0, 1]  # a job that died without a word is a failure


def test_a_launcher_takes_the_jobs_to_other_processes(tmp_path, root):
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxllm.run",
            "-m",
            "hydra/launcher=joblib",
            "hydra.launcher.n_jobs=2",
            "seed=-1,-2",
            "hydra.sweep.dir=sweep",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=300,
    )
    assert ran.returncode == 2, ran.stderr
    first, second = (json.loads(line) for line in ran.stdout.splitlines())
    assert first["error"] == "seed=-1: expected 0 or more" and first["run_dir"] == "sweep/0"
    assert second["error"] == "seed=-2: expected 0 or more" and second["run_dir"] == "sweep/1"


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_and_130(cli, tmp_path, number):
    before = signal.getsignal(number)
    ran = cli(*PROBE, f"name='polite:{number:d}'", "run_dir=x")
    assert ran.code == 130, ran.err
    assert ran.json["interrupted"] is True
    assert (tmp_path / "x" / "saved").read_text() == "1"
    assert "saving and stopping" in ran.err and "Traceback" not in ran.err
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_task_with_nothing_to_save_stops_at_once(cli, tmp_path, number):
    began = time.monotonic()
    ran = cli(*PROBE, f"name='deaf:{number:d}'", "run_dir=x")
    assert ran.code == 130 and time.monotonic() - began < 25
    assert ran.lines == [] and ran.err.splitlines()[-1] == "interrupted"
    assert not (tmp_path / "x").exists()


def test_an_interrupted_sweep_skips_the_rest(cli):
    ran = cli("-m", *PROBE, "name='polite:2',ok", "hydra.sweep.dir=sweep")
    assert ran.code == 130 and len(ran.lines) == 1 and ran.json["interrupted"] is True


def test_the_second_signal_kills(tmp_path, root):
    code = (
        "import sys; from jaxllm import run, tasks; tasks.TASKS['probe'] = 'probe_task'\n"
        "run.WRITES = run.WRITES | {'probe'}; sys.exit(run.main())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *PROBE, "name='stubborn:2'"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"},
        timeout=120,
    )
    assert ran.returncode == -signal.SIGINT
    assert "once more kills" in ran.stderr and ran.stdout == ""


# ---- what is settled before JAX is used


def test_the_compilation_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert compile_cache_dir(True).parent == tmp_path / "jaxllm" / "compiled"
    assert compile_cache_dir(False) is None
    assert compile_cache_dir("~/x").parent == Path.home() / "x"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "y"))
    assert compile_cache_dir(True).parent == tmp_path / "y"


def test_the_second_start_compiles_from_the_cache(tmp_path, root):
    code = (
        "import sys, time; from jaxllm.backend import prepare; from jaxllm.config import Common\n"
        f"prepare(Common(compile_cache={str(tmp_path)!r}, cpu_devices=2))\n"
        "import jax, jax.numpy as jnp; assert len(jax.devices()) == 2\n"
        "def f(x):\n    for i in range(60): x = jnp.sin(x @ x) + i\n    return x\n"
        "x = jax.ShapeDtypeStruct((64, 64), jnp.float32); low = jax.jit(f).lower(x)\n"
        "t = time.perf_counter(); low.compile(); print(time.perf_counter() - t)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(root)}

    def run():
        return float(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout)

    first, second = run(), run()
    assert second < 0.2 * first
    assert len(list(tmp_path.rglob("*-cache"))) >= 1


def test_devices_cannot_change_within_a_process(cli, devices):
    ran = cli(*PROBE, "cpu_devices=3")
    assert ran.code == 2 and "cpu_devices=3: cannot change within one process" in ran.err


def test_importing_the_package_is_light(root):
    code = (
        "import sys, jaxllm, jaxllm.errors; heavy = {'torch', 'transformers', 'wandb'}\n"
        "assert not sys.modules.keys() & (heavy | {'jax', 'numpy', 'hydra'})\n"
        "import jaxllm.run; assert not sys.modules.keys() & heavy"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# ---- what tasks speak through


def test_the_live_line(capsys, monkeypatch):
    io = TaskIO(out=sys.stdout, err=sys.stderr)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    io.progress("step 1")
    io.progress("step 2")
    io.log("saved")
    io.emit("tex")
    io.result("{}")
    captured = capsys.readouterr()
    assert captured.err == "\r\x1b[2Kstep 1\r\x1b[2Kstep 2\nsaved\n"
    assert captured.out == "tex\n{}\n"


def test_without_a_terminal_progress_is_thinned(capsys):
    io = TaskIO(out=sys.stdout, err=sys.stderr)
    for n in range(100):
        io.progress(f"step {n}")
    assert capsys.readouterr().err == "step 0\n"
    TaskIO(out=sys.stdout, err=sys.stderr, level="warning").progress("quiet")
    assert capsys.readouterr().err == ""
