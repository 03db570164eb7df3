"""When a pipeline's engine ran which instruction."""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from models.pipeline.instructions import COMPUTE
from models.pipeline.schedule.order import Kind, Pass
from models.pipeline.schedule.simulation import TimedPass
from models.pipeline.scheduled_engine import ScheduledEngine

KINDS = {instruction: kind for kind, instruction in COMPUTE.items()}


class Event(NamedTuple):
    """An instruction, what it was for, and when it ran.

    start, end: seconds on this host's clock since an unknown time, the same for all its processes;
        on a GPU the host waits after each instruction for what the device computes
    kind: of a pass that is computed
    """

    instruction: str
    kind: Kind | None
    chunk: int | None
    micro_batch: int | None
    start: float
    end: float


class Recording:
    """The events of an engine, from now on."""

    def __init__(self, engine: ScheduledEngine):
        self.engine = engine
        self.events: list[Event] = []
        self.instructions = engine._INSTRUCTION_MAP
        engine._INSTRUCTION_MAP = {
            each: partial(self._run, each, run) for each, run in self.instructions.items()
        }

    def clear(self) -> None:
        """Forget what was recorded."""
        self.events = []

    def stop(self) -> None:
        """Record nothing more."""
        self.engine._INSTRUCTION_MAP = self.instructions

    def _run(
        self,
        instruction: type[PipeInstruction],
        run: Callable[..., None],
        engine: ScheduledEngine,
        **arguments: Any,
    ) -> None:
        start = self._now()
        run(engine, **arguments)
        of_pass = arguments.get("chunk"), arguments.get("buffer_id")
        event = Event(instruction.__name__, KINDS.get(instruction), *of_pass, start, self._now())
        self.events.append(event)

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            # Not the device: a receive that was posted ahead may wait for what comes after this.
            torch.cuda.current_stream(self.engine.device).synchronize()
        return time.perf_counter()


def passes_of(events: Iterable[Event], stage: int) -> list[TimedPass]:
    """The passes among a stage's events."""
    return [
        TimedPass(Pass(each.kind, stage, each.chunk, each.micro_batch), each.start, each.end)
        for each in events
        if each.kind is not None
    ]
