"""The measured timeline: the instructions of every rank in a few steps, with their times.

`timeline.json` in the run folder is a trace for ui.perfetto.dev (Chrome's trace event format).
`timeline.svg` compares the last of these steps on one pipeline with a simulation that uses the
measured durations.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as dist

from models.errors import UserError
from threefold.config.parallel_dims import Coordinates, ParallelDims
from threefold.config.recipe import Recipe
from threefold.engine.engine import Engine, PipelinedEngine
from threefold.pipeline.engine import Event, Recording, passes_of
from threefold.pipeline.simulation import Timeline, simulate, typical_seconds
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.json_lines import write_whole
from threefold.runtime.processes import gathered

Show = Callable[[int, str, Path], None]
Steps = dict[int, list[Event]]  # the events of each recorded step


class TimelineRecorder:
    """Recorder of the steps that `tracking.timeline_step` and `timeline_steps` select.

    Args:
        show: function that gets the step, the name and the file of the picture; called on rank 0
        last_step: the last step that the engine runs; None: the last step of the recipe
    """

    def __init__(
        self,
        engine: Engine,
        recipe: Recipe,
        dims: ParallelDims,
        folder: RunFolder,
        *,
        show: Show,
        last_step: int | None = None,
    ):
        self.engine, self.dims, self.folder, self.show = engine, dims, folder, show
        first = recipe.tracking.timeline_step
        self.wanted = range(first, first + recipe.tracking.timeline_steps) if first else range(0)
        self.last = min(self.wanted[-1], last_step or recipe.training.steps) if first else 0
        self.steps: Steps = {}
        self.origin = 0.0

    @contextmanager
    def recorded(self, step: int) -> Iterator[None]:
        """Record the instructions of this context, if the step is selected.

        Before the first of these steps the ranks synchronize.
        """
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
        self.steps[step] = [
            event._replace(start=event.start - self.origin, end=event.end - self.origin)
            for event in recording.events
        ]

    def write_after(self, step: int) -> None:
        """Write the files after the last of the selected steps; collective at that step."""
        if step != self.last or not self.steps:
            return
        of_ranks = gathered(self.steps)
        self.steps = {}
        if dist.get_rank() == 0:
            self._write(of_ranks, step)

    def _write(self, of_ranks: Sequence[Steps], step: int) -> None:
        # Imported here, because a run without a timeline should not wait a second for matplotlib.
        from threefold.pipeline.picture import comparison, save_figure

        trace = perfetto_trace(of_ranks, self.dims)
        measured = measured_passes(of_ranks, self.dims, step)
        pipeline = self.engine.wrapped.pipeline
        picture = self.folder.path / "timeline.svg"
        try:
            write_whole(self.folder.path / "timeline.json", json.dumps(trace))
            predicted = simulate(pipeline, typical_seconds(measured))
            title = f"{self.engine.recipe.name}, step {step}"
            save_figure(comparison(pipeline, predicted, measured, title), picture)
            first = min(of_ranks[0])
            self.show(step, "timeline", picture)
            print(f"the timeline of steps {first} to {step} is in {picture} and timeline.json")
        except (OSError, UserError) as problem:  # training continues without a timeline
            self.folder.event("warning", step, reason=f"no timeline: {problem}")
            print(f"warning: no timeline: {problem}", file=sys.stderr)


def perfetto_trace(of_ranks: Sequence[Steps], dims: ParallelDims) -> dict[str, Any]:
    """Return Chrome's trace events: a process for each rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, steps in enumerate(of_ranks):
        coordinates = dims.coordinates(rank)
        places = [f"{axis} {getattr(coordinates, axis)}" for axis in dims.axes]
        name = f"rank {rank}: {', '.join(places)}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events += [
            trace_event(event, rank, step) for step, recorded in steps.items() for event in recorded
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def trace_event(event: Event, rank: int, step: int) -> dict[str, Any]:
    """Return an instruction as one of Chrome's complete events."""
    details = {"chunk": event.chunk, "micro_batch": event.micro_batch, "step": step}
    return {
        "ph": "X",
        "name": event.instruction,
        "cat": event.kind or "communication",
        "pid": rank,
        "tid": 0,
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": {key: value for key, value in details.items() if value is not None},
    }


def measured_passes(of_ranks: Sequence[Steps], dims: ParallelDims, step: int) -> Timeline:
    """Return the passes of a step on the first pipeline, with times from its first pass on."""
    stages = []
    for stage in range(dims.pipeline):
        rank = dims.rank(Coordinates(pipeline=stage, data=0, tensor=0))
        stages.append(passes_of(of_ranks[rank][step], stage))
    start = min(passes[0].start for passes in stages)
    return [
        [timed._replace(start=timed.start - start, end=timed.end - start) for timed in passes]
        for passes in stages
    ]
