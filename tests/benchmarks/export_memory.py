"""Peak memory of exporting a checkpoint of at least 1 GB, against its largest tensor.

usage: python tests/benchmarks/export_memory.py [FOLDER]

Writes a checkpoint of a 256-million-parameter model (1.0 GB in fp32) as two workers would have, then exports its weights to
bf16 and to fp32 in fresh processes and prints each one's peak resident memory above what it had before the export began.
The promise is: less than twice the largest tensor, plus a constant that does not grow with the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

SHAPE = "{model_type: llama, hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 11, num_attention_heads: 16, num_key_value_heads: 4, tie_word_embeddings: false, max_position_embeddings: 512}"
VOCAB = 40_000
CHILD = """
import json, resource, sys, threading, time
import torch
from raytune70b.config import compose
from raytune70b.export.merge import Rounding
from raytune70b.export.stream import write_safetensors
from raytune70b.export.tensors import Checkpoint
from raytune70b.export.weights import Wanted, full_tensors, meta_model
from raytune70b.storage import Folder
from pathlib import Path

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
config = compose(json.loads(sys.argv[1]))
model = meta_model(config, int(sys.argv[2]))
tensors = full_tensors(model, Checkpoint(Folder(sys.argv[3])), Wanted(getattr(torch, sys.argv[4]), "trained"))
largest = max(t.elements * 4 for t in tensors.values())
before, peak, over = rss(), [0], threading.Event()

def watch():
    while not over.is_set():
        peak[0] = max(peak[0], rss())
        time.sleep(0.002)

thread = threading.Thread(target=watch); thread.start()
begin = time.process_time()
out = Path(sys.argv[5]); out.mkdir()
written = write_safetensors(out, tensors, 5 * 10**9)
over.set(); thread.join()
print(json.dumps({"bytes": written.bytes, "largest": largest, "before": before, "peak": peak[0] - before, "cpu_s": time.process_time() - begin}))
"""


def arguments() -> list[str]:
    return [f"model.config={SHAPE}", "model.precision=fp32"]


def write_checkpoint(rank: int, world_size: int, folder: str) -> int:
    """One worker's part of the checkpoint: as `raytune70b.training.saver` writes it, without optimizer states."""
    import torch
    import torch.distributed.checkpoint as dcp

    from raytune70b.config import compose
    from raytune70b.model.load import build_model
    from raytune70b.model.shard import make_mesh
    from raytune70b.storage import Folder
    from raytune70b.training.shards import ShardWriter
    from raytune70b.training.state import model_state

    model = build_model(compose(arguments()), VOCAB, make_mesh(world_size, 1, "cpu"), torch.device("cpu"))
    dcp.save({"model": model_state(model)}, storage_writer=ShardWriter(Folder(folder).make()))
    return sum(p.numel() for p in model.parameters())


def main() -> None:
    from tests import distributed

    rows = []
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as root:
        for workers in (2, 1):
            checkpoint = f"{root}/checkpoint-{workers}"
            parameters = distributed.run(write_checkpoint, workers, checkpoint, timeout_s=600)[0]
            size = sum(p.stat().st_size for p in Path(checkpoint).iterdir())
            print(f"checkpoint of {workers} workers: {parameters / 1e6:.0f} M parameters, {size / 1e9:.2f} GB")
            for dtype in ("bfloat16", "float32"):
                command = [sys.executable, "-c", CHILD, json.dumps(arguments()), str(VOCAB), checkpoint, dtype, f"{root}/{workers}-{dtype}"]
                result = json.loads(subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()[-1])
                rows.append({"workers": workers, "dtype": dtype, **result})
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    print("\n| written by | to | GB | CPU s | peak MB | largest tensor MB | peak / largest |\n|---|---|---|---|---|---|---|")
    for r in rows:
        print(f"| {r['workers']} workers | {r['dtype']} | {r['bytes'] / 1e9:.2f} | {r['cpu_s']:.1f} | {r['peak'] / 1e6:.0f} | {r['largest'] / 1e6:.0f} | {r['peak'] / r['largest']:.2f} |")
    worst = max(r["peak"] / r["largest"] for r in rows)
    print("\npeak: resident memory above what the process held before it wrote; the promise: less than twice the largest tensor, plus a constant")
    print(json.dumps({"benchmark": "export_memory", "peak_by_largest_tensor": worst, "peak_mb": max(r["peak"] for r in rows) / 1e6, "holds": worst < 2}))


if __name__ == "__main__":
    main()
