"""scripts/gpu_check.sh without a GPU: it says so and does nothing; and its report tells what ran from what did not."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def collect(root):
    spec = importlib.util.spec_from_file_location("gpu_report", root / "scripts" / "gpu_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.collect


def test_without_an_accelerator_nothing_is_run(root, tmp_path):
    out = tmp_path / "out"
    env = {**os.environ, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(["sh", str(root / "scripts/gpu_check.sh"), str(out)], env=env, capture_output=True, text=True)
    assert ran.returncode == 3 and "no accelerator" in ran.stderr and not out.exists() and ran.stdout == ""


def leave(folder, name, code, out, err=""):
    (folder / f"{name}.part").write_text(f"{code} 7\n")
    (folder / f"{name}.out").write_text(out)
    (folder / f"{name}.err").write_text(err)


def test_the_report(collect, tmp_path):
    leave(tmp_path, "parity", 0, 'noise\n{"ok": true, "cases": []}\n')
    leave(tmp_path, "hardware", 0, '{"rows": []}\n')
    leave(tmp_path, "timing", 124, "", "killed")
    (tmp_path / "timing").mkdir()
    (tmp_path / "timing" / "time.jsonl").write_text('{"median_ms": 3}\n')
    found = collect(tmp_path)
    assert (found["ok"], found["seconds"]) == (False, 21)
    states = {name: found[name]["state"] for name in ("parity", "hardware", "timing", "training")}
    assert states == {"parity": "ok", "hardware": "ok", "timing": "timed out", "training": "never run"}
    assert found["timing"]["rows"] == [{"median_ms": 3}] and found["timing"]["error"] == "killed"
    leave(tmp_path, "timing", 0, '{"rows": [1]}')
    leave(tmp_path, "training", 0, '{"loss": 2.0}')
    assert collect(tmp_path)["ok"]
    leave(tmp_path, "parity", 1, '{"ok": false}')
    assert not collect(tmp_path)["ok"] and json.dumps(collect(tmp_path))
