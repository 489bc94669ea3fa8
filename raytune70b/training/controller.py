"""What Ray Train's controller decides differently here, and why: which machines count, when a group is resized, when it gives up.

- A machine that is being taken back, or whose raylet does not answer, does not count: plain Ray waits out the start of a
  group on a dead machine before it tries with fewer workers, because its view of the cluster is up to 20 s old.
- Before a group is resized its workers publish a checkpoint of the step they are at, so that no step is trained twice.
- A failure that the program causes ends the run instead of a hundred restarts (`guards.gives_up`).

These are hooks of Ray Train's internals, which 2.60 has in this form; Ray is pinned, and tests/faults go through all of them.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy, NoopDecision, ResizeDecision
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import TrainAutoscalingCoordinatorClient

from raytune70b import room
from raytune70b.training.mailbox import HAND_OVER, STOP
from raytune70b.training.preemption import Preempted

PROBE_S = 2.0
"""How long a machine may take to accept a connection before it counts as dead."""
STORAGE_PAUSE_S = 5.0
"""Seconds before a worker group starts again on storage that refused."""
ASK_AGAIN_S = 300.0
"""Seconds before a worker group that could not save is asked again to make way for a larger one."""


class ElasticTrainer(TorchTrainer):
    """A TorchTrainer whose controller decides as described above."""

    def __init__(self, *args: Any, run: str, mailbox: Any, launch: int, hand_over_s: float, replicate: int, held: dict[str, dict[str, float]], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._mailbox, self._launch, self._policy = mailbox, launch, (run, mailbox, launch, hand_over_s, replicate, held)

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        kwargs["scaling_policy"] = LivingNodes(self.scaling_config, *self._policy)
        kwargs["failure_policy"] = GivesUp(kwargs["failure_policy"], self._mailbox, self._launch)
        return super()._initialize_and_run_controller(**kwargs)  # type: ignore[misc]


class LivingNodes(ElasticScalingPolicy):
    """Elastic scaling on the machines that answer and stay. Lives in the controller. held: what the job's own entrypoint holds, by node id."""

    def __init__(self, scaling_config: Any, run: str, mailbox: Any, launch: int, hand_over_s: float, replicate: int, held: dict[str, dict[str, float]]):
        super().__init__(scaling_config)
        self._run, self._mailbox, self._launch, self._hand_over_s, self._replicate, self._held = run, mailbox, launch, hand_over_s, replicate, held
        self._worker = scaling_config._resources_per_worker_not_none
        self._gone: list[str] = []
        self._told, self._unanswered = "", False
        self._waits = 0
        """Seconds that were waited for room."""
        self._starts = 0
        """Groups that were started since the last one that came up."""
        self._announced: ResizeDecision | None = None
        self._asked = self._wait_until = self._not_before = 0.0

    def after_controller_start(self, train_run_context: Any) -> None:
        # A group that has lost a machine cannot take its process group down in good order; plain Ray gives it 30 s.
        os.environ.setdefault("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "2")
        # Named after the run and not after the launch: a killed driver's reservation holds the machines for three minutes, and
        # the same command again takes it over instead of waiting behind it.
        self._requester_id = f"train-{self._run}"
        self._coordinator_client = TrainAutoscalingCoordinatorClient(self._requester_id)
        self._send_resource_request()

    def _get_reserved_resources(self) -> Any:
        """Ray's reservation, computed afresh, without the machines that are gone or going; None, which changes nothing, where Ray does not answer."""
        try:
            reserved = ray.get(self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True), timeout=30)
            self._gone = gone_or_going()
        except Exception as error:  # as in Ray's own: a slow coordinator is no reason to end a group that trains
            if not self._unanswered:
                self._send("warning", text=f"Ray does not say which machines there are ({_first_line(error)}); it is asked again")
            self._unanswered = True
            return None
        self._unanswered = False
        return self._unoccupied({node: resources for node, resources in reserved.items() if node not in self._gone})

    def _unoccupied(self, nodes: dict[str, Any]) -> dict[str, Any]:
        """Without what the job's entrypoint holds; after a group had no place, also without what other jobs hold, which Ray's reservation knows nothing of."""
        if not self._starts:
            return room.left(nodes, self._held)
        free = ray._private.state.available_resources_per_node()
        return {node: {name: min(amount, free.get(node, {}).get(name, 0.0)) for name, amount in has.items()} for node, has in nodes.items()}

    def _count_possible_workers(self, reserved: Any) -> int:
        """A multiple of `model.replicate`: another number of workers cannot be cut into copies."""
        count = min(room.fits(reserved.values(), self._worker), self.scaling_config.max_workers)
        return count - count % self._replicate

    def make_decision_for_non_running_worker_group(self) -> Any:
        self._announced, self._not_before = None, 0.0
        if ray.get(self._mailbox.command.remote()) == STOP:  # no group is there that could obey, and none has anything to save
            self.before_controller_abort()
            ray.actor.exit_actor()
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, NoopDecision):
            self._wait()
        else:
            self._told, self._waits = "", 0
        return decision

    def _wait(self) -> None:
        """Says what is waited for, once it is clear that it is: what the group before held is given back within a second or two."""
        least = self.scaling_config.min_workers
        nodes = self._unoccupied({node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in self._gone})
        lacking = room.shortage(list(nodes.values()), next(iter(self._held.values()), {}), self._worker, least, self._starts > 0)
        text = f"there is no room for {least} worker{'s' if least > 1 else ''} (cluster.workers): {lacking or 'Ray does not give the machines yet'}; waiting for machines"
        self._waits += 1
        if text != self._told and (self._waits == 3 or self._waits % 60 == 0):
            self._send("wait", reason=text)
            self._told = text
        time.sleep(1)  # the control loop would ask again at once

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Called at every poll. A resize is first announced, and decided when the workers have saved: their reports need the polls."""
        self._starts = 0
        if self._announced is not None:
            return self._once_saved(worker_group_state.num_workers)
        decision = super().make_decision_for_running_worker_group(worker_group_state, worker_group_status)
        if isinstance(decision, ResizeDecision) and time.monotonic() >= self._not_before and ray.get(self._mailbox.training.remote()):
            ray.get(self._mailbox.order.remote(HAND_OVER))
            self._announced, self._asked = decision, time.monotonic()
            self._wait_until = self._asked + self._hand_over_s
        return NoopDecision()

    def _once_saved(self, size: int) -> Any:
        state = ray.get(self._mailbox.hand_over_state.remote())
        if state == "waiting" and time.monotonic() < self._wait_until:
            return NoopDecision()
        if state in ("waiting", "lost") and not ray.get(self._mailbox.withdraw.remote()):
            return NoopDecision()  # they have just saved: the next poll sees it
        if state == "waiting":
            state = "declined"  # a larger group can wait: ending the workers now would take back what they are saving
            self._send("warning", text=f"the workers have not saved within {self._hand_over_s:.0f} s, so they go on as they are; are the checkpoints' disks slow?")
        decision, self._announced = self._announced, None
        if state == "declined":  # a full or slow disk is not asked again at once
            self._not_before = time.monotonic() + max(ASK_AGAIN_S, 2 * (time.monotonic() - self._asked))
        if state in ("declined", "lost"):
            return NoopDecision()
        self._send("group_end", reason=f"resize from {size} to {decision.num_workers} workers")  # type: ignore[union-attr]
        return decision

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
        """Keeps the group off machines that Ray still believes in."""
        self._starts += 1
        return {"ray.io/node-id": f"!in({', '.join(self._gone)})"} if self._gone else None

    def _send(self, kind: str, **fields: Any) -> None:
        self._mailbox.put.remote({"kind": kind, "time": time.time(), "launch": self._launch, **fields})


class GivesUp(FailurePolicy):
    """Ray's own policy, until the mailbox says that another start would end in the same way."""

    def __init__(self, ray_policy: FailurePolicy, mailbox: Any, launch: int):
        super().__init__(ray_policy.failure_config)
        self._ray_policy, self._mailbox, self._launch = ray_policy, mailbox, launch
        self._bad_starts = 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        refused = getattr(training_failed_error, "controller_failure", None)
        if isinstance(refused, OSError) and not isinstance(refused, ray.exceptions.RayError):  # the controller keeps notes on the run's storage, and would end the run when it refuses them
            self._send(f"the storage refused Ray Train's own notes: {_first_line(refused)}")
            time.sleep(STORAGE_PAUSE_S)
            return FailureDecision.RETRY
        failures = getattr(training_failed_error, "worker_failures", {})
        if isinstance(refused, (WorkerGroupStartupFailedError, ray.exceptions.RayError)) and not _is_programs_fault(refused):
            return self._start_failed(refused)
        if not failures:  # there was no room for a group, or Ray Train itself saw a preemption
            ray.get(self._mailbox.gone.remote())
            return self._ray_policy.make_decision(training_failed_error)
        left = next((e for e in map(_raised, failures.values()) if isinstance(e, Preempted)), None)
        if left is not None:
            self._send(f"preemption: {left}")
            ray.get(self._mailbox.gone.remote())
            return FailureDecision.RETRY
        reason = _first_line(training_failed_error)
        verdict = ray.get(self._mailbox.group_failed.remote(reason))
        self._send(verdict or reason)
        return FailureDecision.RAISE if verdict else self._ray_policy.make_decision(training_failed_error)

    def _start_failed(self, error: Exception) -> FailureDecision:
        """A worker died, or its machine was lost, while the group was made. Plain Ray starts again for ever, or ends the run at the first one."""
        self._bad_starts += 1
        raised = isinstance(error, ray.exceptions.RayTaskError)
        reason = f"the worker group could not be started or reached: {_first_line(error.__cause__ or error)}"
        verdict = ray.get(self._mailbox.group_failed.remote(f"RayTaskError: {reason}" if raised else reason, "start" if raised else ""))
        self._send(verdict or reason)
        return FailureDecision.RAISE if verdict or self._bad_starts > self.failure_config.max_failures else FailureDecision.RETRY

    def _send(self, reason: str) -> None:
        self._mailbox.put.remote({"kind": "group_end", "time": time.time(), "launch": self._launch, "reason": reason})


def _is_programs_fault(error: Exception) -> bool:
    """Whether a worker raised, while the group was made, what no machine causes: another start would end in the same way."""
    return isinstance(error, ray.exceptions.RayTaskError) and not isinstance(error.cause, (OSError, RuntimeError, ray.exceptions.RayError))


def gone_or_going() -> list[str]:
    """Ids of the machines whose raylet does not answer, or that are being drained."""
    draining = set(ray._private.state.state.get_draining_nodes() or {})
    alive = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(64) as pool:
        answers = pool.map(lambda node: _answers(node["NodeManagerAddress"], node["NodeManagerPort"]), alive)
        return [node["NodeID"] for node, answer in zip(alive, answers, strict=True) if not answer or node["NodeID"] in draining]


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=PROBE_S):
            return True
    except OSError:
        return False


def _raised(error: Exception) -> Exception:
    """The exception that the training function raised, out of Ray Train's wrapping."""
    return getattr(error, "_base_exc", error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
