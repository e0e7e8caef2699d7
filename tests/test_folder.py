"""Run folders: two runs never share one, and nothing half-written is ever read."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jaxllm import folder
from jaxllm.errors import UserError


def test_the_same_second_gives_different_folders(tmp_path):
    name = folder.default_name("my run/4: x", now=0)
    assert name.startswith("my-run-4-x-19")
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: folder.fresh(tmp_path / "runs", name), range(16)))
    assert len({run.path for run in runs}) == 16
    assert (tmp_path / "runs" / f"{name}-16").is_dir()


def test_of_many_that_name_one_folder_one_gets_it(tmp_path):
    def claim(n):
        try:
            return folder.named(tmp_path / "x", f"n: {n}")
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(claim, range(16)))
    won = [n for n, r in enumerate(results) if isinstance(r, folder.RunFolder)]
    assert len(won) == 1
    assert (tmp_path / "x" / "config.yaml").read_text() == f"n: {won[0]}"
    assert all("x" in r for r in results if isinstance(r, str))


def test_a_folder_with_something_in_it_is_refused_untouched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is not empty \(notes.txt\); choose another"):
        folder.named(tmp_path, "a: 1")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(UserError, match=r"already holds a run; add resume=true"):
        folder.named(tmp_path, "a: 2")
    assert (tmp_path / "config.yaml").read_text() == "a: 1"
    with pytest.raises(UserError, match="is a file"):
        folder.named(tmp_path / "notes.txt", "a: 1")


def test_resume_wants_a_run(tmp_path):
    with pytest.raises(UserError, match="no such folder.*nothing to resume"):
        folder.again(tmp_path / "x")
    with pytest.raises(UserError, match="not a run folder"):
        folder.again(tmp_path)
    folder.named(tmp_path / "x", "a: 1").release()
    assert folder.again(tmp_path / "x").resumed


def test_a_folder_in_use_is_refused_until_its_process_ends(tmp_path):
    code = "import sys, pathlib; from jaxllm import folder; run = folder.named(pathlib.Path(sys.argv[1]), 'a: 1')\n"
    child = subprocess.Popen(
        [sys.executable, "-c", code + "print('held', flush=True); input()", str(tmp_path / "x")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="in use by another process"):
        folder.again(tmp_path / "x")
    child.kill()  # no chance to clean up
    child.wait()
    folder.again(tmp_path / "x").release()


def test_a_folder_without_results_can_be_dropped(tmp_path):
    run = folder.named(tmp_path / "x", "a: 1")
    assert run.discard_if_untouched() and not (tmp_path / "x").exists()
    run = folder.named(tmp_path / "y", "a: 1")
    (tmp_path / "y" / "metrics.jsonl").write_text("")
    assert not run.discard_if_untouched() and (tmp_path / "y" / "metrics.jsonl").exists()
    run.release()
    assert not folder.again(tmp_path / "y").discard_if_untouched()


def test_writing_replaces_in_one_step(tmp_path, monkeypatch):
    file = tmp_path / "result.json"
    folder.write_text(file, "old")
    with monkeypatch.context() as patch:
        patch.setattr(folder.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(OSError, match="full"):
            folder.write_text(file, "new")
    assert file.read_text() == "old"
    folder.write_text(file, "new")
    assert file.read_text() == "new"


def test_json_is_strict_and_one_line(tmp_path):
    odd = {"nan": float("nan"), "inf": np.float64("inf"), "p": tmp_path, "t": "ä\n"}
    line = folder.to_json({"a": np.float32(0.5), "b": np.arange(2), **odd})
    assert "\n" not in line
    assert json.loads(line, parse_constant=lambda c: pytest.fail(c)) == {
        "a": 0.5,
        "b": [0, 1],
        "nan": None,
        "inf": None,
        "p": str(tmp_path),
        "t": "ä\n",
    }
