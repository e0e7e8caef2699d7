"""task=time: rows that can be checked against the configuration, files that a person opens, and mistakes in one line."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.measure import time_plots
from jaxllm.measure.chips import Chip
from jaxllm.params import declare, is_declared
from jaxllm.run import main
from jaxllm.tasks import TaskIO, timing
from jaxllm.tasks.timing_subjects import one_layer

SMALL = ["task=time", "model=tiny", "track=none", "model.vocab_size=64", "model.d_model=16", "model.ffns.dense.d_ff=32"]
SMALL += ["model.mixers.global.num_heads=2", "model.mixers.global.num_kv_heads=1", "time.repeats=2"]
WANTED = {"k": "decode", "s": "prefill", "moe": "backward"}
FIELDS = {
    "what",
    "layer",
    "context",
    "batch",
    "dtype",
    "compile_s",
    "median_ms",
    "spread_ms",
    "flops",
    "bytes",
    "mfu",
    "mbu",
    "peak_bytes",
}


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """One run of everything, by the command line: (the JSON line, the rows that it points to, its folder)."""
    folder = tmp_path_factory.mktemp("time") / "run"
    typed = [
        *SMALL,
        "time.context=[16,32]",
        "time.what=[forward,decode]",
        "time.parts=[model,layers,hardware]",
        "chip=h100",
    ]
    typed += ["time.sizes=[16]", "model.layers=global/dense", "time.trace=true", f"run_dir={folder}"]
    assert main(typed) == 0
    result = json.loads((folder / "result.json").read_text())
    return result, [json.loads(line) for line in Path(result["rows"]).read_text().splitlines()], folder


def test_a_row_for_every_call(timed):
    result, everything, folder = timed
    rows = [row for row in everything if "context" in row]
    assert result["rows"] == str(folder / "time.jsonl") and result["calls"] == len(everything)
    assert (
        len(json.dumps({key: result[key] for key in ("rows", "calls", "median_ms", "left_out")})) < 2000
    )  # a line, not a table
    longest = {f"{r['what']}_{r['layer']}": r["median_ms"] for r in rows if r["context"] == 32}
    assert result["median_ms"] == longest
    places = {(r["what"], r["layer"], r["context"]) for r in rows}
    assert places == {(w, n, c) for w in ("forward", "decode") for n in ("model", "global", "dense") for c in (16, 32)}
    for row in rows:
        assert set(row) >= FIELDS and row["median_ms"] > 0 and row["peak_bytes"] > 0 and row["repeats"] == 2
        assert (row["mfu"] == "n/a") == (row["what"] == "decode") == (row["mbu"] != "n/a")
        assert row["limit"] == "memory" and row["reached"] == pytest.approx(row["predicted_ms"] / row["median_ms"])
    kinds = {row["layer"]: row["kind"] for row in rows}
    assert kinds == {"model": "tiny", "global": "gqa", "dense": "swiglu"}
    model = compose([*SMALL, "model.layers=global/dense"]).build("model")
    flops = {(r["layer"], r["context"]): r["flops"] for r in rows if r["what"] == "decode"}
    assert flops["model", 32] == model.cost(1, 1, 32).flops
    assert flops["model", 32] - flops["model", 16] == (flops["global", 32] - flops["global", 16])
    assert result["chip"]["name"] == "H100 SXM" and result["environment"]["versions"]["jax"] == jax.__version__


def test_the_machine_itself(timed):
    rows = timed[1]
    products = {(r["batch"], r["size"], r["dtype"]) for r in rows if r["what"] == "matmul"}
    assert products >= {(1, 16, "float32"), (64, 16, "bfloat16"), (16, 16, "float32")}
    branches = [r for r in rows if r["what"] == "branch"]
    assert {r["layer"] for r in branches} == {"select", "cond", "switch", "while"}
    assert {r["flops"] for r in branches if r["share"] == 0 and r["layer"] != "select"} == {0.0}


def test_what_is_left_behind(timed):
    folder = timed[2]
    for name in ("forward", "decode", "hardware"):
        assert (folder / "plots" / f"time_{name}.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("trace/*/**/*.xplane.pb")), "a profile for each point"
    charts = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {line["time/context"] for line in charts} == {16, 32}
    assert any("time/decode/global_b1_float32/median_ms" in line for line in charts)
    assert json.loads((folder / "summary.json").read_text())["time/forward_model_ms"] > 0


def test_the_modules_have_names_in_a_profile():
    """Traces show names of the compiled program's operations: those of mixer and ffn are among them."""
    model = compose(SMALL).build("model")
    shapes = jax.tree.map(lambda box: box.value, declare(model), is_leaf=is_declared)
    text = jax.jit(lambda p: model.apply({"params": p}, Context.whole(jnp.ones((1, 8), jnp.int32)))[1].logits)
    names = text.lower(shapes).as_text(debug_info=True)
    assert "b0/mixer" in names and "b0/ffn" in names


