import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytune70b.storage import Folder
from raytune70b.training.checkpoint import (
    CheckpointError,
    Cursor,
    cursor_bytes,
    folder_name,
    newest,
    parse_cursor,
    prune,
    read_cursor,
    read_manifest,
    saved_steps,
    scores,
    set_aside,
    superfluous,
    whole_checkpoints,
)
from tests.conftest import publish as publish_cursor
from tests.faults import s3

STEPS = st.lists(st.integers(1, 200), min_size=1, max_size=12, unique=True)


@given(STEPS, st.dictionaries(st.integers(1, 200), st.floats(0, 10)), st.integers(1, 4), st.integers(0, 3), st.integers(0, 30))
def test_retention(whole, losses, last, best, every):
    gone = superfluous(whole, losses, last, best, every)
    kept = sorted(set(whole) - set(gone))
    assert max(whole) in kept
    assert set(sorted(whole)[-last:]) <= set(kept)
    assert all(s in kept for s in whole if every and s % every == 0)
    measured = sorted((losses[s], -s) for s in whole if s in losses)[:best]
    assert {-step for _, step in measured} <= set(kept)
    others = [s for s in kept if s not in sorted(whole)[-last:] and not (every and s % every == 0)]
    assert len(others) <= best


def test_the_newest_checkpoint_stays_even_where_none_is_to_be_kept():
    assert superfluous([3, 1, 2], {}, 0, 0, 0) == [1, 2]
    assert superfluous([3, 1, 2], {1: 0.5}, 0, 1, 0) == [2]


def publish(checkpoints: Folder, step: int, loss: float | None = None) -> Folder:
    return publish_cursor(checkpoints, Cursor(step=step, validation_loss=loss))


def test_steps_sort_by_number(tmp_path):
    checkpoints = Folder(tmp_path)
    for step in (900, 1000, 99_999_999, 100_000_000):
        publish(checkpoints, step)
    assert saved_steps(checkpoints) == [900, 1000, 99_999_999, 100_000_000]
    assert newest(checkpoints).step == 100_000_000


def test_a_folder_without_a_valid_manifest_does_not_exist(tmp_path):
    checkpoints = Folder(tmp_path)
    publish(checkpoints, 1)
    publish(checkpoints, 2).delete("manifest.json")
    set_aside(publish(checkpoints, 3), "a bit is wrong")
    publish(checkpoints, 4).write("shard", b"short")
    assert list(whole_checkpoints(checkpoints)) == [1] and newest(checkpoints).step == 1
    with pytest.raises(CheckpointError, match="set aside: a bit is wrong"):
        read_manifest(checkpoints / folder_name(3))


@pytest.mark.parametrize(("old", "new"), [(b'"step": 2', b'"step": 9'), (b'"step"', b'"stop"'), (b"{", b"}")])
def test_a_cursor_with_wrong_bytes_is_not_believed(tmp_path, old, new):
    """Sizes are equal; what the driver decides by must not wait for the workers' checksums."""
    checkpoints = Folder(tmp_path)
    publish(checkpoints, 1)
    folder = publish(checkpoints, 2)
    folder.write("cursor.json", folder.read("cursor.json").replace(old, new, 1))
    assert newest(checkpoints).step == 1 and list(whole_checkpoints(checkpoints)) == [1]
    publish(checkpoints, 3)
    assert prune(checkpoints, {}, 1, 0, 0) == {3: None} and saved_steps(checkpoints) == [3]


def test_the_best_checkpoint_has_a_loss_that_is_a_number(tmp_path):
    checkpoints = Folder(tmp_path)
    for step, loss in ((1, 1.0), (2, math.nan), (3, None), (4, 2.0)):
        publish(checkpoints, step, loss)
    assert scores(whole_checkpoints(checkpoints)) == {1: 1.0, 4: 2.0}
    assert prune(checkpoints, {}, 1, 1, 0) == {1: 1.0, 4: 2.0} and saved_steps(checkpoints) == [1, 4]


def test_pruning_never_touches_what_is_newer_than_the_last_good_one(tmp_path):
    checkpoints = Folder(tmp_path)
    for step in (1, 2, 3, 4, 5):
        publish(checkpoints, step)
    (checkpoints / folder_name(2)).delete("manifest.json")
    (checkpoints / folder_name(5)).delete("manifest.json")  # a save in flight
    assert prune(checkpoints, {}, 1, 0, 0) == {4: None}
    assert saved_steps(checkpoints) == [4, 5]


def test_pruning_without_a_whole_checkpoint_removes_nothing(tmp_path):
    publish(Folder(tmp_path), 3).delete("manifest.json")
    assert prune(Folder(tmp_path), {}, 1, 0, 0) == {} and saved_steps(Folder(tmp_path)) == [3]


def test_a_cursor_survives_its_file(tmp_path):
    cursor = Cursor(step=7, recent_losses=[1.5, 0.1 + 0.2], fingerprint={"train.steps": None}, ledger="steps-1-7.parquet", kept=[(3, 2.5), (5, None)])
    Folder(tmp_path).write("cursor.json", cursor_bytes(cursor))
    assert read_cursor(Folder(tmp_path)) == cursor


def test_a_cursor_of_before_names_no_others(tmp_path):
    old = {key: value for key, value in json.loads(cursor_bytes(Cursor(step=7))).items() if key != "kept"}
    assert parse_cursor(json.dumps(old).encode()) == Cursor(step=7)


def many(checkpoints: Folder, steps: range) -> None:
    """Checkpoints that each name those before, as a run that keeps all of them leaves them."""
    for step in steps:
        publish_cursor(checkpoints, Cursor(step=step, validation_loss=1 / step, kept=[(s, 1 / s) for s in steps if s < step]))


def test_what_the_newest_one_names_is_believed_only_while_it_is_there(tmp_path):
    checkpoints = Folder(tmp_path)
    many(checkpoints, range(1, 7))
    (checkpoints / folder_name(2)).delete()
    publish(checkpoints, 0, 9.0)  # not named, for an older version wrote it
    publish(checkpoints, 7).delete("manifest.json")
    whole = {0: 9.0, **{s: 1 / s for s in (1, 3, 4, 5, 6)}}
    assert whole_checkpoints(checkpoints) == whole
    (checkpoints / folder_name(5)).write("shard", b"cut")
    assert prune(checkpoints, whole, 2, 1, 0) == {4: 0.25, 6: 1 / 6}, "the damaged one is no fallback"
    assert saved_steps(checkpoints) == [4, 6, 7]


@pytest.mark.parametrize("count", [3, 10])
def test_looking_and_pruning_take_few_calls_of_an_object_store(count):
    """However many checkpoints there are: tests/size has a thousand."""
    with s3.server():
        checkpoints = Folder(f"s3://{s3.BUCKET}/run/checkpoints")
        many(checkpoints, range(1, count + 1))
        assert s3.counted(lambda: newest(checkpoints)) <= 8
        assert s3.counted(lambda: whole_checkpoints(checkpoints)) <= 8
        known = whole_checkpoints(checkpoints)
        assert s3.counted(lambda: prune(checkpoints, known, count, 0, 0)) <= 14
        assert s3.counted(lambda: prune(checkpoints, known, count - 1, 0, 0)) <= 28, "one goes"
        assert saved_steps(checkpoints) == [*range(2, count + 1)]
