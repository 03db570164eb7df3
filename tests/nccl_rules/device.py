"""The communication kernels of one rank's device, scheduled as CUDA and NCCL schedule them."""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.nccl_rules.slots import LaunchRule

UNLIMITED = 10_000  # slots


class Hang(RuntimeError):
    """An error for an operation that has waited longer than the patience of the test."""


class DeviceWideSynchronization(RuntimeError):
    """An error for a call that waits for a receive whose message may depend on later operations."""


@dataclass(frozen=True)
class Rules:
    """The rules of the modelled device.

    slots: maximum number of communication kernels that are resident at a time
    launch: rule that selects the posted kernel that becomes resident next
    one_queue: CUDA_DEVICE_MAX_CONNECTIONS=1, where a kernel that cannot be launched blocks
        everything that is launched after it
    patience: seconds after which a wait counts as a hang
    """

    slots: int = UNLIMITED
    launch: LaunchRule = LaunchRule.FREE_COMMUNICATOR
    one_queue: bool = False
    patience: float = 20.0

    def environment(self) -> dict[str, str]:
        """Return environment variables from which another rank can read these rules."""
        return {f"NCCL_RULES_{name.upper()}": str(value) for name, value in vars(self).items()}

    @classmethod
    def from_environment(cls) -> "Rules":
        """Read the rules of this rank; rules that are not set have their defaults."""
        found = {
            name: os.environ[f"NCCL_RULES_{name.upper()}"]
            for name in cls.__dataclass_fields__
            if f"NCCL_RULES_{name.upper()}" in os.environ
        }
        default = cls()
        return cls(
            slots=int(found.get("slots", default.slots)),
            launch=LaunchRule(found.get("launch", default.launch)),
            one_queue=found.get("one_queue", "False") == "True",
            patience=float(found.get("patience", default.patience)),
        )


class Kernel(dist.Work):
    """An operation of a communicator, which is first posted, then resident, then done."""

    def __init__(self, device: "Device", communicator: object, name: str, run: Callable[[], None]):
        super().__init__()
        self.device, self.communicator, self.name, self.run = device, communicator, name, run
        self.state, self.error = "posted", None
        self.finished = threading.Event()
        self.outputs: list[torch.Tensor] = []

    def wait(self, timeout: Any = None) -> bool:
        """Wait as the compute stream would; here the host waits as well."""
        if not self.finished.wait(self.device.rules.patience):
            raise Hang(f"rank {self.device.rank} waits for {self.name}; {self.device}")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return whether the kernel is done."""
        return self.finished.is_set()

    def is_success(self) -> bool:
        """Return whether the kernel is done and did not fail."""
        return self.finished.is_set() and self.error is None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation wrote."""
        return self.outputs

    def get_future(self) -> torch.futures.Future:
        """Wait, and return a future that holds the result."""
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.outputs)
        return future

    def __str__(self) -> str:
        return f"{self.name} ({self.state})"


@dataclass
class Device:
    """The kernels of a rank, run by threads.

    most_resident: the largest number of kernels that were resident at once
    """

    rules: Rules
    rank: int = -1
    most_resident: int = 0
    doing: str = ""  # the call that blocks the host
    posted: list[Kernel] = field(default_factory=list)
    resident: list[Kernel] = field(default_factory=list)
    receives: list[Kernel] = field(default_factory=list)  # posted and not done
    changed: threading.Condition = field(default_factory=threading.Condition)
    chooser: random.Random = field(default_factory=lambda: random.Random(0))

    def post(self, kernel: Kernel, *, is_receive: bool = False) -> Kernel:
        """Launch a kernel, or queue it until a slot and its communicator are free."""
        with self.changed:
            self.posted.append(kernel)
            if is_receive:
                self.receives.append(kernel)
            self._launch()
            if self.rules.one_queue:  # nothing can be launched before this kernel is
                launched = self.changed.wait_for(
                    lambda: kernel.state != "posted", self.rules.patience
                )
                if not launched:
                    raise Hang(f"rank {self.rank}: {kernel.name} is not launched; {self}")
        return kernel

    def synchronize_all(self, reason: str) -> None:
        """Model a call that waits for all streams of the device.

        Raises:
            DeviceWideSynchronization: a receive is outstanding.
        """
        with self.changed:
            waiting = [str(kernel) for kernel in self.receives if not kernel.finished.is_set()]
        if waiting:
            raise DeviceWideSynchronization(
                f"rank {self.rank}: {reason} waits for all streams while {', '.join(waiting)} "
                f"is outstanding"
            )

    def _launch(self) -> None:
        while len(self.resident) < self.rules.slots and (kernel := self._next()):
            self.posted.remove(kernel)
            self.resident.append(kernel)
            kernel.state = "resident"
            self.most_resident = max(self.most_resident, len(self.resident))
            threading.Thread(target=self._run, args=(kernel,), daemon=True).start()
        self.changed.notify_all()

    def _next(self) -> Kernel | None:
        """Return the kernel that becomes resident next; a communicator's kernels run in turn."""
        in_order = self.rules.one_queue or self.rules.launch == LaunchRule.POSTING_ORDER
        busy = {kernel.communicator for kernel in self.resident}
        free = []
        for kernel in self.posted:
            if kernel.communicator not in busy:
                free.append(kernel)
            elif in_order:
                break
            busy.add(kernel.communicator)
        if not free:
            return None
        is_free = self.rules.launch == LaunchRule.ANY_ORDER and not in_order
        return self.chooser.choice(free) if is_free else free[0]

    def _run(self, kernel: Kernel) -> None:
        try:
            with torch.no_grad():  # gradient mode is per thread
                kernel.run()
        except Exception as error:  # `wait` raises it on the host's thread
            kernel.error = error
        with self.changed:
            kernel.state = "done"
            self.resident.remove(kernel)
            if kernel in self.receives:
                self.receives.remove(kernel)
            kernel.finished.set()
            self._launch()

    def __str__(self) -> str:
        kernels = ", ".join(map(str, [*self.resident, *self.posted])) or "no kernel"
        return f"host in {self.doing or 'a wait'}; {kernels}"
