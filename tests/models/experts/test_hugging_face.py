"""Models with experts against Mixtral, Qwen3-MoE and Dots1 of transformers, through their files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models.config import Experts, ModelConfig
from models.errors import UserError
from models.experts import layer
from models.hugging_face import weights as weights_module
from models.hugging_face.config import (
    export_problem,
    hugging_face_config,
    imported_model,
)
from models.hugging_face.weights import Counterpart
from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, run_layers
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import sharding_of
from tests.models.test_transformer import (
    COMPLETEP,
    LLAMA,
    MUP,
    STANDARD,
    Outcome,
    from_hugging_face,
    gradients_from_hugging_face,
    labels_of,
    relative,
    to_hugging_face,
)
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.convert.from_hugging_face import imported_config

MIXTRAL = Experts(count=8, per_token=2, ffn_hidden_size=40, router="softmax-after-topk")
QWEN3 = Experts(count=8, per_token=3, ffn_hidden_size=40)
DOTS = Experts(count=8, per_token=3, ffn_hidden_size=40, shared=2, router="sigmoid")
MODELS = {
    "Mixtral": replace(LLAMA, experts=MIXTRAL),
    "Mixtral, as normalized softmax": replace(
        LLAMA, experts=replace(MIXTRAL, router="softmax", normalize=True)
    ),
    "Qwen3-MoE": replace(LLAMA, qk_norm=True, experts=QWEN3),
    "Qwen3-MoE, normalized": replace(LLAMA, qk_norm=True, experts=replace(QWEN3, normalize=True)),
    "Qwen3-MoE, first layer dense": replace(
        LLAMA,
        qk_norm=True,
        head_size=16,
        experts=replace(QWEN3, dense_layers=1, normalize=True),
    ),
    "Dots1": replace(LLAMA, qk_norm=True, experts=DOTS),
    "Dots1, normalized and scaled, first layer dense": replace(
        LLAMA,
        qk_norm=True,
        head_size=16,
        experts=replace(DOTS, dense_layers=1, normalize=True, output_scale=2.5),
    ),
    "Dots1, in groups": replace(
        LLAMA, qk_norm=True, experts=replace(DOTS, groups=4, groups_per_token=2)
    ),
}

WITH_MULTIPLIERS = {
    "Mixtral, mup": replace(LLAMA, experts=MIXTRAL, **MUP),
    "Dots1, completep": replace(LLAMA, qk_norm=True, experts=DOTS, **COMPLETEP),
}


def example_tokens(config: ModelConfig) -> Tensor:
    """Return enough tokens to use every expert, so that no gradient is zero."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab_size, (8, config.sequence_length), generator=generator)


def largest_difference(one: Outcome, other: Outcome) -> float:
    """Return the largest relative difference of logits, loss and gradients; NaN if one is NaN."""
    assert one[2].keys() == other[2].keys()
    differences = [relative(one[0], other[0]), relative(one[1], other[1])]
    differences += [relative(one[2][name], other[2][name]) for name in one[2]]
    return float(torch.tensor(differences).max())


def run_ours(config: ModelConfig) -> tuple[Outcome, dict[str, Tensor]]:
    """Return logits, loss and gradients, and the weights, by logical name."""
    model = SequentialModel(layer_specs(config))
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3)
    for name, parameter in parameters.items():
        if name.endswith("router.bias"):  # as after many updates: other experts are chosen
            parameter.data.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(4))
    tokens = example_tokens(config)
    loss = model(tokens, labels_of(tokens), MicroBatchInfo())
    loss.backward()
    logits = run_layers(model.layers, tokens, info=MicroBatchInfo()).detach()

    def logical(of: Callable[[torch.nn.Parameter], Tensor]) -> dict[str, Tensor]:
        return {
            name: sharding_of(each).logical_tensor([of(each)]).clone()
            for name, each in parameters.items()
        }

    outcome = (
        logits[..., : config.vocab_size].transpose(0, 1),
        loss.detach(),
        logical(lambda parameter: torch.as_tensor(parameter.grad)),
    )
    return outcome, logical(lambda parameter: parameter.detach())


