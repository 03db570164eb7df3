"""Predicted times of saves, snapshots and restarts of a job, for the goodput."""

from dataclasses import dataclass

from models.cost import checkpoint_elements
from threefold.plan.goodput import FaultCosts
from threefold.plan.job import Job
from threefold.plan.memory.muon_working import momentum_parameters
from threefold.plan.stage_contents import own_parameters, stage_parameters

ELEMENT_BYTES = 4  # of weights and optimizer state in a checkpoint, which are in fp32
HOST_BYTES_PER_SECOND = 20e9  # of a copy from a GPU to pinned host memory (PCIe 4.0 x16), assumed
STORAGE_BYTES_PER_SECOND_OF_NODE = 1e9  # share of each node in the storage's rate, assumed
PAUSE_SHARE = 0.05  # of a background write, lost to slower steps; measured on CPUs: 0.048
HASH_BYTES_PER_SECOND = 1.4e9  # SHA-256 on one core; each rank hashes its own files; measured
NODE_BYTES_PER_SECOND = 5e9  # of a node, from memory to memory over TCP, assumed
COPIES = 2  # of each file of a snapshot, on different nodes
START_SECONDS = 60.0  # assumed: joining, building and warming up, without detection and reading


@dataclass(frozen=True)
class SnapshotCosts:
    """The costs of snapshots in the memory of the nodes.

    Attributes:
        times: of a snapshot, and of a restart from it
        memory_bytes: host memory of a node: two snapshots, each with the copies of a partner, and
            the staged state of its ranks
        sent_bytes: what a node sends for each snapshot
    """

    times: FaultCosts
    memory_bytes: float
    sent_bytes: float


def snapshot_costs(
    job: Job, *, detection_seconds: float, restart_seconds: float | None = None
) -> SnapshotCosts:
    """Return the costs of snapshots for the nodes with the largest stage.

    Args:
        job: the job
        detection_seconds: from a failure to its detection
        restart_seconds: from a failure to the next step; None for detection, the assumed start,
            verification and reading
    """
    own, node_ranks = own_bytes(job), job.machine.gpus_per_node
    copies = min(COPIES, job.machine.nodes)
    # The ranks of a stage exchange parts to assemble logical tensors, then send copies.
    sent = copies * own * node_ranks
    write = own / HASH_BYTES_PER_SECOND + sent / NODE_BYTES_PER_SECOND
    if restart_seconds is None:
        # A rank reads all its weights, and its own shard of the optimizer state.
        weights = ELEMENT_BYTES * max(stage_parameters(job))
        state = own - weights / job.layout.optimizer_ranks
        read = node_ranks * (weights + state) / NODE_BYTES_PER_SECOND
        restart_seconds = detection_seconds + START_SECONDS + own / HASH_BYTES_PER_SECOND + read
    times = FaultCosts(
        pause_seconds=own / HOST_BYTES_PER_SECOND + PAUSE_SHARE * write,
        write_seconds=write,
        restart_seconds=restart_seconds,
    )
    memory = (2 * copies + 1) * own * node_ranks
    return SnapshotCosts(times, memory, sent)


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
    write = ELEMENT_BYTES * checkpoint_elements(job.model, job.optimizer) / rate
    if restart_seconds is None:
        restart_seconds = detection_seconds + START_SECONDS + write  # reading takes as long
    return FaultCosts(
        pause_seconds=own_bytes(job) / HOST_BYTES_PER_SECOND + PAUSE_SHARE * write,
        write_seconds=write,
        restart_seconds=restart_seconds,
    )


def own_bytes(job: Job) -> float:
    """Return the bytes of a checkpoint that a rank of the largest stage writes."""
    elements = max(
        3 * own_parameters(job, stage) - momentum_parameters(job, stage)
        for stage in range(job.layout.pipeline)
    )
    return ELEMENT_BYTES * elements / job.layout.optimizer_ranks
