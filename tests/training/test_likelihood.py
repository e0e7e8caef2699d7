"""Likelihoods of continuations: by whole logits, in any batch, tokens at the border, choices, and the harness' three questions."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from jaxllm.data import BPE, Bytes
from jaxllm.data.probes import Question, needles, read_questions
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.params import init_params
from jaxllm.tasks.eval_suites import answers
from jaxllm.training.likelihood import Scorer, pair

PAIRS = [([256, 97, 98], [99, 100]), ([256], [97]), ([256] + [97] * 20, [98] * 3)]


@pytest.fixture(scope="module")
def model(tiny):
    made = tiny.model("gqa", "mlp", "1* global/dense", vocab_size=258)
    params = init_params(made, jax.random.key(3))
    params["embed"] = params["embed"] * 20  # a fresh model finds everything equally likely
    return made, params, Scorer(made, batch=2, longest=32)


def by_hand(model, params, context, continuation):
    ids = np.array([*context, *continuation])
    logits = np.asarray(model.apply({"params": params}, Context.whole(ids[None, :-1]))[1].logits, np.float64)[
        0, :, :258
    ]
    rows = log_softmax(logits, axis=-1)[len(context) - 1 :]
    labels = ids[len(context) :]
    picked = [row[label] for row, label in zip(rows, labels, strict=True)]
    return sum(picked), bool(np.all(np.argmax(rows, -1) == labels))


def test_scores_by_whole_logits(model):
    made, params, scorer = model
    scores = scorer(params, PAIRS)
    for score, (context, continuation) in zip(scores, PAIRS, strict=True):
        want, greedy = by_hand(made, params, context, continuation)
        np.testing.assert_allclose(score.logprob, want, rtol=1e-4)
        assert score.greedy == greedy and score.tokens == len(continuation)
    context = PAIRS[0][0]
    logits = made.apply({"params": params}, Context.whole(np.array([context])))[1].logits
    best = int(np.argmax(np.asarray(logits)[0, -1, :258]))
    assert scorer(params, [(context, [best])])[0].greedy
    # what does not fit loses its beginning, never what is scored
    long = scorer(params, [([256] * 50, [97, 98])])[0]
    np.testing.assert_allclose(long.logprob, by_hand(made, params, [256] * 31, [97, 98])[0], rtol=1e-4)
    for bad, message in ((([], [1]), "at least one token"), (([1], [2] * 33), "33 tokens is longer than 32")):
        with pytest.raises(UserError, match=message):
            scorer(params, [bad])


def test_the_border_of_context_and_continuation():
    text = ["the cat sat on the mat", "the dog sat on the rug"] * 20
    bpe = BPE(vocab_size=300, min_frequency=1).fit(text, None)
    begin, rest = pair(bpe, "the cat ", "sat")  # the space belongs to what follows it
    assert bpe.decode(begin) == "the cat" and bpe.decode(rest) == " sat" and begin[0] == bpe.bos_id
    assert [*begin, *rest] == bpe.prompt("the cat sat")
    begin, rest = pair(bpe, "the c", "at")  # no border of tokens there: each on its own
    assert bpe.decode(begin) == "the c" and bpe.decode(rest) == "at"
    assert pair(Bytes(), "", "a") == ([256], [97])


def test_choices_by_likelihood_and_by_likelihood_a_byte():
    class Fixed:
        """A model that finds every byte equally likely but `x`, which it expects a little."""

        def __call__(self, params, pairs):
            return [type("S", (), {"logprob": -sum(1.0 if i == 120 else 1.2 for i in rest)}) for _, rest in pairs]

    asked = [Question("?", ("xx", "y"), 0), Question("?", ("yyy", "xx"), 1)]
    # -2.0 against -1.2: the short one; by byte -1.0 against -1.2: the other one
    assert answers(asked, Bytes(), Fixed(), {}) == [(1, 0), (1, 1)]


def test_questions_are_read_or_named(tmp_path):
    path = tmp_path / "q.jsonl"
    good = {"prompt": "1+1=", "choices": ["2", "3"], "answer": 0}
    path.write_text(json.dumps(good) + "\n")
    assert read_questions(str(path), tmp_path) == [Question("1+1=", ("2", "3"), 0)]
    for change, message in (
        ({"choices": ["2"]}, "two texts or more"),
        ({"answer": 2}, "answer=2 must be the index of a choice, 0 to 1"),
        ({"prompt": None}, "needs prompt and choices"),
    ):
        path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
        with pytest.raises(UserError, match=f"q.jsonl:2: {message}|q.jsonl:2: .*{message}"):
            read_questions(str(path), tmp_path)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_lies_where_it_should(depth):
    hay = np.frombuffer(b"hay " * 200, np.uint8)
    store = needles(Bytes(), hay, 128, depth, 3, seed=0)
    assert len(store) == 3 and set(store.lengths) == {128}
    for index in range(3):
        ids = store.document(index)
        text = bytes(int(i) for i in ids[1:]).decode()
        number = text[-4:]
        assert ids[0] == 256 and number.isdigit() and text.count(number) == 2
        before = text.index("\nThe number of")
        assert abs(before - depth * (text.rindex("\nThe number of") - 30)) < 12  # 30 bytes, about, are the needle
        trained = store.trained[store.starts[index] :][:128]
        assert list(np.flatnonzero(trained)) == [123, 124, 125, 126, 127]  # a space and four digits
    with pytest.raises(UserError, match="eval.needle=20: a needle and its question take"):
        needles(Bytes(), hay, 20, depth, 1, seed=0)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra lm-eval")
def test_a_task_of_the_harness(model, tmp_path):
    """Local multiple choice through lm-evaluation-harness: the same accuracy as ours."""
    from jaxllm.tasks import lm_eval_adapter
    from jaxllm.training.settings import EvalSettings

    made, params, _ = model
    lines = [
        {"prompt": f"{a}+{b}=", "choices": [str(a + b), str(a + b + 1)], "answer": (a + b) % 2}
        for a in range(4)
        for b in range(3)
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "sums.yaml").write_text(
        "task: sums\ndataset_path: json\ndataset_kwargs: {data_files: {test: " + str(tmp_path / "sums.jsonl") + "}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: prompt\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    source = type("Source", (), {"model": made, "tokenizer": Bytes()})
    settings = EvalSettings(lm_eval=("sums",), lm_eval_path=".")
    got = lm_eval_adapter.evaluate(settings, source, params, tmp_path)["sums"]
    asked = [Question(line["prompt"], tuple(line["choices"]), line["answer"]) for line in lines]
    ours = answers(asked, Bytes(), Scorer(made), params)
    for name, i in (("acc", 0), ("acc_norm", 1)):
        assert got[name] == pytest.approx(np.mean([best[i] == q.answer for best, q in zip(ours, asked, strict=True)]))
    with pytest.raises(UserError, match="eval.lm_eval=nothing: the harness knows no such task"):
        lm_eval_adapter.evaluate(EvalSettings(lm_eval=("nothing",)), source, params, tmp_path)


def test_what_the_harness_asks(model):
    from jaxllm.tasks.lm_eval_adapter import Requests

    made, params, scorer = model
    asked = Requests(type("Source", (), {"model": made, "tokenizer": Bytes()}), params)
    asked.scorer = scorer
    (found,) = asked.loglikelihood([("ab", "cd")])
    np.testing.assert_allclose(found[0], by_hand(made, params, [256, 97, 98], [99, 100])[0], rtol=1e-4)
    text = "abcdefgh" * 5  # longer than a row: each byte is scored once
    ids = [256, *text.encode()]
    want = by_hand(made, params, ids[:1], ids[1:33])[0] + by_hand(made, params, ids[32:33], ids[33:])[0]
    np.testing.assert_allclose(asked.loglikelihood_rolling([(text,)]), [want], rtol=1e-4)
