"""Finds the raw documents and reads them: JSON lines, Parquet, text, HTML, PDF and Word, by file, folder, glob or URI.

Promises: every row that is read is either a `Row` or a `Bad` one with its file, line and reason - never an exception,
never a silence. A file that storage does not give, after tries for about two minutes, ends the run with an `InputError`: its
rows are not bad. Lines end at `\\n` only, so U+2028 and its kind stay inside a row. A file is cut into shards of about
`shard_bytes` that can be read apart from each other: JSON lines by byte ranges (a shard owns the lines that start in its
range), Parquet by row groups; files that are one document each share a shard. Shards come in the order of their names,
whatever order the disk lists them in. Reading holds one line, or one batch of 256 rows, at a time; of a compressed file also
what 16 KiB unpack to.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
import zstandard

from data_pipelines.formats import READERS, FormatError, document_text
from data_pipelines.rows import NAMES, RowError, interpret
from raytune70b.config import UserError
from raytune70b.storage import CHUNK, Folder, retried

FORMATS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl.gz", ".jsonl.zst": "jsonl.zst", ".parquet": "parquet", ".txt": "txt",
           ".html": "html", ".htm": "html", ".pdf": "pdf", ".docx": "docx"}  # fmt: skip
"""Kinds by suffix; a name without a suffix is text too."""
SPLITTABLE = "jsonl"
BATCH_ROWS = 256
MARKERS = {"_SUCCESS", "_metadata", "_common_metadata"}
"""What Spark and its kind write beside the data."""
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)
"""What the readers of compressed files raise."""
COMPRESSED_CHUNK = 16 << 10
"""Compressed bytes that are unpacked at a time; they can grow a thousandfold."""
MAX_WINDOW = 2**31
"""Bytes that a zstandard file may look back: all that `zstd --long=31` writes."""
RAW_BYTES = 2000
"""Of a bad row, so much is kept in the quarantine."""


class InputError(UserError):
    """Inputs that are missing, empty or of no known kind."""


@dataclass(frozen=True)
class InputFile:
    """A file of raw documents; `label` names it in reports, without the machine's own folders."""

    folder: str
    name: str
    label: str
    format: str
    bytes: int
    changed_ns: int = 0

    @property
    def identity(self) -> str:
        """Equal for two names of the same file: through links on a local disk, and from inputs that overlap."""
        path = f"{self.folder}/{self.name}"
        return path if "://" in path else os.path.realpath(path)

    def open(self) -> BinaryIO:
        """A seekable file. Its reads are tried again after errors that may pass; they raise InputError."""
        return io.BufferedReader(_Source(self), 1 << 20)


class _Source(io.RawIOBase):
    """The bytes of a file; opened again where a read fails, as a connection may be broken for good."""

    def __init__(self, file: InputFile):
        super().__init__()
        self._file = file
        self._opened: Any = None
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.bytes}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        try:
            content = retried(lambda: self._read(len(buffer)))
        except OSError as error:
            raise InputError(f"data.inputs: {self._file.label} cannot be read ({error})") from error
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        try:
            if self._opened is None:
                self._opened = Folder(self._file.folder).open(self._file.name)
            self._opened.seek(self._position)
            return self._opened.read(size)
        except OSError:
            self._opened = None
            raise

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        super().close()


@dataclass(frozen=True)
class Scan:
    """What one pass over a file says: its checksum, and where it can be cut."""

    xxh3: str
    newlines: tuple[int, ...] = ()
    """JSON lines: newlines in each stretch of `shard_bytes`."""


@dataclass(frozen=True)
class Piece:
    """A part of a file: bytes [start, stop) of JSON lines, row groups [start, stop) of Parquet, else the whole file."""

    file: InputFile
    xxh3: str
    start: int = 0
    stop: int = 0
    first_line: int = 1
    """The line in which the range starts."""


@dataclass(frozen=True)
class Shard:
    """The unit of work and of resuming."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def content(self) -> list[Any]:
        """What the shard's rows depend on; neither the machine's folders nor dates."""
        return [(p.file.label, p.file.format, p.xxh3, p.start, p.stop, p.first_line) for p in self.pieces]


@dataclass(frozen=True)
class Row:
    """One document or conversation, with its place: line, or row number, from 1."""

    source: str
    line: int
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of a conversation; empty for a document."""


