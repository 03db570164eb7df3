"""Recordings of the instructions of a pipeline's engine, with their times."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from threefold.pipeline.engine import ScheduledEngine
from threefold.pipeline.instructions import COMPUTE
from threefold.pipeline.passes import Kind, Pass
from threefold.pipeline.simulation import TimedPass

KIND_OF_INSTRUCTION = {instruction: kind for kind, instruction in COMPUTE.items()}


class Event(NamedTuple):
    """An instruction of the engine and its times.

    start, end: seconds on the monotonic clock of this host, which all its processes share; on a
        GPU the host waits for the device after each instruction
    kind: the kind of the pass, if the instruction computes one
    """

    instruction: str
    kind: Kind | None
    chunk: int | None
    micro_batch: int | None
    start: float
    end: float


class Recording:
    """The events of an engine, from its creation until `stop`."""

    def __init__(self, engine: ScheduledEngine):
        self.engine = engine
        self.events: list[Event] = []
        engine.observers.append(self._observe)

    def clear(self) -> None:
        """Discard the events that were recorded so far."""
        self.events = []

    def stop(self) -> None:
        """Stop recording."""
        self.engine.observers.remove(self._observe)

    @contextmanager
    def _observe(self, instruction: PipeInstruction) -> Iterator[None]:
        start = self._now()
        yield
        arguments = instruction.kwargs
        self.events.append(
            Event(
                instruction=instruction.name,
                kind=KIND_OF_INSTRUCTION.get(type(instruction)),
                chunk=arguments.get("chunk"),
                micro_batch=arguments.get("buffer_id"),
                start=start,
                end=self._now(),
            )
        )

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            # Synchronizing the whole device would wait for receives that were posted ahead, whose
            # messages may depend on later instructions of this rank.
            torch.cuda.current_stream(self.engine.device).synchronize()
        return time.perf_counter()


def passes_of(events: Iterable[Event], stage: int) -> list[TimedPass]:
    """Return the passes among the events of a stage."""
    passes = []
    for each in events:
        if each.kind is not None:
            assert each.chunk is not None and each.micro_batch is not None
            work = Pass(each.kind, stage, each.chunk, each.micro_batch)
            passes.append(TimedPass(work, each.start, each.end))
    return passes
