"""The three studies of experts on a toy: what they read, what they take away, what they write."""

import importlib.util
import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from jaxllm.checkpoint import Checkpoints
from jaxllm.compose import compose
from jaxllm.measure.jsonl import JsonlTracker
from jaxllm.tasks.source import build_model, pack_tokenizer
from jaxllm.training.state import new_state

ROOT = Path(__file__).parents[2] / "experiments"
TINY = [
    "+experiment=moe_routing",
    "data.tokenizer.vocab_size=280",
    "data.val_every=4",
    "model.layers=2* global/experts",
]
TINY += [
    "model.d_model=32",
    "model.ffns.experts.num_experts=4",
    "model.ffns.experts.d_expert=16",
    "track=none",
    "mesh=single",
]
TINY += ["train.seq_len=32", "train.batch_size=2"]
PROMPT = 'if x < 1: print("<b>hi</b>")\n'


def load(name, file="report"):
    path = ROOT / name / f"{file}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_{file}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A finished run as training leaves it, untrained."""
    folder = tmp_path_factory.mktemp("moe")
    texts, run = folder / "texts", folder / "sweep" / "0"
    texts.mkdir()
    for i in range(8):
        (texts / f"{i}.txt").write_text(f"def f{i}(x):\n    return x + {i}\n" * 8)
    cfg = compose([*TINY, f"data.path={texts}", f"data.cache_dir={folder / 'cache'}"])
    tokenizer = cfg.build("data").prepare().tokenizer
    checkpoints = Checkpoints(run / "checkpoints")
    meta = {"config": cfg.to_yaml(), "tokenizer": pack_tokenizer(tokenizer)}
    checkpoints.save(1, new_state(build_model(cfg, tokenizer), cfg.build("optim"), 0), meta)
    checkpoints.close()
    (run / "config.yaml").write_text(cfg.to_yaml())
    (run / "result.json").write_text(json.dumps({"val_loss": 3.0, "val_bpb": 2.0}))
    tracker = JsonlTracker(run)
    for step in range(1, 13):
        loads = {f"train/metric/g0/b0/ffn/load_max/{i}": 1.0 + 1 / step for i in range(2)}
        tracker.log(step, {"train/next_token": 5.0 - 0.1 * step, **loads})
    tracker.close()
    return folder / "sweep"


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_narrowing_keeps_the_units_that_matter_and_removing_the_experts_that_are_used():
    study, rng = load("moe_budget"), np.random.default_rng(0)
    layer = {
        "gate_proj": rng.random((2, 4, 3, 6)),
        "up_proj": rng.random((2, 4, 3, 6)),
        "down_proj": rng.random((2, 4, 6, 3)),
    }
    layer["router"] = {"kernel": rng.random((2, 3, 4)), "bias": rng.random((2, 4))}
    layer["down_proj"][:, :, [1, 4]] *= 100
    less = study.narrowed(layer, 2)
    np.testing.assert_array_equal(less["gate_proj"], layer["gate_proj"][..., [1, 4]])
    np.testing.assert_array_equal(less["down_proj"], layer["down_proj"][:, :, [1, 4]])
    few = study.reduced(layer, np.array([[0, 3, 1, 2], [4, 0, 5, 0]]), 2)
    for r, kept in enumerate(([1, 3], [0, 2])):
        np.testing.assert_array_equal(few["up_proj"][r], layer["up_proj"][r][kept])
        np.testing.assert_array_equal(few["router"]["kernel"][r], layer["router"]["kernel"][r][:, kept])
        np.testing.assert_array_equal(few["router"]["bias"][r], layer["router"]["bias"][r][kept])
    sizes = [(b.kind, b.size) for b in study.budgets(8, 24, 32)]
    assert sizes[:4] == [("experts a token", k) for k in (8, 4, 2, 1)]
    assert sizes[4:] == [("width of experts", f) for f in (24, 12, 6, 3)] + [("experts held", e) for e in (32, 16, 8)]