@dataclass(frozen=True)
class Bad:
    """A row that could not be read."""

    source: str
    line: int
    reason: str
    raw: bytes = b""
    rows: int = 1

    def to_json(self) -> str:
        values = {**asdict(self), "raw": self.raw[:RAW_BYTES].decode("utf-8", "backslashreplace")}
        return json.dumps(values, ensure_ascii=False)


def find_files(inputs: list[str]) -> tuple[list[InputFile], dict[str, int]]:
    """The files that the inputs name, each once, sorted by label; and how many others were passed over, by suffix. Raises InputError.

    In a glob `*` stays within a folder and `**` spans folders. Hidden files and the markers of Spark are passed over.
    """
    if not inputs:
        raise InputError("data.inputs: is empty; name files, folders, globs or URIs, or sample")
    unique: dict[str, InputFile] = {}
    for text in inputs:
        found = list(_files_of(text))
        if not found:
            why = " or matches nothing (* stays within a folder, ** spans folders)" if _is_glob(text) else ""
            raise InputError(f"data.inputs: {text} does not exist{why}")
        if not any(f.format for f in found):
            raise InputError(f"data.inputs: {text} holds no file of a known kind ({' '.join(FORMATS)})")
        for file in found:
            other = unique.get(file.identity, file)
            unique[file.identity] = min(file, other, key=lambda f: (not f.format, f.name.count("/"), f.label, f.folder))
    known = [f for f in unique.values() if f.format]
    if not any(f.bytes for f in known):
        raise InputError(f"data.inputs: {', '.join(inputs)}: nothing but empty files")
    others = Counter(_kind_left_out(f.name) for f in unique.values() if not f.format)
    return sorted(known, key=lambda f: (f.label, f.folder)), dict(others)


def _kind_left_out(name: str) -> str:
    last = name.rpartition("/")[2]
    return "hidden" if _is_hidden(name) else os.path.splitext(last)[1] or last


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _is_glob(text: str) -> bool:
    return any(c in text for c in "*?[")


def _files_of(text: str) -> Iterator[InputFile]:
    """Every file that one input names; those to pass over have an empty format."""
    parts = text.rstrip("/").split("/")
    fixed = next((n for n, part in enumerate(parts) if _is_glob(part)), len(parts))
    folder = Folder("/".join(parts[:fixed]) or ("/" if text.startswith("/") else "."))
    patterns = parts[fixed:]
    size = folder.size("") if not patterns else None
    if size is not None:
        parent = Folder(folder.uri.rpartition("/")[0] or "/")
        yield _input_file(parent, folder.name, folder.name, size)
        return
    for name, size in folder.files():
        if not patterns or _matches(name.split("/"), patterns):
            file = _input_file(folder, name, f"{folder.name}/{name}", size)
            passed_over = _is_hidden(name) or not MARKERS.isdisjoint(name.split("/"))
            yield replace(file, format="") if passed_over else file


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether the parts of a path match those of a glob."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[n:], patterns[1:]) for n in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


def _input_file(folder: Folder, name: str, label: str, size: int) -> InputFile:
    info = folder.filesystem.get_file_info(folder.path(name))
    kind = next((f for suffix, f in FORMATS.items() if name.lower().endswith(suffix)), "")
    if not kind and not re.search(r"\.[A-Za-z]\w*$", name):  # LICENSE, copyright, GPL-2.0
        kind = "txt"
    return InputFile(str(folder.local or folder.uri), name, label, kind, size, info.mtime_ns or 0)


def scan_files(files: list[InputFile], shard_bytes: int, known: dict[str, Scan]) -> dict[str, Scan]:
    """Reads every file once for checksums and newlines, eight at a time; files in `known` with equal size and date are not read."""

    def one(file: InputFile) -> Scan:
        return known.get(scan_key(file, shard_bytes)) or _scan(file, shard_bytes)

    with ThreadPoolExecutor(8) as pool:
        return {scan_key(f, shard_bytes): s for f, s in zip(files, pool.map(one, files), strict=True)}


