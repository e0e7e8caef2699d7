"""Background prefetch: in order, a bounded distance ahead, errors in their place, and no thread left behind."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from jaxllm.data.prefetch import Prefetch


def wait_for(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def threads():
    return [t for t in threading.enumerate() if t.name == "jaxllm-prefetch"]


def test_items_in_order_up_to_stop():
    with Prefetch(lambda i: i * i, 3, depth=2, stop=8) as ahead:
        assert list(ahead) == [(i, i * i) for i in range(3, 8)]
        assert list(ahead) == []
    assert not threads()


def test_it_runs_ahead_by_depth_and_no_more():
    made = []
    with Prefetch(lambda i: made.append(i) or i, 0, depth=3) as ahead:
        assert wait_for(lambda: len(made) >= 3)
        time.sleep(0.05)
        assert len(made) == 3
        assert next(ahead) == (0, 0)
        assert wait_for(lambda: len(made) == 4)
    assert not threads()


def test_an_error_comes_after_the_items_before_it_and_ends_the_thread():
    def make(i):
        if i == 2:
            raise RuntimeError("disk gone")
        return i

    ahead = Prefetch(make, 0, depth=5)
    assert [next(ahead), next(ahead)] == [(0, 0), (1, 1)]
    with pytest.raises(RuntimeError, match="disk gone"):
        next(ahead)
    assert not threads()
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_close_while_the_thread_waits_or_works():
    ahead = Prefetch(lambda i: i, 0, depth=1)
    next(ahead)
    ahead.close()
    ahead.close()
    assert not threads()
    with pytest.raises(StopIteration):
        next(ahead)
    slow = Prefetch(lambda i: time.sleep(0.1), 0)
    slow.close()
    assert not threads()


def test_a_forgotten_iterator_ends_its_thread():
    ahead = Prefetch(lambda i: i, 0)
    next(ahead)
    del ahead
    gc.collect()
    assert wait_for(lambda: not threads())


def test_the_program_ends_though_nobody_closed():
    code = (
        "from jaxllm.data.prefetch import Prefetch\n"
        "p = Prefetch(lambda i: i, 0)\nprint(next(p))\nq = Prefetch(lambda i: i, 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(0, 0)\n", "")


def test_depth_must_be_positive():
    with pytest.raises(ValueError, match="depth 0"):
        Prefetch(lambda i: i, 0, depth=0)
