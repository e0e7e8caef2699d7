"""The study of long context on a toy: what it reads, how it stretches, what is asked, what it writes."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.data.store import TokenStore
from jaxllm.layers.base import Context
from jaxllm.tasks.source import build_model, pack_tokenizer
from jaxllm.training.state import new_state

FILE = Path(__file__).parents[2] / "experiments" / "long_context" / "report.py"
TINY = ["+experiment=long_context", "data=synthetic", "data.task=copy", "data.length=70", "data.documents=16"]
TINY += [
    "data.val_every=4",
    "model.layers=local/dense | 1* global/dense",
    "model.d_model=32",
    "model.ffns.dense.d_ff=32",
]
TINY += ["model.mixers.global.rope.theta=100", "train.seq_len=32", "track=none", "mesh=single"]


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("long_context_report", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FILE.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FILE.parent))
    return module


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A finished run as training leaves it, untrained."""
    folder = tmp_path_factory.mktemp("sweep")
    run = folder / "0"
    cfg = compose([*TINY, f"data.cache_dir={folder / 'cache'}"])
    tokenizer = cfg.build("data").prepare().tokenizer
    model = build_model(cfg, tokenizer)
    checkpoints = Checkpoints(run / "checkpoints")
    meta = {"config": cfg.to_yaml(), "tokenizer": pack_tokenizer(tokenizer)}
    checkpoints.save(1, new_state(model, cfg.build("optim"), 0), meta)
    checkpoints.close()
    (run / "config.yaml").write_text(cfg.to_yaml())
    (run / "result.json").write_text("{}")
    return folder


def test_windows_are_whole_pieces_of_long_documents_and_documents_take_turns(study):
    store = TokenStore.of([np.arange(25), np.arange(100, 109), np.arange(200, 213)])
    got = study.windows(store, 8, 3)
    np.testing.assert_array_equal(got[:, 0], [0, 100, 200])  # 9 tokens are just enough
    got = study.windows(store, 8, 10)
    np.testing.assert_array_equal(got[:, 0], [0, 100, 200, 8, 16])
    assert (np.diff(got, axis=1) == 1).all() and got.shape == (5, 9)
    with pytest.raises(SystemExit, match="30"):
        study.windows(store, 29, 1)
    pieces = study.cut(got, 4)
    assert pieces.shape == (10, 5)
    np.testing.assert_array_equal(np.sort(pieces[:, 1:].ravel()), np.sort(got[:, 1:].ravel()))  # every label once


def test_ranges_double_and_the_table_means_over_runs(study):
    assert study.ranges(8) == [(0, 4), (4, 8), (8, 16), (16, 32)]
    assert study.ranges(2) == [(0, 16), (16, 32)]
    assert study.ranges(6) == [(0, 5), (5, 10), (10, 21), (21, 32)]
    flat = {m: [[1.0] * 16 + [2.0] * 16, [3.0] * 32] for m in (*study.METHODS, "cut")}
    lines = study.table(flat, 32, 2).splitlines()
    assert lines[0] == "| stretched by | 0 to 31 | 32 to 63 |"
    assert lines[2] == "| none | 2.000 ± 1.414 | 2.500 ± 0.707 |"


def test_the_study_reads_a_run_under_each_method_and_one_that_was_trained_on(study, sweep, tmp_path, capsys):
    study.main([str(sweep), str(tmp_path), "--staged", str(sweep), "--times", "4", "--windows", "3"])
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["trained"] == 32 and facts["length"] == 128 and facts["needles"] == {}
    assert set(facts["nats"]) == {*study.METHODS, "cut", "after_none"}
    curves = {name: np.array(runs[0]) for name, runs in facts["nats"].items()}
    assert all(c.shape == (study.BUCKETS,) and np.isfinite(c).all() for c in curves.values())
    for a, b in zip(study.METHODS, study.METHODS[1:], strict=False):
        assert np.abs(curves[a] - curves[b]).max() > 1e-5, f"{a} and {b} turn alike"
    np.testing.assert_array_equal(curves["after_none"], curves["none"])  # the same run, as it is
    text = (tmp_path / "table.md").read_text()
    assert "YaRN" in text and "none, then the long stage" in text and not (tmp_path / "needles.md").exists()
    assert (tmp_path / "loss_by_position.png").read_bytes()[:4] == b"\x89PNG"
    said = capsys.readouterr().out
    assert text in said and "3 windows of 128 tokens" in said
    with pytest.raises(SystemExit, match="no finished run"):
        study.main([str(sweep), str(tmp_path), "--needles", str(tmp_path / "nothing")])


def test_needles_are_where_they_are_said_to_be_and_found_by_one_who_knows(study):
    recall = study.recall
    tokenizer = compose(["+experiment=long_context_needles"]).build("data").tokenizer
    asked = recall.needles(tokenizer, 3, 60, 5)
    assert asked.tokens.shape == (5, 60) and asked.at.shape == asked.depth.shape == (5, 3)
    for row, at, depth in zip(asked.tokens, asked.at, asked.depth, strict=True):
        hay = list(row[1 : at[0] - 1])  # between the begin and the sign
        for place, d in zip(at, depth, strict=True):
            key, value = row[place], row[place + 1]
            assert hay.count(key) == 1 and hay[hay.index(key) + 1] == value
            assert d == hay.index(key) / len(hay)

    class Knows:  # looks a key up in the haystack
        def apply(self, _, ctx):
            before = jnp.triu(
                ctx.tokens[:, :, None] == ctx.tokens[:, None, :], 1
            )  # [b s t]: an earlier s holds the token at t
            value = jnp.take_along_axis(jnp.roll(ctx.tokens, -1, 1), jnp.argmax(before, axis=1), axis=1)
            return None, SimpleNamespace(logits=jax.nn.one_hot(value, 300))

    right = recall.found(Knows(), {}, asked)
    assert right.shape == (5, 3) and right.all()
    wrong = asked._replace(at=asked.at - 1)
    assert not recall.found(Knows(), {}, wrong).all()
    shares = recall.by_part(np.array([[True, False, True, True]]), np.array([[0.0, 0.24, 0.5, 1.0]]))
    np.testing.assert_array_equal(shares, [0.5, np.nan, 1.0, 1.0])
    table = study.needle_table({"yarn": [{"found": [1.0, 0.5], "parts": shares}]}, (32, 128)).splitlines()
    assert table[2] == "| YaRN | 1 | 1.00 | 0.50 | 0.50 | nan | 1.00 | 1.00 |"


def test_the_reader_gives_the_loss_of_each_token(study):
    cfg = compose(TINY)
    node = study.stretched(cfg["model.mixers.global.rope"], "yarn", 4.0, 32)
    assert node["theta"] == 100.0 and node["factor"] == 4.0 and node["original_max_position"] == 32
    model = cfg.replace({"model.mixers.global.rope": node}).build("model", vocab_size=20)
    params = new_state(model, cfg.build("optim"), 0).params
    tokens = np.random.default_rng(0).integers(0, 20, (2, 12)).astype(np.int32)
    logits = model.apply({"params": params}, Context.whole(tokens[:, :-1]))[1].logits
    want = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(study.reader(model)(params, tokens), want, atol=1e-5)