def scan_key(file: InputFile, shard_bytes: int) -> str:
    return json.dumps([file.folder, file.name, file.bytes, file.changed_ns, shard_bytes])


def _scan(file: InputFile, shard_bytes: int) -> Scan:
    digest, newlines = xxhash.xxh3_128(), []
    with file.open() as source:
        for start in range(0, max(file.bytes, 1), shard_bytes):
            count = 0
            for offset in range(start, min(start + shard_bytes, file.bytes), CHUNK):
                piece = source.read(min(CHUNK, start + shard_bytes - offset))
                digest.update(piece)
                count += piece.count(b"\n")
            newlines.append(count)
    return Scan(digest.hexdigest(), tuple(newlines) if file.format == SPLITTABLE else ())


def plan_shards(files: list[InputFile], scans: dict[str, Scan], shard_bytes: int, columns: dict[str, str]) -> list[Shard]:
    """The shards of all files, in order. Raises InputError for a Parquet file that cannot be read or has no usable column."""
    groups: list[list[Piece]] = []
    small: list[Piece] = []
    for file in files:
        pieces = list(_pieces(file, scans[scan_key(file, shard_bytes)], shard_bytes, columns))
        if file.format in READERS:
            small += pieces
            if sum(p.file.bytes for p in small) >= shard_bytes or len(small) >= 1000:
                groups, small = [*groups, small], []
        else:
            groups += [[p] for p in pieces]
    groups += [small] if small else []
    return [Shard(n, tuple(group)) for n, group in enumerate(groups)]


def _pieces(file: InputFile, scan: Scan, shard_bytes: int, columns: dict[str, str]) -> Iterator[Piece]:
    if file.format == SPLITTABLE:
        line = 1
        for n, newlines in enumerate(scan.newlines):
            yield Piece(file, scan.xxh3, n * shard_bytes, min((n + 1) * shard_bytes, file.bytes), line)
            line += newlines
    elif file.format == "parquet":
        yield from _row_group_pieces(file, scan, shard_bytes, columns)
    else:
        yield Piece(file, scan.xxh3)


def _row_group_pieces(file: InputFile, scan: Scan, shard_bytes: int, columns: dict[str, str]) -> Iterator[Piece]:
    try:
        with file.open() as source:
            parquet = pq.ParquetFile(source)
            meta, names = parquet.metadata, parquet.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file.label}: not a readable Parquet file ({_first_line(error)})") from error
    if not _wanted(names, columns):
        raise InputError(f"{file.label}: its columns are {', '.join(names)}; none is a text, instruction or messages column - map them with data.columns")
    start, size, line = 0, 0, 1
    for group in range(meta.num_row_groups):
        size += meta.row_group(group).total_byte_size
        if size >= shard_bytes or group == meta.num_row_groups - 1:
            yield Piece(file, scan.xxh3, start, group + 1, line)
            line += sum(meta.row_group(g).num_rows for g in range(start, group + 1))
            start, size = group + 1, 0


def _wanted(names: list[str], columns: dict[str, str]) -> list[str]:
    known = {columns.get(k, k) for k in NAMES}
    return [n for n in names if n in known]


def read_shard(shard: Shard, columns: dict[str, str]) -> Iterator[Row | Bad]:
    """Every row of a shard, in order."""
    for piece in shard.pieces:
        if piece.file.format == "parquet":
            values = _parquet_rows(piece, columns)
        elif piece.file.format.startswith("jsonl"):
            values = _json_rows(piece)
        else:
            values = _whole_file(piece)
        for item in values:
            mapping = {} if piece.file.format in READERS else columns
            yield item if isinstance(item, Bad) else _interpreted(piece.file.label, *item, mapping)


def _interpreted(source: str, line: int, value: Any, raw: bytes, columns: dict[str, str]) -> Row | Bad:
    try:
        text, messages = interpret(value, columns)
    except RowError as error:
        return Bad(source, line, str(error), raw or repr(value).encode("utf-8", "backslashreplace"))
    return Row(source, line, text, messages)


Parsed = tuple[int, Any, bytes]
"""Line or row number, value, raw bytes."""