def test_layers_of_every_kind_can_be_timed_alone():
    """One that keeps a state, one that takes what another gives, in pieces of a prompt, and one that routes, with its gradient."""
    cfg = compose([*SMALL, "+mixer@model.mixers.k=kda", "+mixer@model.mixers.d=dsa", "+mixer@model.mixers.s=dsa_shared",
                   "+ffn@model.ffns.moe=moe_aux_free", "model.mixers.d.qk_rope_head_dim=4", "model.mixers.s.qk_rope_head_dim=4",
                   "model.layers=global/dense k/moe d/dense s/dense"])  # fmt: skip
    model = cfg.build("model")
    for role, phase in WANTED.items():
        out = one_layer(model, role, phase, 2, 12, chunk=8, seed=0).call()
        assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(out) if a.dtype.kind == "f")


def test_lines_and_crossovers():
    def row(layer, context, ms, **more):
        base = {"what": "decode", "layer": layer, "kind": layer, "context": context, "batch": 1, "dtype": "float32"}
        return base | {"median_ms": ms, "spread_ms": 0.0, "predicted_ms": "n/a"} | more

    rows = [row("full", n, n / 100) for n in (100, 1000, 10000)] + [row("state", n, 30.0) for n in (100, 1000, 10000)]
    rows += [row("model", n, n / 3.0) for n in (100, 10000)]
    ((context, names),) = time_plots.crossovers(time_plots.series(rows))
    assert context == pytest.approx(3000, rel=1e-6) and names == ("full", "state")
    assert list(time_plots.series([*rows, row("full", 100, 2.0, batch=4)])) == [
        "full, batch 1", "state, batch 1", "model, batch 1", "full, batch 4"
    ]  # fmt: skip
    figure = time_plots.by_context(rows, "title", Chip(name="x"))
    assert any("state wins" in text.get_text() for text in figure.axes[0].texts)


def test_a_sweep_is_drawn_together(timed, tmp_path):
    """Runs 0 and 1 of a sweep, of two kinds of mixer, on one picture; the ffn and the whole models do not repeat."""
    rows = timed[1]
    for n, kind in enumerate(("gqa", "kda")):
        (tmp_path / str(n)).mkdir()
        mine = [row | ({"kind": kind} if row.get("layer") == "global" else {}) for row in rows]
        (tmp_path / str(n) / "time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mine))
    drawn = {}
    real = time_plots.by_context
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            time_plots, "by_context", lambda rows, *a: drawn.update({rows[0]["what"]: rows}) or real(rows, *a)
        )
        paths = time_plots.draw_sweep(tmp_path, "time.jsonl", Chip(name="x"))
    assert [p.name for p in paths] == ["time_forward.png", "time_decode.png"]
    assert set(time_plots.series(drawn["decode"])) == {"gqa", "kda", "swiglu"}
    assert all(len(points) == 2 for points in time_plots.series(drawn["decode"]).values())


def test_a_probe_that_was_taken_at_a_bad_moment_is_told(monkeypatch, tmp_path):
    slow = Chip(name="cpu", measured=True, matmul={"float32": 1.0}, bandwidth=1.0, memory=1.0)
    monkeypatch.setattr(timing, "chip_of", lambda cfg, io: slow)
    lines, io = [], TaskIO(run_dir=tmp_path)
    io.log = lambda text, level="info": lines.append(text)
    timing.run(
        compose([*SMALL, "time.context=16", "time.what=forward", "time.parts=[layers]", "model.layers=global/dense"]),
        io,
    )
    assert any("outdo the probe" in line and ".json" in line for line in lines)


def test_what_does_not_fit_is_named_and_the_rest_goes_on(monkeypatch, tmp_path):
    def short(model, params, phase, rows, context, **more):
        if context == 32:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        raise UserError("reached")

    monkeypatch.setattr(timing, "whole_model", short)
    cfg = compose([*SMALL, "time.context=[32,16]", "time.what=forward", "time.parts=[model]", "chip=l4"])
    io = TaskIO(run_dir=tmp_path)
    lines = []
    io.log = lambda text, level="info": lines.append(text)
    with pytest.raises(UserError, match="reached"):
        timing.run(cfg, io)
    assert any("context 32, batch 1, float32: does not fit" in line for line in lines)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("time.context=0", "time.context: 0 must be numbers of at least 1"),
        ("time.what=backwards", "expected one of forward, backward, train"),
        ("time.dtype=float8", "time.dtype: 'float8' is not one of"),
        ("time.parts=[]", "time.parts: is empty"),
        ("chip=h1000", "did you mean h100"),
        ("chip.bandwidth=fast", "chip.bandwidth=fast: expected a number"),
        ("model.max_seq_len=256", "time.context: 256 must be below model.max_seq_len=256"),
    ],
)
def test_mistakes(typed, said, capsys, tmp_path):
    with pytest.raises(UserError) as error:
        timing.run(compose([*SMALL, *(["chip=h100"] if "chip=" not in typed else []), typed]), TaskIO(run_dir=tmp_path))
    assert said in str(error.value)
