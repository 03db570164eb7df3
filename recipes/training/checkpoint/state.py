"""What a run must not lose, where DeepSpeed keeps this rank's share of it.

ZeRO lays the parameters of an optimizer group end to end, cuts the result into equal parts and
gives every data rank one. A *flat* is such a part: fp32 weights, and of the same length Adam's two
moments. A *fragment* is the run of a flat's elements that belongs to one parameter. Flats end in
padding, which belongs to none and stays zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch.optim.AdamW
KINDS = (WEIGHTS, *MOMENTS)
LOSS_SCALER_STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class Fragment:
    """Consecutive elements of a rank's part of a parameter, and where in the flats they are.

    elements: of the flattened part
    flat, offset: which flat, and the first element's place in it
    """

    name: str
    elements: range
    flat: int
    offset: int


class TrainingState(ABC):
    """This rank's share of weights and moments.

    parameters: by logical name; each knows its `.sharding`
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
        """Give the model the weights that are in the flats."""

    def tensors(self) -> list[dict[str, Tensor]]:
        """Of each flat, the weights and both moments, as they are until the next step."""
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
        """Put other weights and moments in.

        read: (kind, fragment) to the fragment's values
        updates: the optimizer's steps so far; None: weights only, moments start again
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
        """AdamW's state, which it makes at its first step only."""
        state = self.optimizer.optimizer.state[flat]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            state |= {kind: torch.zeros_like(flat) for kind in MOMENTS}
        return state


class SharedState(TrainingState):
    """ZeRO-1 and ZeRO-2, and DeepSpeed's BF16_Optimizer: whole weights, shared fp32 flats."""

    @property
    def weights(self) -> list[Tensor]:
        """The flats' fp32 weights."""
        if hasattr(self.optimizer, "fp32_groups_flat_partition"):  # BF16_Optimizer
            return self.optimizer.fp32_groups_flat_partition
        return self.optimizer.single_partition_of_fp32_groups

    def _find_fragments(self) -> Iterable[Fragment]:
        for name, parameter in self.parameters.items():
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:  # this rank holds a part of the parameter
                part, flat = mapping.lp_fragment_address, mapping.hp_fragment_address
                elements = range(part.start, part.start + part.numel)
                yield Fragment(name, elements, mapping.param_group_index, flat.start)

    def _weights_have_changed(self) -> None:
        self.optimizer.update_lp_params()
        # DeepSpeed's own view of the state, which it links at the first group's step.
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()


class PartitionedState(TrainingState):
    """ZeRO-3: every parameter is cut into equal parts, padded, one for each data rank."""

    @property
    def weights(self) -> list[Tensor]:
        """The flats' fp32 weights."""
        return self.optimizer.fp32_partitioned_groups_flat

    def _find_fragments(self) -> Iterable[Fragment]:
        for name, parameter in self.parameters.items():
            number = self.optimizer.get_param_id(parameter)
            flat, offset, share = self.optimizer.grad_position[number]
            first = self.optimizer._get_param_partition_rank(parameter) * share
            elements = range(first, min(first + share, cast(Any, parameter).ds_numel))
            yield Fragment(name, elements, flat, offset)

    def _weights_have_changed(self) -> None:
        # DeepSpeed does the same after it has read weights from a checkpoint of its own.
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
    """Of the optimizer that DeepSpeed has wrapped around AdamW."""
    partitioned = hasattr(optimizer, "fp32_partitioned_groups_flat")
    return (PartitionedState if partitioned else SharedState)(optimizer, parameters)
