import json

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
    prune,
    read_cursor,
    read_manifest,
    saved_steps,
    set_aside,
    superfluous,
    whole_steps,
)

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


def publish(checkpoints: Folder, step: int, loss: float | None = None) -> Folder:
    folder = checkpoints / folder_name(step)
    folder.write("shard", b"x" * step)
    folder.write("cursor.json", cursor_bytes(Cursor(step=step, validation_loss=loss)))
    files = {name: (folder.size(name), folder.checksum(name)) for name in ("shard", "cursor.json")}
    folder.write("manifest.json", json.dumps({"step": step, "world_size": 1, "files": files}).encode())
    return folder


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
    assert whole_steps(checkpoints) == [1] and newest(checkpoints).step == 1
    with pytest.raises(CheckpointError, match="set aside: a bit is wrong"):
        read_manifest(checkpoints / folder_name(3))


def test_pruning_never_touches_what_is_newer_than_the_last_good_one(tmp_path):
    checkpoints = Folder(tmp_path)
    for step in (1, 2, 3, 4, 5):
        publish(checkpoints, step)
    (checkpoints / folder_name(2)).delete("manifest.json")
    (checkpoints / folder_name(5)).delete("manifest.json")  # a save in flight
    assert prune(checkpoints, 1, 0, 0) == [1, 2, 3]
    assert saved_steps(checkpoints) == [4, 5]


def test_pruning_without_a_whole_checkpoint_removes_nothing(tmp_path):
    publish(Folder(tmp_path), 3).delete("manifest.json")
    assert prune(Folder(tmp_path), 1, 0, 0) == [] and saved_steps(Folder(tmp_path)) == [3]


def test_a_cursor_survives_its_file(tmp_path):
    cursor = Cursor(step=7, recent_losses=[1.5, 0.1 + 0.2], fingerprint={"train.steps": None}, ledger="steps-1-7.parquet")
    Folder(tmp_path).write("cursor.json", cursor_bytes(cursor))
    assert read_cursor(Folder(tmp_path)) == cursor
