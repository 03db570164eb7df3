"""A run: the objects that work together in it, the outcome of a step, and the end of the run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from threefold.config.parallel_dims import ParallelDims
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.run_folder.folder import RunFolder
from threefold.runtime.exits import INTERRUPTED
from threefold.supervision.step_watch import LossWatch, StragglerHistory
from threefold.tracking.clocks import Startup, StepClock

if TYPE_CHECKING:  # these import torch, which takes seconds
    from threefold.checkpoint.resume import Start
    from threefold.checkpoint.snapshots.writer import SnapshotWriter
    from threefold.checkpoint.writer import CheckpointWriter
    from threefold.data.dataset import Prefetcher, TrainingData
    from threefold.engine.engine import Engine
    from threefold.pretrain.evaluation import Evaluator
    from threefold.supervision.supervisor import Supervisor
    from threefold.tracking.profiler import StepProfiler, TimelineRecorder
    from threefold.tracking.tracker import Meter, Tracker


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects that work together in a run.

    Attributes:
        recipe: the plain recipe of the step for which the engine was built
        last_step_of_engine: the last step before a phase that needs another engine, or of the run
        snapshots: takes snapshots in the memory of the nodes; None if the run takes none
        find_start: finds the newest checkpoint of the run, for a rollback; collective
    """

    recipe: Recipe
    phase_plan: PhasePlan
    last_step_of_engine: int
    dims: ParallelDims
    folder: RunFolder
    data: "TrainingData"
    prefetcher: "Prefetcher"
    engine: "Engine"
    evaluator: "Evaluator"
    meter: "Meter"
    clock: StepClock
    watch: LossWatch
    writer: "CheckpointWriter"
    snapshots: "SnapshotWriter | None"
    tracker: "Tracker"
    supervisor: "Supervisor"
    timeline: "TimelineRecorder"
    profiler: "StepProfiler"
    startup: Startup
    find_start: "Callable[[], Start]"
    straggler_history: StragglerHistory = field(default_factory=StragglerHistory)

    @property
    def last_step(self) -> int:
        """The number of the run's last step."""
        return self.recipe.training.steps

    def is_save_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after a step, as always after an engine's last one."""
        is_boundary = step == self.last_step_of_engine
        return is_boundary or self.recipe.checkpoint.is_save_due(step, self.last_step)


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, or of an engine before the ranks start again for another phase.

    Attributes:
        reason: the reason; empty if every step is done
        step: the step after which the ranks start again with the engine of another phase; 0 if the
            run ends
    """

    code: int
    reason: str = ""
    step: int = 0

    @property
    def restarts_for_phase(self) -> bool:
        """True if the ranks start again with the engine of another phase."""
        return self.step > 0


class StepOutcome(NamedTuple):
    """The state of the run after a step.

    Attributes:
        step: the last step that is done; an earlier one after a rollback
        ending: the end of the run, if it ends here
    """

    step: int
    ending: RunEnd | None


def is_due(step: int, every: int, last: int) -> bool:
    """Return True after every `every`-th step and the last one; never if `every` is 0."""
    return every > 0 and (step % every == 0 or step == last)


def stopped_after_save(step: int, request: str) -> RunEnd:
    """Return the end of a run whose ranks were asked to stop, and which has saved a step."""
    reason = f"saved at step {step} ({request}); rerun the same command to resume"
    return RunEnd(INTERRUPTED, reason)


def stopped_without_save(step: int, reason: str) -> str:
    """Return the message of a run that stops before it saves a step."""
    return f"step {step}: {reason}; the newest checkpoint, if there is one, is from an earlier step"
