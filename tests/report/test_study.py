"""What reports of studies share: which runs count, differences within a seed, spread, programs in turn."""

import json

import pytest

from jaxllm.errors import UserError
from jaxllm.report import study


def run_folder(folder, seed, result, rows):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"seed: {seed}\n")
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_finished_runs_come_in_their_order_and_interrupted_ones_not_at_all(tmp_path):
    for number in (10, 2):
        run_folder(tmp_path / str(number), number, {"val_loss": 1.0}, [])
    run_folder(tmp_path / "3", 3, {"interrupted": True}, [])
    (tmp_path / "4").mkdir()
    assert [run.seed for run in study.finished([tmp_path])] == [2, 10]
    with pytest.raises(UserError, match="nothing: no finished run"):
        study.finished([tmp_path / "nothing"])


def test_a_metric_between_two_records_lies_on_the_line_and_beyond_them_is_refused(tmp_path):
    rows = [
        {"step": 10, "val/loss": 4.0},
        {"step": 15, "train/loss": 9.0},
        {"step": 20, "val/loss": 2.0},
        {"step": 30, "val/loss": "nan"},
    ]
    run_folder(tmp_path / "0", 0, {}, rows)
    (run,) = study.finished([tmp_path])
    assert run.curve("val/loss") == [(10, 4.0), (20, 2.0)]
    assert [run.at("val/loss", step) for step in (10, 12.5, 20)] == [4.0, 3.5, 2.0]
    with pytest.raises(UserError, match="val/loss is not known at step 21"):
        run.at("val/loss", 21)


def test_differences_are_within_a_seed():
    def run(seed, loss):
        return study.Finished(None, {"seed": seed}, {"loss": loss}, [])

    base, other = [run(0, 1.0), run(1, 5.0)], [run(1, 4.0), run(0, 1.5), run(7, 0.0)]
    assert study.beside(other, base, lambda r: r.result["loss"]) == [-1.0, 0.5]
    assert study.beside(other, base, lambda r: r.result["loss"], lambda r: 0.0) == [4.0, 1.5]
    assert study.grouped([*base, *other], lambda r: str(r.seed), ("7", "x", "1")) == {
        "7": other[2:],
        "1": [base[1], other[0]],
    }


def test_numbers_and_tables():
    assert study.spread([], 2) == "-" and study.spread([1.0], 2, sign=True) == "+1.00"
    assert study.spread([1.0, 3.0], 1) == "2.0 ± 1.4"
    assert study.table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_programs_take_turns_and_the_first_round_is_dropped():
    said = []
    taken = study.in_turn({name: lambda name=name: said.append(name) for name in "ab"}, 2, times=2)
    assert "".join(said) == "aabb" * 3 and {name: len(times) for name, times in taken.items()} == {"a": 2, "b": 2}
    assert study.ratios({"a": [1.0, 6.0], "b": [2.0, 3.0]}, "a", "b") == [0.5, 2.0]
