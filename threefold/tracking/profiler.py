"""Profiles: the operations of one step on a rank, and the timeline of all ranks in a few steps.

The operations are compared with the planner's seconds for the same kernels.

The files of a rank in `profile/step-0000100/` in the run folder:

rank-00000.json.gz        trace for ui.perfetto.dev (Chrome's trace event format)
rank-00000.txt            the most expensive operations, with the planner's seconds
rank-00000.pickle         allocations on the GPU, for https://pytorch.org/memory_viz

`timeline.json` in the run folder has the instructions of every rank with their times, as a trace
for ui.perfetto.dev. `timeline.svg` compares the last of these steps on one pipeline with a
simulation that uses the measured durations.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from models.errors import UserError, counted
from threefold.config.parallel_dims import Coordinates, ParallelDims
from threefold.config.recipe import Recipe
from threefold.engine.engine import Engine, StageEngine
from threefold.gpus.datasheet import Gpu, gpu_of_device, load_gpu
from threefold.pipeline.engine import Event, EventRecorder, passes_of
from threefold.pipeline.simulation import Timeline, simulate, typical_seconds
from threefold.plan.software import THREEFOLD
from threefold.plan.time.block import BACKWARD_SLOWER, fused_attention_seconds, matmul_seconds
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
        assert isinstance(self.engine, StageEngine)
        if not self.steps:
            dist.barrier()
            self.origin = perf_counter()
        recording = EventRecorder(self.engine.wrapped)
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
        places = [f"{axis} {getattr(coordinates, axis)}" for axis in dims.shown_sizes]
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


# The operations of a profiled step, compared with the planner's seconds for the same kernels.

BACKWARD_MATMULS = 2.5  # per matmul of attention's forward pass (arXiv 2307.08691, section 4.1)
FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # position of a matmul's first factor
COMMUNICATION = ("nccl:", "gloo:", "c10d::", "record_param_comms")
KINDS = ("matmul", "attention", "communication", "other")
MAX_OPERATIONS = 40

Shapes = tuple[tuple[int, ...], ...]  # of the tensor arguments; () for other arguments


@dataclass(frozen=True)
class ProfiledOperation:
    """All calls of an operation with the same shapes in a step, on one rank.

    Attributes:
        name: name in torch, such as "aten::mm"
        seconds: time of all calls, without the operations that they call; on a GPU, the time of
            the kernels
    """

    name: str
    shapes: Shapes
    calls: int
    seconds: float

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self._first_factor is not None:
            return "matmul"
        if self.name.startswith(COMMUNICATION):
            return "communication"
        return "attention" if self._is_attention else "other"

    @property
    def _first_factor(self) -> int | None:
        """Position of a matmul's first factor among its arguments; None for other operations."""
        return FIRST_FACTOR.get(self.name.removeprefix("aten::").removesuffix("_"))

    @property
    def _is_attention(self) -> bool:
        # Without aten::scaled_dot_product_attention, which only calls one of the others.
        return self.name.startswith("aten::_") and "_attention" in self.name

    def planned_seconds(self, gpu: Gpu, precision: str) -> float | None:
        """Return the planner's seconds for one call; None if it has no formula for the operation.

        Attention is counted with a causal mask over whole sequences, as the planner does.
        """
        if precision not in gpu.peak_tflops:
            return None
        if self._first_factor is not None:
            factors = self.shapes[self._first_factor :][:2]
            if len(factors) < 2 or any(len(shape) < 2 for shape in factors):
                return None
            (*batches, rows, inner), (*_, columns) = factors
            batch = prod(batches)
            if not batch * rows * inner * columns:
                return None
            software = THREEFOLD.on_device(gpu.device)
            seconds = matmul_seconds(
                software.kernels_on(gpu), precision,
                rows=rows, columns=columns, inner=inner, batch=batch,
            )  # fmt: skip
            return seconds / software.kernel_efficiency
        return self._planned_attention(gpu, precision) if self._is_attention else None

    def _planned_attention(self, gpu: Gpu, precision: str) -> float | None:
        backward = "_backward" in self.name
        # The first argument of the backward pass is the output's gradient.
        tensors = self.shapes[1:3] if backward else self.shapes[:2]
        if len(tensors) < 2 or any(len(shape) != 4 for shape in tensors):
            return None  # for example sequences of several lengths in one tensor
        q, k = tensors
        # [b, heads, s, d] in scaled_dot_product_attention, [b, s, heads, d] in kernels below it
        keys = k[2] if "scaled_dot_product" in self.name else k[1]
        flops = 4 * prod(q) * keys / 2
        software = THREEFOLD.on_device(gpu.device)
        speed = software.attention_speed(q[-1], limited="_flash_" in self.name)
        seconds = fused_attention_seconds(gpu, precision, flops=flops) / speed
        return (
            seconds
            * (BACKWARD_MATMULS * BACKWARD_SLOWER if backward else 1)
            / software.kernel_efficiency
        )


