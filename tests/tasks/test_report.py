"""`task=report`: what is on the page, how fast it is made, and how it looks in a browser."""

import json
import time
from pathlib import Path

import pytest
from pages import check_self_contained, fake_run, seen

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.report.runs import Run, differing, labels, pareto, seeds
from jaxllm.run import main
from jaxllm.tasks import TaskIO, report


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of learning rate, seed and mixer; one run that failed, one that has not ended, one of another task."""
    folder = tmp_path_factory.mktemp("runs")
    for i, (lr, seed) in enumerate([(1e-3, 0), (1e-3, 1), (1e-2, 0), (1e-2, 1)]):
        fake_run(folder / "sweep" / str(i), f"optim.lr={lr:f}", f"seed={seed}", end=2 + i, speed=1000.0 * (i + 1))
    fake_run(folder / "sweep" / "10", "mixer@model.mixers.global=swa", end=2.5, speed=500)
    fake_run(folder / "failed", end=9, error="UserError: <b>no</b>", exit_code=2)
    fake_run(folder / "going", ended=False, end=3)
    other = fake_run(folder / "asked")
    (other / "result.json").write_text(json.dumps({"task": "eval", "bpb": 1.25, "loss": 3.5}))
    return folder


@pytest.fixture(scope="module")
def made(sweep):
    out = sweep / "report.html"
    assert main(["task=report", f"runs={sweep}", f"out={out}", "log_level=error"]) == 0
    return out


def test_the_page_holds_every_run_and_no_link_to_elsewhere(sweep, made):
    page = check_self_contained(made.read_text())
    for name in ("sweep/0", "sweep/10", "failed", "going", "asked", "unfinished", "Task eval", "optim.lr"):
        assert name in page.shown, name
    assert page.shown.index("sweep/10") < page.shown.index("sweep/2")  # the best first
    assert [p.name for p in report.find(str(sweep / "sweep"), Path)] == ["0", "1", "2", "3", "10"]  # as numbers
    hrefs = [a["href"] for a in page.all("a")]
    assert hrefs and all((sweep / href).exists() for href in hrefs)
    assert "sweep/0/metrics.jsonl" in hrefs and "sweep/0" in hrefs
    assert "best of 7 by validation, bits per byte is sweep/0 (1)" in page.shown
    assert "2 have not ended as planned" in page.shown
    assert "None" not in page.shown and "nan" not in page.shown


def test_pareto_and_cache_bytes(sweep):
    costs = report.Costs()
    found = {name: report.read_run(sweep / "sweep" / name, name, costs) for name in ("0", "1", "2", "10")}
    plain, window = (found[name].result for name in ("0", "10"))
    model = compose(["+experiment=smoke"]).build("model", vocab_size=256)
    assert plain["cache_bytes"] == report.CACHE_TOKENS * model.cost(1, 1, 4096).cache_per_token
    assert 0 < window["cache_bytes"] < plain["cache_bytes"] / 100  # a window keeps a ring
    assert len(costs._known) == 2
    # 0: best loss; 1 and 2: slower to learn, faster to run; 10: worse than 0 in loss, and slower
    assert pareto(list(found.values()), ["val_loss"], ["tokens_per_s"]) == {"0", "1", "2"}
    assert pareto(list(found.values()), ["val_loss", "cache_bytes"]) == {"0", "10"}


def test_seeds_and_what_differs(sweep):
    costs = report.Costs()
    runs = [report.read_run(sweep / "sweep" / str(i), str(i), costs) for i in range(4)]
    assert set(differing(runs)) == {"seed", "optim.lr"}
    assert [[run.label for run in group] for group in seeds(runs)] == [["0", "1"], ["2", "3"]]


def test_a_run_that_has_not_ended_shows_what_there_is(sweep):
    run = report.read_run(sweep / "going", "going", report.Costs())
    assert run.state == "unfinished" and run.number("loss") == pytest.approx(3, abs=0.2)
    assert run.number("val_bpb") == run.curves["val/bpb"][1][-1]


def test_labels(tmp_path):
    assert labels([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert labels([tmp_path / "x" / "0", tmp_path / "y" / "0"]) == ["x/0", "y/0"]
    assert labels([tmp_path / "s" / "0", tmp_path / "s" / "1"]) == ["s/0", "s/1"]


def test_runs_without_a_number_are_on_no_front(tmp_path):
    def run(label, **result):
        return Run(label, tmp_path, "train", "done", {}, result, {})

    assert pareto([run("a", loss=1), run("b", loss=1), run("c", loss=2), run("d")], ["loss"]) == {"a", "b"}


@pytest.mark.parametrize(
    "runs, words",
    [
        (None, "runs: missing"),
        ("nothing/*", "runs=nothing/*: nothing there"),
        ("empty", "no run folder among what it names"),
        (",", "names nothing"),
    ],
)
def test_mistakes_are_one_line(tmp_path, runs, words, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    cfg = compose(["task=report", *([] if runs is None else [f"runs='{runs}'"])])
    with pytest.raises(UserError, match=words.replace("*", r"\*")) as error:
        report.run(cfg, TaskIO(level="error"))
    assert "\n" not in str(error.value)


def test_a_strangers_folder_is_data(tmp_path):
    """Nothing of a configuration runs, aliases do not unfold, markup is text, one bad folder does not spoil the rest."""
    fake_run(tmp_path / "good")
    evil = fake_run(tmp_path / "<img src=x onerror=alert(1)>")
    text = (evil / "config.yaml").read_text().replace("jaxllm.model.LanguageModel", "os.system")
    (evil / "config.yaml").write_text(text.replace("name: smoke", "name: '<script>alert(1)</script>'"))
    (evil / "result.json").write_text('{"task": "<script>", "loss": NaN, "x": "<b>"}')
    bomb = fake_run(tmp_path / "bomb")
    (bomb / "config.yaml").write_text("a: &a [1]\nb: *a\n")
    lines = []
    io = TaskIO(level="error")
    io.log = lambda line, level="info": lines.append(line)
    result = report.run(compose(["task=report", f"runs={tmp_path}", f"out={tmp_path / 'r.html'}"]), io)
    page = check_self_contained((tmp_path / "r.html").read_text())
    assert result["runs"] == 2 and any("bomb is left out" in line and "aliases" in line for line in lines)
    assert not page.all("script") and not [a for a in page.all("img") if a.get("src") == "x"]


def test_fifty_runs_take_less_than_ten_seconds(tmp_path):
    """CPU seconds of reading and drawing, without what importing JAX takes."""
    first = fake_run(tmp_path / "0", steps=400)
    for i in range(1, 50):
        again = tmp_path / str(i)
        again.mkdir()
        for name in ("config.yaml", "metrics.jsonl", "result.json"):
            (again / name).write_text((first / name).read_text().replace("seed: 0", f"seed: {i}"))
    start = time.process_time()
    result = report.run(
        compose(["task=report", f"runs={tmp_path}", f"out={tmp_path / 'r.html'}"]), TaskIO(level="error")
    )
    assert time.process_time() - start < 10 and result["runs"] == 50
    assert result["bytes"] < 2_000_000


def test_in_a_browser_on_a_phone_and_in_the_dark(made, tmp_path):
    light = seen(made, tmp_path)
    assert light["bad"] == [] and light["outside"] == []
    assert light["scroll"] <= light["width"] <= 500  # nothing hangs out at the side
    assert light["pictures"] and all(0 < width <= light["width"] for width in light["pictures"])
    dark = seen(made, tmp_path, dark=True)

    def lightness(colour):
        return sum(int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])

    assert lightness(light["paper"]) > 700 > 200 > lightness(light["ink"])
    assert lightness(dark["paper"]) < 200 < 600 < lightness(dark["ink"])
