import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from raytune70b.sweep.fit import STUDENT, best_rate, edge, noise, spaced, threshold, transfer


@given(st.floats(-1, 1), st.floats(0.02, 2), st.floats(1, 8))
def test_a_parabola_is_found_again(shift, curvature, floor):
    optimum = 1e-3 * math.exp(shift)
    points = {r: floor + curvature * math.log(r / optimum) ** 2 for r in spaced(1e-3 / 16, 1.6e-2, 9)}
    fit = best_rate(points, noise=0.0)
    assert abs(math.log(fit.rate / optimum)) < 0.01
    assert abs(fit.curvature / curvature - 1) < 0.02
    assert abs(fit.at(optimum) - floor) < 1e-3


@pytest.mark.parametrize("shift", np.linspace(-0.7, 0.7, 8))
def test_on_a_lopsided_valley_the_loss_at_the_fitted_rate_is_nearly_the_lowest(shift):
    optimum = 1e-3 * math.exp(shift)

    def loss(rate):
        x = math.log(rate / optimum)
        return 3 + 0.08 * (math.exp(1.5 * x) / 1.5 + math.exp(-0.5 * x) / 0.5 - 1 / 1.5 - 2)

    points = {r: loss(r) for r in spaced(1e-3 / 16, 1.6e-2, 9)}
    fit = best_rate(points, noise=0.002)
    assert loss(fit.rate) - 3 < 0.005 < min(points.values()) - 3 + 0.01


def test_the_optimum_stays_between_the_neighbours_of_the_best_rate():
    falling = best_rate({1e-4: 5.0, 1e-3: 4.0, 1e-2: 3.0}, noise=0.0)
    assert falling.rate == 1e-2 and falling.low <= falling.rate <= falling.high
    hill = best_rate({1e-4: 3.0, 1e-3: 4.0, 1e-2: 3.5}, noise=0.0)
    assert (hill.rate, hill.loss, hill.curvature) == (1e-4, 3.0, 0.0)
    assert best_rate({1e-3: 3.0}, noise=0.0).rate == 1e-3


def test_what_cannot_be_told_from_the_best_grows_with_the_margin():
    points = {r: 3 + 0.1 * math.log(r / 1e-3) ** 2 for r in spaced(1e-4, 1e-2, 9)}
    narrow, wide = best_rate(points, 0.0, margin=0.001), best_rate(points, 0.0, margin=0.1)
    assert wide.low < narrow.low < 1e-3 < narrow.high < wide.high
    assert abs(wide.at(wide.high) - wide.loss - 0.1) < 1e-6


def test_student_quantiles_are_those_of_scipy():
    assert [round(float(scipy.stats.t.ppf(0.95, n)), 2) for n in range(1, 11)] == list(STUDENT)


def test_two_trials_of_equal_settings_rarely_differ_by_more_than_the_threshold():
    random, wrong, rounds = np.random.default_rng(0), 0, 4000
    for _ in range(rounds):
        seeds, pair = random.normal(0, 0.1, 3), random.normal(0, 0.1, 2)
        wrong += pair[0] - pair[1] > threshold(noise(list(seeds)), 3)
    assert 0.03 < wrong / rounds < 0.07  # the test promises 5 %


def test_edges():
    assert edge([1, 2, 3], 1) == "low" and edge([1, 2, 3], 3) == "high" and edge([1, 2, 3], 2) is None


def test_transfer_follows_its_exponents():
    assert transfer(1e-3, 4.0, 1.0, 0.5, 0.32) == 2e-3
    assert transfer(1e-3, 1.0, 100.0, 0.5, 0.32) == pytest.approx(1e-3 * 100**-0.32, rel=0.01)
    assert transfer(1e-3, 1.0, 100.0, 0.5, 0.0) == 1e-3
