"""The study of paged memory: its allocator, and the figures it is there to show."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "experiments" / "paged_memory" / "study.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("paged_memory_study", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_buddy_allocator_splits_and_merges(study):
    buddy = study.Buddy(64)
    blocks = [buddy.take(want) for want in (9, 16, 20, 1)]
    assert blocks == [(0, 16), (16, 16), (32, 32), None]
    buddy.give(*blocks[0])
    assert buddy.take(3) == (0, 4) and buddy.free_tokens == 12
    assert buddy.take(9) is None  # 12 places are free, 8 of them in one piece
    for block in ((0, 4), blocks[1], blocks[2]):
        buddy.give(*block)
    assert buddy.take(64) == (0, 64)


def test_every_place_is_counted_once_and_pages_hold_what_rows_cannot(study):
    jobs = study.trace(600, 0)
    held = {}
    for name in ("max", "pow2", "oracle"):
        use, series, _, _ = study.contiguous(name, jobs, 300)
        assert sum(use.values()) == 300 * study.POOL and min(use.values()) >= 0
        held[name] = use["tokens"] / sum(use.values())
        assert sum(series) * study.POOL == pytest.approx(use["tokens"])
    use, _, finished, rows = study.paged(jobs, 300)
    assert sum(use.values()) == 300 * study.POOL
    assert held["max"] < held["pow2"] < held["oracle"] < 0.45
    assert use["tokens"] / sum(use.values()) > 0.9 and rows > 30 and finished > 10
    assert isinstance(use, Counter)
