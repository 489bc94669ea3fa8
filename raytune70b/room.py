"""Whether a group of workers fits into a Ray cluster, added up before it starts or grows. Pure numbers.

What else runs needs no CPU of its own: Ray Data's read tasks, the validation hook, the controller and the mailbox reserve none, so
a cluster with as many CPUs as workers trains. Only a submitted job's entrypoint may hold some (`--entrypoint-num-cpus`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Resources = Mapping[str, float]
"""Ray's: CPU and GPU among others."""

SLACK = 1e-6
"""Ray counts in ten-thousandths; sums of fractions are short by less."""


def fits(nodes: Iterable[Resources], worker: Resources) -> int:
    """How many workers the nodes have room for side by side; each runs on one node."""
    return sum(int(min(node.get(name, 0.0) / share for name, share in worker.items() if share > 0) + SLACK) for node in nodes)


def left(nodes: Mapping[str, Resources], taken: Mapping[str, Resources]) -> dict[str, dict[str, float]]:
    """The nodes' resources, by node id, less those that are taken on them."""
    return {node: {name: max(0.0, amount - taken.get(node, {}).get(name, 0.0)) for name, amount in has.items()} for node, has in nodes.items()}


def shortage(nodes: Sequence[Resources], taken: Resources, worker: Resources, least: int, free: bool = False) -> str | None:
    """What the cluster lacks for `least` workers, with the numbers that disagree; None where it lacks nothing.

    nodes: what is left for workers. taken: what the job's own entrypoint holds. free: others' work is taken off, too.
    """
    room = fits(nodes, worker)
    if room >= least:
        return None
    there = {name: sum(node.get(name, 0.0) for node in nodes) for name in worker}
    held = {name: taken[name] for name in worker if taken.get(name)}
    less = f" beside the {_named(held)} of this job's entrypoint" if held else ""
    wanted = {name: least * share for name, share in worker.items()}
    return f"{least} with {_named(worker)} each (cluster.cpus_per_worker) take {_named(wanted)}, the Ray cluster has {_named(there)}{' free' if free else less}, room for {room}"


def way_out(nodes: Sequence[Resources], worker: Resources, least: int, replicate: int = 1) -> str:
    """The settings that would make it fit. replicate: workers come in multiples of it."""
    room, share = fits(nodes, worker) // replicate * replicate, cpu_share(nodes, worker, least)
    ways = ([f"cluster.workers=[{room},{room}]"] if room else []) + ([f"cluster.cpus_per_worker={share:g}"] if share else [])
    return f"use {' or '.join(ways)}, or start Ray on more machines" if ways else "start Ray on more or larger machines"


def cpu_share(nodes: Sequence[Resources], worker: Resources, least: int) -> float:
    """The most CPUs a worker, in hundredths, with which `least` fit; 0 where CPUs are not what lacks."""
    shares = {int(100 * node.get("CPU", 0.0) / count + SLACK) / 100 for node in nodes for count in range(1, least + 1)}
    return max((share for share in shares if 0 < share < worker["CPU"] and fits(nodes, {**worker, "CPU": share}) >= least), default=0.0)


def _named(amounts: Resources) -> str:
    return " and ".join(f"{amounts[name]:g} {name}{'' if amounts[name] == 1 else 's'}" for name in ("CPU", "GPU") if name in amounts)
