"""The study of precision on made-up runs: what is told apart, what arrives, whose bytes are whose."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from jaxllm.compose import compose

FILE = Path(__file__).parents[2] / "experiments" / "precision" / "report.py"
LOW = ["model.dtype=bfloat16", "model.param_dtype=bfloat16"]
KINDS = {"float32": [], "compute": LOW[:1], "master": LOW, "none": [*LOW, "optim.master=false"]}


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("precision_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision")
    small = ["model.layers=1* global/dense", "model.d_model=32", "model.ffns.dense.d_ff=32", "train.seq_len=16"]
    for number, (name, words) in enumerate(KINDS.items()):
        config = yaml.safe_load(compose(["+experiment=precision", "track=none", *small, *words]).to_yaml())
        for seed in (0, 1):
            run = folder / name / str(seed)
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(yaml.safe_dump(config | {"seed": seed}))
            (run / "result.json").write_text(json.dumps({"val_loss": 4 + 0.1 * number + seed}))
            rows = [
                {
                    "step": s,
                    "train/update_norm": 2.0,
                    "train/moved_norm": 2.0 - (name == "none") * s / 20,
                    "train/grad_norm": 0.5,
                }
                for s in range(0, 21)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_table_tells_the_four_apart(study, sweeps, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        study,
        "memory",
        lambda run, width: seen.append(study.kind(run)) or dict.fromkeys(("params", "optimiser", "scratch"), 2e6),
    )
    study.main([*(str(sweeps / name) for name in KINDS), "--out", str(tmp_path)])
    assert seen == list(KINDS)
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == list(study.NAMES.values())
    assert [row[4].split()[0] for row in rows] == ["+0.0000", "+0.1000", "+0.2000", "+0.3000"]
    assert rows[3][1:4] == ["0.004", "2", "4.8000 ± 0.7071"] and rows[3][5].startswith("0.5000")
    arrives = [float(row[7].split()[0]) for row in rows]
    assert arrives == pytest.approx([1, 1, 1, 0.5375], abs=1e-3)  # the last fifth: steps 17 to 20
    assert rows[0][8:] == ["2.0", "2.0", "2.0 |"] and (tmp_path / "norms.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="no finished run"):
        study.main([str(tmp_path / "nothing")])


def test_bytes_follow_the_numbers(study, sweeps):
    from jaxllm.report.study import finished

    runs = {name: finished([sweeps / name])[0] for name in KINDS}
    found = {name: study.memory(runs[name], 1) for name in ("float32", "none")}
    whole, alone = found["float32"], found["none"]
    assert whole["params"] == 2 * alone["params"] and whole["optimiser"] == alone["optimiser"]  # moments are float32
    assert whole["optimiser"] - 2 * whole["params"] < 100 and alone["scratch"] > 0
    wide = study.widened(runs["float32"].config, 3)["model"]
    assert (wide["d_model"], wide["mixers"]["global"]["num_heads"], wide["ffns"]["dense"]["d_ff"]) == (96, 12, 96)
    assert runs["float32"].config["model"]["d_model"] == 32
