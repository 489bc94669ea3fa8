"""What the driver hands to a worker group. Light on purpose: the controller and the data's actors import it, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ray.train import DataConfig

from raytune70b.blocks.stream import Feed, Reader, dataset
from raytune70b.schema import Config
from raytune70b.storage import Folder
from raytune70b.training.checkpoint import newest


@dataclass(frozen=True)
class Job:
    """The same for every worker group of a launch."""

    config: Config
    run: Folder
    feed: Feed
    validation: Reader
    vocab_size: int
    fingerprint: dict[str, Any]
    data_digest: str
    launch: int
    mlflow_run_id: str | None
    mailbox: Any
    evaluate_every: int = 0
    """Steps between checkpoints that are evaluated beside the workers; 0: none."""


class ExactSplit(DataConfig):
    """Gives each worker group the blocks that the newest checkpoint has not seen, dealt round robin in the exact order."""

    def __init__(self, feed: Feed, checkpoints: Folder):
        super().__init__()
        self._feed, self._checkpoints = feed, checkpoints

    def configure(self, datasets: Any, world_size: int, *args: Any, **kwargs: Any) -> Any:
        """Called when the workers ask for their shards, which they do after the checkpoint was checked."""
        cursor = newest(self._checkpoints)
        blocks = dataset(self._feed, cursor.step if cursor else 0, world_size)
        return [{"train": part} for part in blocks.streaming_split(world_size, equal=False)]


def train_on_worker(settings: dict[str, Job]) -> None:
    """Ray Train's training function; torch and transformers are imported by the workers alone."""
    from raytune70b.training.worker import train

    train(settings["job"])
