"""Memory and time of the loss over a large vocabulary: full logits, chunks of several sizes, and torch's own chunked loss.

    python tests/benchmarks/chunked_loss.py [ROUNDS, default 2] [--small]

One loss with its gradients for 1,024 tokens of width 128 through a head of V = 131,072 entries, in fp32 on one core, each way in
a process of its own. Memory is the growth of the process's largest resident size, the gradients (68 MB) included; the time is
the best of ROUNDS; the difference is that of the gradient by the tokens from the full loss's, by its largest entry. Bar: chunks of
64 tokens take at most a fifth of the full logits' memory.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed import run

LARGE, SMALL = (1024, 128, 131072), (256, 32, 16384)
TORCH = -1
WAYS = {"full logits": 0, "chunks of 1,024": 1024, "chunks of 256": 256, "chunks of 64": 64, "torch's linear_cross_entropy, chunked": TORCH}
BAR = 0.2

Found = tuple[float, float, torch.Tensor]


def loss_of(chunk: int, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from raytune70b.model.loss import linear_cross_entropy

    if chunk == TORCH:
        return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=torch.nn.LinearCrossEntropyOptions())
    return linear_cross_entropy(hidden, weight, None, labels, chunk)


def measure(rank: int, world: int, chunk: int, size: tuple[int, int, int], rounds: int) -> Found:
    """(peak MB, seconds, gradient by the tokens)."""
    tokens, width, vocab = size
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width).requires_grad_(), torch.randn(vocab, width).mul_(0.05).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,))
    loss_of(chunk, hidden[:64], weight[:1024], labels[:64] % 1024).backward()  # thread pools and kernels
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(rounds):
        hidden.grad = weight.grad = None
        begin = time.perf_counter()
        loss_of(chunk, hidden, weight, labels).backward()
        times.append(time.perf_counter() - begin)
    assert hidden.grad is not None
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, min(times), hidden.grad


def main() -> int:
    rounds = next((int(a) for a in sys.argv[1:] if a.isdigit()), 2)
    size = SMALL if "--small" in sys.argv else LARGE
    found: dict[str, Found] = {}
    for way, chunk in WAYS.items():
        found[way] = run(measure, 1, chunk, size, rounds)[0]
        print(f"{way}: {found[way][0]:,.0f} MB, {found[way][1]:.1f} s", file=sys.stderr, flush=True)
    whole_mb, whole_s, exact = found["full logits"]
    print(f"{size[0]:,} tokens, width {size[1]}, vocabulary {size[2]:,}, fp32, one core, best of {rounds}\n")
    print("| loss | peak MB | of the full | seconds | of the full | gradient differs by |\n|---|---|---|---|---|---|")
    rows = {}
    for way, (mb, seconds, gradient) in found.items():
        error = ((gradient - exact).abs().max() / exact.abs().max()).item()
        rows[way] = {"mb": mb, "seconds": seconds, "error": error}
        print(f"| {way} | {mb:,.0f} | {mb / whole_mb:.0%} | {seconds:.2f} | {seconds / whole_s:.2f} | {error:.1e} |")
    share = found["chunks of 64"][0] / whole_mb
    print(json.dumps({"benchmark": "chunked_loss", "size": size, "rows": rows, "share": share}))
    return 0 if share <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
