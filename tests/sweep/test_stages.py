import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytune70b.storage import Folder
from raytune70b.sweep.answer import ALL_DIVERGED, ALL_FAILED, FOUND, NOTHING_YET, answer, rows
from raytune70b.sweep.points import Result, elapsed, hopeless, read_results, write_result
from raytune70b.sweep.stages import next_stage, settled
from tests.sweep.world import START, World, make_space, sweep


@pytest.mark.parametrize("best", [2e-4, 5e-4, 1e-3, 2.2e-3, 7e-3])
def test_the_chosen_rate_is_as_good_as_the_best_one(best):
    space, world = make_space(), World(best)
    results, _ = sweep(space, world)
    found = answer(space, results)
    assert found.status == FOUND
    assert world.loss(replace(START, learning_rate=found.trial_rate), noise=False) < 3.0 * 1.002
    assert found.point.learning_rate == pytest.approx(found.trial_rate * 4**-0.32, rel=0.01)  # carried to four times the tokens
    assert found.deviation == pytest.approx(0.003, rel=0.9)


@pytest.mark.parametrize(("best", "side"), [(1e-6, "below"), (1e-1, "above")])
def test_a_range_beside_the_optimum_is_extended(best, side):
    space, world = make_space(extensions=6), World(best, cliff=1e9)
    results, _ = sweep(space, world)
    found = answer(space, results)
    assert abs(math.log(found.trial_rate / best)) < 0.5
    assert any(f"extended {side}" in note for note in found.notes)


@pytest.mark.parametrize(("best", "end"), [(1e-9, "lowest"), (1e2, "highest")])
def test_extension_is_bounded_and_the_answer_says_what_is_open(best, end):
    space, world = make_space(extensions=2), World(best, cliff=1e9)
    results, _ = sweep(space, world)
    outside = {p.learning_rate for p in results if not 1e-4 <= p.learning_rate <= 1e-2 and p.global_batch_size == 16}
    coarse = {r for r in outside if round(math.log(r / 1e-4) / math.log(10**0.5), 2) % 1 == 0}
    assert len(coarse) == 2
    assert any(f"still the {end} tried" in note for note in answer(space, results).notes)


def test_divergence_above_the_best_rate_brackets_it():
    space, world = make_space(), World(best=8e-3, cliff=5e-3)
    results, _ = sweep(space, world)
    found = answer(space, results)
    assert found.trial_rate <= 1e-2 and max(p.learning_rate for p in results) <= 1e-2 * math.sqrt(2)
    assert any(note.startswith("diverged: ") and note.endswith(" 0.01") for note in found.notes)


def test_a_range_in_which_all_diverge_says_so_and_tries_nothing_more():
    space = make_space()
    results, ran = sweep(space, World(best=1e-6, cliff=5e-5))
    found = answer(space, results)
    assert (found.status, len(ran)) == (ALL_DIVERGED, 5)
    assert "from 0.0001 to 0.01 diverge" in found.verdict


def test_failures_of_all_are_no_divergence():
    space = make_space()
    results = {space.at(r): Result(space.at(r), "failed", (), None, 0, 0.0, 1.0, "no such model") for r in space.rates}
    assert answer(space, results).status == ALL_FAILED and "no such model" in answer(space, results).verdict
    assert answer(space, {}).status == NOTHING_YET


@settings(max_examples=60)
@given(st.floats(-4, 4), st.integers(0, 20), st.integers(0, 2**32), st.sampled_from([None, 2e-3]))
def test_killed_anywhere_no_trial_runs_twice_and_the_answer_is_the_same(shift, kill_after, luck, cliff):
    """Whether a leader was done in time to stop a trial is luck too: it changes no answer."""
    space, world = make_space(), World(1e-3 * math.exp(shift), noise=0.01, cliff=cliff)
    whole, _ = sweep(space, world)
    part, first = sweep(space, world, kill_after=kill_after, lucky=lambda p: hash((luck, p)) % 2 == 0)
    rest, second = sweep(space, world, results=part, lucky=lambda p: hash((luck, p)) % 3 == 0)
    assert max(Counter(first + second).values()) == 1
    assert set(rest) == set(whole)
    assert replace(answer(space, rest), notes=()) == replace(answer(space, whole), notes=())  # the notes name the stopped ones