def export(config: ModelConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write weights and config as files of transformers."""
    AutoConfig.for_model(**hugging_face_config(config)).save_pretrained(folder)
    tensors = {name: each.contiguous() for name, each in to_hugging_face(config, weights).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run_theirs(config: ModelConfig, folder: Path) -> Outcome:
    """Return the results of transformers, which loads the folder, under our names.

    transformers joins the weights of all experts. It splits them again when it writes a file, so
    the gradients are written as if they were weights.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    tokens = example_tokens(config)
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_of(tokens).flatten())
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    model.save_pretrained(folder / "gradients")
    gradients = load_file(folder / "gradients" / "model.safetensors")
    return logits.detach(), loss.detach(), gradients_from_hugging_face(config, gradients)


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("config", [*MODELS.values(), *WITH_MULTIPLIERS.values()])
def test_logits_loss_and_every_gradient_are_those_of_transformers(
    config: ModelConfig, tmp_path: Path
) -> None:
    ours, weights = run_ours(config)
    export(config, weights, tmp_path)
    assert largest_difference(ours, run_theirs(config, tmp_path)) < 1e-5


@pytest.mark.parametrize("config", WITH_MULTIPLIERS.values())
def test_weights_with_multipliers_survive_a_round_trip(config: ModelConfig) -> None:
    _, weights = run_ours(config)
    theirs = to_hugging_face(config, weights)
    back = from_hugging_face(config, theirs)
    assert all(relative(back[each], weights[each]) < 1e-6 for each in weights)
    plain = to_hugging_face(replace(config, **STANDARD), weights)
    assert any(relative(theirs[each], plain[each]) > 0.1 for each in theirs)


def test_weights_survive_a_round_trip_bit_for_bit(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    _, weights = run_ours(config)
    export(config, weights, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    back = from_hugging_face(config, written)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[each], weights[each]) for each in weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "again")
    theirs = load_file(tmp_path / "again" / "model.safetensors")
    assert theirs.keys() == written.keys()
    assert all(torch.equal(theirs[each], written[each]) for each in written)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_survive_a_round_trip_bit_for_bit(dtype: torch.dtype) -> None:
    config = MODELS["Qwen3-MoE, first layer dense"]
    weights = {name: each.to(dtype) for name, each in run_ours(config)[1].items()}
    back = from_hugging_face(config, to_hugging_face(config, weights))
    assert all(torch.equal(back[each], weights[each]) for each in weights)


def test_settings_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    """A model of Mixtral has no size of dense layers, and one way to write its router."""
    config = MODELS[name]
    assert config.experts is not None
    if config.experts.router != "sigmoid":  # Dots1's config has no balance loss
        config = replace(config, experts=replace(config.experts, balance_loss=0.001))
    AutoConfig.for_model(**hugging_face_config(config)).save_pretrained(tmp_path)
    back = imported_model(AutoConfig.from_pretrained(tmp_path).to_dict())
    expected = replace(config, initial_std=back.initial_std)
    if name.startswith("Mixtral"):
        assert config.experts is not None
        experts = replace(config.experts, router="softmax-after-topk", normalize=False)
        expected = replace(expected, ffn_hidden_size=experts.ffn_hidden_size, experts=experts)
    assert back == expected


