"""The position study on a toy: what it reads, how it stretches, what it writes."""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.data.store import TokenStore
from jaxllm.layers.base import Context
from jaxllm.tasks.source import build_model, pack_tokenizer
from jaxllm.training.state import new_state

FILE = Path(__file__).parents[2] / "experiments" / "long_positions" / "report.py"
TINY = ["+experiment=long_positions", "data=synthetic", "data.task=copy", "data.length=70", "data.documents=16"]
TINY += ["data.val_every=4", "model.layers=1* global/dense", "model.d_model=32", "model.ffns.dense.d_ff=32"]
TINY += ["model.mixers.global.rope.theta=100", "train.seq_len=32", "track=none", "mesh=single"]


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("long_positions_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


def test_the_study_reads_a_run_under_each_method(study, sweep, tmp_path):
    said = []
    text = study.report([sweep / "0"], tmp_path, 4, 3, lambda text, level="info": said.append(text))
    facts = json.loads((tmp_path / "results.json").read_text())
    assert facts["trained"] == 32 and facts["length"] == 128
    assert set(facts["nats"]) == {*study.METHODS, "cut"}
    curves = {name: np.array(runs[0]) for name, runs in facts["nats"].items()}
    assert all(c.shape == (study.BUCKETS,) and np.isfinite(c).all() for c in curves.values())
    for a, b in zip(study.METHODS, study.METHODS[1:], strict=False):
        assert np.abs(curves[a] - curves[b]).max() > 1e-5, f"{a} and {b} turn alike"
    assert text == (tmp_path / "table.md").read_text() and "YaRN" in text
    assert (tmp_path / "loss_by_position.png").read_bytes()[:4] == b"\x89PNG"
    assert any("3 windows of 128 tokens" in line for line in said)


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