def test_a_batch_that_wins_by_more_than_noise_is_taken_with_its_rate():
    space, world = make_space(), World(batch_gain=0.2)
    results, _ = sweep(space, world)
    found = answer(space, results)
    assert found.point.global_batch_size == 8
    assert found.point.learning_rate == pytest.approx(found.trial_rate * 0.5**0.5 * 4**-0.32, rel=0.01)
    tried = [p for p in results if p.warmup_share != START.warmup_share]
    assert {p.global_batch_size for p in tried} == {8}  # the warm-up is tried at the batch that won


def test_a_batch_within_noise_changes_nothing():
    space, world = make_space(), World(batch_gain=0.001, noise=0.01)
    results, _ = sweep(space, world)
    assert settled(space, results).global_batch_size == 16
    assert any("global batch: no difference beyond noise" in note for note in answer(space, results).notes)


class Flat(World):
    """No rate below the cliff is better than another."""

    def loss(self, point, noise=True):
        return 3.0 + (World.loss(self, point) - World.loss(self, point, noise=False))


def test_a_flat_range_keeps_the_rate_of_the_run():
    space = make_space()
    results, _ = sweep(space, Flat(noise=0.01))
    found = answer(space, results)
    assert "no difference beyond noise" in found.verdict and found.point.learning_rate == START.learning_rate


@pytest.mark.parametrize(("low", "high", "cliff"), [(1e-5, 1e-3, 9e-4), (1e-6, 1e-4, None)], ids=["it diverged", "it was not tried"])
def test_a_flat_range_never_keeps_a_rate_that_it_did_not_see_train(low, high, cliff):
    space = make_space(low=low, high=high)
    results, _ = sweep(space, Flat(noise=0.01, cliff=cliff))
    found = answer(space, results)
    finished = [r.point.learning_rate for r in results.values() if r.usable and r.point.global_batch_size == 16]
    assert "no difference beyond noise" in found.verdict and "0.001 is not among them" in found.verdict
    assert min(finished) <= found.trial_rate <= max(finished) < START.learning_rate
    assert found.point.learning_rate == pytest.approx(found.trial_rate * 4**-0.32, rel=0.01)


def test_ranks_are_tried_where_there_are_any():
    results, _ = sweep(make_space(ranks=(8, 32)), World())
    assert {p.lora_rank for p in results} == {8, 16, 32}


def test_stopping_early_saves_tokens_and_not_the_best():
    space, world = make_space(), World(noise=0.0)
    with_stops, _ = sweep(space, world)
    without, _ = sweep(replace(space, patience=1e9), world)
    assert sum(r.tokens for r in with_stops.values()) < sum(r.tokens for r in without.values())
    assert answer(space, with_stops).trial_rate == pytest.approx(answer(replace(space, patience=1e9), without).trial_rate, rel=0.1)


def test_the_first_trial_is_the_one_nearest_to_the_runs_rate_and_runs_to_its_end():
    stage = next_stage(make_space(start=replace(START, learning_rate=2.5e-3)), {})
    assert stage.points[0].learning_rate == 3.16e-3 and stage.points[0] not in stage.leaders


