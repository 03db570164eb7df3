"""Predicted times of saves and restarts of a job, for the goodput."""

from models.cost import parameter_count
from recipes.planning.goodput.renewal import FaultCosts
from recipes.planning.inputs.job import Job
from recipes.planning.inputs.stage_contents import stage_parameters

STATE_BYTES = 12  # per parameter in a checkpoint: fp32 weights and two moments
HOST_BYTES_PER_SECOND = 20e9  # of a copy from a GPU to pinned host memory (PCIe 4.0 x16), assumed
STORAGE_BYTES_PER_SECOND_OF_NODE = 1e9  # share of each node in the storage's rate, assumed
PAUSE_SHARE = 0.05  # of a background write, lost to slower steps; measured on CPUs: 0.048
START_SECONDS = 60.0  # of a restart without detection and reading: join, build, warm up; assumed


def fault_costs(
    job: Job,
    *,
    detection_seconds: float,
    storage_bytes_per_second: float | None = None,
    restart_seconds: float | None = None,
) -> FaultCosts:
    """Return the times that saves and failures cost a job.

    Args:
        job: the job
        detection_seconds: from a failure to its detection
        storage_bytes_per_second: rate at which all nodes together write and read checkpoints; None
            for the assumed rate per node
        restart_seconds: from a failure to the next step; None for detection, the assumed start and
            reading the checkpoint
    """
    rate = storage_bytes_per_second or STORAGE_BYTES_PER_SECOND_OF_NODE * job.machine.nodes
    checkpoint = STATE_BYTES * parameter_count(job.model)
    own = STATE_BYTES * max(stage_parameters(job)) / job.layout.optimizer_ranks
    if restart_seconds is None:
        restart_seconds = detection_seconds + START_SECONDS + checkpoint / rate
    write = checkpoint / rate
    return FaultCosts(
        pause=own / HOST_BYTES_PER_SECOND + PAUSE_SHARE * write,
        write=write,
        restart=restart_seconds,
    )
