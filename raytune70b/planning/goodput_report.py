"""`jobs/plan.py simulate` for people: goodput under each rate of faults, with the run's own checkpoint interval and with `auto`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from raytune70b.config import main_with_clear_errors
from raytune70b.planning.plan import build_plan, planned_hours
from raytune70b.planning.report import SECTIONS, print_table
from raytune70b.planning.simulate import Fault, FaultRate, Outcome, own_rate, quantile, read_rates, read_trace, shares, simulate
from raytune70b.schema import Config

COLUMNS = ("faults", "MTBF, h", "save every", "faults", "goodput", "5 to 95 %", "fewer machines", "validation", "stalls", "work again", "recovery", "waiting")


def main(usage: str, arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--faults", metavar="NAME|TRACE.csv")
    parser.add_argument("--seeds", type=int, default=200)
    wrong = ""
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        wrong = str(error)
    else:
        unknown = [a for a in rest if a.startswith("-") and a not in ("-h", "--help")]
        if unknown:
            wrong = f"{unknown[0]}: unknown option; simulate takes --faults NAME|TRACE.csv, --seeds N and --help"
        elif options.seeds < 1:
            wrong = f"--seeds: is {options.seeds}; it takes a number from 1"
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    return main_with_clear_errors(usage, SECTIONS, lambda config: print_simulation(config, options.faults, options.seeds), rest)


def print_simulation(config: Config, faults: str | None, seeds: int) -> None:
    """The table for one rate or trace, or for all published rates and the configuration's own. Raises UserError."""
    machines, hours = config.hardware.nodes, planned_hours(build_plan(config).schedule)
    rows = []
    for name, rate in chosen(config, faults).items():
        for every in dict.fromkeys((config.checkpoint.every, "auto")):
            assumed = rate.mtbf_hours if isinstance(rate, FaultRate) and every == "auto" else config.cluster.mtbf_hours
            varied = replace(config, checkpoint=replace(config.checkpoint, every=every), cluster=replace(config.cluster, mtbf_hours=assumed))
            steps = build_plan(varied).checkpoint.every_steps
            rows.append(_row(name, rate, f"{steps:,} (auto)" if every == "auto" else f"{steps:,}", simulate(varied, rate, seeds)))
    print_table(f"{config.run.name}: {hours:,.1f} h on {machines} x {config.hardware.gpus_per_node} GPUs, {seeds} runs each" if hours else config.run.name, COLUMNS, rows, right=tuple(range(1, len(COLUMNS))))
    print("MTBF: of one machine; auto: checkpoint.every=auto with cluster.mtbf_hours at that figure; save every: steps; goodput: mean, and where 90 % of the runs lie")
    for name, rate in chosen(config, faults).items():
        print(f"{name}: {rate.source}" if isinstance(rate, FaultRate) else f"{name}: {len(rate)} faults of a trace, played once")


def chosen(config: Config, faults: str | None) -> dict[str, FaultRate | list[Fault]]:
    """The rates to play, by name. Raises UserError for a file that is no trace."""
    published = read_rates()
    if faults is None:
        return {"own": own_rate(config), **published}
    if faults in published:
        return {faults: published[faults]}
    return {Path(faults).name: read_trace(Path(faults), config.hardware.nodes)}


def _row(name: str, rate: FaultRate | list[Fault], every: str, outcomes: list[Outcome]) -> tuple[str, ...]:
    goodput, lost = [o.goodput for o in outcomes], shares(outcomes)
    met = sum(o.faults for o in outcomes) / len(outcomes)
    mtbf = f"{rate.mtbf_hours:,.0f}" if isinstance(rate, FaultRate) else "-"
    span = f"{quantile(goodput, 0.05):.1%} - {quantile(goodput, 0.95):.1%}" if len(outcomes) > 1 else "-"
    return (name, mtbf, every, f"{met:,.2f}", f"{sum(goodput) / len(goodput):.1%}", span, *(f"{lost[kind]:.2%}" for kind in COLUMNS[6:]))
