"""Saves and loads on plain gloo processes: any number of workers, damage, kills, full disks, memory."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from raytune70b.blocks.ledger import Entry, lineage
from raytune70b.config import compose
from raytune70b.schema import Checkpoint
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor, folder_name, newest, read_manifest, saved_steps, wrong_checksum
from tests.distributed import ChildFailed, run
from tests.model import common

KEEP_ALL = Checkpoint(keep_last=100, retries=1)


def tensors(value: float, rows: int = 13) -> dict:
    """A state of sharded tensors, unevenly split over two workers and more."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = torch.arange(rows * 7, dtype=torch.float32).reshape(rows, 7) + value
    return {"model": {"w": distribute_tensor(weight, mesh, [Shard(0)])}, "optimizer": {"w.exp_avg": distribute_tensor(-weight, mesh, [Shard(0)])}}


def saver(path: Path, settings: Checkpoint = KEEP_ALL, warnings: list | None = None):
    from raytune70b.training.saver import Saver

    return Saver(Folder(path), settings, dist.new_group(backend="gloo"), (warnings if warnings is not None else []).append)


def entry(step: int) -> Entry:
    return Entry(step, 0, [step], 1.0, 1.0, 1, 1, False)


def save(writer, step: int, state: dict, ledger: str | None = None, loss: float | None = None):
    writer.start(state, Cursor(step=step, ledger=ledger, validation_loss=loss), [entry(step)])
    writer.wait()
    return writer.take()


def digests(state: dict) -> dict[str, str]:
    return {f"{part}/{name}": hashlib.sha256(common.full(t).numpy().tobytes()).hexdigest()
            for part, named in state.items() for name, t in named.items()}  # fmt: skip


# --- any number of workers ------------------------------------------------------------------------------------------------


def model_state(seed: int, steps: int) -> dict:
    from raytune70b.training.state import state_dict

    config = compose([f"run.seed={seed}", "model.precision=fp32", "model.config.hidden_size=24", "model.config.intermediate_size=40",
                      "model.config.num_attention_heads=3", "model.config.num_key_value_heads=1", "model.loss_chunk_tokens=10"])  # fmt: skip
    model, optimizer = common.build(config)
    torch.manual_seed(0)
    ids = torch.randint(1, common.VOCAB, (4, 12))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": torch.arange(12).repeat(4, 1)}
    common.train(model, optimizer, config, [batch] * steps)
    return state_dict(model, optimizer)


def save_model(rank: int, world: int, path: Path) -> dict:
    state = model_state(1, steps=3)
    assert save(saver(path), 3, state).error is None
    return digests(state)


def load_model(rank: int, world: int, path: Path) -> tuple[dict, dict]:
    state, reader = model_state(2, steps=0), saver(path)
    before, cursor = digests(state), reader.choose()
    reader.load(state, cursor)
    return before, digests(state)


def test_one_two_three_and_five_workers_load_what_four_saved_bit_for_bit(tmp_path):
    saved = run(save_model, 4, tmp_path)[0]
    assert any("exp_avg_sq" in name for name in saved)
    for world in (1, 2, 3, 5):
        for before, after in run(load_model, world, tmp_path):
            assert after == saved
            assert before != saved


# --- damage ---------------------------------------------------------------------------------------------------------------


def save_three(rank: int, world: int, path: Path) -> list[int]:
    writer = saver(path)
    outcomes = [save(writer, step, tensors(100.0 * step)) for step in (1, 2, 3)]
    return [o.bytes for o in outcomes if o.error is None]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def shard(folder: Path) -> Path:
    return next(folder.glob("__1*.distcp"))


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def trap(folder: Path) -> None:
    """Puts a pickle that acts when it is read in the place of the checkpoint's pickled metadata, of the same length."""
    metadata = folder / ".metadata"
    metadata.write_bytes(pickle.dumps(Trap(folder.parents[1] / "sprung")).ljust(metadata.stat().st_size, b"\0"))


