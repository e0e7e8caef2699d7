"""The MTP study on made-up runs: what counts as equal compute, whose seed is compared with whose, what is written."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from jaxllm.compose import compose

FILE = Path(__file__).parents[2] / "experiments" / "mtp" / "report.py"
SWEEPS = {
    "plain": ["+experiment=mtp"],
    "chained_1": ["+experiment=mtp_1"],
    "chained_2": ["+experiment=mtp_2"],
    "parallel_1": ["+experiment=mtp_1", "mtp@model.mtp=parallel", "model.mtp.depth=1"],
}


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("mtp_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    """Runs whose loss falls by a line: 5 - step / 1000, plus 0.1 for seed 1, less 0.05 with modules."""
    folder = tmp_path_factory.mktemp("mtp")
    for name, words in SWEEPS.items():
        config = yaml.safe_load(compose([*words, "track=none"]).to_yaml())
        for seed in (0, 1):
            run = folder / name / str(seed)
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(yaml.safe_dump(config | {"seed": seed}))
            (run / "result.json").write_text("{}")
            rows = []
            for step in range(50, config["train"]["steps"] + 1, 50):
                rows.append({"step": step, "val/loss": 5 + 0.1 * seed - step / 1000 - 0.05 * (name != "plain")})
                for k in range(1, (config["model"].get("mtp") or {"depth": 0})["depth"] + 1):
                    rows[-1] |= {f"val/mtp_{k}/agreement": 0.5 / k, f"val/mtp_{k}/accepted": 0.4 / k}
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_each_sweep_is_its_variant_and_modules_cost_what_they_multiply(study, sweeps):
    from jaxllm.report.study import finished

    runs = {name: finished([sweeps / name])[0] for name in SWEEPS}
    assert {name: study.variant(run) for name, run in runs.items()} == {name: name for name in SWEEPS}
    plain, one, two, parallel = (study.step_flops(runs[name]) for name in SWEEPS)
    d, tokens = 64, 4 * 256
    join = 3 * 2 * tokens * 2 * d * d
    assert two - plain == pytest.approx(2 * (one - plain)) and one - parallel == pytest.approx(join)
    head = 3 * 2 * tokens * d * 1024
    assert parallel - plain == pytest.approx(head + (plain - head) / 4)  # a fifth block and the head once more


def test_the_table_compares_seeds_at_equal_steps_and_at_equal_flops(study, sweeps, tmp_path, capsys):
    study.main([*(str(sweeps / name) for name in SWEEPS), "--out", str(tmp_path)])
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in (tmp_path / "table.md").read_text().splitlines()
    ]
    rows = {row[0]: row[1:] for row in lines[2:]}
    assert list(rows) == list(study.NAMES.values())
    assert rows["next token alone"][1:5] == ["1.00", "4.7500 ± 0.0707", "+0.0000 ± 0.0000", "+0.0000 ± 0.0000"]
    _, cost, loss, steps, flops, *agreement = rows["chained, depth 2"]
    assert (loss, steps) == ("4.7000 ± 0.0707", "-0.0500 ± 0.0000")
    assert float(flops.split()[0]) == pytest.approx(-0.05 + 0.3 * (float(cost) - 1), abs=3e-3)
    assert [cell.split()[0] for cell in agreement] == ["0.500", "0.250", "0.200"]
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("loss.png", "agreement.png"))
    assert "depth 2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no run without MTP"):
        study.main([str(sweeps / "chained_1"), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no finished run"):
        study.main([str(tmp_path / "nothing")])
