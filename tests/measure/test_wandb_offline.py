"""A real offline run, read back with W&B's own reader: nothing lost, nothing in it that was not announced."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from jaxllm.measure.panels import PANELS

pytest.importorskip("wandb")

RUN = """
    import sys
    from jaxllm.measure.trackers import make_tracker
    assert "wandb" not in sys.modules, "wandb is imported only when a run opens"
    folder = sys.argv[1]
    def go(resume_id, steps):
        tracker = make_tracker("wandb", folder, {"optim": {"lr": 0.1}}, project="p", name="n", resume_id=resume_id,
                               tags=("t",), group="g", log=lambda line: print("SAID", line))
        for step in steps:
            tracker.log(step, {"train/loss": 10.0 + step, "train/mfu": "n/a", "train/metric/g0/b0/ffn/load_max/0": 1.5})
            tracker.log(step, {"val/loss": 20.0 + step})
        tracker.table(steps[-1], "samples", ["text", "ms"], [["def f(): ü", 1.5], ["no", "n/a"]])
        tracker.histogram(steps[-1], "w", [1.0, 2.0])
        tracker.image(steps[-1], "picture", sys.argv[2])
        tracker.summary({"best": 1.5})
        tracker.close(60)
        return tracker.id
    first = go(None, [1, 2, 3])
    assert go(first, [2, 3, 4]) == first
    print("ID", first)
"""


def records(folder: Path) -> list[dict]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_an_offline_run_is_complete_and_reads_back(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    run_dir, picture = tmp_path / "run", tmp_path / "dot.png"
    Figure(figsize=(1, 1)).savefig(picture)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), str(run_dir), str(picture)],
        capture_output=True, text=True, timeout=300, env=os.environ.copy(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert said and all("Nothing leaves this machine" in line for line in said), done.stdout  # and no complaint
    identity = done.stdout.split()[-1]
    folders = sorted(
        (run_dir / "wandb").glob(f"offline-run-*-{identity}*")
    )  # a second one in the same second ends in -1
    assert folders, list(run_dir.rglob("*"))
    history, everything = [], []
    for folder in folders:
        found = records(folder)
        everything += found
        history += [r["history"]["item"] for r in found if r["type"] == "history"]
    rows = [(row["step"], row["train/loss"], row["eval/loss"]) for row in history]
    assert sorted(rows) == sorted((s, 10.0 + s, 20.0 + s) for s in [1, 2, 3, 2, 3, 4]), "every step, also those again"
    declared = [r["metric"] for r in everything if r["type"] == "metric"]
    assert any(m.get("glob_name") == "*" and m.get("step_metric") == "step" for m in declared)
    assert {name.partition("/")[0] for row in history for name in row if not name.startswith("_")} <= {"step", *PANELS}
    assert all(row["moe/load_max/g0/b0/0"] == 1.5 for row in history)
    (best,) = [m for m in declared if m.get("name") == "eval/loss"][-1:]
    assert best["summary"] == {"min": True, "last": True}, "what a sweep is sorted by"
    (run, *_) = [r["run"] for r in everything if r["type"] == "run"]
    assert run["run_id"] == identity and run["project"] == "p" and run["config"]["update"]["optim"] == {"lr": 0.1}
    text = json.dumps(everything)
    assert "table-file" in text and '"train/w._type": "histogram"' in text and '"best": 1.5' in text
    tables = [p.read_text(encoding="utf-8") for p in run_dir.rglob("*.table.json")]
    assert any(json.loads(t)["data"] == [["def f(): ü", 1.5], ["no", None]] for t in tables)
    assert '"train/picture._type": "image-file"' in text and list(run_dir.rglob("media/images/**/picture*.png"))
    assert json.loads((run_dir / "images.jsonl").read_text().splitlines()[-1])["path"] == str(picture)
    names = {p.name for p in run_dir.rglob("*")}
    assert not names & {"requirements.txt", "diff.patch", "wandb-metadata.json", "output.log"}, names
