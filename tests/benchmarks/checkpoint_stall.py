"""How long a save stops training: asynchronous against synchronous, in one run; and what each rank writes.

usage: python tests/benchmarks/checkpoint_stall.py [MB of state, default 512] [folder]

Promise: an asynchronous save stops training for at most a tenth of what a synchronous one does, and a rank writes its shard only.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import distributed

WORLD, PAIRS = 2, 5


def body(rank: int, world: int, folder: str, megabytes: int) -> list[tuple[float, float, int]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from raytune70b.schema import Checkpoint
    from raytune70b.storage import Folder
    from raytune70b.training.checkpoint import Cursor
    from raytune70b.training.saver import Saver

    mesh = init_device_mesh("cpu", (world,))
    layers = 32
    width = int((megabytes * 2**20 / 4 / 3 / layers) ** 0.5)
    state = {part: {f"{n}": distribute_tensor(torch.rand(width, width), mesh, [Shard(0)]) for n in range(layers)} for part in ("model", "exp_avg", "exp_avg_sq")}
    group, found, step = dist.new_group(backend="gloo"), [], 0
    savers = [Saver(Folder(folder), Checkpoint(asynchronous=a, keep_last=1), group, print) for a in (False, True)]
    for pair in range(PAIRS + 1):  # the first pair fills the host memory that later ones reuse
        stalls = []
        for saver in savers:
            step += 1
            dist.barrier()
            begin = time.perf_counter()
            saver.start(state, Cursor(step=step), [])
            stalls.append(time.perf_counter() - begin)
            saver.wait()
            outcome = saver.take()
            assert outcome.error is None, outcome.error
        mine = sum(f.stat().st_size for f in (Path(folder) / "checkpoints" / f"step-{step:08d}").glob(f"__{rank}_*.distcp"))
        if pair:
            found.append((*stalls, mine))
    return found


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    folder = tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None)
    try:
        ranks = distributed.run(body, WORLD, folder, megabytes, timeout_s=900)
    finally:
        shutil.rmtree(folder)
    whole = sum(rank[0][2] for rank in ranks)
    print(f"state {whole / 2**20:.0f} MB on {WORLD} workers, {PAIRS} pairs\n")
    print("| worker | synchronous, s | asynchronous, s | ratio (least to most) | of the bytes |\n|---|---|---|---|---|")
    for rank, pairs in enumerate(ranks):
        synchronous, asynchronous = (statistics.median(p[n] for p in pairs) for n in (0, 1))
        ratios = sorted(p[1] / p[0] for p in pairs)
        print(f"| {rank} | {synchronous:.3f} | {asynchronous:.3f} | {statistics.median(ratios):.1%} ({ratios[0]:.1%}-{ratios[-1]:.1%}) | {pairs[0][2] / whole:.1%} |")
    print(json.dumps({"state_mb": whole / 2**20, "pairs": ranks}))


if __name__ == "__main__":
    main()
