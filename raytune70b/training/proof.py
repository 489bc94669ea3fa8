"""The proof that a run lost nothing: its ledger, its checkpoints' bytes and its journal, compared with the order of its data.

Reads every file of every checkpoint and the journal once; needs no Ray, no torch and no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytune70b.blocks.ledger import Proof, verify
from raytune70b.blocks.manifest import read_manifest as read_data_manifest
from raytune70b.blocks.order import Order
from raytune70b.blocks.stream import row_groups
from raytune70b.config import UserError, get
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.tracking.journal import lineage, read_journal
from raytune70b.training.checkpoint import CheckpointError, folder_name, newest, read_manifest, saved_steps, wrong_checksum

MOST_SHOWN = 100
"""Faults that are printed: with another order every step is one."""


@dataclass
class Verdict:
    """What was looked at, and what was wrong."""

    ledger: Proof
    checkpoints: list[int]
    """Steps whose checkpoint is whole, every byte read."""
    journal_steps: int
    faults: list[str]
    unrecorded: int = 0
    """Committed steps that the journal lacks: the driver was killed before it wrote them down. The ledger holds them."""

    def lines(self) -> list[str]:
        """The proof for people."""
        worlds = ", ".join(f"{count} with {world}" for world, count in sorted(self.ledger.world_sizes.items()))
        return [
            f"ledger       steps 1 to {self.ledger.steps} in {self.ledger.segments} segments, each named by the hash of its bytes; {self.ledger.abandoned} of steps trained again",
            f"blocks       {self.ledger.blocks} in {self.ledger.epochs} epoch{'s' if self.ledger.epochs != 1 else ''}, each step those of the order",
            f"workers      {worlds or 'none'}",
            f"skipped      {len(self.ledger.skipped)} steps" + (f": {self.ledger.skipped[:20]}" if self.ledger.skipped else ""),
            f"checkpoints  {', '.join(map(str, self.checkpoints)) or 'none'}: every checksum right",
            f"journal      {self.journal_steps} steps, each once" + (f"; {self.unrecorded} more are in the ledger alone, for the driver was killed" if self.unrecorded else ""),
            *(f"FAULT        {fault}" for fault in self.faults[:MOST_SHOWN]),
            *([f"             and {len(self.faults) - MOST_SHOWN} more"] if len(self.faults) > MOST_SHOWN else []),
            "no gap, no repeat, no bad file" if not self.faults else f"{len(self.faults)} faults",
        ]


def prove(run: Folder, data: Folder) -> Verdict:
    """Compares a run with the data that it was to train on. Raises UserError where the run has no checkpoint yet or the data is another."""
    cursor = newest(run / "checkpoints")
    if cursor is None:
        raise UserError(f"{run.uri}: has no checkpoint, so nothing is committed that could be verified; check run.path and run.name")
    manifest = read_data_manifest(data)
    if manifest.digest != cursor.data:
        raise UserError(f"data.path: {data.uri} has digest {manifest.digest}, the run was trained on {cursor.data}; give the run's own data set")
    window, batch = (cursor.fingerprint[key] for key in ("data.shuffle_window", "train.global_batch_size"))
    order = Order(row_groups(manifest, "train"), cursor.seed, window, batch)
    ledger = verify(run / "ledger", cursor.ledger, order)
    whole, faults = judged_checkpoints(run / "checkpoints")
    if ledger.steps != cursor.step:
        faults.append(f"the newest checkpoint is of step {cursor.step}, the ledger leads to {ledger.steps}")
    losses = journal_losses(run)
    lacking = [step for step in range(1, max([ledger.steps, *losses]) + 1) if step not in losses]
    faults = [*ledger.faults, *faults, *(f"the journal lacks step {step}" for step in lacking if step > ledger.steps), *compare_losses(ledger.losses, losses)]
    return Verdict(ledger, whole, len(losses), faults, sum(step <= ledger.steps for step in lacking))


def judged_checkpoints(checkpoints: Folder) -> tuple[list[int], list[str]]:
    """(steps of whole checkpoints, what is wrong with the published others)."""
    whole, faults = [], []
    for step in saved_steps(checkpoints):
        folder = checkpoints / folder_name(step)
        try:
            files = read_manifest(folder)["files"]
        except CheckpointError as error:
            if "never published" not in str(error):  # a save that was cut off is no fault: it does not count as a checkpoint
                faults.append(str(error))
            continue
        wrong = wrong_checksum(folder, sorted(files), files)
        if wrong:
            faults.append(wrong)
        else:
            whole.append(step)
    return whole, faults


def journal_losses(run: Folder) -> dict[int, float]:
    """Loss by step of the journal's lineage."""
    return {r["step"]: r["loss"] for r in lineage(read_journal(run), "step")}


def compare_losses(ledger: dict[int, float], journal: dict[int, float]) -> list[str]:
    """The committed steps' losses must stand in the journal as they do in the ledger: both tell of the same training."""
    told = ((step, loss, journal.get(step)) for step, loss in ledger.items())
    return [f"step {step}: the journal's loss is {said}, the ledger's {loss}" for step, loss, said in told if said is not None and said != loss]


def prove_run(config: Config) -> Verdict:
    """The proof of the run that a configuration names."""
    return prove(Folder(get(config, "run.path")) / config.run.name, Folder(config.data.path))
