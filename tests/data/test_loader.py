"""The loader: every token once, every label once and never across documents, the same rows from any step and host."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.data.loader import Loader
from jaxllm.data.store import TokenStore
from jaxllm.errors import UserError

EOS = 0


def unique_store(lengths):
    """Documents whose tokens are all different, so that every label tells where it comes from."""
    tokens = iter(range(1, sum(lengths) + 1))
    return TokenStore.of([[next(tokens) for _ in range(n)] for n in lengths])


def epoch_batches(loader, epoch):
    """The rows of one epoch out of the endless stream, rows in order."""
    first, last = epoch * loader.rows_per_epoch, (epoch + 1) * loader.rows_per_epoch
    rows = []
    for step in range(first // loader.batch_size, -(-last // loader.batch_size)):
        batch = loader.batch(step)
        for j in range(loader.batch_size):
            if first <= step * loader.batch_size + j < last:
                rows.append({k: v[j] for k, v in batch.items()})
    return {k: np.stack([r[k] for r in rows]) for k in rows[0]}


def check_rows(store, batch, seq_len):
    """What must hold in any rows of a store of unique tokens."""
    documents = [store.document(i).tolist() for i in range(len(store))]
    after = {a: b for d in documents for a, b in zip(d, d[1:], strict=False)}
    home = {token: i for i, d in enumerate(documents) for token in d}
    for key in ("tokens", "labels", "positions", "segments"):
        assert batch[key].dtype == np.int32 and batch[key].shape[1] == seq_len
    assert batch["weights"].dtype == np.float32
    for tokens, labels, positions, segments, weights in zip(
        *(batch[k] for k in ("tokens", "labels", "positions", "segments", "weights")), strict=True
    ):
        for i in range(seq_len):
            if segments[i] == 0:
                assert positions[i] == weights[i] == labels[i] == 0
            elif weights[i]:
                assert labels[i] == after[tokens[i]]  # the next token of the same document
            else:
                assert tokens[i] not in after and labels[i] == 0  # only the document's last token has none
        real = np.flatnonzero(segments)
        assert len(real) == 0 or segments[real[0]] == 1
        for segment in range(1, segments.max(initial=0) + 1):
            at = np.flatnonzero(segments == segment)
            assert len(at) and (np.diff(at) == 1).all()
            assert positions[at].tolist() == list(range(len(at)))
            assert len({home[t] for t in tokens[at]}) == 1


lengths = st.lists(st.integers(1, 30), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 17), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_each_token_and_each_label_exactly_once_an_epoch(lengths, seq_len, batch_size, seed, epoch, shuffle):
    store = unique_store(lengths)
    loader = Loader(store, batch_size, seq_len, seed, shuffle=shuffle)
    batch = epoch_batches(loader, epoch)
    check_rows(store, batch, seq_len)
    assert sorted(batch["tokens"][batch["segments"] > 0]) == list(range(1, store.size + 1))
    firsts = {int(store.document(i)[0]) for i in range(len(store))}  # nothing predicts them
    assert sorted(batch["labels"][batch["weights"] > 0]) == [t for t in range(1, store.size + 1) if t not in firsts]


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(1, 5), st.sampled_from([2, 3, 4]))
def test_aligned_documents_start_at_multiples(lengths, blocks, batch_size, align):
    store = unique_store(lengths)
    batch = epoch_batches(Loader(store, batch_size, blocks * align, align=align), 0)
    check_rows(store, batch, blocks * align)
    assert sorted(batch["tokens"][batch["segments"] > 0]) == list(range(1, store.size + 1))
    assert (batch["weights"] > 0).sum() == store.size - len(store)
    starts = np.argwhere((batch["positions"] == 0) & (batch["segments"] > 0))
    assert (starts[:, 1] % align == 0).all()


def test_epochs_and_seeds_differ_and_batches_cross_epochs():
    store = unique_store([7, 5, 9, 3, 11])
    loader = Loader(store, 4, 5, seed=1)  # 7 rows an epoch: step 1 holds rows of two epochs
    assert loader.rows_per_epoch == 7 and loader.steps_per_epoch == pytest.approx(7 / 4)
    epochs = [epoch_batches(loader, e)["tokens"].tolist() for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert epoch_batches(Loader(store, 4, 5, seed=2), 0)["tokens"].tolist() != epochs[0]
    assert epoch_batches(Loader(store, 4, 5, seed=1), 0)["tokens"].tolist() == epochs[0]
    plain = Loader(store, 4, 5, shuffle=False)
    assert epoch_batches(plain, 0)["tokens"].tolist() == epoch_batches(plain, 1)["tokens"].tolist()
    assert plain.batch(0)["tokens"][0].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("hosts", [2, 4])
def test_any_number_of_hosts_gives_the_same_rows(hosts):
    store = unique_store([13, 2, 29, 8, 17, 5])
    alone = Loader(store, 8, 6, seed=3)
    for step in (0, 1, 2, 7, 1000):
        whole = alone.batch(step)
        parts = [Loader(store, 8, 6, seed=3, host=h, hosts=hosts).batch(step) for h in range(hosts)]
        for key, value in whole.items():
            assert parts[0][key].shape[0] == 8 // hosts
            assert np.array_equal(np.concatenate([p[key] for p in parts]), value)


def test_resume_in_a_new_process_on_other_hosts_gives_the_same_stream():
    """Batches 0..19 straight = 0..6, then 7..19 by a new process that stands in for two hosts and prefetches 3."""
    store = unique_store([13, 2, 29, 8, 17, 5])
    loader = Loader(store, 4, 6, seed=3)
    straight = [loader.batch(s)["tokens"].tolist() for s in range(20)]
    with Loader(store, 4, 6, seed=3).prefetch(0, depth=3) as ahead:
        before = [next(ahead)[1]["tokens"].tolist() for _ in range(7)]  # made ahead is not used up
    code = """
