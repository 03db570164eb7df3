"""A training loop in one process with Muon and AdamW, written without the code under test."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from threefold.config.optimization import learning_rate
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.dataset import TrainingData


@dataclass
class State:
    """The two running means of AdamW, or the momentum of Muon in `first`."""

    first: Tensor
    second: Tensor
    steps: int = 0


@dataclass
class PlainRun:
    """The model of a recipe, trained in one process; `train` runs all steps.

    Attributes:
        losses: loss of each step
        norms: norm of the gradient of each step
    """

    recipe: Recipe
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        model = self.recipe.model
        self.model = SequentialModel(layer_specs(model))
        parameters = list(logical_parameters(self.model, model))
        initialize(parameters, model, seed=self.recipe.seed)
        self.parameters: dict[str, nn.Parameter] = dict(parameters)
        self.states = {
            name: State(torch.zeros_like(each), torch.zeros_like(each))
            for name, each in self.parameters.items()
        }

    def train(self, steps: int) -> None:
        """Run steps, and record losses and norms."""
        data = TrainingData(self.recipe, self.recipe.parallel_dims(LaunchEnvironment()), 0)
        for step in range(1, steps + 1):
            micro_batches = list(data.micro_batches(step))
            total = 0.0
            for each in micro_batches:
                loss = self.model(each.tokens, each.labels, each.info)
                (loss / len(micro_batches)).backward()
                total += float(loss.detach()) / len(micro_batches)
            self.losses.append(total)
            clipping = self.recipe.optimizer.gradient_clipping
            norm = nn.utils.clip_grad_norm_(self.parameters.values(), clipping)
            self.norms.append(float(norm))
            rate = learning_rate(step, self.recipe.optimizer, self.recipe.training.steps)
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    self.update(name, parameter, rate)
                    parameter.grad = None

    def update(self, name: str, parameter: nn.Parameter, rate: float) -> None:
        """Update a parameter."""
        state, settings = self.states[name], self.recipe.optimizer
        is_matrix = name.startswith("blocks.") and name.endswith(".weight") and parameter.dim() == 2
        if is_matrix:
            parameter.mul_(1 - rate * settings.weight_decay)
            state.first.mul_(settings.momentum).add_(parameter.grad)
            nesterov = parameter.grad + settings.momentum * state.first
            for rows in self.matrices(name, len(parameter)):
                scale = 0.2 * math.sqrt(max(nesterov[rows].shape))
                parameter[rows] -= rate * scale * by_singular_values(nesterov[rows])
            return
        state.steps += 1
        first, second = settings.betas
        decay = settings.weight_decay if parameter.dim() == 2 else 0.0
        parameter.mul_(1 - rate * decay)
        state.first.lerp_(parameter.grad, 1 - first)
        state.second.lerp_(parameter.grad**2, 1 - second)
        mean = state.first / (1 - first**state.steps)
        square = state.second / (1 - second**state.steps)
        parameter -= rate * mean / (square.sqrt() + settings.epsilon)

    def matrices(self, name: str, rows: int) -> Iterator[slice]:
        """Yield the rows of q, k and v, of gate and up, or of the only matrix."""
        model = self.recipe.model
        ends = [0, rows]
        if ".qkv." in name:
            keys = model.query_size + model.key_value_size
            ends = [0, model.query_size, keys, rows]
        elif ".up." in name and model.activation == "swiglu":
            ends = [0, model.ffn_hidden_size, rows]
        yield from (slice(a, b) for a, b in pairwise(ends))


def by_singular_values(matrix: Tensor) -> Tensor:
    """Return what five Newton-Schulz iterations compute, from the singular values, in fp64.

    Each iteration maps a singular value s to a s + b s^3 + c s^5 and keeps the singular vectors.
    """
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return ((u * s) @ v).to(matrix.dtype)
