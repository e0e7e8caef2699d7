"""The needle study at toy scale: its data, its models, its questions, what it reads and draws."""

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.data.synthetic import FILLER, Synthetic, haystack
from jaxllm.data.tokenizer import Bytes
from jaxllm.errors import UserError
from jaxllm.params import declare, init_params, is_declared
from jaxllm.tasks.source import build_model, pack_tokenizer
from jaxllm.training.state import new_state

FILE = Path(__file__).parents[2] / "experiments" / "needle" / "report.py"
TINY = ["data.documents=8", "data.val_every=4", "data.length=3", "data.filler=20", "train.seq_len=35", "track=none"]
TINY += ["model.d_model=32", "model.ffns.dense.d_ff=32", "model.layers=2* global/dense", "mesh=single"]
CHOSEN = ("dsa", "csa")


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("needle_report", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def composed(name, *more):
    return compose([f"+experiment=needle{'_chosen' * (name in CHOSEN)}", f"model=needle/{name}", *more])


def test_models_are_equally_large_and_meet_equally_many_keys(study):
    """At the trained budget and, of models already built, at half of it."""
    models = {name: composed(name).build("model", vocab_size=259) for name in study.NAMES}
    sizes = [sum(b.value.size for b in jax.tree.leaves(declare(m), is_leaf=is_declared)) for m in models.values()]
    assert max(sizes) / min(sizes) < 1.01
    assert {study.budget(name, m.mixer("global")) for name, m in models.items() if name != "full"} == {16}
    for name, m in models.items():
        assert study.variant(composed(name)["model"]) == name
        assert name == "full" or study.budget(name, study.with_budget(m, name, 8).mixer("global")) == 8


def test_a_row_is_a_haystack_whose_needles_are_asked_for():
    cfg = composed("dsa")
    pairs = cfg.section("stages")[0]
    first = cfg.build_node(pairs.data, "stages.0.data")
    for source, row in ((first, pairs.seq_len), (cfg.build("data"), cfg["train.seq_len"])):
        lengths = dataclasses.replace(source, documents=20).prepare().train.lengths
        assert {int(n) for n in lengths} == {row}
    hay = haystack(np.random.default_rng(0), ["a1", "b2"], [0, 3], 3)
    assert (hay[:2], hay[-2:], len(hay)) == ("a1", "b2", 7)
    for text in Synthetic(length=4, filler=30, documents=5, answers_only=False)._read():
        hay, asked = text.split("?")
        assert len(hay) == 38 and len(asked) == 8 and sum(c in FILLER for c in hay) == 30
        assert all(asked[i : i + 2] in hay for i in range(0, 8, 2))
    with pytest.raises(UserError, match=r"data\.filler=3: only for task=recall"):
        Synthetic(task="copy", filler=3)


def test_a_question_has_its_needle_at_the_depth(study):
    tokenizer = Bytes()
    for depth, least, most in ((0.0, 0, 0), (0.5, 10, 10), (1.0, 20, 20)):
        tokens, answers, place = study.questions(tokenizer, 3, 20, depth, 4)
        assert tokens.shape == (4, 1 + 26 + 2)
        assert tokens[-1, place] == answers[-1] and tokens[-1, place - 1] == tokens[-1, -1]
        ahead = tokenizer.decode(tokens[-1, 1 : place - 1].tolist())
        assert least <= sum(c in FILLER for c in ahead) <= most


def finished(folder, cfg):
    """A run as training leaves it after its last stage, untrained."""
    tokenizer = cfg.build("data").prepare().tokenizer
    checkpoints = Checkpoints(folder / "checkpoints")
    meta = {"config": cfg.to_yaml(), "tokenizer": pack_tokenizer(tokenizer)}
    checkpoints.save(cfg["train.steps"], new_state(build_model(cfg, tokenizer), cfg.build("optim"), 0), meta)
    checkpoints.close()
    (folder / "result.json").write_text(json.dumps({"loss": 2.5}))


def test_the_report_asks_measures_and_draws(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "PARTS", (1.0,))
    folders = []
    for name in ("window_global", "dsa"):
        folders.append(tmp_path / "sweep" / name)
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        finished(folders[-1], composed(name, *TINY, "model.layers=1* global/dense", cache))
    text = study.report(folders, tmp_path, 4, (10, 16), (0.0, 1.0))
    lines = [line.split(" | ") for line in text.splitlines()[2:]]
    assert [(line[0], line[1]) for line in lines] == [
        (f"| {study.NAMES[name]}", k) for name in ("window_global", "dsa") for k in ("10", "16, as trained")
    ]
    assert all(0 <= float(line[4]) <= 1 and float(line[5]) > 0 for line in lines)
    assert float(lines[0][3]) != float(lines[1][3])  # another window is another answer
    modes = (tmp_path / "modes.md").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in modes[2:]] == [["| DSA", "20"]]
    for name in ("depth", "budget", "selected"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_selected_is_causal_and_of_the_budget(study):
    """Of CSA one token of the window and one entry: its 4 tokens and the 4 before, or of the first 4 alone."""
    for name, k, sizes in (("window", 8, {8}), ("dsa", 8, {8}), ("csa", 2, {5, 8, 9})):
        model = study.with_budget(composed(name, *TINY).build("model", vocab_size=259), name, k)
        params = init_params(model, jax.random.key(0))
        layers = study.selected(model, params, np.arange(29, dtype=np.int32)[None] + 40)
        assert len(layers) == 2
        for seen in layers:
            assert not np.triu(seen, 1).any() and set(seen[8:].sum(1).tolist()) <= sizes
