"""Learning rates: exact values, no jump over a restart, a documented last value."""

import jax
import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.training.schedules import WSD, Constant, Cosine

ALL = [Constant(), Constant(warmup_steps=3), Cosine(warmup_steps=4, final=0.1), Cosine(final=0.0)]
ALL += [WSD(warmup_steps=2, decay=0.3), WSD(warmup_steps=2, decay=0.3, form="linear", final=0.2)]


def values(schedule, total, counts=None):
    factor = jax.jit(lambda c: schedule.factor(c, total))
    return np.array([factor(c) for c in (range(total) if counts is None else counts)])


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_a_schedule_is_a_function_of_the_count_alone(schedule):
    straight = values(schedule, 10)
    restarted = np.concatenate([values(schedule, 10, part) for part in (range(5), range(5, 8), range(8, 10))])
    np.testing.assert_array_equal(straight, restarted)
    assert np.all(straight > -1e-9) and np.all(straight <= 1.0)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_the_last_update_and_all_later_ones_use_the_final_share(schedule):
    final = getattr(schedule, "final", 1.0)
    np.testing.assert_allclose(values(schedule, 10, [9, 10, 50]), final, atol=1e-7)


def test_the_first_update_of_a_warm_up_moves_and_the_peak_is_reached():
    np.testing.assert_allclose(values(Constant(warmup_steps=4), 10)[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    np.testing.assert_allclose(values(Cosine(warmup_steps=4), 10)[:4], [0.25, 0.5, 0.75, 1.0])
    assert values(Cosine(), 10)[0] == 1.0


def test_cosine_and_wsd_have_their_shapes():
    cosine = values(Cosine(warmup_steps=1, final=0.1), 11)
    np.testing.assert_allclose(cosine[5], 0.55, atol=1e-6)  # half-way between peak and end
    assert np.all(np.diff(cosine) < 0)
    wsd = values(WSD(warmup_steps=2, decay=0.4, form="linear"), 11)
    np.testing.assert_allclose(wsd, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0], atol=1e-6)
    root = values(WSD(warmup_steps=2, decay=0.4), 11)
    np.testing.assert_allclose(root[7], 1 - np.sqrt(0.25), atol=1e-6)


def test_a_longer_run_agrees_up_to_the_shorter_ones_decay():
    short, long = (values(WSD(warmup_steps=3, decay=0.2), total) for total in (20, 40))
    np.testing.assert_array_equal(short[:16], long[:16])


@pytest.mark.parametrize("total", [1, 2, 3])
@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_very_short_runs_are_finite(schedule, total):
    assert np.isfinite(values(schedule, total)).all()


@pytest.mark.parametrize(
    "make",
    [lambda: Constant(warmup_steps=-1), lambda: Cosine(final=2.0), lambda: WSD(decay=0.0), lambda: WSD(form="exp")],
)
def test_wrong_fields_are_refused(make):
    with pytest.raises(UserError):
        make()
