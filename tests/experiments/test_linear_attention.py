"""The linear-attention study at toy scale: its sweep's runs are read, measured and drawn; its recall rows hold one document each."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.params import declare, is_declared
from jaxllm.tasks.source import build_model, pack_tokenizer
from jaxllm.training.state import new_state

FILE = Path(__file__).parents[2] / "experiments" / "linear_attention" / "report.py"
MODELS = ("softmax", "softmax_local", "gdn", "kda", "hybrid")
TINY = [
    "+experiment=linear_attention",
    "data=synthetic",
    "data.task=copy",
    "data.length=70",
    "data.documents=16",
    "track=none",
]
TINY += ["data.val_every=4", "model.d_model=32", "model.ffns.dense.d_ff=32", "train.seq_len=32", "mesh=single"]


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("linear_attention_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_models_are_equally_large():
    def size(name):
        model = compose(["+experiment=linear_attention", f"model=linear_attention/{name}"]).build(
            "model", vocab_size=1024
        )
        return sum(box.value.size for box in jax.tree.leaves(declare(model), is_leaf=is_declared))

    sizes = [size(name) for name in MODELS]
    assert max(sizes) / min(sizes) < 1.006


def test_a_row_of_the_recall_experiment_is_a_document():
    cfg = compose(["+experiment=linear_attention_recall", "data.documents=20"])
    few, all_pairs = cfg.section("stages")
    first = dataclasses.replace(cfg.build_node(few.data, "stages.0.data"), documents=20)
    for source, row in ((first, few.seq_len), (cfg.build("data"), all_pairs.seq_len or cfg["train.seq_len"])):
        assert {int(n) for n in source.prepare().train.lengths} == {row}


def finished(folder, cfg):
    """A run as training leaves it, untrained."""
    tokenizer = cfg.build("data").prepare().tokenizer
    checkpoints = Checkpoints(folder / "checkpoints")
    meta = {"config": cfg.to_yaml(), "tokenizer": pack_tokenizer(tokenizer)}
    checkpoints.save(1, new_state(build_model(cfg, tokenizer), cfg.build("optim"), 0), meta)
    checkpoints.close()
    (folder / "config.yaml").write_text(cfg.to_yaml())
    (folder / "result.json").write_text(json.dumps({"val_loss": 2.5, "tokens_per_s": 1000.0}))


def test_the_report_reads_measures_and_draws(study, tmp_path):
    for name, layers in (("kda", "2* linear/dense"), ("softmax", "1* global/dense")):
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        cfg = compose([*TINY, f"model=linear_attention/{name}", f"model.layers={layers}", cache])
        finished(tmp_path / "sweep" / name, cfg)
    study.main([str(tmp_path / "sweep"), str(tmp_path / "sweep"), str(tmp_path), "--times", "2", "--windows", "2"])
    lines = (tmp_path / "table.md").read_text().splitlines()
    local = compose(["model=linear_attention/softmax_local"])["model"]
    recalled = study.table({}, {study.variant(local): [{"val_loss": 0.5}]}, {}, 2).splitlines()[-1]
    assert recalled == f"| {study.NAMES['softmax_local']} | 1 | - | - | - | - | 0.5000 |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| softmax, RoPE", "| KDA"]
    assert "| 2.5000 | 1,000 |" in lines[2] and lines[3].endswith("| 2.5000 |")
    assert (tmp_path / "loss_by_position.png").stat().st_size > 0 and (tmp_path / "decays.png").stat().st_size > 0
    layers = study.decays(tmp_path / "sweep" / "kda", lambda *_, **__: None)
    assert len(layers) == 2
    for alpha, beta in layers:
        assert alpha.shape[1:] == (4, 16) and beta.shape[1:] == (4,)
        assert (alpha > 0).all() and (alpha < 1).all() and (beta > 0).all() and (beta < 1).all()
