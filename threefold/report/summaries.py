"""The planner's predictions for the recipe of a run, on the GPUs on which it runs."""

from dataclasses import dataclass

from models.errors import UserError
from threefold.config.deepspeed_json import precision, read_deepspeed_json
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import gpus, load_gpu
from threefold.plan.job import Machine, own_job
from threefold.plan.memory.peak import GIB, fullest_stage
from threefold.plan.predicted_metrics import metrics_of_job
from threefold.plan.software import THREEFOLD
from threefold.report.run_record import RunRecord

PEAK_TOLERANCE = 1e-3  # relative, of the peak that the metrics imply
USUAL_GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The planner's numbers for a run.

    Attributes:
        gpu: name of the datasheet
        ranks: number of ranks
        step_seconds: duration of a step
        tokens_per_second: throughput of all ranks
        mfu: model FLOP/s as a share of the GPU's peak
        tflops_per_gpu: model TFLOP/s per GPU, without recomputation
        memory_gb: peak of what rank 0 allocates, in 10^9 bytes, as in the metric `memory_gb`
        fullest_gib: memory of the fullest pipeline stage with CUDA and NCCL, in 2^30 bytes
        device_gib: memory of the device, in 2^30 bytes
    """

    gpu: str
    ranks: int
    step_seconds: float
    tokens_per_second: float
    mfu: float
    tflops_per_gpu: float
    memory_gb: float
    fullest_gib: float
    device_gib: float


def predict(record: RunRecord, gpu: str | None) -> Prediction:
    """Predict the speed and the memory of a run.

    Args:
        record: the record of the run
        gpu: name of a datasheet; None for the GPU that the recipe names or the metrics imply

    Raises:
        UserError: the reason why there is no prediction.
    """
    if record.plan is None:
        raise UserError("the recipe cannot be read")
    recipe, ranks = record.plan.at(record.newest_step).recipe, record.world_size
    if ranks is None:
        raise UserError("the metrics do not tell the number of ranks")
    kind = precision(read_deepspeed_json(recipe.deepspeed))
    name = gpu or gpu_of_run(record, recipe, kind)
    cluster = recipe.cluster
    per_node = cluster.gpus_per_node if cluster else USUAL_GPUS_PER_NODE
    machine = Machine.of(load_gpu(name), gpus=ranks, gpus_per_node=min(ranks, per_node))
    job, problem = own_job(recipe, machine, THREEFOLD)
    if job is None:
        raise UserError(problem)
    return Prediction(
        gpu=name,
        ranks=ranks,
        **metrics_of_job(job, recipe.training.steps),
        fullest_gib=fullest_stage(job).total / GIB,
        device_gib=machine.gpu.memory_gib,
    )


def gpu_of_run(record: RunRecord, recipe: Recipe, kind: str) -> str:
    """Return the name of the datasheet of the run's GPU.

    The run folder does not name the device. The metrics give its peak, `tflops_per_gpu / mfu`, and
    have no `mfu` on devices without a datasheet, such as CPUs.

    Raises:
        UserError: the GPU has no datasheet, or the peak fits several GPUs.
    """
    rate, mfu = record.steps.last("tflops_per_gpu"), record.steps.last("mfu")
    if not (rate and mfu):
        raise UserError(
            "the run is on a CPU, or on a device without a datasheet, because its metrics have no "
            "mfu; use --gpu NAME to compare it with a datasheet, for example --gpu cpu"
        )
    if recipe.cluster:
        return recipe.cluster.gpu
    peak = rate / mfu
    fitting = [
        gpu.name
        for gpu in gpus()
        if abs(gpu.peak_tflops.get(kind, 0.0) / peak - 1) < PEAK_TOLERANCE
    ]
    if len(fitting) != 1:
        which = f"fits {', '.join(fitting)}" if fitting else "fits no datasheet"
        example = fitting[0] if fitting else "H100"
        raise UserError(
            f"the recipe has no [cluster], and the peak of {peak:.0f} TFLOP/s {which}; use --gpu "
            f"NAME, for example --gpu {example}"
        )
    return fitting[0]
