"""The training state: this rank's share of it, and the tensors of a checkpoint in any layout.

ZeRO concatenates the parameters of an optimizer group, cuts the result into equal parts and gives
one part to every data rank. A *flat* is such a part: the fp32 weights, and AdamW's two moments or
Muon's momentum with the same length, and the average of the weights if the recipe has one. A
*fragment* is the range of a flat that belongs to one parameter. Flats end in padding, which belongs
to no parameter and stays zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from typing_extensions import override

from threefold.checkpoint.format import Manifest, find_damages, tensor_key

WEIGHTS = "weights"
STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # by algorithm
AVERAGE = "average"  # of the weights (`optimizer.average`)
KINDS = (WEIGHTS, *STATES["adamw"], *STATES["muon"], AVERAGE)
LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of this rank's part of a parameter, and their address in the flats.

    Attributes:
        name: logical name of the parameter
        elements: indices in the flattened part of the parameter
        offset: index of the first element within the flat
    """

    name: str
    elements: range
    flat: int
    offset: int


class TrainingState(ABC):
    """This rank's share of weights, moments and, if there is one, the average of the weights.

    Args:
        optimizer: DeepSpeed's wrapper around the optimizer
        parameters: the parameters by logical name; each has an attribute `sharding`
        algorithms: "adamw" or "muon" by logical name; a parameter without an entry has "adamw"
        has_average: keep an average of the weights, which is equal to them at first
    """

    def __init__(
        self,
        optimizer: Any,
        parameters: Mapping[str, nn.Parameter],
        algorithms: Mapping[str, str],
        *,
        has_average: bool = False,
    ):
        self.optimizer, self.parameters, self.algorithms = optimizer, parameters, algorithms
        self.has_average = has_average
        self.fragments = [f for f in self._find_fragments() if len(f.elements)]

    @property
    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The flats' fp32 weights."""

    @abstractmethod
    def _find_fragments(self) -> Iterable[Fragment]: ...

    @abstractmethod
    def _group_of(self, flat: int) -> int:
        """Return the number of the optimizer group that a flat belongs to."""

    @abstractmethod
    def copy_to_model(self) -> None:
        """Copy the weights from the flats to the model of all data ranks; collective."""

    def tensors(self) -> list[dict[str, Tensor]]:
        """Return each flat's weights and state, without copying; the next step changes them."""
        flats = []
        for number, flat in enumerate(self.weights):
            group = self.optimizer.optimizer.param_groups[self._group_of(number)]
            kinds = STATES[group.get("algorithm", "adamw")]
            state = initial_state(self.optimizer.optimizer.state, flat, kinds)
            if self.has_average:
                kinds = (*kinds, AVERAGE)
                if AVERAGE not in state:
                    state[AVERAGE] = flat.detach().clone()
            flats.append({WEIGHTS: flat.detach()} | {kind: state[kind] for kind in kinds})
        return flats

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return what is stored of a parameter: weights, states of its algorithm, average."""
        average = (AVERAGE,) if self.has_average else ()
        return (WEIGHTS, *STATES[self.algorithms.get(name, "adamw")], *average)

    @property
    def updates(self) -> int:
        """The number of steps that the optimizer has taken."""
        self.tensors()
        return int(self.optimizer.optimizer.state[self.weights[0]]["step"])

    @property
    def loss_scale(self) -> dict[str, Any] | None:
        """The state of fp16's dynamic loss scale."""
        scaler = getattr(self.optimizer, "loss_scaler", None)
        if scaler is None or not scaler.dynamic:
            return None
        return {key: getattr(scaler, key) for key in LOSS_SCALER_STATE}

    @torch.no_grad()
    def restore(
        self,
        read: Callable[[str, Fragment], Tensor],
        *,
        file_of: Callable[[str, str], str],
        updates: int | None,
        loss_scale: dict[str, Any] | None = None,
        reads_average: bool = False,
    ) -> None:
        """Replace the weights, the moments and the average of the weights.

        Args:
            read: returns the values of a fragment, given the kind and the fragment
            file_of: returns the file of a tensor, given the kind and the name; all fragments in a
                file are read one after the other
            updates: number of optimizer steps so far; None to restore only the weights and count
                from 0
            loss_scale: state of fp16's dynamic loss scale
            reads_average: `read` has an average; otherwise the average becomes the weights
        """
        flats = self.tensors()
        pieces = [
            (kind, fragment)
            for fragment in self.fragments
            for kind in ((WEIGHTS,) if updates is None else self.kinds(fragment.name))
            if kind != AVERAGE or reads_average
        ]
        for kind, fragment in sorted(pieces, key=lambda piece: file_of(piece[0], piece[1].name)):
            stop = fragment.offset + len(fragment.elements)
            flats[fragment.flat][kind][fragment.offset : stop] = read(kind, fragment)
        for tensors in flats if self.has_average and not reads_average else ():
            tensors[AVERAGE].copy_(tensors[WEIGHTS])
        for flat in self.weights:
            self.optimizer.optimizer.state[flat]["step"].fill_(updates or 0)
        if loss_scale and self.loss_scale:
            for key, value in loss_scale.items():
                setattr(self.optimizer.loss_scaler, key, value)
        self.copy_to_model()


def initial_state(
    states: Mapping[Tensor, dict[str, Tensor]], weights: Tensor, kinds: Iterable[str]
) -> dict[str, Tensor]:
    """Return the optimizer's state of a tensor of weights; create it before the first step.

    Args:
        states: the attribute `state` of a torch optimizer
        kinds: names of the states, apart from the number of steps
    """
    state = states[weights]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=weights.device)
        state |= {kind: torch.zeros_like(weights) for kind in kinds}
    return state