PUBLISHED: dict[str, dict[str, Any]] = {  # recipe -> config.json of the released model
    "mixtral/8x7b": {  # mistralai/Mixtral-8x7B-v0.1
        "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen3/30b-a3b": {  # Qwen/Qwen3-30B-A3B-Base
        "model_type": "qwen3_moe", "attention_bias": False, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 32768,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_has_the_published_architecture(recipe: str) -> None:
    theirs = AutoConfig.for_model(**PUBLISHED[recipe]).to_dict()
    ours = load_recipe(REPOSITORY / "recipes" / f"{recipe}.toml").model
    assert imported_model(theirs) == replace(ours, sequence_length=32768)


DEFAULTS = {  # of attributes that transformers leaves open
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2},
}
EXPERT_TENSORS = weights_module._expert_tensors


def gate_and_up_swapped(config: ModelConfig, *prefixes: str) -> dict[str, Counterpart]:
    table = EXPERT_TENSORS(config, *prefixes)
    return {name: replace(each, names=each.names[::-1]) for name, each in table.items()}


def next_expert(config: ModelConfig, *prefixes: str) -> dict[str, Counterpart]:
    table = EXPERT_TENSORS(config, *prefixes)
    kinds = [[name for name in table if f"experts.{kind}_" in name] for kind in ("up", "down")]
    moved = {
        a: table[b] for names in kinds for a, b in zip(names, names[1:] + names[:1], strict=True)
    }
    return table | moved


def other_gates(**changes: Any) -> Callable[..., Tensor]:
    gates_of = layer.gates_of
    return lambda scores, chosen, **given: gates_of(scores, chosen, **(given | changes))


ROUTER_FORWARD = layer.Router.forward


def with_biases_in_scores(router: layer.Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, scores, preferences = ROUTER_FORWARD(router, x)
    assert router.bias is not None
    return logits, scores + router.bias.detach(), preferences


FAULTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "gate and up swapped": ("Mixtral", weights_module, "_expert_tensors", gate_and_up_swapped),
    "gate and up swapped, Qwen3-MoE": (
        "Qwen3-MoE",
        weights_module,
        "_expert_tensors",
        gate_and_up_swapped,
    ),
    "weights of the next expert": ("Qwen3-MoE", weights_module, "_expert_tensors", next_expert),
    "not normalized": (
        "Qwen3-MoE, normalized",
        layer,
        "gates_of",
        other_gates(sum_is_one=False),
    ),
    "normalized": ("Qwen3-MoE", layer, "gates_of", other_gates(sum_is_one=True)),
    "softmax before top-k": ("Mixtral", layer, "gates_of", other_gates(sum_is_one=False)),
    "not scaled": (
        "Dots1, normalized and scaled, first layer dense",
        layer,
        "gates_of",
        other_gates(scale=1.0),
    ),
    "biases in the scores": (
        "Dots1",
        layer.Router,
        "forward",
        lambda self, x: with_biases_in_scores(self, x),
    ),
    "one expert less": (
        "Qwen3-MoE",
        layer,
        "choose_experts",
        lambda logits, k: torch.sort(logits, descending=True).indices[:, [*range(k - 1), k]],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    model, *target = FAULTS[fault]
    config = MODELS[model]
    with mock.patch.object(*target):
        ours, weights = run_ours(config)
        export(config, weights, tmp_path)
    assert largest_difference(ours, run_theirs(config, tmp_path)) > 1e-3


def per_kind(*shares: float | None) -> dict[str, Any]:
    return {
        f"{kind}_attention": {"rope_type": "default", "partial_rotary_factor": share}
        for kind, share in zip(("full", "sliding"), shares, strict=True)
    }


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: not supp.* = 1"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]: .* = \[0\]"),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, r"mlp_only_layers = \[0, 2\]: .* = \[0, 1\]"),
        ("qwen3_moe", {"sliding_window": 8}, r'model.attention_pattern = \["window"\] is'),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ("phi3", {"resid_pdrop": 0.1}, r"resid_pdrop = 0\.1: not supported; .* = 0\.0"),
        ("gemma3_text", {"attn_logit_softcapping": 3.0}, r"attn_logit_soft.* = 3\.0: .* = null"),
        ("gemma3_text", {"query_pre_attn_scalar": -4}, "scalar = -4 is not above 0; .* = 256"),
        (
            "gemma3_text",
            {"query_pre_attn_scalar": 10**14},
            r"model\.attention_scale = .*another mod",
        ),
        (
            "gemma3_text",
            {"final_logit_softcapping": 0.0},
            "^final_logit_softcapping = 0.0 .* model$",
        ),
        ("mistral", {"sliding_window": 0}, "^sliding_window = 0 is not in 1 .*; use sliding_w"),
        ("olmo3", {"sliding_window": None}, "^sliding_window = null, but layer_types has"),
        (
            "olmo3",
            {"rope_parameters": per_kind(0.5, None)},
            "factor = 0.5 is not supported for Olmo3",
        ),
        (
            "olmo3",
            {"rope_parameters": per_kind(None, 0.5)},
            "factor = 0.5 is not supported for Olmo3",
        ),
        ("olmo3", {"rms_norm_eps": 0.0}, "^rms_norm_eps = 0.0 .*; use rms_norm_eps = 1e-05"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0}}, "= 0 is not above 0 .* = 0.02"),
        ("smollm3", {"no_rope_layers": []}, "has 0 entries for num_hidden_layers = 36; .* 1, 1"),
        ("mixtral", {"num_local_experts": 1}, "^num_local_experts = 1 is .*; use num_.* = 8$"),
        (
            "mixtral",
            {"num_experts_per_tok": 9},
            "^num_experts_per_tok = 9 .* num_local_experts = 8; ",
        ),
        (
            "mixtral",
            {"num_key_value_heads": 5},
            "^num_key_value_heads = 5 does .* num_attention_heads",
        ),
        ("qwen2", {"is_causal": False}, "is_causal = false: .* use a model with is_causal = true"),
        ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, "per_layer_config: not sup"),
    ],
)
def test_an_architecture_that_we_lack_is_rejected(
    family: str, changes: dict[str, Any], message: str
) -> None:
    theirs = AutoConfig.for_model(family, **DEFAULTS.get(family, {})).to_dict()
    imported_config(theirs)
    with pytest.raises(UserError, match=message):
        imported_config(theirs | changes)


