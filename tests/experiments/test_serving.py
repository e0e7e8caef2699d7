"""The study of serving at toy scale: its commands run, and what they print is what its report reads."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "serving"


@pytest.fixture
def script(monkeypatch):
    """A file of the study as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def run(module, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_commands_of_the_study(script, monkeypatch, capsys, tmp_path):
    decode = script("decode")
    steps = run(
        decode,
        monkeypatch,
        capsys,
        "--toy",
        "--layers",
        1,
        "--rows",
        2,
        "--context",
        64,
        "--contexts",
        16,
        "--rounds",
        3,
    )
    assert [row["context"] for row in steps] == [16, 64]
    assert all(row["paged"]["median_ms"] > 0 and row["ratio_median_ms"] > 0 for row in steps)
    overhead = steps[-1]["overhead"]
    assert overhead["host_ms"] > 0
    assert overhead["host"] == pytest.approx(overhead["host_ms"] / overhead["step_ms"])
    batching = script("batching")
    static, continuous, ratios = run(
        batching, monkeypatch, capsys, "--toy", "--layers", 1, "--rows", 2, "--requests", 5, "--rounds", 1
    )
    assert static["variant"] == "static" and static["steps"] > continuous["steps"]
    assert ratios["step_ratio"] > 1 and 1 < ratios["ideal_time_ratio"] < ratios["ideal_ratio"]
    for name, rows in (("rows", [static, continuous]), ("context", steps)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script("report").main(tmp_path)
    assert (tmp_path / "frontier.png").stat().st_size > 5_000 and (tmp_path / "context.png").stat().st_size > 5_000
