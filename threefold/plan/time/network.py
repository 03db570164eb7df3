"""Predicted seconds of collectives and of transfers between stages."""

from math import log2

from threefold.plan.job import Machine

# Number of ring steps, within a node or between nodes, that take as long as the network's latency.
# Fitted to InternEvo's broadcasts and DeepSpeed's ZeRO-3: 8 microseconds per step on A100s.
RING_STEPS_PER_LATENCY = 8


def all_reduce_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds of an all-reduce of `moved` bytes.

    It moves twice the bytes of a gather. Across nodes, NCCL uses trees for it.
    """
    return 2 * (
        _moving_seconds(machine, moved, ranks=ranks, stride=stride)
        + _tree_seconds(machine, ranks=ranks, stride=stride)
    )


def gather_seconds(
    machine: Machine, moved: float, *, ranks: int, stride: int, messages: int = 1
) -> float:
    """Return the seconds of all-gathers or reduce-scatters of `moved` bytes per rank in total.

    NCCL uses rings for gathers, scatters and broadcasts. Each message visits all ranks one after
    another. If many ranks share few bytes, this latency exceeds the time of the transfer.

    Args:
        ranks: number of ranks of the group
        stride: distance between neighbouring global ranks of the group; `stride` groups share a
            node
        messages: number of collectives that the bytes are divided into, one after the other
    """
    if _ranks_inside(machine, ranks=ranks, stride=stride) == ranks:
        latency = _tree_seconds(machine, ranks=ranks, stride=stride)
    else:
        latency = machine.gpu.network_latency_seconds / RING_STEPS_PER_LATENCY * ranks
    return _moving_seconds(machine, moved, ranks=ranks, stride=stride) + messages * latency


def _ranks_inside(machine: Machine, *, ranks: int, stride: int) -> int:
    """Return the number of a group's ranks in each node."""
    return max(1, min(ranks, machine.gpus_per_node // stride))


def _tree_seconds(machine: Machine, *, ranks: int, stride: int) -> float:
    """Return the latency of a collective on a tree of nodes, or of ranks within one node."""
    inside = _ranks_inside(machine, ranks=ranks, stride=stride)
    if ranks == 1:
        return 0.0
    if inside == ranks:
        return machine.gpu.node_link_latency_seconds * log2(2 * ranks)
    return machine.gpu.network_latency_seconds * log2(2 * ranks / inside)


def _moving_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds of gathering `moved` bytes per rank, without latency.

    A ring moves (n - 1) / n of the bytes through each link (Thakur et al. 2005, section 4.1;
    NCCL's bus bandwidth). Across nodes, a group with several GPUs in each node divides the bytes
    over the network links of these GPUs (NCCL has one ring per link), while the links within the
    node carry their part at the same time.
    """
    gpu = machine.gpu
    inside = _ranks_inside(machine, ranks=ranks, stride=stride)
    part = (ranks - 1) / ranks * moved
    rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
    if inside < ranks:
        outside = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency * inside
        if stride > 1 and inside > 1:
            outside *= machine.network_contention
        rate = min(rate, outside)
    return part / rate


def transfer_seconds(machine: Machine, moved: float, *, stride: int) -> float:
    """Return the seconds of sending `moved` bytes to the next stage, `stride` ranks away."""
    gpu = machine.gpu
    if stride < machine.gpus_per_node:
        rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
        return moved / rate + gpu.node_link_latency_seconds
    rate = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency
    return moved / rate + gpu.network_latency_seconds


def pass_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds in which each rank of a ring sends `moved` bytes to the next rank.

    The slowest link decides. Between nodes, it is the network link of one GPU.
    """
    spans_nodes = _ranks_inside(machine, ranks=ranks, stride=stride) < ranks
    distance = machine.gpus_per_node if spans_nodes else stride
    return transfer_seconds(machine, moved, stride=distance)


def all_to_all_seconds(machine: Machine, moved: float, *, ranks: int, stride: int) -> float:
    """Return the seconds in which each rank sends an equal part of `moved` bytes to every rank.

    The bytes for other nodes leave over the GPU's own network link, while those for the same node
    use the links within the node.
    """
    gpu = machine.gpu
    inside = _ranks_inside(machine, ranks=ranks, stride=stride)
    node_rate = machine.node_link_gigabytes_per_second * 1e9 * gpu.node_link_efficiency
    network_rate = machine.network_gigabytes_per_second * 1e9 * gpu.network_efficiency
    seconds = max(
        moved * (inside - 1) / ranks / node_rate,
        moved * (ranks - inside) / ranks / network_rate,
    )
    return seconds + _tree_seconds(machine, ranks=ranks, stride=stride)
