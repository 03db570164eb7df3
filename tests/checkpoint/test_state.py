"""The files that a load opens, and the state of fp16's loss scaler.

The values of weights and moments are tested by the relay.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models.parallel.collectives import TensorAxis
from models.sharding import Sharding
from threefold.checkpoint import state as state_module
from threefold.checkpoint.format import TensorFileWriter, tensor_key
from threefold.checkpoint.state import (
    KINDS,
    STATES,
    WEIGHTS,
    CheckpointReader,
    Fragment,
    SharedState,
    training_state,
)
from threefold.engine.engine import Engine

SIZE = 6  # elements of each tensor


class StateOfThree(SharedState):
    """The second half of three parameters, in one flat."""

    def _find_fragments(self) -> Iterator[Fragment]:
        for number, name in enumerate("abc"):
            yield Fragment(name, range(SIZE // 2, SIZE), 0, number * SIZE // 2)


def written_by_two_ranks(folder: Path) -> CheckpointReader:
    """Write the parameters a and c into the files of one rank, and b into those of another."""
    tensors = {}
    for kinds in ((WEIGHTS,), STATES["adamw"]):
        for names in ("ac", "b"):
            file = f"{kinds[0]}-{names}.safetensors"
            keys = {tensor_key(kind, name): (kind, name) for kind in kinds for name in names}
            with TensorFileWriter(folder / file, dict.fromkeys(keys, (SIZE,)), dtype="F32") as own:
                for key, (kind, name) in keys.items():
                    own.write(key, tensor_of(kind, name).numpy().data)
            tensors |= dict.fromkeys(keys, file)
    manifest: Any = SimpleNamespace(tensors=tensors, updates=7, loss_scale=None, has_average=False)
    return CheckpointReader(folder, manifest)


def tensor_of(kind: str, name: str) -> torch.Tensor:
    return torch.arange(float(SIZE)) + 100 * KINDS.index(kind) + 10 * "abc".index(name)


def test_each_file_is_opened_once_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, opened = written_by_two_ranks(tmp_path), list[str]()
    safe_open = state_module.safe_open

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path.name)
        return safe_open(path, **options)

    monkeypatch.setattr(state_module, "safe_open", counted)
    parameters = {name: nn.Parameter(torch.zeros(SIZE)) for name in "abc"}
    for parameter in parameters.values():
        parameter.sharding = Sharding((SIZE,))  # type: ignore[attr-defined]
    optimizer = fp16_optimizer(elements=3 * SIZE // 2, dynamic=False)
    engine: Any = SimpleNamespace(
        state=StateOfThree(optimizer, parameters, {}),
        axes=SimpleNamespace(tensor=TensorAxis(rank=0, size=1)),
        crumb=SimpleNamespace(note=lambda _: None),
        finish_communication=lambda: None,
        average=None,
    )
    Engine.load(engine, reader)
    (flat,) = engine.state.tensors()
    for kind in (WEIGHTS, *STATES["adamw"]):
        expected = torch.cat([tensor_of(kind, name)[SIZE // 2 :] for name in "abc"])
        assert torch.equal(flat[kind], expected)
    files = {file.name for file in tmp_path.iterdir()}
    assert sorted(opened) == sorted(files) and len(files) == 4
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()  # a deletion frees the disk


def fp16_optimizer(elements: int = 4, **scaler: Any) -> Any:
    """Return a stand-in for DeepSpeed's fp16 optimizer, which does not run on a CPU."""
    flat = torch.zeros(elements)
    return SimpleNamespace(
        optimizer=torch.optim.AdamW([flat]),
        single_partition_of_fp32_groups=[flat],
        loss_scaler=SimpleNamespace(**scaler),
        update_lp_params=lambda: None,
        _lazy_init_hp_params_optimizer_state=lambda: None,
    )


def nothing(*_: Any) -> Any:
    raise AssertionError("there are no fragments")


def test_the_loss_scale_resumes_from_its_saved_value() -> None:
    fresh = {"cur_scale": 65536.0, "cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 2}
    later = {"cur_scale": 256.0, "cur_iter": 90, "last_overflow_iter": 7, "cur_hysteresis": 1}
    saved = training_state(fp16_optimizer(dynamic=True, **later), {}).loss_scale
    assert saved == later
    state = training_state(fp16_optimizer(dynamic=True, **fresh), {})
    state.restore(nothing, file_of=nothing, updates=88, loss_scale=saved)
    assert state.loss_scale == later and state.updates == 88
    assert state.optimizer._hp_optimizer_states_linked is False


def test_a_fixed_loss_scale_is_not_saved() -> None:
    state = training_state(fp16_optimizer(dynamic=False), {})
    assert state.loss_scale is None and state.updates == 0
    state.restore(nothing, file_of=nothing, updates=3, loss_scale={"cur_scale": 2.0})
    assert state.updates == 3 and not hasattr(state.optimizer.loss_scaler, "cur_scale")
