"""Sleeps in chosen parts of a step, to test that each part receives its own time."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from models.parallel import layers
from models.transformer import Block
from threefold.engine.engine import Engine
from threefold.pipeline.stage import replaced

SLEEP_SECONDS = 0.3


class VirtualClock:
    """A clock that only sleeps move, apart from a microsecond per reading.

    Other processes on the same cores do not change what it shows.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def read(self) -> float:
        self.seconds += 1e-6
        return self.seconds


class Sleep:
    """A sleep at the first call of each step; ranks that are not named do not sleep.

    sleep: called with the seconds
    """

    def __init__(self, engine: Engine, ranks: list[int], sleep: Callable[[float], None]):
        self.engine, self.is_here, self.is_due = engine, dist.get_rank() in ranks, False
        self.sleep = sleep

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.is_due and self.is_here:
            self.is_due = False
            self.sleep(SLEEP_SECONDS)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that sleeps before it calls the given one."""

        def call(*arguments: Any, **settings: Any) -> Any:
            self()
            return function(*arguments, **settings)

        return call

    @contextmanager
    def every_step(self) -> Iterator[None]:
        """Make the sleep due at the start of each step."""
        train = self.engine._train

        def begin(*arguments: Any) -> Any:
            self.is_due = True
            return train(*arguments)

        with replaced(self.engine, "_train", begin):
            yield


def block_of(engine: Engine) -> Block:
    return next(each for each in engine.wrapped.module.modules() if isinstance(each, Block))


@contextmanager
def slow_pass(engine: Engine, sleep: Sleep) -> Iterator[None]:
    hook = block_of(engine).register_forward_pre_hook(sleep)
    yield
    hook.remove()


@contextmanager
def slow_backward_pass(engine: Engine, sleep: Sleep) -> Iterator[None]:
    hook = next(block_of(engine).parameters()).register_hook(sleep)
    yield
    hook.remove()


@contextmanager
def slow_weight_pass(engine: Engine, sleep: Sleep) -> Iterator[None]:
    with replaced(layers, "add_product", sleep.before(layers.add_product)):
        yield


@contextmanager
def slow_optimizer(engine: Engine, sleep: Sleep) -> Iterator[None]:
    hook = engine.wrapped.optimizer.optimizer.register_step_pre_hook(sleep)
    yield
    hook.remove()


@contextmanager
def slow_collective(engine: Engine, sleep: Sleep) -> Iterator[None]:
    """The first all-reduce of more than one number."""
    start = dist.ProcessGroup.allreduce

    def allreduce(group: dist.ProcessGroup, tensors: list, *options: Any) -> Any:
        if tensors[0].numel() > 1 and group.size() > 1:
            sleep()
        return start(group, tensors, *options)

    with replaced(dist.ProcessGroup, "allreduce", allreduce):
        yield


@contextmanager
def slow_wait(engine: Engine, sleep: Sleep) -> Iterator[None]:
    """The first wait for a collective that is neither a broadcast nor a message."""
    wait = dist.Work.wait
    with replaced(dist.Work, "wait", lambda work, *rest: (sleep(), wait(work, *rest))[1]):
        yield


@contextmanager
def slow_background_collective(engine: Engine, sleep: Sleep) -> Iterator[None]:
    """The wait for a sum of gradients that runs during the weight gradient."""
    begin, wait = layers.begin_sum_of_copies, dist.Work.wait
    begun = []

    def note_begin(*arguments: Any) -> Any:
        finish = begin(*arguments)
        begun.append(True)
        return finish

    def wait_slowly(work: dist.Work, *rest: Any) -> Any:
        if begun:
            sleep()
        begun.clear()
        return wait(work, *rest)

    with ExitStack() as stack:
        stack.enter_context(replaced(layers, "begin_sum_of_copies", note_begin))
        stack.enter_context(replaced(dist.Work, "wait", wait_slowly))
        yield


@contextmanager
def slow_send(engine: Engine, sleep: Sleep) -> Iterator[None]:
    with replaced(dist, "isend", sleep.before(dist.isend)):
        yield


@contextmanager
def slow_host(engine: Engine, sleep: Sleep) -> Iterator[None]:
    """The time before the first pass."""
    with replaced(engine, "_train", sleep.before(engine._train)):
        yield


SLOW_PARTS = {
    "pass": slow_pass,
    "backward pass": slow_backward_pass,
    "weight pass": slow_weight_pass,
    "optimizer": slow_optimizer,
    "collective": slow_collective,
    "wait": slow_wait,
    "background collective": slow_background_collective,
    "send": slow_send,
    "host": slow_host,
}


@contextmanager
def slowed(
    engine: Engine, part: str, ranks: list[int], sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Let ranks sleep once in each step, in one of SLOW_PARTS."""
    due = Sleep(engine, ranks, sleep)
    with SLOW_PARTS[part](engine, due), due.every_step():
        yield
