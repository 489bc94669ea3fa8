"""Runs the benchmarks that a CPU allows, one after the other, and writes what they print into RESULTS.md.

usage: python tests/benchmarks/run_all.py [NAME ...]     (all: about an hour on 2 quiet cores; `--list` names them)

Each benchmark is also a program of its own and says in its docstring what it compares and what was promised. Only the text
between a benchmark's two markers is replaced in RESULTS.md, so the remarks around it, such as why a peer is ahead, stay. A
benchmark whose peer is not installed says so there.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
VERSIONS = ("torch", "ray", "transformers", "pyarrow", "mlflow")
LIMIT_S = 1800

BENCHMARKS = {
    "training_step": "Training step",
    "chunked_loss": "Loss in chunks of the vocabulary",
    "checkpoint_stall": "Checkpoint stall",
    "recovery": "Recovery",
    "watching": "Cost of watching",
    "startup": "Start-up of the jobs",
    "data_tokenise": "Tokenise and pack",
    "data_redact": "Redaction",
    "data_dedup": "Near duplicates",
    "data_pipeline": "The whole data pipeline",
    "data_read": "Reading token blocks back",
    "size_order": "Order, proof and dealing at full size",
    "size_first_batch": "The first batch at full size",
    "sweep_default": "The default's sweep",
    "sweep_vs_grid": "Sweep against grid",
    "generation_throughput": "Generation",
    "export_memory": "Export memory",
}
"""File name: title, in the order of RESULTS.md."""


def machine() -> str:
    """What the figures depend on, in one line."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else None
    import psutil

    cores, memory = psutil.cpu_count(), psutil.virtual_memory().total / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    return f"{date.today()}; {cores} cores ({model.group(1) if model else platform.machine()}), {memory:.0f} GiB; Python {platform.python_version()}, {packages}"


def run(name: str) -> str:
    """What a benchmark printed, with where and when; a failure's last lines where it failed."""
    begin = time.monotonic()
    try:
        done = subprocess.run([sys.executable, str(HERE / f"{name}.py")], capture_output=True, text=True, timeout=LIMIT_S)
        table = "\n".join(line for line in done.stdout.splitlines() if not line.startswith(("{", "[{", "Writing model shards"))).strip()  # "{": for programs
        printed = table if done.returncode == 0 else f"{table}\n\nexit code {done.returncode}: a bar is missed, or it failed\n{done.stderr.strip()[-1500:]}"
    except subprocess.TimeoutExpired:
        printed = f"not done within {LIMIT_S} s"
    return f"{machine()}; took {time.monotonic() - begin:.0f} s\n\n```\n{printed}\n```"


def put(text: str, name: str, content: str) -> str:
    """RESULTS.md with a benchmark's part replaced; a new one goes to the end."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    part = f"{begin}\n{content}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n## {BENCHMARKS[name]}\n\n{part}\n"
    return text[: text.index(begin)] + part + text[text.index(end) + len(end) :]


def main() -> None:
    names = sys.argv[1:] or list(BENCHMARKS)
    if "--list" in names:
        print("\n".join(f"{name:24}{title}" for name, title in BENCHMARKS.items()))
        return
    if unknown := [n for n in names if n not in BENCHMARKS]:
        sys.exit(f"{unknown[0]}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    for name in names:
        print(f"{name} ...", flush=True)
        content = run(name)
        RESULTS.write_text(put(RESULTS.read_text(), name, content))
        print(content, flush=True)


if __name__ == "__main__":
    main()