def operations_table(
    operations: Iterable[ProfiledOperation], *, title: str, gpu: Gpu | None, precision: str
) -> str:
    """Return the most expensive operations as text, after the sums of each kind.

    Args:
        operations: the operations of a step on one rank
        title: the first line
        gpu: datasheet of the device, for the planner's numbers; None if there is none
    """
    ordered = sorted(operations, key=lambda operation: -operation.seconds)
    total = sum(operation.seconds for operation in ordered)
    planned = [operation.planned_seconds(gpu, precision) if gpu else None for operation in ordered]
    lines = [title, ""]
    for kind in KINDS:
        lines += _sum_of_kind(kind, ordered, planned, total)
    if gpu is None:
        lines += ["", "The planner has no datasheet for this device."]
    lines += ["", f"{'seconds':>9} {'share':>6} {'calls':>6} {'us/call':>9} {'planned':>9} "
              f"{'ratio':>6}  operation"]  # fmt: skip
    for operation, seconds in list(zip(ordered, planned, strict=True))[:MAX_OPERATIONS]:
        call = operation.seconds / operation.calls
        plan, ratio = f"{seconds * 1e6:.1f}" if seconds else "", ""
        if seconds:
            ratio = f"{call / seconds:.2f}"
        shapes = " x ".join(str(list(shape)) for shape in operation.shapes if shape)
        lines.append(
            f"{operation.seconds:9.4f} {_share(operation.seconds, total)} {operation.calls:6} "
            f"{call * 1e6:9.1f} {plan:>9} {ratio:>6}  {operation.name} {shapes}".rstrip()
        )
    if len(ordered) > MAX_OPERATIONS:
        rest = sum(operation.seconds for operation in ordered[MAX_OPERATIONS:])
        lines.append(
            f"{rest:9.4f} {_share(rest, total)}  {counted(len(ordered) - MAX_OPERATIONS, 'other')}"
        )
    return "\n".join(lines) + "\n"


def _sum_of_kind(
    kind: str, found: Sequence[ProfiledOperation], planned: Sequence[float | None], total: float
) -> list[str]:
    """Return the line of a kind: its seconds, and the ratio to the planner's if there are any."""
    own = [
        (operation, plan)
        for operation, plan in zip(found, planned, strict=True)
        if operation.kind == kind
    ]
    if not own:
        return []
    seconds = sum(operation.seconds for operation, _ in own)
    line = f"{kind:14} {seconds:9.4f} s {_share(seconds, total)}"
    with_plan = [(operation, plan) for operation, plan in own if plan]
    if with_plan:
        measured = sum(operation.seconds for operation, _ in with_plan)
        expected = sum(plan * operation.calls for operation, plan in with_plan)
        line += f", {measured / expected:.2f} times the planner's {expected:.4f} s"
        if measured < 0.999 * seconds:
            line += f" (for {_share(measured, seconds).strip()} of this time)"
    return [line]


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:6.1%}"


MAX_RECORDED_ALLOCATIONS = 1_000_000  # only the newest allocations of the step are kept


