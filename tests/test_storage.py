import errno
import pickle

import fsspec
import pytest

from raytune70b.storage import Folder, retried


@pytest.fixture(params=["local", "memory"])
def folder(request, tmp_path):
    if request.param == "local":
        return Folder(tmp_path / "a folder")
    fsspec.filesystem("memory").rm("/", recursive=True) if fsspec.filesystem("memory").ls("/") else None
    return Folder("memory://bucket/a")


def test_files_come_and_go(folder):
    assert folder.names() == [] and not folder.exists("x") and folder.size("x") is None
    folder.write("deep/er/x.bin", b"one")
    folder.write("deep/er/x.bin", b"three")
    folder.write("y.bin", b"")
    assert list(folder.files()) == [("deep/er/x.bin", 5), ("y.bin", 0)]
    assert folder.names() == ["deep", "y.bin"] and (folder / "deep").names() == ["er"]
    assert folder.read("deep/er/x.bin") == b"three" and folder.size("y.bin") == 0
    assert pickle.loads(pickle.dumps(folder)).read("deep/er/x.bin") == b"three"
    folder.delete("deep")
    folder.delete("absent")
    assert list(folder.files()) == [("y.bin", 0)]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    folder.write("x", b"old")

    def full(fd):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        folder.write("x", b"new")
    assert folder.read("x") == b"old" and folder.names() == ["x"]


def test_checksum_is_that_of_the_reference_library(tmp_path):
    import xxhash

    content = bytes(range(256)) * 50_000
    Folder(tmp_path).write("x", content)
    assert Folder(tmp_path).checksum("x") == xxhash.xxh3_128_hexdigest(content)


@pytest.mark.parametrize(
    ("errors", "calls"),
    [([OSError("busy")] * 2, 3), ([OSError("busy")] * 9, 4), ([FileNotFoundError(errno.ENOENT, "gone")], 1), ([OSError("CRC checksum verification failed")], 1)],
)
def test_only_what_may_pass_is_tried_again(errors, calls):
    tried = []

    def action():
        tried.append(1)
        if len(tried) <= len(errors):
            raise errors[len(tried) - 1]
        return "done"

    if calls == 3:
        assert retried(action, 3, 0.001) == "done"
    else:
        with pytest.raises(OSError):
            retried(action, 3, 0.001)
    assert len(tried) == calls