def test_budget_report(sweep, tmp_path, monkeypatch):
    study = load("moe_budget")
    few = [
        b for b in study.budgets(2, 16, 4) if "top_k" in b.fields or b.fields in ({"d_expert": 16}, {"num_experts": 4})
    ]
    monkeypatch.setattr(study, "budgets", lambda *sizes: few)
    study.main([str(sweep), str(tmp_path), "--batches", "2"])
    (rows,) = json.loads((tmp_path / "results.json").read_text())
    assert [r["size"] for r in rows] == [2, 1, 16, 4]  # the second is the only one with less than everything
    assert rows[0]["flops"] > rows[1]["flops"] and len({r["params"] for r in rows}) == 1
    whole = [rows[i]["loss"] for i in (0, 2, 3)]
    np.testing.assert_allclose(whole, whole[0], atol=1e-5)
    assert abs(rows[1]["loss"] - whole[0]) > 1e-4
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 4 + len(rows) and "+0.0000" in lines[4] and "+0.0000" not in lines[5]
    assert is_png(tmp_path / "budget.png")


def test_dense_report(sweep, tmp_path):
    study = load("moe_dense")
    study.ROUNDS = 1
    study.main([str(sweep), str(tmp_path)])
    row = (tmp_path / "table.md").read_text().splitlines()[2]
    assert "8 experts, 2 a token" in row and "3.0000 | 2.0000" in row
    assert is_png(tmp_path / "loss.png")
    names = {study.variant(compose([f"model=moe_dense/{name}"])["model"]): name for name in study.NAMES}
    assert names == {name: name for name in study.NAMES}


def test_routing_numbers():
    study = load("moe_routing", "routing")
    assert [study.kind_of(t) for t in ("    ", " return", "12", "):", "(", " x1")] == [
        "space, indent", "word", "digits", "punctuation", "brackets", "mixed"]  # fmt: skip
    experts = np.array([[[0, 1], [0, 2], [0, 1]]])
    np.testing.assert_allclose(study.shares(experts, 4), [[2.0, 4 / 3, 2 / 3, 0.0]])
    np.testing.assert_allclose(study.together(experts[0], 3), [[0, 2 / 3, 1 / 3], [1, 0, 0], [1, 0, 0]])
    np.testing.assert_allclose(study.difference(np.array([[2.0, 0.0]]), np.array([[0.0, 2.0]])), [1.0])


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.shown = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.shown += data


def test_routing_report(sweep, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "moe_routing"))
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    (corpus / "heldout").mkdir(parents=True)
    (corpus / "heldout" / "code.txt").write_text("x = [1, 2]\n" * 20)
    (corpus / "heldout" / "prose.txt").write_text("Some words of a text. " * 10)
    try:
        study = load("moe_routing")
        study.main([str(sweep), str(corpus), str(out), "--prompt", PROMPT, "--track", "none"])
    finally:
        for name in ("draw", "page", "routing"):
            sys.modules.pop(name, None)
    for name in ("domains", "kinds", "together", "load", "prompt"):
        assert is_png(out / f"{name}.png")
    page = Page((out / "routing.html").read_text())
    kinds = [tag for tag, _ in page.tags]
    choices = (sweep / "report" / "routing_prompt.jsonl").read_text().splitlines()
    assert kinds.count("span") == len(choices) and kinds.count("img") == 5
    assert "".join(json.loads(line)["text"] for line in choices) == 2 * PROMPT  # two layers
    assert not {"script", "b", "link", "iframe"} & set(kinds)
    assert all(attrs["src"].startswith("data:image/png;base64,") for tag, attrs in page.tags if tag == "img")
    assert "<b>hi</b>" in page.shown  # shown as text
    titles = [attrs["title"] for tag, attrs in page.tags if tag == "span"]
    assert all(title.count("expert") == 2 for title in titles)
    head, _, row = (out / "table.md").read_text().splitlines()
    assert "code against prose" in head and row.startswith("| text and code, balanced | 1 | ")
    images = [json.loads(line)["name"] for line in (sweep / "report" / "images.jsonl").read_text().splitlines()]
    assert images == [f"routing/{name}" for name in ("domains", "kinds", "together", "load", "prompt")]


def test_the_corpus_keeps_held_out_documents_apart(tmp_path, monkeypatch):
    corpus = load("moe_routing", "corpus")
    assert corpus.docstrings('"""A."""\ndef f():\n    "B"\n') == "A.\n\nB" and corpus.docstrings("def (") == ""
    texts = [(kind, f"d{i}", f"{kind} {i}") for i in range(1, 41) for kind in ("code", "prose")]
    monkeypatch.setattr(corpus, "documents", lambda: iter(texts))
    corpus.write(tmp_path)
    assert len(list((tmp_path / "mixed").iterdir())) == 76
    assert (tmp_path / "heldout" / "prose.txt").read_text() == "prose 20\n\nprose 40"
