"""Synthetic tasks: the right answer is really there, and only it is trained."""

import numpy as np
import pytest

from jaxllm.data.loader import Loader
from jaxllm.data.synthetic import Synthetic
from jaxllm.errors import UserError


def prepared(folder, **fields):
    return Synthetic(**({"documents": 40, "cache_dir": str(folder)} | fields)).prepare()


def documents(corpus):
    return [corpus.tokenizer.decode(corpus.train.document(i)) for i in range(len(corpus.train))]


def test_copy(tmp_path):
    corpus = prepared(tmp_path, task="copy", length=6)
    made = documents(corpus)
    assert len(made) == 38 and len(set(made)) > 30
    for text in made:
        left, right = text.split("=")
        assert left == right and len(left) == 6


def test_recall(tmp_path):
    for text in documents(prepared(tmp_path, length=10, queries=4)):
        pairs, asked = text.split("?")
        book = dict(zip(pairs[::2], pairs[1::2], strict=True))
        assert len(book) == 10
        assert len(asked) == 8 and len(set(asked[::2])) == 4
        assert all(book[k] == v for k, v in zip(asked[::2], asked[1::2], strict=True))


def test_only_answers_and_the_end_are_trained(tmp_path):
    corpus = prepared(tmp_path, task="recall", length=5)
    batch = Loader(corpus.train, 4, 64).batch(0)
    trained = batch["weights"] > 0
    labels = corpus.tokenizer.decode(batch["labels"][trained])
    assert labels and set(labels) <= set("0123456789")
    whole = np.concatenate([b["labels"][b["weights"] > 0] for b in Loader(corpus.train, 4, 64, shuffle=False).epoch()])
    assert len(whole) == len(corpus.train) * (5 + 1)  # five values and eos
    everything = prepared(tmp_path, task="recall", length=5, answers_only=False)
    weights = sum(b["weights"].sum() for b in Loader(everything.train, 4, 64, shuffle=False).epoch())
    assert weights == everything.train.size - len(everything.train)


def test_a_seed_is_a_corpus(tmp_path):
    assert documents(prepared(tmp_path, seed=1)) == documents(prepared(tmp_path / "other", seed=1))
    assert documents(prepared(tmp_path, seed=1)) != documents(prepared(tmp_path, seed=2))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"task": "sort"}, "recall, copy"),
        ({"length": 53}, "52 distinct keys"),
        ({"queries": 9}, "data.queries=9"),
        ({"task": "copy", "queries": 1}, "data.queries=1"),
        ({"documents": 0}, "data.documents=0"),
        ({"answers_only": "yes"}, "data.answers_only='yes'"),
        ({"seed": -1}, "data.seed=-1"),
    ],
)
def test_mistakes_in_the_fields(fields, message):
    with pytest.raises(UserError, match=message):
        Synthetic(**fields)
