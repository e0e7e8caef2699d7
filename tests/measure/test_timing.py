"""The harness that times calls: it is right about a call of known cost, and nothing that is still running looks finished."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.measure.timing import SHORTEST, Timing, compiled, peak_bytes, seconds_of, time_calls


def test_a_call_of_known_cost_reads_as_numpys_own_time():
    """Sorts by numpy, called from a compiled program: timed where they run, and from outside by the harness, call by call, as other work on
    the machine slows some; they take long beside the millisecond that calling back costs."""
    a = np.random.default_rng(0).standard_normal(500_000)
    shape, numpys = jax.ShapeDtypeStruct((), jnp.float32), []

    def least(x):
        start = time.perf_counter()
        found = min(np.sort(a, kind="heapsort")[0] for _ in range(8))
        numpys.append(1e3 * (time.perf_counter() - start))
        return np.float32(found + float(x))

    program, _ = compiled(lambda x: jax.pure_callback(least, shape, x), jnp.float32(0))
    one = jnp.float32(1)
    timing = time_calls({"sort": lambda: program(one)}, repeats=20)["sort"]
    own = np.array(numpys[-20:])  # the calls before warm up
    beside = (np.array(timing.samples_ms) - own) / own
    assert beside.shape == (20,) and np.all(beside >= 0) and np.median(beside) < 0.1
    assert timing.min_ms == min(timing.samples_ms)


class Later:
    """A result that is not there yet."""

    def __init__(self, seconds):
        self.seconds = seconds

    def block_until_ready(self):
        time.sleep(self.seconds)
        return self


def test_every_output_is_awaited():
    assert seconds_of(lambda: (jnp.float32(0), {"late": Later(0.03)})) >= 0.03
    timing = time_calls({"call": lambda: [Later(0.002)]}, repeats=3)["call"]
    assert min(timing.samples_ms) >= 2 and timing.first_ms >= 2


def test_the_harness_takes_less_than_two_percent_of_a_millisecond():
    done = jnp.float32(0)
    taken = min(seconds_of(lambda: done) for _ in range(200))
    assert taken < 0.02 * 1e-3


def test_calls_are_timed_in_turn_and_short_ones_several_times():
    seen = []

    def slow():
        seen.append("slow")
        return Later(2 * SHORTEST)

    def quick():
        seen.append("quick")
        return Later(SHORTEST / 50)

    timings = time_calls({"slow": slow, "quick": quick}, repeats=4)
    assert all(len(t.samples_ms) == 4 for t in timings.values())
    assert seen[:4] == ["slow", "quick"] * 2, "the first run of each, and one that says how long it takes"
    rounds = "".join(name[0] for name in seen[4:]).split("s")[1:]
    assert len(rounds) == 4 and len(set(rounds)) == 1 and rounds[0], (
        "one slow call, then its share of quick ones, four times"
    )


def test_what_a_timing_says():
    timing = Timing(9.0, tuple(float(n) for n in range(1, 12)))
    assert (timing.median_ms, timing.min_ms, timing.spread_ms) == (6.0, 1.0, pytest.approx(8.0))


def test_compiling_is_timed_apart_and_the_plan_of_memory_is_read():
    def slow_to_trace(x):
        time.sleep(0.05)
        return x @ x

    x = jnp.ones((256, 256))
    program, seconds = compiled(slow_to_trace, x)
    assert seconds > 0.05 and seconds_of(lambda: program(x)) < seconds
    assert 2 * x.nbytes <= peak_bytes(program) < 4 * x.nbytes
    donated, _ = compiled(lambda x: x + 1, x, donate=0)
    assert peak_bytes(donated) < 2 * x.nbytes, "an argument that becomes the result counts once"
