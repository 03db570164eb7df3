"""Transformers' Llama with our initial weights."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from models.hugging_face.config import hugging_face_config
from models.hugging_face.weights import counterparts
from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.sharding import declare, sharding_of
from threefold.config.recipe import Recipe


class TransformersLlama(nn.Module):
    """Transformers' Llama with our initial weights; maps tokens and labels [b, s] to its loss."""

    def __init__(self, recipe: Recipe, autocast: bool):
        super().__init__()
        settings = hugging_face_config(recipe.model) | {"use_cache": False}
        settings.pop("model_type")
        self.llama = LlamaForCausalLM(LlamaConfig(attn_implementation="sdpa", **settings))
        self.llama.train()
        self.autocast = autocast
        copy_first_weights(self.llama, recipe)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy by transformers' loss function; labels are shifted."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
            output = self.llama(
                input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False
            )
        return output.loss


@torch.no_grad()
def copy_first_weights(llama: LlamaForCausalLM, recipe: Recipe) -> None:
    """Fill transformers' model with our initial weights, one tensor at a time."""
    with torch.device("meta"):
        ours = SequentialModel(layer_specs(recipe.model))
    table, theirs = counterparts(recipe.model), dict(llama.named_parameters())
    for name, declared in logical_parameters(ours, recipe.model):
        weight = nn.Parameter(torch.empty(declared.shape))
        declare(weight, sharding_of(declared))
        initialize([(name, weight)], recipe.model, seed=recipe.seed)
        for part, tensor in table[name].split(sharding_of(declared).logical_tensor([weight])):
            theirs.pop(part).copy_(tensor)
    assert not theirs, list(theirs)
