"""TensorBoard and Weights & Biases, offline, read back from the files they wrote."""

import importlib.util
import json
import struct
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from raytune70b.config import ConfigError, compose
from raytune70b.storage import Folder
from raytune70b.tracking.boards import boards
from tests.tracking.run_of_records import Story


def launches(tmp_path, *settings):
    """Two launches of one run, the first killed, with a replayed step and a resize; returns what trackers told."""
    config = compose([f"run.path={tmp_path}", "tracking.mlflow=null", *settings])
    run, told = (Folder(tmp_path) / "r").make(), []
    story = Story().start().group(4, 0).steps(1, 7).validation(5).group_end("killed").group(2, 5).steps(6, 8)
    for board in boards(config, run, [], told.append):
        for record in story.records:
            board.put(record)
        board.close("stopped", 120)
    done = list(story.records)
    story.start().group(2, 5).steps(6, 12)
    for board in boards(config, run, done, told.append):
        for record in story.records[len(done) :]:
            board.put(record)
        board.close("finished", 120)
    return run, told


def tensorboard_scalars(folder: Path):
    """(tag, step, value) of every event, from the record format of TFRecord: length, crc, data, crc."""
    found = []
    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_shows_each_step_once_over_launches(tmp_path):
    run, told = launches(tmp_path, "tracking.tensorboard=true")
    scalars = tensorboard_scalars(run.local / "tensorboard")
    assert [step for tag, step, _ in scalars if tag == "train/loss"] == list(range(1, 13)) and told == []
    assert [step for tag, step, _ in scalars if tag == "validation/loss"] == [5]


def wandb_records(file: Path):
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; crc, length, type of each fragment) after 7 bytes of head."""
    data, position, parts = file.read_bytes(), 7, []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield b"".join(parts)
            parts = []


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline_is_one_run_with_each_step_once(tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    run, told = launches(tmp_path, "tracking.wandb=offline")
    ids, rows = set(), []
    for file in sorted((run.local / "wandb").glob("offline-run-*/run-*.wandb")):
        ids.add(file.stem)
        for data in wandb_records(file):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    assert told == [] and len(ids) == 1
    assert [row["train/step"] for row in rows if "train/loss" in row] == list(range(1, 13))


def test_a_missing_package_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tracking.wandb: is offline, but the package wandb is not installed"):
        boards(compose(["tracking.wandb=offline"]), Folder(tmp_path), [], print)
