import pytest
import torch
import torch.distributed

from raytune70b.training.guards import Failure, gives_up

BUG = Failure(7, "ValueError: wrong", "step.py:10")
BROKEN = Failure(7, "RuntimeError: Connection closed by peer", "step.py:20")
DEATH = Failure(7, "The actor is dead", "")


@pytest.mark.parametrize(("failure", "patience"), [(BUG, 2), (BROKEN, 3), (DEATH, 5)])
def test_what_repeats_at_one_step_ends_the_run_sooner_or_later(failure, patience):
    assert not gives_up([failure] * (patience - 1))
    assert failure.error in gives_up([failure] * patience)


def test_progress_buys_patience():
    elsewhere = Failure(8, BUG.error, BUG.place)
    assert not gives_up([BUG, elsewhere, BUG])
    assert gives_up([elsewhere, BUG, BUG])


def test_two_bugs_at_one_step_are_not_one_that_repeats():
    other = Failure(7, "KeyError: 'x'", "step.py:30")
    assert not gives_up([BUG, other])
    assert not gives_up([BUG, other, BUG])


def test_broken_connections_of_all_kinds_at_one_step_count_together():
    assert gives_up([BROKEN, Failure(7, "RuntimeError: NCCL error", "loss.py:1"), Failure(7, "OSError: gone", "shards.py:5")])


def test_what_the_program_calls_final_is_final():
    assert gives_up([Failure(0, "UserError: 5 bad steps in a row", "worker.py:1", final=True)]) == "UserError: 5 bad steps in a row"


@pytest.mark.parametrize("error", [torch.AcceleratorError, torch.distributed.DistNetworkError, torch.distributed.DistBackendError, ConnectionResetError])
def test_what_machines_raise_is_known_by_its_own_name(error):
    """Two in a row may be one dying GPU; a bug would end the run."""
    failure = Failure(7, f"{error.__name__}: CUDA error", "step.py:20")
    assert not gives_up([failure] * 2) and gives_up([failure] * 3)
