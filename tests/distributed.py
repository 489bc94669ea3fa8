"""Runs a function on N gloo processes of this machine, as a distributed test needs it.

The processes fork from a server that has imported torch, transformers and the model package once, so a call costs about a second. The body is
a top-level function of the test module (it travels by name) with signature `body(rank, world_size, *args)`; its arguments
and results are pickled by value (multiprocessing would share tensors by file descriptors that end with the child).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.checkpoint", "bitsandbytes", "transformers.models.llama.modeling_llama", "raytune70b.model.load"]
)


class ChildFailed(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


def run(body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """The results of `body(rank, world_size, *args)` on every rank, in rank order.

    Raises ChildFailed with the first failing rank's traceback; the other ranks are then ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        children = [
            _context.Process(target=_child, args=(body, rank, world_size, f"{folder}/store", pipes[rank][1], pickle.dumps(args)), daemon=True)
            for rank in range(world_size)
        ]
        for child in children:
            child.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return _collect([ours for ours, _ in pipes], timeout_s)
        finally:
            for child in children:
                child.join(timeout=5 if child.exitcode is None else 0)
                if child.is_alive():
                    child.kill()
                    child.join()


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        pending = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ChildFailed(f"ranks {sorted(set(range(len(pipes))) - set(results))} gave no result in {timeout_s:.0f} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                raise ChildFailed(f"rank {rank} died without a word") from None
            if not succeeded:
                raise ChildFailed(f"rank {rank} of {len(pipes)}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _child(body: Callable[..., Any], rank: int, world_size: int, store: str, pipe: Connection, args: bytes) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
        result = body(rank, world_size, *pickle.loads(args))
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException:  # DCP's CheckpointException is one
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
