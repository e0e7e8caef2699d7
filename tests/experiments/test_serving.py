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


PEER = """#!{python}
import json, sys
assert sys.argv[1].endswith("peer_made_up.py") and sys.argv[2:] == ["--rows", "8"]
for line in sys.stdin:
    jobs = json.loads(line)["jobs"]
    print(json.dumps({{"seconds": float(len(jobs)), "new_tokens": sum(n for _, n in jobs), "ttft_p50": 0.5}}), flush=True)
    if len(jobs) > 1:
        sys.exit()
"""


def test_a_peer_gets_the_trace_line_by_line_and_its_end_is_said(script, tmp_path):
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable))
    python.chmod(0o755)
    script("decode"), script("batching")
    peers = script("peers")
    jobs = [peers.Job([1, 2], 3), peers.Job([4], 5)]
    peer = peers.Peer("made_up", str(python), {"rows": 8})
    assert peer.ride(jobs[:1]) == {"seconds": 1.0, "new_tokens": 3, "ttft_p50": 0.5}
    assert peer.ride(jobs)["new_tokens"] == 8
    peer.process.wait(10)
    with pytest.raises(SystemExit, match="has ended"):
        peer.ride(jobs)
