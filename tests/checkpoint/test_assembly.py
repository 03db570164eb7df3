"""The ranks of a stage put logical tensors together, and connect only with the ranks they need."""

import os
import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from models.parallel.collectives import TensorAxis, create_host_groups
from models.sharding import Sharding
from tests.ranks import join_world, run_ranks
from threefold.checkpoint import writer as writer_module
from threefold.checkpoint.state import WEIGHTS, Fragment
from threefold.checkpoint.writer import Assembly

DIGEST_BYTES = 32  # of SHA-256
RANKS, SIZE = 6, 10  # as many tensors as ranks, of SIZE elements
PARTNERS = [3, 1, 5, 0, 4, 2]
TENSORS = {f"w{n}": torch.arange(SIZE) + 100.0 * n for n in range(RANKS)}


def sockets() -> int:
    """Return the number of this process's network connections."""
    return len(psutil.Process().net_connections(kind="tcp"))


def state_of(rank: int) -> Any:
    """Return a state with the second half of its tensor and the first half of its partner's."""
    parameters = {}
    for name, tensor in TENSORS.items():
        parameters[name] = nn.Parameter(tensor)
        parameters[name].sharding = Sharding((SIZE,))  # type: ignore[attr-defined]
    names = list(parameters)
    fragments = [
        Fragment(names[rank], range(SIZE // 2, SIZE), 0, 0),
        Fragment(names[PARTNERS[rank]], range(SIZE // 2), 0, SIZE // 2),
    ]
    return SimpleNamespace(
        parameters=parameters, fragments=fragments, kinds=lambda name: (WEIGHTS,)
    )


def assembly_worker(
    different: bool, interfaces: str
) -> tuple[dict[str, Tensor], list[int], list[int]]:
    """Assemble this rank's tensor.

    Also return the sockets of a group whose ranks are all connected, and those of the assembly
    before and after it has exchanged pieces; and the sizes of what this rank sends to all others.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = interfaces
    rank = join_world().rank
    state = state_of(rank)
    gathered, sizes = writer_module.gathered, list[int]()

    def noted(value: Any, group: Any = None) -> list[Any]:
        sizes.append(len(pickle.dumps(value)))
        return gathered(value, group)

    writer_module.gathered = noted
    if different:  # experts: each rank holds only the tensors of which it has fragments
        held = {fragment.name for fragment in state.fragments}
        state.parameters = {n: p for n, p in state.parameters.items() if n in held}
    before = sockets()
    create_host_groups([range(RANKS)], timedelta(seconds=60))
    counts = [sockets() - before]
    group = create_host_groups([range(RANKS)], timedelta(seconds=60), on_demand=True)
    assert group is not None and "TORCH_GLOO_LAZY_INIT" not in os.environ
    assembly = Assembly(state, group, tensor=TensorAxis(rank=0, size=1))
    counts.append(sockets() - before - counts[0])
    own = torch.cat([TENSORS[each.name][list(each.elements)] for each in state.fragments])
    flats = [{WEIGHTS: own}]
    works = assembly.send(flats)
    tensors = dict(assembly.receive(WEIGHTS, flats))
    for work in works:
        work.wait()
    torch.distributed.barrier()
    return tensors, [*counts, sockets() - before - counts[0]], sizes


@pytest.mark.parametrize(
    ("different", "interfaces"), [(False, "lo"), (True, "lo"), (False, "lo,lo")]
)
def test_ranks_connect_only_with_those_they_exchange_pieces_with(
    different: bool, interfaces: str
) -> None:
    results = run_ranks(RANKS, assembly_worker, different, interfaces)
    assembled = {name: tensor for tensors, *_ in results for name, tensor in tensors.items()}
    assert assembled.keys() == TENSORS.keys()
    assert all(torch.equal(assembled[name], tensor) for name, tensor in TENSORS.items())
    everyones = [sockets for _, sockets, _ in results]
    assert all(after <= before for _, before, after in everyones), everyones
    if not different:  # else the broadcasts from every rank connect nearly all
        assert sum(before for _, before, _ in everyones) < sum(most for most, *_ in everyones)
    # Only the owner of a tensor learns where its pieces are.
    assert max(size for *_, sizes in results for size in sizes) < 2 * DIGEST_BYTES