import json
from jaxllm.data.loader import Loader
from jaxllm.data.store import TokenStore
tokens = iter(range(1, 75))
store = TokenStore.of([[next(tokens) for _ in range(n)] for n in (13, 2, 29, 8, 17, 5)])
hosts = [Loader(store, 4, 6, seed=3, host=h, hosts=2).prefetch(7, depth=3, stop=20) for h in (0, 1)]
print(json.dumps([a[1]["tokens"].tolist() + b[1]["tokens"].tolist() for a, b in zip(*hosts)]))
"""
    after = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
    assert before + after == straight


def test_seeking_to_step_a_million_is_instant():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 200_000)
    tokens = np.arange(lengths.sum()).astype(np.uint32)
    store = TokenStore(tokens, np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths)
    loader = Loader(store, 8, 64, seed=5)
    begun = time.perf_counter()
    batch = loader.batch(10**6)
    assert time.perf_counter() - begun < 1.0
    assert batch["tokens"].shape == (8, 64)
    assert np.array_equal(batch["tokens"], Loader(store, 8, 64, seed=5).batch(10**6)["tokens"])


def test_the_order_never_changes_between_versions():
    """A resumed run must see the rows it would have seen; these numbers may never move."""
    loader = Loader(unique_store([3, 4, 2, 5]), 2, 4, seed=7)
    assert [loader.batch(s)["tokens"].tolist() for s in (0, 1, 5)] == [
        [[2, 3, 0, 0], [10, 11, 12, 13]],
        [[14, 8, 9, 4], [5, 6, 7, 1]],
        [[1, 2, 3, 10], [4, 5, 6, 7]],
    ]


def test_every_eos_is_trained_though_padding_looks_the_same():
    """Masking by id would hide the end of every document when pad = eos."""
    loader = Loader(TokenStore.of([[5, 6, EOS]]), 1, 5, pad_id=EOS)
    batch = loader.batch(0)
    assert batch["tokens"].tolist() == [[5, 6, EOS, EOS, EOS]]
    assert batch["weights"].tolist() == [[1, 1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[6, EOS, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 0, 0]]  # attention keeps the real eos
    documents = [[1, 2, EOS], [3, EOS], [EOS], [4, 5, 6, EOS]]
    batch = epoch_batches(Loader(TokenStore.of(documents), 2, 4, pad_id=EOS), 0)
    trained = batch["labels"][batch["weights"] > 0]
    assert (trained == EOS).sum() == 3  # the empty document has no token that could predict its eos
    assert len(trained) == sum(len(d) - 1 for d in documents)


def test_the_last_label_of_one_document_is_not_the_first_token_of_the_next():
    batch = Loader(TokenStore.of([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]), 1, 11, shuffle=False).batch(0)
    assert batch["segments"].tolist() == [[1] * 5 + [2] * 6]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5]]
    assert batch["weights"].tolist() == [[1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5, 0, 7, 8, 9, 10, 11, 0]]


def test_a_row_that_ends_within_a_document_keeps_its_last_label():
    batch = Loader(TokenStore.of([[1, 2, 3, 4, 5, 6]]), 2, 3, shuffle=False).batch(0)
    assert batch["tokens"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["labels"].tolist() == [[2, 3, 4], [5, 6, 0]]
    assert batch["weights"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2], [0, 1, 2]]


def test_untrained_tokens_are_context_only():
    store = TokenStore.of([[1, 2, 3, 4], [5, 6]])
    masked = TokenStore(store.tokens, store.starts, store.lengths, np.array([1, 0, 0, 1, 1, 1], np.uint8))
    batch = Loader(masked, 1, 6, shuffle=False).batch(0)
    assert batch["weights"].tolist() == [[0, 0, 1, 0, 1, 0]] and batch["labels"].tolist() == [[0, 0, 4, 0, 6, 0]]
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("batch_size", [2, 4, 64])
def test_an_evaluation_epoch_holds_every_token_once(batch_size, hosts):
    store = unique_store([13, 2, 29, 8])
    loaders = [Loader(store, batch_size, 6, shuffle=False, host=h, hosts=hosts) for h in range(hosts)]
    batches = [b for loader in loaders for b in loader.epoch()]
    assert len(batches) == hosts * -(-loaders[0].rows_per_epoch // batch_size)
    assert all(b["tokens"].shape == (batch_size // hosts, 6) for b in batches)
    seen = np.concatenate([b["tokens"][b["segments"] > 0] for b in batches])
    assert sorted(seen) == list(range(1, store.size + 1))
    assert sum(b["weights"].sum() for b in batches) == store.size - len(store)
    for batch in batches:
        check_rows(store, batch, 6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"batch_size": 0}, "train.batch_size=0"),
        ({"batch_size": 3, "hosts": 2}, "train.batch_size=3: .* hosts, 2"),
        ({"seq_len": "abc"}, "train.seq_len='abc'"),
        ({"seed": -1}, "seed=-1"),
        ({"host": 1}, "hosts, 1"),
        ({"align": 3}, "train.seq_len=4: must be a multiple of 3"),
    ],
)
def test_bad_settings_are_one_line(fields, message):
    with pytest.raises(UserError, match=message):
        Loader(unique_store([5]), **({"batch_size": 2, "seq_len": 4} | fields))


def test_an_empty_store_is_refused_with_the_way_out():
    with pytest.raises(UserError, match="data.val_every"):
        Loader(unique_store([5]).select([]), 2, 4)
    with pytest.raises(ValueError, match="step -1"):
        Loader(unique_store([5]), 2, 4).batch(-1)
