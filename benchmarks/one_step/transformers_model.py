"""Transformers' class of a recipe's model, with our initial weights."""

import re

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from models.hugging_face.config import hugging_face_config
from models.hugging_face.weights import counterparts
from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.sharding import declare, sharding_of
from threefold.config.recipe import Recipe

OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class TransformersModel(nn.Module):
    """Transformers' class with our initial weights; maps tokens and labels [b, s] to its loss."""

    def __init__(self, recipe: Recipe, autocast: bool):
        super().__init__()
        settings = hugging_face_config(recipe.model) | {"use_cache": False}
        config = AutoConfig.for_model(**settings)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.model.train()
        self.autocast = autocast
        copy_first_weights(self.model, recipe)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy by transformers' loss function; labels are shifted."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            output = self.model(
                input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False
            )
        return output.loss


@torch.no_grad()
def copy_first_weights(model: PreTrainedModel, recipe: Recipe) -> None:
    """Fill transformers' model with our initial weights, one tensor at a time."""
    with torch.device("meta"):
        ours = SequentialModel(layer_specs(recipe.model))
    table, theirs = counterparts(recipe.model), dict(model.state_dict(keep_vars=True))
    filled = set()
    for name, declared in logical_parameters(ours, recipe.model):
        weight = nn.Parameter(torch.empty(declared.shape))
        declare(weight, sharding_of(declared))
        initialize([(name, weight)], recipe.model, seed=recipe.seed)
        for part, tensor in table[name].split(sharding_of(declared).logical_tensor([weight])):
            whole, place = place_of(part, theirs)
            place.copy_(tensor)
            filled.add(whole)
    assert not theirs.keys() - filled, theirs.keys() - filled


def place_of(name: str, theirs: dict[str, Tensor]) -> tuple[str, Tensor]:
    """Return the tensor that has a weight, by name, and the weight's part of it.

    In memory transformers joins the weights of experts, [count, 2f, h] and [count, h, f].
    """
    if name in theirs or not (match := OF_EXPERT.fullmatch(name)):
        return name, theirs[name]
    experts, number, kind = match.groups()
    whole = f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj"
    of_expert = theirs[whole][int(number)]
    return whole, of_expert if kind == "down" else of_expert.chunk(2)[kind == "up"]
