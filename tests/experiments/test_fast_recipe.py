"""The study of the fast recipe: which run is which, what it costs by closed forms, what is timed, what is written."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from jaxllm.compose import compose

FILE = Path(__file__).parents[2] / "experiments" / "fast_recipe" / "report.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("fast_recipe_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sweeps(study, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fast_recipe")
    for number, name in enumerate(study.NAMES):
        experiment = "fast_recipe_ahead" if name in ("ahead", "together") else "fast_recipe"
        cfg = compose([f"+experiment={experiment}", f"model=fast_recipe/{name}", "track=none"])
        for seed in (0, 1):
            run = folder / name / str(seed)
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load(cfg.to_yaml()) | {"seed": seed}))
            (run / "result.json").write_text(json.dumps({"val_loss": 4 - 0.1 * number + seed}))
            row = {"step": 200} | ({"val/mtp_1/agreement": 0.25} if experiment != "fast_recipe" else {})
            (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_the_table_adds_up_what_each_part_costs(study, sweeps, tmp_path, monkeypatch):
    one = {name: [0.01 * (i + 1)] * 3 for i, name in enumerate(study.NAMES)}
    monkeypatch.setattr(study, "times", lambda runs, context, rounds: {"step": one, "decode": one})
    study.main([*(str(sweeps / name) for name in study.NAMES), "--out", str(tmp_path), "--context", "1024"])
    lines = [line.strip("| ").split(" | ") for line in (tmp_path / "table.md").read_text().splitlines()[2:]]
    rows = {row[0]: row[1:] for row in lines}
    assert list(rows) == list(study.NAMES.values())
    plain, experts, windows, ahead, together = rows.values()

    def number(text):
        return float(text.split()[0].replace(",", ""))

    assert [row[4].split()[0] for row in rows.values()] == ["+0.0000", "-0.1000", "-0.2000", "-0.3000", "-0.4000"]
    # Experts hold eight where two work, and their router; windows keep 64 of the tokens in three of four layers.
    assert number(experts[0]) > 2 * number(plain[0]) and number(experts[1]) < 1.02 * number(plain[1])
    cache = 2 * 2 * 16 * 4  # keys and values of two heads of 16 channels, float32, a token and layer
    assert number(plain[7]) == pytest.approx(4 * cache * 1024 / 1e3, abs=1)
    assert number(windows[7]) == pytest.approx(cache * (1024 + 3 * 64) / 1e3, abs=1)
    assert number(together[7]) == number(windows[7]) and number(ahead[7]) == number(plain[7])
    assert number(windows[6]) < number(plain[6]) == number(ahead[6]) and number(ahead[5]) > 1.3 * number(plain[5])
    assert (
        together[9] == "5.00" and together[8].startswith("50.00") and plain[12] == "-" and ahead[12].startswith("1.25")
    )
    assert (tmp_path / "recipe.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="no run of fast_recipe/plain"):
        study.main([str(sweeps / "ahead"), "--out", str(tmp_path)])


def test_a_step_and_a_decoded_token_are_timed(study):
    from jaxllm.report.study import Finished

    small = ["model.layers=1* global/dense", "model.d_model=32", "model.ffns.dense.d_ff=32"]
    cfg = compose(["+experiment=fast_recipe", "track=none", *small])
    run = Finished(Path(), yaml.safe_load(cfg.to_yaml()), {}, [])
    taken = study.times({"plain": run}, 16, 1)
    assert {kind: [t > 0 for t in found["plain"]] for kind, found in taken.items()} == {
        "step": [True],
        "decode": [True],
    }