DAMAGE = {
    "bit flipped": (lambda f: flip(shard(f)), "checksum"),
    "truncated": (lambda f: os.truncate(shard(f), shard(f).stat().st_size // 2), "bytes, the manifest says"),
    "shard missing": (lambda f: shard(f).unlink(), "missing"),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "never published"),
    "manifest cut off": (lambda f: os.truncate(f / "manifest.json", 40), "damaged"),
    "emptied": (lambda f: [p.unlink() for p in f.iterdir()], "never published"),
    "cursor changed": (lambda f: flip(f / "cursor.json"), "checksum"),
    "metadata that acts when unpickled": (trap, "checksum"),
}


def choose_in_each(rank: int, world: int, path: Path, names: list[str]) -> dict:
    found = {}
    for name in names:
        warnings: list[str] = []
        reader, state = saver(path / name, warnings=warnings), tensors(0.0)
        cursor = reader.choose()
        reader.load(state, cursor)
        again = saver(path / name).choose()
        found[name] = (cursor.step, again.step, common.full(state["model"]["w"])[0, 0].item(), warnings)
    return found


def test_a_bad_checkpoint_is_set_aside_with_its_reason_and_the_one_before_is_used(tmp_path):
    run(save_three, 2, tmp_path / "whole")
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        damage(tmp_path / name / "checkpoints" / folder_name(3))
    leader, _ = run(choose_in_each, 2, tmp_path, list(DAMAGE))
    for name, (_, reason) in DAMAGE.items():
        step, again, value, warnings = leader[name]
        assert (step, again, value) == (2, 2, 200.0), name
        assert len(warnings) == 1 and "step 3" in warnings[0] and reason in warnings[0], (name, warnings)
        assert newest(Folder(tmp_path / name / "checkpoints")).step == 2
        assert not (tmp_path / name / "sprung").exists()


def test_every_worker_writes_its_shard_alone(tmp_path):
    def shards(folder: Path) -> list[int]:
        return [f.stat().st_size for f in folder.glob("*.distcp")]

    run(save_large, 2, tmp_path)
    sizes = shards(tmp_path / "checkpoints" / folder_name(1))
    assert len(sizes) == 2
    assert all(abs(size / (2 * 4096 * 7 * 4 / 2) - 1) < 0.05 for size in sizes), sizes


def save_large(rank: int, world: int, path: Path) -> None:
    assert save(saver(path), 1, tensors(1.0, rows=4096)).error is None


# --- while training goes on -----------------------------------------------------------------------------------------------


def change_while_saving(rank: int, world: int, path: Path) -> float:
    state, writer = tensors(1.0, rows=4096), saver(path)
    writer.start(state, Cursor(step=1), [])
    state["model"]["w"].to_local().add_(100)  # pytorch/pytorch#144657: 101.0 went into the file
    writer.wait()
    assert writer.take().error is None
    found = tensors(0.0, rows=4096)
    writer.load(found, writer.choose())
    return common.full(found["model"]["w"])[0, 0].item()


def test_a_step_during_a_save_does_not_reach_the_file(tmp_path):
    assert run(change_while_saving, 2, tmp_path) == [1.0, 1.0]


def save_thirty_times(rank: int, world: int, path: Path) -> list[int]:
    writer, rows, resident = saver(path, Checkpoint(keep_last=1)), 1 << 18, []
    state = tensors(1.0, rows)  # 7 MB each for weights and moments
    for step in range(1, 31):
        assert save(writer, step, state).error is None
        resident.append(psutil.Process().memory_info().rss)
    return resident


def slow_saves(rank: int, world: int, path: Path) -> tuple[tuple[float, float, float], ...]:
    found = []
    for asynchronous in (True, False):
        writer = saver(path / str(asynchronous), Checkpoint(asynchronous=asynchronous, retries=1))
        write = writer._write_shards
        writer._write_shards = lambda *a, write=write: (time.sleep(0.5), write(*a))[1]
        outcome = save(writer, 1, tensors(1.0))
        found.append((outcome.stall_s, outcome.seconds, outcome.total_s))
    return tuple(found)


def test_the_stall_of_a_synchronous_save_holds_its_writing(tmp_path):
    """The interval of `checkpoint.every: auto` follows the stall."""
    for (copied, written, total), (stall, seconds, whole) in run(slow_saves, 2, tmp_path):
        assert copied < written and written > 0.5 and total == copied + written
        assert stall == whole > seconds > 0.5


def test_memory_stays_flat_over_thirty_saves(tmp_path):
    """pytorch/pytorch#170163: it grew by the state with every save."""
    for resident in run(save_thirty_times, 2, tmp_path):
        assert resident[29] - resident[4] < 7 << 20, [r >> 20 for r in resident]
    assert saved_steps(Folder(tmp_path / "checkpoints")) == [30]


# --- kills ----------------------------------------------------------------------------------------------------------------


def save_until_killed(rank: int, world: int, path: Path, moment: float) -> None:
    """Saves on and on; both ranks are killed `moment` times the length of a save after the first one."""
    writer = saver(path, Checkpoint(keep_last=2, retries=0))
    cursor = writer.choose()
    step, ledger = (cursor.step, cursor.ledger) if cursor else (0, None)
    for number in range(step + 1, step + 10_000):
        outcome = save(writer, number, tensors(float(number), rows=1 << 14), ledger)
        if outcome.cursor is None:  # the other rank is dead already
            time.sleep(60)
        ledger = outcome.cursor.ledger
        if number == step + 1:
            threading.Timer(moment * outcome.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def test_a_kill_inside_a_save_leaves_a_whole_checkpoint(tmp_path):
    """SIGKILL at 20 random moments (Lightning-AI/pytorch-lightning#688); only saves are made, so every moment is inside one."""
    moments, checkpoints, unfinished = random.Random(5), Folder(tmp_path / "checkpoints"), 0
    for n in range(20):
        with pytest.raises(ChildFailed, match="died without a word"):
            run(save_until_killed, 1 + n % 2, tmp_path, moments.uniform(0.05, 3.0))
        steps = saved_steps(checkpoints)
        cursor = newest(checkpoints)
        unfinished += steps[-1] > cursor.step
        folder = checkpoints / folder_name(cursor.step)
        files = read_manifest(folder)["files"]
        assert wrong_checksum(folder, list(files), files) is None
        assert lineage(Folder(tmp_path / "ledger"), cursor.ledger)[0].column("step").to_pylist() == list(range(1, cursor.step + 1))
    assert newest(checkpoints).step >= 20
    assert unfinished >= 3, "the kills did not fall inside saves"


# --- storage --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk of 12 MB can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def save_on_a_full_disk(rank: int, world: int, path: Path) -> list:
    writer, filler, found = saver(path, Checkpoint(keep_last=2, retries=1)), path / "filler", []
    for step in range(1, 5):
        if step == 2 and rank == 0:
            filler.write_bytes(bytes(7 << 20))
        if step == 4 and rank == 0:
            filler.unlink()
        dist.barrier()
        outcome = save(writer, step, tensors(float(step), rows=1 << 16))  # 3.7 MB
        found.append((outcome.error, newest(Folder(path / "checkpoints")).step))
    return found


def test_a_full_disk_publishes_nothing_and_the_next_save_with_room_succeeds(small_disk):
    for first, full, still_full, room in run(save_on_a_full_disk, 2, small_disk):
        assert first == (None, 1)
        assert "No space left" in full[0] and full[1] == 1
        assert "No space left" in still_full[0] and still_full[1] == 1
        assert room == (None, 4)
    assert saved_steps(Folder(small_disk / "checkpoints")) == [1, 4]


def save_best(rank: int, world: int, path: Path) -> None:
    writer = saver(path, Checkpoint(keep_last=2, keep_best=1, keep_every=4))
    for step in range(1, 10):
        assert save(writer, step, tensors(1.0), loss=0.5 if step == 3 else 1.0 + step).error is None


def test_retention_keeps_the_last_the_best_and_every_nth(tmp_path):
    run(save_best, 2, tmp_path)
    assert saved_steps(Folder(tmp_path / "checkpoints")) == [3, 4, 8, 9]


def block_one_writer(rank: int, world: int, path: Path) -> list:
    """KempnerInstitute/KempnerForge#102: a writer that hangs in the middle."""
    writer, checkpoints = saver(path, Checkpoint(keep_last=1)), Folder(path / "checkpoints")
    assert save(writer, 1, tensors(1.0)).error is None
    if rank == 1:
        from raytune70b.training import shards

        write = shards._Hashing.write
        shards._Hashing.write = lambda self, data: (time.sleep(0.05), write(self, data))[1]
    begin = time.monotonic()
    writer.start(tensors(2.0), Cursor(step=2), [])
    stall, seen = time.monotonic() - begin, []
    while writer.busy:
        seen.append((newest(checkpoints).step, 1 in saved_steps(checkpoints)))
        time.sleep(0.1)
    return [stall, seen[: len(seen) // 2], newest(checkpoints).step]


def test_nothing_is_published_or_pruned_while_one_writer_is_blocked(tmp_path):
    for stall, during, after in run(block_one_writer, 2, tmp_path):
        assert stall < 0.9 and len(during) > 3
        assert set(during) == {(1, True)}
        assert after == 2


def one_that_cannot_read(rank: int, world: int, path: Path) -> None:
    """Worker 1 is on a machine where the run's storage is not mounted."""
    assert save(saver(path), 3, tensors(1.0)).error is None
    saver(path if rank != 1 else path / "not mounted").choose()


def test_a_checkpoint_that_one_worker_cannot_see_is_not_the_checkpoints_fault(tmp_path):
    with pytest.raises(ChildFailed, match=r"can be read by 1 of 2 workers, but not by worker 1 .* storage that all nodes share"):
        run(one_that_cannot_read, 2, tmp_path)
    assert newest(Folder(tmp_path / "checkpoints")).step == 3, "it is not set aside"


def writes_elsewhere(rank: int, world: int, path: Path) -> str | None:
    return save(saver(path if rank != 1 else path / "own disk"), 3, tensors(1.0)).error


def test_shards_that_lie_on_another_machines_disk_are_not_published(tmp_path):
    errors = run(writes_elsewhere, 2, tmp_path)
    assert errors[0] == errors[1] and "another worker has written it, but it is not seen here" in errors[0]
    assert newest(Folder(tmp_path / "checkpoints")) is None


def fails_behind_the_manifest(rank: int, world: int, path: Path) -> str | None:
    from raytune70b.training import saver as module

    def refuse(*_):
        raise TypeError("a cursor of another version")

    module.prune = refuse
    warnings: list[str] = []
    writer = saver(path, warnings=warnings)
    outcome = save(writer, 3, tensors(1.0))
    assert rank or warnings == ["old checkpoints could not be removed: TypeError: a cursor of another version"]
    writer._clear(Folder(path / "checkpoints") / folder_name(3))  # as when a worker dies before the outcome is told
    return outcome.error


def test_what_fails_behind_the_manifest_leaves_the_checkpoint(tmp_path):
    assert run(fails_behind_the_manifest, 2, tmp_path) == [None, None]
    assert newest(Folder(tmp_path / "checkpoints")).step == 3
