"""Page-locked memory, with a substitute for the CUDA runtime."""

import gc

import pytest
import torch

from threefold.checkpoint.writer import CheckpointWriter, host_copy, page_locked


class Runtime:
    """A substitute for the CUDA runtime that records the registered memory."""

    def __init__(self, code: int = 0):
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        self.registered[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("count", [1, 1000, 2**20 + 1])
def test_only_the_tensors_memory_is_locked_and_only_while_it_exists(count: int) -> None:
    runtime = Runtime()
    shape = torch.Size([count, 3])
    buffer = page_locked(shape, torch.float32, runtime)
    assert buffer.shape == shape and not buffer.any()
    assert runtime.registered == {buffer.data_ptr(): 4 * 3 * count}
    assert buffer.untyped_storage().nbytes() == 4 * 3 * count  # not the next power of two
    assert buffer.data_ptr() % 4096 == 0  # no page is shared with other memory
    buffer.copy_(torch.ones(shape))
    assert memoryview(buffer.numpy()).nbytes == 4 * 3 * count
    del buffer
    gc.collect()
    assert runtime.registered == {}


def test_a_checkpoint_writer_unlocks_its_memory_at_the_end_of_a_run() -> None:
    runtime = Runtime()
    writer = CheckpointWriter.__new__(CheckpointWriter)
    writer._thread = writer._broken = writer._problem = None
    writer.staged = [{"weights": page_locked(torch.Size([5]), torch.float32, runtime)}]
    writer.__exit__(RuntimeError)  # a thread may still be reading them
    assert len(runtime.registered) == 1
    writer.__exit__(None)
    gc.collect()
    assert runtime.registered == {}


def test_nothing_is_locked_for_an_empty_share() -> None:
    runtime = Runtime()
    assert page_locked(torch.Size([0]), torch.float32, runtime).numel() == 0
    assert runtime.registered == {}


def test_memory_that_cannot_be_locked_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match=r"cannot lock 0\.00 GB .* returned 2"):
        page_locked(torch.Size([8]), torch.float32, Runtime(code=2))


def test_a_copy_of_a_tensor_on_the_cpu_is_ordinary_memory() -> None:
    copy = host_copy(torch.ones(3, 5, dtype=torch.float64))
    assert copy.shape == (3, 5) and copy.dtype == torch.float64 and not copy.any()
