"""A thousand checkpoints on an object store: looking for one and retention cost as many calls as with ten."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import boto3
import pytest
import xxhash

from raytune70b.storage import Folder
from raytune70b.training.checkpoint import Cursor, cursor_bytes, folder_name, newest, prune, saved_steps, whole_checkpoints
from tests.faults import s3

pytestmark = pytest.mark.size
COUNT = 1000


def published(client, step: int) -> None:
    """A whole checkpoint of 4 shards, of the last step before which all are kept."""
    cursor = cursor_bytes(Cursor(step=step, validation_loss=1 / step, kept=[(s, 1 / s) for s in range(1, step)] if step == COUNT else []))
    files = {f"__{rank}_0.distcp": b"x" for rank in range(4)} | {"cursor.json": cursor}
    listed = {name: (len(content), xxhash.xxh3_128_hexdigest(content)) for name, content in files.items()}
    for name, content in {**files, "manifest.json": json.dumps({"step": step, "world_size": 4, "files": listed}).encode()}.items():
        client.put_object(Bucket=s3.BUCKET, Key=f"run/checkpoints/{folder_name(step)}/{name}", Body=content)


def test_retention_at_a_thousand_checkpoints():
    with s3.server():
        client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda step: published(client, step), range(1, COUNT + 1)))
        checkpoints = Folder(f"s3://{s3.BUCKET}/run/checkpoints")
        assert s3.counted(lambda: newest(checkpoints)) <= 8
        assert s3.counted(lambda: whole_checkpoints(checkpoints)) <= 8
        known = whole_checkpoints(checkpoints)
        assert list(known) == saved_steps(checkpoints) == list(range(1, COUNT + 1)) and newest(checkpoints).step == COUNT
        assert s3.counted(lambda: prune(checkpoints, known, 2, 1, 1)) <= 14, "none goes"
        assert s3.counted(lambda: prune(checkpoints, known, COUNT - 1, 0, 0)) <= 28, "one goes"
        assert saved_steps(checkpoints) == list(range(2, COUNT + 1))