WITHOUT_A_CLASS: list[
    tuple[dict[str, Any], dict[str, Any], str]
] = [  # changes of the model, changes of its experts, the named setting
    ({}, {"shared": 1}, "model.experts.shared = 1; use model.experts.shared = 0 (Mixtral"),
    ({}, {"output_scale": 2.5}, "output_scale = 2.5; use model.experts.output_scale = 1.0 (Mixtr"),
    ({}, {"router": "sigmoid"}, 'router = "sigmoid"; use model.experts.router = "softmax-after-'),
    ({}, {"router": "softmax"}, 'router = "softmax"; use model.experts.router = "softmax-after-'),
    ({}, {"dense_layers": 1}, "dense_layers = 1; use model.experts.dense_layers = 0 (MixtralFor"),
    ({"activation": "gelu"}, {}, 'activation = "gelu"; use model.activation = "swiglu" (Mixtral'),
]


@pytest.mark.parametrize(("model", "experts", "named"), WITHOUT_A_CLASS)
def test_a_model_without_a_class_is_rejected(
    model: dict[str, Any], experts: dict[str, Any], named: str
) -> None:
    config = replace(LLAMA, **model, experts=replace(MIXTRAL, **experts))
    with pytest.raises(UserError, match="transformers has no model class with") as rejected:
        hugging_face_config(config)
    assert named in str(rejected.value)


@pytest.mark.parametrize(
    ("recipe", "overrides", "named"),
    [
        (
            "tiny-window",
            ["model.rope_scaling={type='linear',factor=2.0}", "model.window.rope_scaled=false"],
            'attention_pattern = ["window", "nope", "window", "full"], model.window.rope_theta = '
            '1000.0, model.window.rope_scaled = false, model.rope_scaling.type = "linear", '
            'model.attention_sinks = true; use model.attention_pattern = ["full"], '
            "model.attention_sinks = false and leave model.rope_scaling, model.window out (P",
        ),
        (
            "olmo3/7b",
            ["model.rope_scaling={type='yarn',factor=8.0,original_sequence_length=8192,"
             "truncate=false}"],
            "model.rope_scaling.truncate = false; use model.rope_scaling.truncate = true (Olmo3",
        ),
        (
            "mistral/7b",
            ["model.window.rope_theta=5e5", "model.qkv_bias=true"],
            "model.window.rope_theta = 500000.0; leave model.window.rope_theta out (Qwen2",
        ),
        (
            "tiny",
            ["model.partial_rotary_factor=0.5", "model.rope_scaling={type='linear',factor=2.0}"],
            'model.rope_scaling.type = "linear"; leave model.rope_scaling out (Phi3',
        ),
        (
            "tiny-postnorm",
            ["model.qkv_bias=true"],
            "; use model.bias = false and leave model.logit_soft_cap, model.qkv_bias out (Olmo2",
        ),
    ],
)  # fmt: skip
def test_positions_and_windows_without_a_class_are_named(
    recipe: str, overrides: list[str], named: str
) -> None:
    model = load_recipe(REPOSITORY / "recipes" / f"{recipe}.toml", overrides).model
    assert named in export_problem(model)


@pytest.mark.parametrize("recipe", ["tiny-moe", "qwen3/30b-a3b", "dots/llm1"])
def test_recipes_have_a_class(recipe: str) -> None:
    model = load_recipe(REPOSITORY / "recipes" / f"{recipe}.toml").model
    expected = {"tiny-moe": "mixtral", "qwen3/30b-a3b": "qwen3_moe", "dots/llm1": "dots1"}
    assert hugging_face_config(model)["model_type"] == expected[recipe]
