"""The distillation study on made-up runs: who is compared with whom, and what is written."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from jaxllm.compose import compose

FILE = Path(__file__).parents[2] / "experiments" / "distill" / "report.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("distill_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_study_compares_runs_of_the_same_seed(study, tmp_path, capsys):
    losses = {(0, "forward"): (3.0, 4.0), (1, "forward"): (2.5, 3.75), (1, "reverse"): (3.5, 4.0)}
    for number, ((weight, direction), pair) in enumerate(losses.items()):
        for seed, loss in enumerate(pair):
            folder = tmp_path / "sweep" / f"{number}{seed}"
            folder.mkdir(parents=True)
            config = {"seed": seed, "objective": {"distill": {"weight": weight, "direction": direction}}}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
            rows = [{"step": 1, "val/loss": 5.0}, {"step": 2, "train/loss": 1.0}, {"step": 4, "val/loss": loss}]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "result.json").write_text("{}")
    study.main([str(tmp_path / "sweep"), "--out", str(tmp_path / "out")])
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()[2:]
    assert lines == [
        "| forward KL, weight 1 | 2 | 3.1250 ± 0.8839 | -0.3750 ± 0.1768 |",
        "| text alone | 2 | 3.5000 ± 0.7071 | +0.0000 ± 0.0000 |",
        "| reverse KL, weight 1 | 2 | 3.7500 ± 0.3536 | +0.2500 ± 0.3536 |",
    ]
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000 and "text alone" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no finished run"):
        study.main([str(tmp_path / "nothing")])


def test_the_experiment_composes_with_a_teacher_and_a_student_of_its_tokens():
    student, teacher = (compose([f"+experiment={name}", "track=none"]) for name in ("distill", "quickstart"))
    assert student["data"] == teacher["data"] and student["objective.distill.teacher"] == "runs/distill_teacher"
    assert student["model.layers"] == "2* global/dense" and student["model.d_model"] == 96
    assert set(student.build("objective")) == {"next_token", "distill"}
