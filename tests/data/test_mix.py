"""Mixes: exact shares, any step and host by itself, each source held out and started over by itself, one tokenizer, mistakes named."""

import numpy as np
import pytest

from jaxllm.data import Bytes, Loader, Mix, MixLoader, Synthetic, Text
from jaxllm.data.mix import PERIOD, schedule
from jaxllm.data.store import TokenStore
from jaxllm.errors import UserError


def store(first, lengths):
    tokens = iter(range(first, first + sum(lengths)))
    return TokenStore.of([[next(tokens) for _ in range(n)] for n in lengths])


def loaders(batch_size=8, **kwargs):
    """Tokens 1..79 of one source, 1000.. of the other, 5000.. of the third."""
    parts = {"a": store(1, [20, 31, 28]), "b": store(1000, [100, 90]), "c": store(5000, [7, 300])}
    return {name: Loader(s, batch_size, 5, seed=2, **kwargs) for name, s in parts.items()}


WEIGHTS = {"a": 5.0, "b": 2.5, "c": 0.3}


def test_every_stretch_of_rows_has_its_shares():
    rows = np.tile(schedule(WEIGHTS), 3)
    shares = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    counts = np.cumsum(rows[:, None] == np.arange(3), axis=0)
    assert np.abs(counts - shares * np.arange(1, len(rows) + 1)[:, None]).max() < 2.5
    assert np.bincount(schedule({"big": 1e6, "tiny": 1.0})).tolist() == [PERIOD - 1, 1]
    assert np.bincount(schedule({"big": 0.9998, "b": 0.0001, "c": 0.0001})).tolist() == [PERIOD - 2, 1, 1]
    with pytest.raises(UserError, match="data.sources: 1025 sources; a mix has at most 1024"):
        schedule(dict.fromkeys(map(str, range(PERIOD + 1)), 1.0))
    assert np.bincount(schedule({str(i): 1.0 for i in range(3)})).tolist() == [342, 341, 341]


def test_rows_are_those_of_the_sources_in_order_and_any_step_and_host_stands_alone():
    mix = MixLoader(loaders(), WEIGHTS)
    parts, taken = list(loaders(batch_size=1).values()), [0, 0, 0]
    for step in range(40):
        batch = mix.batch(step)
        assert batch["tokens"].dtype == np.int32 and batch["weights"].dtype == np.float32
        for j, row in enumerate(batch["tokens"]):
            source = int(mix.schedule[(step * 8 + j) % PERIOD])
            assert row.tolist() == parts[source].batch(taken[source])["tokens"][0].tolist()
            taken[source] += 1
    assert [p["rows"] for p in mix.position(40).values()] == taken
    assert mix.position(40)["a"]["epochs"] == taken[0] / parts[0].rows_per_epoch > 1  # started over by itself
    late = mix.batch(10**6)
    halves = [MixLoader(loaders(host=h, hosts=2), WEIGHTS).batch(10**6) for h in (0, 1)]
    for name, values in late.items():
        np.testing.assert_array_equal(values, np.concatenate([h[name] for h in halves]))
    with mix.prefetch(7, stop=9) as feed:
        assert [step for step, _ in feed] == [7, 8]


def sources(tmp_path, **fields):
    if not (tmp_path / "prose.txt").exists():  # a text that was written again is another one
        (tmp_path / "prose.txt").write_text("it was the best of times, it was the worst of times. " * 40)
    common = {"cache_dir": str(tmp_path / "cache"), "tokenizer": Bytes(), "val_every": 4}
    parts = {"prose": Text(path=str(tmp_path / "prose.txt")), "recall": Synthetic(documents=40, length=3)}
    return Mix(**common, sources=parts, **fields)


def test_rows_of_a_source_are_counted_over_the_end_of_a_period():
    mix = MixLoader(loaders(), WEIGHTS)
    rows = np.array([0, 1, PERIOD - 1, PERIOD, PERIOD + 7, 3 * PERIOD + 500])
    drawn = np.tile(mix.schedule, 4)
    want = [np.bincount(drawn[:n], minlength=3) for n in rows]
    np.testing.assert_array_equal(mix.before(rows), want)


def test_a_mix_is_one_corpus_whose_sources_hold_out_their_own(tmp_path):
    corpus = sources(tmp_path, weights={"recall": 1, "prose": 3}).prepare()
    assert corpus.facts["parts"] == {"prose": 1, "recall": 40} and corpus.weights == {"prose": 0.75, "recall": 0.25}
    prose, recall = corpus.parts["prose"], corpus.parts["recall"]
    assert (len(recall.train), len(recall.val), len(prose.val)) == (30, 10, 1)
    assert corpus.train.size == prose.train.size + recall.train.size and len(corpus.val) == 11
    text = corpus.tokenizer.decode(prose.train.document(0).tolist())
    assert text.startswith("it was the best") and prose.train.trained is not None
    batch = Loader(recall.train, 2, 16).batch(0)
    assert 0 < batch["weights"].mean() < 0.5  # answers alone, as of the source by itself
    batch = Loader(prose.train, 2, 16).batch(0)
    assert batch["weights"].all()
    said = []
    again = sources(tmp_path).prepare(said.append)  # other weights, the same tokens
    assert any("from the cache" in line for line in said)
    assert again.weights["prose"] == pytest.approx(prose.train.size / corpus.train.size)


def test_mistakes_name_their_key(tmp_path):
    for fields, message in (
        ({"weights": {"prose": 1}}, "data.weights.recall: no weight of that name; data.weights has prose"),
        (
            {"weights": {"prose": 1, "recall": 1, "code": 1}},
            "data.weights.code: no source of that name; data.sources has",
        ),
        ({"weights": {"prose": 1, "recall": 0}}, "data.weights.recall: 0 must be above 0; leave a source out"),
    ):
        with pytest.raises(UserError, match=message):
            sources(tmp_path, **fields)
    with pytest.raises(UserError, match="data.sources: empty"):
        Mix()
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="data.sources.none: holds no text|is empty|no text"):
        Mix(sources={"none": Text(path=str(tmp_path / "empty.txt"))}, cache_dir=str(tmp_path / "c")).prepare()