class StepProfiler:
    """Profiler of the step that `tracking.profile_step` selects.

    Args:
        show: function that gets the step, the name and the file of the table of operations
    """

    def __init__(
        self, engine: Engine, recipe: Recipe, folder: RunFolder, *, precision: str, show: Show
    ):
        self.engine, self.recipe, self.folder = engine, recipe, folder
        self.precision, self.show = precision, show
        tracking = recipe.tracking
        is_chosen = dist.get_rank() in tracking.profile_ranks
        self.step = tracking.profile_step if is_chosen else 0  # 0: none
        self.profile: profile | None = None

    @contextmanager
    def recorded(self, step: int) -> Iterator[None]:
        """Record the operations of this context, if the step is selected."""
        if step != self.step:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if self.engine.on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MAX_RECORDED_ALLOCATIONS)
        recording = profile(activities=activities, record_shapes=True)
        with recording:
            yield
            if self.engine.on_gpu:
                torch.cuda.synchronize()
        self.profile = recording

    def write_after(self, step: int) -> None:
        """Write the files after the selected step; if that fails, warn and continue training."""
        if step != self.step or self.profile is None:
            return
        rank = dist.get_rank()
        target = self.folder.path / "profile" / f"step-{step:07d}" / f"rank-{rank:05d}"
        try:
            self._write(target, self.profile)
            self.show(step, "profile", target.with_suffix(".txt"))
            print(f"the profile of step {step} is in {target}.txt and {target.name}.json.gz")
        except (OSError, RuntimeError) as problem:
            self.folder.event("warning", step, message=f"no profile of rank {rank}: {problem}")
            print(f"warning: no profile: {problem}", file=sys.stderr)
        finally:
            self.profile = None
            if self.engine.on_gpu and not self.recipe.tracking.memory_snapshot:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, target: Path, recording: profile) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        trace = target.with_suffix(".json.gz")
        incomplete = trace.with_name(f"incomplete-{trace.name}")
        recording.export_chrome_trace(str(incomplete))
        os.replace(incomplete, trace)
        operations = operations_of(recording, on_gpu=self.engine.on_gpu)
        table = operations_table(
            operations, title=self._title(operations), gpu=self._gpu(), precision=self.precision
        )
        write_whole(target.with_suffix(".txt"), table)
        if self.engine.on_gpu:
            torch.cuda.memory._dump_snapshot(str(target.with_suffix(".pickle")))

    def _title(self, operations: list[ProfiledOperation]) -> str:
        seconds = sum(operation.seconds for operation in operations)
        title = (
            f"{self.recipe.name}, step {self.step}, rank {dist.get_rank()}: {seconds:.3f} s in "
            f"operations on {self.engine.device_name} (each without the operations that it calls)"
        )
        if self.engine.on_gpu and not seconds:
            title += (
                "\nNo kernel times: the driver may allow only root to profile GPUs (see CUPTI)."
            )
        return title

    def _gpu(self) -> Gpu | None:
        """Return the datasheet of the device; None if there is none."""
        if not self.engine.on_gpu:
            return load_gpu("cpu")
        cluster = self.recipe.cluster
        try:
            return load_gpu(cluster.gpu) if cluster else gpu_of_device(self.engine.device_name)
        except UserError:
            return None


def operations_of(recording: profile, *, on_gpu: bool) -> list[ProfiledOperation]:
    """Return the operations of a profile that take time; on a GPU, that of their kernels counts."""
    operations = []
    for event in recording.key_averages(group_by_input_shape=True):
        if event.device_type != DeviceType.CPU:  # a kernel, which its operation counts already
            continue
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if micros > 0:
            operations.append(
                ProfiledOperation(
                    event.key, _shapes(event.input_shapes), event.count, micros * 1e-6
                )
            )
    return operations


def _shapes(shapes: list[list[int]]) -> Shapes:
    """Return the shapes of tensor arguments, without lists of tensors such as those of a cat."""
    return tuple(
        tuple(shape) if all(isinstance(size, int) for size in shape) else () for shape in shapes
    )
