"""When a pipeline's engine ran which instruction."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from models.pipeline.engine import ScheduledEngine


class Event(NamedTuple):
    """An instruction, what it was for, and when it ran.

    start, end: seconds on this host's clock since an unknown time, the same for all its processes;
        on a GPU the host waits for the device after each instruction while it is recorded
    """

    instruction: str
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
            kind: partial(self._run, kind, run) for kind, run in self.instructions.items()
        }

    def clear(self) -> None:
        """Forget what was recorded."""
        self.events = []

    def stop(self) -> None:
        """Record nothing more."""
        self.engine._INSTRUCTION_MAP = self.instructions

    def _run(
        self,
        kind: type[PipeInstruction],
        run: Callable[..., None],
        engine: ScheduledEngine,
        **arguments: Any,
    ) -> None:
        start = self._now()
        run(engine, **arguments)
        work = arguments.get("work")  # of CommitP2P
        chunk = work.chunk if work else arguments.get("chunk")
        micro_batch = work.micro_batch if work else arguments.get("buffer_id")
        self.events.append(Event(kind.__name__, chunk, micro_batch, start, self._now()))

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
