"""This rank's share of the training state, at the addresses where DeepSpeed keeps it.

ZeRO concatenates the parameters of an optimizer group, cuts the result into equal parts and gives
one part to every data rank. A *flat* is such a part: the fp32 weights, and Adam's two moments with
the same length. A *fragment* is the range of a flat that belongs to one parameter. Flats end in
padding, which belongs to no parameter and stays zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch.optim.AdamW
KINDS = (WEIGHTS, *MOMENTS)
LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of this rank's part of a parameter, and their address in the flats.

    Attributes:
        name: logical name of the parameter
        elements: indices in the flattened part of the parameter
        flat: index of the flat
        offset: index of the first element within the flat
    """

    name: str
    elements: range
    flat: int
    offset: int


class TrainingState(ABC):
    """This rank's share of weights and moments.

    Args:
        optimizer: DeepSpeed's wrapper around AdamW
        parameters: the parameters by logical name; each has an attribute `sharding`
    """

    def __init__(self, optimizer: Any, parameters: Mapping[str, nn.Parameter]):
        self.optimizer, self.parameters = optimizer, parameters
        self.fragments = [f for f in self._find_fragments() if len(f.elements)]

    @property
    @abstractmethod
    def weights(self) -> list[Tensor]:
        """The flats' fp32 weights."""

    @abstractmethod
    def _find_fragments(self) -> Iterable[Fragment]: ...

    @abstractmethod
    def _weights_have_changed(self) -> None:
        """Copy the weights from the flats to the model."""

    def tensors(self) -> list[dict[str, Tensor]]:
        """Return each flat's weights and moments, without copying; the next step changes them."""
        flats = []
        for flat in self.weights:
            state = self._adam(flat)
            flats.append({WEIGHTS: flat.detach()} | {kind: state[kind] for kind in MOMENTS})
        return flats

    @property
    def updates(self) -> int:
        """The number of steps that the optimizer has taken."""
        return int(self._adam(self.weights[0])["step"])

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
        updates: int | None,
        loss_scale: dict[str, Any] | None = None,
    ) -> None:
        """Replace the weights and moments.

        Args:
            read: returns the values of a fragment, given the kind and the fragment
            updates: number of optimizer steps so far; None to restore only the weights and count
                from 0
            loss_scale: state of fp16's dynamic loss scale
        """
        kinds = (WEIGHTS,) if updates is None else KINDS
        flats = self.tensors()
        for fragment in self.fragments:
            stop = fragment.offset + len(fragment.elements)
            for kind in kinds:
                flats[fragment.flat][kind][fragment.offset : stop] = read(kind, fragment)
        for flat in self.weights:
            self._adam(flat)["step"].fill_(updates or 0)
        if loss_scale and self.loss_scale:
            for key, value in loss_scale.items():
                setattr(self.optimizer.loss_scaler, key, value)
        self._weights_have_changed()

    def _adam(self, flat: Tensor) -> dict[str, Tensor]:
        """Return AdamW's state; create it if AdamW has not taken its first step yet."""
        state = self.optimizer.optimizer.state[flat]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            state |= {kind: torch.zeros_like(flat) for kind in MOMENTS}
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
    def _find_fragments(self) -> Iterable[Fragment]:
        for name, parameter in self.parameters.items():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:  # this rank holds a part of the parameter
                part, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                elements = range(part.start, part.start + part.numel)
                yield Fragment(name, elements, mapping.param_group_index, flat.start)

    @override
    def _weights_have_changed(self) -> None:
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
    def _find_fragments(self) -> Iterable[Fragment]:
        for name, parameter in self.parameters.items():
            number = self.optimizer.get_param_id(parameter)
            flat, offset, share = self.optimizer.grad_position[number]
            first = self.optimizer._get_param_partition_rank(parameter) * share
            elements = range(first, min(first + share, cast(Any, parameter).ds_numel))
            yield Fragment(name, elements, flat, offset)

    @override
    def _weights_have_changed(self) -> None:
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


def training_state(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> TrainingState:
    """Return the training state of the optimizer that DeepSpeed has wrapped around AdamW."""
    partitioned = hasattr(optimizer, "fp32_partitioned_groups_flat")
    return (PartitionedState if partitioned else SharedState)(optimizer, parameters)
