"""Dividing documents into training and validation: nothing lost, nothing in both."""

import numpy as np
import pytest

from jaxllm.data.store import TokenStore, divide


def spans(store):
    return [(int(s), int(s + n)) for s, n in zip(store.starts, store.lengths, strict=True)]


def test_whole_documents_each_so_many():
    store = TokenStore.of([[i] * (i + 1) for i in range(45)])
    train, val = divide(store, 20)
    assert [int(d[0]) for d in map(val.document, range(len(val)))] == [19, 39]
    assert len(train) == 43 and train.size + val.size == store.size
    assert not set(spans(train)) & set(spans(val))


def test_none_held_out():
    store = TokenStore.of([[1, 2], [3]])
    train, val = divide(store, 0)
    assert train is store and len(val) == 0 and val.size == 0


@pytest.mark.parametrize("lengths", [[1000], [30, 900, 70], [10] * 5, [2, 2], [4]])
def test_few_documents_lose_the_end_of_the_longest(lengths):
    store = TokenStore.of([np.arange(n) for n in lengths])
    train, val = divide(store, 20)
    assert train.size + val.size == store.size
    longest = int(np.argmax(lengths))
    if lengths[longest] < 4:
        assert len(val) == 0
        return
    assert len(train) == len(lengths) and len(val) == 1
    assert 2 <= val.size <= max(sum(lengths) // 20, 2) and val.size <= lengths[longest] // 2
    assert val.document(0).tolist() == list(range(lengths[longest] - val.size, lengths[longest]))
    assert train.document(longest).tolist() == list(range(lengths[longest] - val.size))


def test_select_keeps_order():
    store = TokenStore.of([[1], [2, 3], [4]])
    chosen = store.select([2, 1])
    assert [chosen.document(i).tolist() for i in range(2)] == [[4], [2, 3]] and chosen.size == 3
