"""Recipes of released models: the architecture and the parameters of transformers' classes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from models.config import ModelConfig, Prediction
from models.cost import active_parameter_count, parameter_count
from models.hugging_face.config import imported_model
from threefold.config.loading import REPOSITORY, load_recipe

# The class of each model, and the attributes of its config.json that are not the class's defaults.
OLMO3 = {
    "vocab_size": 100278, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
}  # fmt: skip
RELEASED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mistral/7b": ("Mistral", {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768}),
    "qwen2.5/7b": (
        "Qwen2",
        {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "smollm3/3b": ("SmolLM3", {}),
    "olmo3/7b": ("Olmo3", OLMO3),
    "olmo3/32b": (
        "Olmo3",
        OLMO3
        | {
            "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8,
        },
    ),
    "gpt-oss/20b": ("GptOss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss/120b": ("GptOss", {}),
    "gemma3/27b": (
        "Gemma3Text",
        {
            "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
            "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
            "query_pre_attn_scalar": 168, "sliding_window": 1024,
        },
    ),
    "glm/4.5-air": (
        "Glm4Moe",
        {
            "attention_bias": True, "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
            },
        },
    ),
    "deepseek/v3": ("DeepseekV3", {}),
    "deepseek/v2-lite": (
        "DeepseekV2",
        {
            "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
            "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
            "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        },
    ),
    "kimi/k2": (
        "DeepseekV3",
        {
            "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
            "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 2.827,
        },
    ),
}  # fmt: skip
# Parameters that are not an element of transformers' `parameters`: biases for the choice of experts
BUFFERS = {"glm/4.5-air": 45 * 128, "deepseek/v3": 58 * 256, "kimi/k2": 60 * 384}
# Keys that a recipe of an earlier stage of the training has, and keys of the training itself.
FREE = ("sequence_length", "rope_scaling", "rope_theta", "initial_std", "z_loss")
TRAINING_OF_EXPERTS = ("bias_update", "balance_loss", "z_loss")


def model_of(name: str) -> ModelConfig:
    """Return a recipe's model without the prediction modules, which transformers' classes lack."""
    model = load_recipe(REPOSITORY / "recipes" / f"{name}.toml").model
    return replace(model, prediction=None)


def released(name: str) -> Any:
    kind, attributes = RELEASED[name]
    return getattr(transformers, f"{kind}Config")(**attributes)


def test_recipes_have_the_parameters_of_transformers() -> None:
    for name in RELEASED:
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(released(name))
        count = sum(parameter.numel() for parameter in theirs.parameters())
        assert parameter_count(model_of(name)) == count + BUFFERS.get(name, 0), name


def test_the_module_of_deepseek_v3_is_in_the_released_files_with_copies_of_both_tables() -> None:
    model = load_recipe(REPOSITORY / "recipes" / "deepseek" / "v3.toml").model
    assert model.prediction == Prediction(depth=1, loss_weight=0.3)
    copies = 2 * model.vocab_size * model.hidden_size
    assert parameter_count(model) + copies == 684_489_845_504


def test_recipes_have_the_architecture_of_the_released_models() -> None:
    for name in RELEASED:
        ours = model_of(name)
        theirs = imported_model(released(name).to_dict())
        without = {key: getattr(theirs, key) for key in FREE}
        if ours.window and theirs.window and theirs.rope_scaling is None:  # nothing is scaled
            without["window"] = replace(ours.window, rope_scaled=theirs.window.rope_scaled)
        if ours.experts is not None:
            training = {key: getattr(theirs.experts, key) for key in TRAINING_OF_EXPERTS}
            without["experts"] = replace(ours.experts, **training)
        assert replace(ours, **without) == theirs, name


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss/20b", 3.61), ("gpt-oss/120b", 5.13)])
def test_the_active_parameters_of_gpt_oss_are_published_without_its_embedding(
    name: str, billions: float
) -> None:
    model = model_of(name)
    active = active_parameter_count(model) - model.vocab_size * model.hidden_size
    assert active / 1e9 == pytest.approx(billions, abs=0.005)