class SharedState(TrainingState):
    """State of ZeRO-1, ZeRO-2 and BF16_Optimizer: whole model weights, partitioned fp32 flats."""

    @property
    @override
    def weights(self) -> list[Tensor]:
        if hasattr(self.optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
            return self.optimizer.fp32_groups_flat_partition
        return self.optimizer.single_partition_of_fp32_groups

    @override
    def _group_of(self, flat: int) -> int:
        return flat

    @override
    def _find_fragments(self) -> Iterable[Fragment]:
        for name, parameter in self.parameters.items():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:  # this rank holds a part of the parameter
                part, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                elements = range(part.start, part.start + part.numel)
                yield Fragment(name, elements, mapping.param_group_index, flat.start)

    @override
    def copy_to_model(self) -> None:
        self.optimizer.update_lp_params()
        # DeepSpeed links its own view of the state only once, at the first optimizer step.
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()


class PartitionedState(TrainingState):
    """State of ZeRO-3: each parameter is padded and cut into equal parts, one per data rank."""

    @property
    @override
    def weights(self) -> list[Tensor]:
        return self.optimizer.fp32_partitioned_groups_flat

    @override
    def _group_of(self, flat: int) -> int:
        return self.optimizer.sub_group_to_group_id[flat]

    @override
    def _find_fragments(self) -> Iterable[Fragment]:
        for name, parameter in self.parameters.items():
            number = self.optimizer.get_param_id(parameter)
            flat, offset, share = self.optimizer.grad_position[number]
            first = self.optimizer._get_param_partition_rank(parameter) * share
            elements = range(first, min(first + share, cast(Any, parameter).ds_numel))
            yield Fragment(name, elements, flat, offset)

    @override
    def copy_to_model(self) -> None:
        # DeepSpeed makes the same calls after it has read weights from its own checkpoint.
        optimizer = self.optimizer
        optimizer.checkpoint_event_prologue()
        optimizer._rigid_load_state_dict(
            {
                "loss_scaler": optimizer.loss_scaler,
                "dynamic_loss_scale": optimizer.dynamic_loss_scale,
                "overflow": False,
                "fp32_flat_groups": self.weights,
            },
            load_optimizer_states=False,
        )
        optimizer.checkpoint_event_epilogue()


def training_state(
    optimizer: Any,
    parameters: Mapping[str, nn.Parameter],
    algorithms: Mapping[str, str] = MappingProxyType({}),
    *,
    has_average: bool = False,
) -> TrainingState:
    """Return the training state of DeepSpeed's wrapper around the optimizer (`TrainingState`)."""
    partitioned = hasattr(optimizer, "fp32_partitioned_groups_flat")
    kind = PartitionedState if partitioned else SharedState
    return kind(optimizer, parameters, algorithms, has_average=has_average)


# Find the newest undamaged checkpoint, and read its tensors in any layout.


class DamagedCheckpoint(Exception):
    """A checkpoint or a snapshot whose files have changed; the message describes the damage."""

    def __init__(self, path: Path, damage: str):
        super().__init__(damage)
        self.path = path


VERIFYING_THREADS = 8  # of a process that verifies a checkpoint alone


def first_damage(checkpoint: Path, kinds: Collection[str] = ()) -> str | None:
    """Return the first damage of a checkpoint, which this process verifies alone.

    kinds: verify only the files that hold tensors of these kinds; (): all files
    """
    return next(find_damages(checkpoint, kinds=kinds, threads=VERIFYING_THREADS), None)


@dataclass(frozen=True)
class CheckpointReader:
    """The logical tensors of a verified checkpoint, in fp32, read on demand.

    A file stays mapped as long as one of its tensors exists.
    """

    path: Path
    manifest: Manifest
    _open: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def verified(
        cls, path: Path, find_damage: Callable[[Path], str | None] = first_damage
    ) -> "CheckpointReader":
        """Verify a checkpoint, and return its reader.

        Raises:
            DamagedCheckpoint: `find_damage` has found a damage.
        """
        if damage := find_damage(path):
            raise DamagedCheckpoint(path, damage)
        return cls(path, Manifest.read(path))

    @property
    def in_memory(self) -> bool:
        """True for a snapshot in the memory of the nodes."""
        return False

    def file_of(self, kind: str, name: str) -> str:
        """Return the name of the file that holds a weight or a moment."""
        return self.manifest.tensors[tensor_key(kind, name)]

    def rows(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Return the rows start .. stop - 1 (dimension 0) of a weight or a moment.

        The file stays open until rows of another file are read, or `close` is called.
        """
        file = self.file_of(kind, name)
        if file not in self._open:
            self.close()
            self._open[file] = safe_open(self.path / file, framework="pt")
        return self._open[file].get_slice(tensor_key(kind, name))[start:stop]

    def close(self) -> None:
        """Close the open file, which would otherwise take space on the disk after its deletion."""
        self._open.clear()

    def tensor(self, kind: str, name: str) -> Tensor:
        """Return a whole weight or moment."""
        with safe_open(self.path / self.file_of(kind, name), framework="pt") as file:
            return file.get_tensor(tensor_key(kind, name))


Saved = TypeVar("Saved")


def newest_undamaged(
    newest_first: Iterable[Saved],
    verified: Callable[[Saved], CheckpointReader],
    skipped: dict[Path, str],
) -> Iterator[CheckpointReader]:
    """Yield the undamaged checkpoints or snapshots among those of a run, newest first.

    The checkpoints are verified one at a time, as the caller asks for them.

    Args:
        verified: verifies a checkpoint and returns its reader, or raises DamagedCheckpoint
        skipped: receives damaged checkpoint -> description of the damage
    """
    for saved in newest_first:
        try:
            reader = verified(saved)
        except DamagedCheckpoint as damage:
            skipped[damage.path] = str(damage)
        else:
            yield reader
