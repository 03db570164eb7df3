"""A process-group backend for the CPU that obeys NCCL's rules where they differ from gloo's.

Data travels over gloo, with one gloo group per connection. The rules of docs/nccl-and-cuda.md:

1. The first operation between two ranks of a communicator, and a communicator's first collective,
   blocks the host until all its ranks have posted theirs: creating the gloo group does that. A
   split of a communicator also blocks, and all ranks must pass the same groups.
2. A communicator runs its operations in the order in which they were posted, and there are no tags.
   A message that meets the wrong receive is an error here; NCCL would deliver it.
3. Few kernels are resident at a time (`Rules.slots`).
4. One hardware queue blocks all kernels behind the first one (`Rules.one_queue`).
5. A device-wide synchronization waits for outstanding receives (`Device.synchronize_all`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo

from tests.nccl_rules.device import Device, Hang, Kernel, Rules

NAME = "nccl_rules"
DEVICE = Device(Rules.from_environment())


@dataclass
class Options:
    """The part of `ProcessGroupNCCL.Options` that a split copies and changes."""

    is_high_priority_stream: bool = False
    config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(max_ctas=None))


class NcclRules(ProcessGroup):
    """A communicator; groups of more than two ranks connect each ordered pair by itself.

    label, ranks: the group's name and its global ranks, for messages
    """

    supports_splitting = True

    def __init__(self, store: dist.Store, rank: int, size: int, label: str, ranks: Sequence[int]):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options, self.splits = Options(), 0
        self.store, self.own, self.count = store, rank, size
        self.label, self.ranks = label, list(ranks) or list(range(size))
        self.connections: dict[tuple[str, ...], ProcessGroupGloo] = {}
        if DEVICE.rank < 0:
            DEVICE.rank = rank

    def getBackendName(self) -> str:
        """Return the name under which the backend is registered."""
        return NAME

    def send(self, tensors: list[Tensor], receiver: int, tag: int = 0) -> Kernel:
        """Post a send; it ends when the peer has received."""
        gloo: Any = self._connect(f"{self.own} to {receiver}", [self.own, receiver])

        def run() -> None:
            for each in (torch.tensor([tag]), *tensors):
                gloo.send([each], 1, 0).wait(_gloo_limit())

        name = f"send {self.ranks[self.own]} to {self.ranks[receiver]} over {self.label}"
        return DEVICE.post(Kernel(DEVICE, self, name, run))

    def recv(self, tensors: list[Tensor], sender: int, tag: int = 0) -> Kernel:
        """Post a receive of the next message of the peer."""
        gloo: Any = self._connect(f"{sender} to {self.own}", [sender, self.own])

        def run() -> None:
            sent = torch.zeros(1, dtype=torch.int64)
            for each in (sent, *tensors):
                gloo.recv([each], 0, 0).wait(_gloo_limit())
            if sent.item() != tag:
                raise RuntimeError(f"{kernel.name}: message {sent.item()} met receive {tag}")

        name = f"receive {self.ranks[sender]} to {self.ranks[self.own]} over {self.label}"
        kernel = Kernel(DEVICE, self, name, run)
        return DEVICE.post(kernel, is_receive=True)

    def barrier(self, options: Any = None, **_: Any) -> Kernel:
        """Wait for all ranks; the host waits too, as with NCCL."""
        kernel = self._collective("barrier", [])
        kernel.wait()
        return kernel

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Kernel:
        """Post an all-reduce."""
        return self._collective("allreduce", tensors, tensors, *_given(options))

    def broadcast(self, tensors: list[Tensor], options: Any) -> Kernel:
        """Post a broadcast."""
        return self._collective("broadcast", tensors, tensors, options)

    def reduce(self, tensors: list[Tensor], options: Any) -> Kernel:
        """Post a reduce."""
        return self._collective("reduce", tensors, tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None):
        """Post an all-gather into a list."""
        return self._collective("allgather", outputs, outputs, inputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Kernel:
        """Post a gather."""
        return self._collective("gather", outputs, outputs, inputs, options)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> Kernel:
        """Post a scatter."""
        return self._collective("scatter", outputs, outputs, inputs, options)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any):
        """Post a reduce-scatter of a list."""
        return self._collective("reduce_scatter", outputs, outputs, inputs, options)

    def all_gather_single(self, output: Tensor, part: Tensor, options: Any = None) -> Kernel:
        """Post an all-gather into one tensor."""
        return self._collective("_allgather_base", [output], output, part)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, options: Any) -> Kernel:
        """Post a reduce-scatter of one tensor."""
        return self._collective("_reduce_scatter_base", [output], output, whole, options)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall_base(
        self, output: Tensor, whole: Tensor, into: list[int], out_of: list[int], options: Any = None
    ) -> Kernel:
        """Post an all-to-all of one tensor."""
        return self._collective("alltoall_base", [output], output, whole, into, out_of)

    all_to_all_single = alltoall_base

    def shutdown(self) -> None:
        """Leave the connections to the end of the process."""

    def _get_backend(self, device: torch.device) -> "NcclRules":
        """Return the group itself, which has the same operations for all devices."""
        return self

    def split_group(
        self, ranks: list[int], *, opts: Options, group_name: str, **_: Any
    ) -> "NcclRules":
        """Split this communicator as `torch.distributed.split_group` asks for it.

        Args:
            ranks: the ranks of the new group in this one; this rank is one of them
            opts: the options of the new group
            group_name: its name
        """
        self.join_split(ranks)
        group = NcclRules(
            PrefixStore(f"split {group_name}", self.store),
            ranks.index(self.own),
            len(ranks),
            group_name,
            [self.ranks[rank] for rank in ranks],
        )
        group.options = opts
        return group

    @property
    def group_name(self) -> str:
        """Name of the group; torch's property would look up a backend, which this class lacks."""
        return self.label

    def get_group_store(self) -> dist.Store:
        """Return the store of the group."""
        return self.store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: there is no sequence number."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: NCCL creates the communicator, but its first collective still connects."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Join a split of this communicator without becoming a member of a new group."""
        self.join_split([])

    def join_split(self, ranks: Sequence[int]) -> None:
        """Wait until all ranks split this communicator, and check that they agree on the groups.

        ranks: the ranks of this rank's new group; empty: it is in none
        """
        self.splits += 1
        gloo: Any = self._connect("splits", list(range(self.count)))
        own = torch.tensor([self.splits, *(int(rank in ranks) for rank in range(self.count))])
        rows = [torch.empty_like(own) for _ in range(self.count)]
        gloo.allgather([rows], [own]).wait(_gloo_limit())
        groups = [row.tolist() for row in rows]
        if any(groups[rank] != group for group in groups for rank in members_of(group)):
            raise RuntimeError(f"the ranks split {self.label} into other groups: {groups}")

    def _collective(self, name: str, outputs: list, *arguments: Any) -> Kernel:
        gloo: Any = self._connect("all", list(range(self.count)))
        method: Callable[..., dist.Work] = getattr(gloo, name)

        def run() -> None:
            method(*arguments).wait()

        kernel = Kernel(DEVICE, self, f"{name} of ranks {self.ranks} over {self.label}", run)
        kernel.outputs = outputs
        return DEVICE.post(kernel)

    def _connect(self, key: str, members: list[int]) -> ProcessGroupGloo:
        """Return the gloo group of a connection; the first call waits for all its members."""
        if key not in self.connections:
            DEVICE.doing = f"the first use of {self.label} by {key}"
            patience = timedelta(seconds=DEVICE.rules.patience)
            store = PrefixStore(key, self.store)
            store.set_timeout(patience)
            try:
                self.connections[key] = ProcessGroupGloo(
                    store, members.index(self.own), len(members), patience
                )
            except RuntimeError as error:
                reason = str(error).splitlines()[0][:80]
                raise Hang(f"rank {DEVICE.rank}: {DEVICE}: {reason}") from None
            self.connections[key]._set_default_timeout(_gloo_limit())  # of collectives
            DEVICE.doing = ""
        return self.connections[key]


def members_of(group: Sequence[int]) -> list[int]:
    """Return the ranks of a group in the form of `join_split`: a number, then 1 for each member."""
    return [rank for rank, is_member in enumerate(group[1:]) if is_member]


def _gloo_limit() -> timedelta:
    """Return gloo's time limit: it must not end an operation before the device reports a hang."""
    return timedelta(seconds=2 * DEVICE.rules.patience, minutes=1)


def _given(options: Any) -> tuple:
    return () if options is None else (options,)


def create(options: Any, _: Any) -> NcclRules:
    """Create a group as torch.distributed asks for it (extended API).

    A bound device makes each new group a split of the world's communicator, as with NCCL.
    """
    if dist.is_initialized() and (world := dist.group.WORLD).bound_device_id is not None:
        world.join_split(options.global_ranks_in_group)
    return NcclRules(
        options.store,
        options.group_rank,
        options.group_size,
        options.group_id,
        options.global_ranks_in_group,
    )
