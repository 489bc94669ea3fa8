"""What can go wrong around an export: each ends in one clear line, and nothing half-made is ever published."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from raytune70b.config import UserError, main_with_clear_errors
from raytune70b.export import publish, stream
from raytune70b.export.job import export_run
from raytune70b.export.publish import DiskFull
from raytune70b.export.verify import VerifyError
from raytune70b.runs import run_arguments
from raytune70b.storage import Folder
from tests import distributed
from tests.export.run_folders import VOCAB, run_config, write_data, write_runs
from tests.reference import write_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two runs: `full` from random weights, `lora` on a base."""
    root = tmp_path_factory.mktemp("faults")
    write_data(root / "data")
    base = write_model(root / "base", "llama", VOCAB)
    torch.set_num_threads(1)
    distributed.run(write_runs, 2, [config(root, "full"), config(root, "lora", f"model.path={base}", "model.method=lora")])
    return root


def config(root: Path, name: str, *overrides: str):
    return run_config(root, name, "model.precision=fp32", "export.dtype=fp32", *overrides)


def job(*arguments: str, capsys) -> tuple[int, str]:
    """Exit code and error line of the job with the given arguments."""
    code = main_with_clear_errors("", (), lambda c: export_run(c) and 0, list(arguments), expand=run_arguments)
    return code, capsys.readouterr().err.strip()


def test_no_run_folder(root, capsys):
    code, line = job(str(root / "runs" / "nothing"), capsys=capsys)
    assert code == 2 and "no such run folder" in line and "\n" not in line


def test_folder_that_is_no_run(root, capsys):
    code, line = job(str(root / "data"), capsys=capsys)
    assert code == 2 and "is not a run folder" in line


def test_run_without_checkpoint(root, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_bytes((root / "runs/full/config.yaml").read_bytes())
    code, line = job(str(tmp_path / "empty"), capsys=capsys)
    assert code == 2 and "has no checkpoint" in line and "jobs/finetune.py" in line


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_run_that_insists_on_flash_attention_is_exported_on_a_cpu(root, tmp_path, name):
    extra = [f"model.path={root / 'base'}", "model.method=lora"] if name == "lora" else []
    exported = export_run(config(root, name, *extra, "model.attention=flash_attention_2", f"export.path={tmp_path / 'out'}", "export.register="))
    assert exported.facts["checks"]["logit_error"] is not None


def test_step_that_does_not_exist(root, capsys):
    code, line = job(str(root / "runs/full"), "export.checkpoint=9", capsys=capsys)
    assert code == 2 and "step 9" in line and "[7]" in line


def test_wrong_base_of_the_same_shape_is_noticed(root, tmp_path):
    """Other weights of the same shapes load without an error; only the fingerprint tells."""
    other = write_model(tmp_path / "other", "llama", VOCAB, seed=1)
    with pytest.raises(UserError, match="is not the base that the run was started with"):
        export_run(config(root, "lora", f"model.path={other}", "model.method=lora", f"export.path={tmp_path / 'out'}"))
    assert not (tmp_path / "out").exists()


def test_missing_base(root, tmp_path):
    with pytest.raises(UserError, match="holds no config"):
        export_run(config(root, "lora", f"model.path={tmp_path / 'gone'}", "model.method=lora", f"export.path={tmp_path / 'out'}"))


def test_another_data_set(root, tmp_path):
    data = write_data(tmp_path / "data")
    data.write("manifest.json", data.read("manifest.json").replace(b'"read": 14', b'"read": 15'))
    with pytest.raises(UserError, match="is not the data set"):
        export_run(dataclasses.replace(config(root, "full"), data=dataclasses.replace(config(root, "full").data, path=str(tmp_path / "data"))))


def test_flipped_bit_in_a_shard(root, tmp_path):
    import shutil

    run = shutil.copytree(root / "runs/full", tmp_path / "full")
    shard = next(run.glob("checkpoints/*/__0_0.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 64
    shard.write_bytes(content)
    with pytest.raises(UserError, match="checksum"):
        export_run(run_config(root, "full", f"run.path={tmp_path}", "model.precision=fp32"))


def test_disk_too_small_is_said_before_a_byte_is_written(root, tmp_path, monkeypatch):
    monkeypatch.setattr(publish.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(DiskFull, match="free, the export needs"):
        export_run(config(root, "full", f"export.path={tmp_path / 'out'}"))
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_in_the_middle(root, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stream.os, "fsync", full)
    with pytest.raises(DiskFull, match="no space left"):
        export_run(config(root, "full", f"export.path={tmp_path / 'out'}"))
    assert list(tmp_path.iterdir()) == []


def test_wrong_weight_fails_the_check_and_publishes_nothing(root, tmp_path, monkeypatch):
    from raytune70b.export import tensors

    honest = tensors.Checkpoint._chunk
    monkeypatch.setattr(tensors.Checkpoint, "_chunk", lambda self, key, offsets: honest(self, key, offsets) * (1.01 if "down_proj" in key else 1.0))
    with pytest.raises(VerifyError, match="logits of the export differ"):
        export_run(config(root, "full", f"export.path={tmp_path / 'out'}"))
    assert list(tmp_path.iterdir()) == []


def test_target_in_the_way(root, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    for overwrite in ("false", "true"):
        with pytest.raises(UserError, match="is there already"):
            export_run(config(root, "full", f"export.path={tmp_path / 'out'}", f"export.overwrite={overwrite}"))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_overwrite_replaces_a_model(root, tmp_path):
    settings = config(root, "full", f"export.path={tmp_path / 'out'}", "export.overwrite=true", "export.verify_logits=false")
    export_run(settings)
    (tmp_path / "out" / "stale.safetensors").write_bytes(b"")
    export_run(settings)
    assert not (tmp_path / "out" / "stale.safetensors").exists() and (tmp_path / "out" / "config.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_object_store_gets_the_same_files(root, tmp_path):
    local = export_run(config(root, "full", f"export.path={tmp_path / 'out'}")).folder
    remote = export_run(config(root, "full", "export.path=memory://bucket/models/out")).folder
    assert {n for n, _ in remote.files()} == {n for n, _ in local.files()}
    assert remote.checksum("model.safetensors") == local.checksum("model.safetensors")


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_killed_export_publishes_nothing(root, tmp_path, delay):
    """Killed while it writes: its place stays empty, and the next export removes what it left."""
    code = (
        "import sys, time; from raytune70b.export import stream, job; from tests.export.test_faults import config; from pathlib import Path\n"
        "honest = stream._write_file\n"
        "def slow(path, tensors):\n    print('writing', flush=True); result = honest(path, tensors); time.sleep(30); return result\n"
        "stream._write_file = slow\n"
        f"job.export_run(config(Path({str(root)!r}), 'full', 'export.path={tmp_path / 'out'}'))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None and child.stdout.readline() == b"writing\n"
    time.sleep(delay)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert [p.name for p in tmp_path.iterdir()] == [".out.partial"]
    exported = export_run(config(root, "full", f"export.path={tmp_path / 'out'}", "export.verify_logits=false"))
    assert exported.folder.exists("config.json") and [p.name for p in tmp_path.iterdir()] == ["out"]


def test_best_checkpoint_is_the_one_of_lowest_validation_loss(root, tmp_path):
    from raytune70b.export.source import choose_checkpoint

    assert choose_checkpoint(Folder(root / "runs/full"), "best").name == "step-00000007"
