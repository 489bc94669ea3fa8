"""The files that stages hand to each other, read and written piece by piece: Parquet by batches, Arrow by partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from raytune70b.storage import Folder

T = TypeVar("T")


class ParquetSink:
    """A Parquet file that is written batch by batch. It counts only once its unit's `KEY.json` is there (see `work`)."""

    def __init__(self, out: Folder, name: str, schema: pa.Schema):
        self.schema = schema
        self.stream = out.make().filesystem.open_output_stream(out.path(name))
        self.writer = pq.ParquetWriter(self.stream, schema, compression="zstd", compression_level=1)

    def __enter__(self) -> ParquetSink:
        return self

    def write(self, columns: Sequence[Any]) -> None:
        """One row group, from a list or array for each column."""
        arrays = [pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)]
        self.writer.write_table(pa.table(arrays, schema=self.schema))

    def __exit__(self, *_: Any) -> None:
        self.writer.close()
        self.stream.close()


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`."""
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def write_partitions(out: Folder, name: str, schema: pa.Schema, columns: Sequence[Sequence[Any]]) -> None:
    """An Arrow file with one record batch for each partition; `columns[p]` holds partition p's columns."""
    with out.make().filesystem.open_output_stream(out.path(name)) as stream, pa.ipc.new_file(stream, schema) as writer:
        for arrays in columns:
            writer.write_batch(pa.record_batch([pa.array(a, f.type) for a, f in zip(arrays, schema, strict=True)], schema=schema))


def read_partition(folder: Folder, name: str, partition: int) -> pa.RecordBatch:
    """One partition, without reading the others."""
    with folder.open(name) as source:
        return pa.ipc.open_file(source).get_batch(partition)
