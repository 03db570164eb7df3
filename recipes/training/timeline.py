"""The measured timeline: what every rank ran in a few steps, and when.

`timeline.json` in the run folder is a trace for ui.perfetto.dev (Chrome's trace event format);
`timeline.svg` shows the last of the steps on one pipeline, as the simulator would have run it with
the durations that were measured, and below as it was.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch.distributed as dist

from models.pipeline.order import BACKWARD, FORWARD, WEIGHT, Pass, Pipeline
from models.pipeline.recording import Event, Recording
from models.pipeline.simulation import TimedPass, Timeline, simulate
from recipes.planning.picture import draw_comparison
from recipes.training.engine import Engine, PipelinedEngine
from recipes.training.recipe import Recipe
from recipes.training.run_folder import RunFolder, write_whole
from recipes.training.topology import Coordinates, Topology

KINDS = {"ForwardPass": FORWARD, "BackwardPass": BACKWARD, "WeightPass": WEIGHT}

Steps = list[list[Event]]  # the events of each recorded step


class TimelineRecorder:
    """Records the steps that `tracking.timeline_step` and `timeline_steps` name."""

    def __init__(self, engine: Engine, recipe: Recipe, topology: Topology, folder: RunFolder):
        self.engine, self.topology, self.folder = engine, topology, folder
        first = recipe.tracking.timeline_step
        self.wanted = range(first, first + recipe.tracking.timeline_steps) if first else range(0)
        self.last = min(self.wanted[-1], recipe.training.steps) if first else 0
        self.steps: Steps = []
        self.origin = 0.0

    @contextmanager
    def recorded(self, step: int) -> Iterator[None]:
        """Record what runs within it, if this step is wanted; the first time, ranks meet before."""
        if step not in self.wanted:
            yield
            return
        assert isinstance(self.engine, PipelinedEngine)
        if not self.steps:
            dist.barrier()
            self.origin = perf_counter()
        recording = Recording(self.engine.wrapped)
        try:
            yield
        finally:
            recording.stop()
        self.steps.append(
            [
                event._replace(start=event.start - self.origin, end=event.end - self.origin)
                for event in recording.events
            ]
        )

    def write_after(self, step: int) -> None:
        """Write the files, if this was the last of the steps; collective then."""
        if step != self.last or not self.steps:
            return
        of_ranks = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, self.steps)
        self.steps = []
        if dist.get_rank() == 0:
            self._write(of_ranks, step)

    def _write(self, of_ranks: Sequence[Steps], step: int) -> None:
        trace = perfetto_trace(of_ranks, self.topology, first_step=self.wanted[0])
        measured = measured_passes(of_ranks, self.topology)
        pipeline = self.engine.wrapped.pipeline
        picture = self.folder.path / "timeline.svg"
        try:
            write_whole(self.folder.path / "timeline.json", json.dumps(trace))
            draw_comparison(
                pipeline,
                predicted_passes(pipeline, measured),
                measured,
                title=f"{self.engine.recipe.name}, step {step}",
                file=picture,
            )
        except (OSError, ValueError) as problem:  # training goes on without it
            self.folder.event("warning", step, reason=f"no timeline: {problem}")
            print(f"warning: no timeline: {problem}", file=sys.stderr)


def perfetto_trace(
    of_ranks: Sequence[Steps], topology: Topology, *, first_step: int
) -> dict[str, Any]:
    """Chrome's trace events: a process for each rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, steps in enumerate(of_ranks):
        place = topology.coordinates(rank)
        name = f"pipeline {place.pipeline}, data {place.data}, tensor {place.tensor}"
        named = {"name": f"rank {rank}: {name}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": named})
        for number, step in enumerate(steps, start=first_step):
            for event in step:
                about = {"chunk": event.chunk, "micro_batch": event.micro_batch, "step": number}
                events.append(
                    {
                        "ph": "X",
                        "name": event.instruction,
                        "cat": KINDS.get(event.instruction, "communication"),
                        "pid": rank,
                        "tid": 0,
                        "ts": event.start * 1e6,
                        "dur": (event.end - event.start) * 1e6,
                        "args": {key: value for key, value in about.items() if value is not None},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def measured_passes(of_ranks: Sequence[Steps], topology: Topology) -> Timeline:
    """The passes of the last step on the first pipeline, from its first one on."""
    stages = []
    for stage in range(topology.pipeline):
        rank = topology.rank(Coordinates(pipeline=stage, data=0, tensor=0))
        stages.append(
            [
                TimedPass(
                    Pass(KINDS[event.instruction], stage, event.chunk, event.micro_batch),
                    event.start,
                    event.end,
                )
                for event in of_ranks[rank][-1]
                if event.instruction in KINDS
            ]
        )
    start = min(stage[0].start for stage in stages)
    return [
        [timed._replace(start=timed.start - start, end=timed.end - start) for timed in stage]
        for stage in stages
    ]


def predicted_passes(pipeline: Pipeline, measured: Timeline) -> Timeline:
    """What the simulator makes of the medians of each stage's, chunk's and kind's passes."""
    durations = defaultdict(list)
    for stage in measured:
        for timed in stage:
            work = timed.work
            durations[work.kind, work.stage, work.chunk].append(timed.end - timed.start)
    medians = {key: median(found) for key, found in durations.items()}
    return simulate(pipeline, lambda work: medians[work.kind, work.stage, work.chunk])
