"""A profile of one step with torch.profiler, on chosen ranks.

The files of a rank in `profile/step-0000100/` in the run folder:

rank-00000.json.gz        trace for ui.perfetto.dev (Chrome's trace event format)
rank-00000.txt            the most expensive operations, with the planner's seconds
rank-00000.pickle         allocations on the GPU, for https://pytorch.org/memory_viz
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from models.errors import UserError
from threefold.config.recipe import Recipe
from threefold.engine.engine import Engine
from threefold.gpus.datasheet import Gpu, gpu_of_device, load_gpu
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.json_lines import write_whole
from threefold.tracking.operations import Operation, Shapes, operations_table
from threefold.tracking.timeline import Show

MAX_RECORDED_ALLOCATIONS = 1_000_000  # only the newest allocations of the step are kept


class StepProfiler:
    """Profiler of the step that `tracking.profile_step` selects.

    Args:
        engine: the engine of this rank
        recipe: the recipe of the run
        folder: the run folder
        precision: "fp32", "bf16" or "fp16"
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
        found = operations_of(recording, on_gpu=self.engine.on_gpu)
        table = operations_table(
            found, title=self._title(found), gpu=self._gpu(), precision=self.precision
        )
        write_whole(target.with_suffix(".txt"), table)
        if self.engine.on_gpu:
            torch.cuda.memory._dump_snapshot(str(target.with_suffix(".pickle")))

    def _title(self, found: list[Operation]) -> str:
        seconds = sum(operation.seconds for operation in found)
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


def operations_of(recording: profile, *, on_gpu: bool) -> list[Operation]:
    """Return the operations of a profile that take time; on a GPU, that of their kernels counts."""
    found = []
    for each in recording.key_averages(group_by_input_shape=True):
        if each.device_type != DeviceType.CPU:  # a kernel, which its operation counts already
            continue
        micros = each.self_device_time_total if on_gpu else each.self_cpu_time_total
        if micros > 0:
            found.append(Operation(each.key, _shapes(each.input_shapes), each.count, micros * 1e-6))
    return found


def _shapes(shapes: list[list[int]]) -> Shapes:
    """Return the shapes of tensor arguments, without lists of tensors such as those of a cat."""
    return tuple(
        tuple(shape) if all(isinstance(size, int) for size in shape) else () for shape in shapes
    )