def _json_rows(piece: Piece) -> Iterator[Parsed | Bad]:
    number = piece.first_line - 1
    try:
        for number, raw in _numbered_lines(piece):
            if not raw.strip():
                continue
            try:
                yield number, json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8")), raw
            except UnicodeDecodeError as error:
                yield Bad(piece.file.label, number, f"not UTF-8 at byte {error.start}", raw)
            except (ValueError, RecursionError) as error:
                reason = f"not JSON: {error.msg}" if isinstance(error, json.JSONDecodeError) else f"not JSON: {type(error).__name__}"
                yield Bad(piece.file.label, number, reason, raw)
    except DAMAGED as error:
        if piece.file.format == SPLITTABLE:
            raise
        reason = f"compressed data damaged, the file ends early and all rows from {number + 1} on are missing"
        yield Bad(piece.file.label, number + 1, f"{reason}: {error}")


def _numbered_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of every line that starts in the piece's range."""
    with piece.file.open() as source:
        if piece.file.format == SPLITTABLE:
            yield from _lines_in_range(source, piece)
            return
        opened = gzip.GzipFile(fileobj=source) if piece.file.format == "jsonl.gz" else io.BufferedReader(_Unpacked(source))
        with opened as stream:
            yield from enumerate(stream, 1)


class _Unpacked(io.RawIOBase):
    """The content of a zstandard file, of any number of frames. Raises EOFError where one is cut off; the library's reader does not."""

    def __init__(self, source: BinaryIO):
        super().__init__()
        self._chunks = _unpacked_chunks(source)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _unpacked_chunks(source: BinaryIO) -> Iterator[bytes]:
    frame = None
    while piece := source.read(COMPRESSED_CHUNK):
        while piece:
            if frame is None or frame.eof:
                frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj()
            if content := frame.decompress(piece):
                yield content
            piece = frame.unused_data
    if frame is not None and not frame.eof:
        raise EOFError("the last zstandard frame is cut off")


def _lines_in_range(source: BinaryIO, piece: Piece) -> Iterator[tuple[int, bytes]]:
    number, position = piece.first_line, piece.start
    source.seek(max(position - 1, 0))
    if position > 0:
        skipped = source.readline()  # the rest of a line that an earlier piece owns; only "\n" where a line starts here
        number, position = number + (len(skipped) > 1), position - 1 + len(skipped)
    while position < piece.stop and (line := source.readline()):
        yield number, line
        number, position = number + 1, position + len(line)


def _parquet_rows(piece: Piece, columns: dict[str, str]) -> Iterator[Parsed | Bad]:
    number = piece.first_line
    with piece.file.open() as source:
        parquet = pq.ParquetFile(source)
        wanted = _wanted(parquet.schema_arrow.names, columns)
        for group in range(piece.start, piece.stop):
            first, rows = number, parquet.metadata.row_group(group).num_rows
            try:
                for batch in parquet.iter_batches(BATCH_ROWS, [group], wanted):
                    for value in _values(batch):
                        yield Bad(piece.file.label, number, *value) if isinstance(value, tuple) else (number, value, b"")
                        number += 1
            except (pa.ArrowException, OSError) as error:
                yield Bad(piece.file.label, number, f"unreadable row group {group}: {_first_line(error)}", rows=rows - (number - first))
            number = first + rows


def _values(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | tuple[str, bytes]]:
    """The rows of a batch; of one that Python cannot hold, the reason and the bytes that it fails on."""
    unusable = (ValueError, OverflowError)  # text that is not UTF-8, dates beyond the year 9999
    try:
        yield from batch.to_pylist()
        return
    except unusable:
        pass
    for n in range(batch.num_rows):
        try:
            yield batch.slice(n, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield f"not UTF-8 at byte {error.start}", error.object
        except unusable as error:
            yield f"unreadable value: {_first_line(error)}", b""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _whole_file(piece: Piece) -> Iterator[Parsed | Bad]:
    with piece.file.open() as source:
        content = source.read()
    try:
        yield 1, {"text": document_text(piece.file.format, content)}, content
    except FormatError as error:
        yield Bad(piece.file.label, 1, str(error), content)