def test_a_high_rate_is_given_the_time_that_its_falling_rate_needs():
    leader = Result(START, "finished", ((0.0, 7.0), (0.5, 3.6), (1.0, 3.0)), 3.0, 1, 0.0, 1.0)
    assert hopeless([(0.0, 7.0), (0.5, 4.1)], leader, 2.0) is None  # behind, but the fall of its rate is to come
    assert hopeless([(0.0, 7.0), (0.5, 4.3)], leader, 2.0) == 0.5
    assert hopeless([(0.0, 99.0), (1.0, 99.0)], leader, 2.0) is None  # only in mid-schedule
    assert hopeless([(0.5, 9.0)], replace(leader, status="diverged", loss=None), 2.0) is None


def test_a_leader_that_runs_beside_a_trial_stops_it_as_well():
    """From the middle on, for more than its pace would still bring it; before that, and within it, the trial goes on."""
    running = Result(START, "running", ((0.0, 7.0), (0.25, 5.0), (0.5, 4.0)), None, 0, 0.0, 0.0)
    assert hopeless([(0.0, 7.0), (0.25, 6.9), (0.5, 6.3)], running, 1.0) == 0.5  # its pace would still bring it 2.0
    assert hopeless([(0.0, 7.0), (0.25, 6.9), (0.5, 5.9)], running, 1.0) is None
    assert hopeless([(0.0, 7.0), (0.25, 6.9)], running, 1.0) is None
    assert hopeless([(0.0, 7.0), (0.5, 6.9)], replace(running, curve=running.curve[:2]), 1.0) is None  # the leader has not come so far


@settings(max_examples=30)
@given(st.floats(-4, 4), st.floats(0, 0.02))
def test_side_by_side_trials_lead_to_the_answer_of_one_after_the_other(shift, noise):
    """With room for all trials of a stage no leader is finished when they are judged, only as far as they are."""
    space, world = make_space(), World(1e-3 * math.exp(shift), noise=noise)
    one_by_one, beside = sweep(space, world)[0], sweep(space, world, beside=True)[0]
    assert replace(answer(space, beside), notes=()) == replace(answer(space, one_by_one), notes=())


def test_side_by_side_a_trial_far_behind_is_stopped():
    space, world = make_space(start=replace(START, learning_rate=1e-3)), World(noise=0.0, steep=60.0)
    results, _ = sweep(space, world, beside=True)
    stopped = [r for r in results.values() if r.status == "stopped" and r.point.learning_rate in space.rates]
    assert stopped and all(0.5 <= r.curve[-1][0] < 1 for r in stopped)


def test_results_are_files(tmp_path):
    folder, world = Folder(tmp_path), World(cliff=5e-3)
    results, _ = sweep(make_space(), world)
    for result in results.values():
        write_result(folder, result)
    assert read_results(folder) == results
    assert next(r["loss"] for r in rows(results.values())) == min(r.loss for r in results.values() if r.loss)


def test_time_counts_once_where_trials_overlap():
    trial = Result(START, "finished", (), 1.0, 1, 10.0, 20.0)
    assert elapsed([trial, replace(trial, begin=15.0, end=25.0), replace(trial, begin=40.0, end=41.0), replace(trial, begin=16.0, end=17.0)]) == 16.0


LEADER = Result(START, "running", ((0.0, 8.0), (0.25, 4.0), (0.5, 3.0), (0.75, 2.8)), None, 0, 0.0, 0.0)


@pytest.mark.parametrize(("share", "loss", "hopeless_at"), [
    (0.25, 1e6, None),  # in the first half a running leader says nothing of its end: its pace there would grant little or much
    (0.5, 3.0 + 2 * 2.0 + 0.01, 0.5),  # at its pace from 0.25 on (4 a schedule) it would gain 2 more by the end: twice that is granted
    (0.5, 3.0 + 2 * 2.0 - 0.01, None),
    (0.75, 2.8 + 2 * 0.2 + 0.01, 0.75),
    (0.75, 2.8 + 2 * 0.2 - 0.01, None),
])  # fmt: skip
def test_a_running_leader_judges_in_the_second_half_only(share, loss, hopeless_at):
    assert hopeless([(share, loss)], LEADER, patience=2.0) == hopeless_at
