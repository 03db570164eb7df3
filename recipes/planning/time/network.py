"""Predicted seconds of collectives and of transfers between stages."""

from math import log2

from recipes.planning.inputs.job import Machine

RING_STEP_SECONDS = 5e-6  # between two nodes, estimated; NCCL gathers and scatters only on rings


def all_reduce_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds of an all-reduce of `moved` bytes.

    It takes twice as long as a gather, without the ring's steps: across nodes, NCCL uses trees.
    """
    rings = gather_seconds(machine, moved, ranks=ranks, stride=stride)
    inside = max(1, min(ranks, machine.gpus_per_node // stride))
    return 2 * (rings - RING_STEP_SECONDS * (ranks / inside - 1))


def gather_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds of an all-gather or reduce-scatter of `moved` bytes per rank.

    A ring moves (n - 1) / n of the bytes through each link (Thakur et al. 2005, section 4.1;
    NCCL's bus bandwidth). Across nodes, a group with several GPUs in each node divides the bytes
    over the network links of these GPUs (NCCL has one ring per link), while the links within the
    node carry their part at the same time.

    Args:
        ranks: number of ranks of the group
        stride: distance of the group's neighbouring global ranks; `stride` groups share a node
    """
    if ranks == 1:
        return 0.0
    gpu = machine.gpu
    inside = max(1, min(ranks, machine.gpus_per_node // stride))
    part = (ranks - 1) / ranks * moved
    rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
    if inside == ranks:
        return part / rate + gpu.node_link_latency_seconds * log2(2 * ranks)
    outside = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency * inside
    if stride > 1 and inside > 1:
        outside *= machine.network_contention
    nodes = ranks / inside
    latency = gpu.network_latency_seconds * log2(2 * nodes) + RING_STEP_SECONDS * (nodes - 1)
    return part / min(rate, outside) + latency


def transfer_seconds(machine: Machine, moved: float, *, stride: int) -> float:
    """Return the seconds of sending `moved` bytes to the next stage, `stride` ranks away."""
    gpu = machine.gpu
    if stride < machine.gpus_per_node:
        rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
        return moved / rate + gpu.node_link_latency_seconds
    rate = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency
    return moved / rate + gpu.network_latency_seconds
