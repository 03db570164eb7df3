"""Scaled rotary positions: frequencies, logits and gradients of transformers, and conversion."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models import attention
from models.attention import Frequencies
from models.config import ModelConfig, RopeScaling
from models.errors import UserError
from models.hugging_face.config import hugging_face_config, imported_model
from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, run_layers
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import sharding_of
from tests.models.test_transformer import SHAPES, from_hugging_face, relative, to_hugging_face

CPU = torch.device("cpu")
SCALINGS = {
    "linear": RopeScaling(type="linear", factor=4.0),
    "Llama 3.1": RopeScaling(type="llama3", factor=8.0, original_sequence_length=8192),
    "llama3, other bounds": RopeScaling(
        type="llama3", factor=32.0, original_sequence_length=1000, low_frequency_factor=2.0,
        high_frequency_factor=8.0,
    ),
    "Qwen3": RopeScaling(type="yarn", factor=4.0, original_sequence_length=32768),
    "yarn, other bounds": RopeScaling(
        type="yarn", factor=10.0, original_sequence_length=1000, beta_fast=16.0, beta_slow=2.0,
        attention_factor=1.3, truncate=False,
    ),
}  # fmt: skip


def config_of(scaling: RopeScaling | None, **changes: Any) -> ModelConfig:
    family = "qwen3" if scaling and scaling.type == "yarn" else "llama"
    settings = {"layers": 2, "rope_theta": 500_000.0, "rope_scaling": scaling}
    return replace(SHAPES[family], **(settings | changes))


def weights_of(config: ModelConfig) -> tuple[SequentialModel, dict[str, torch.nn.Parameter]]:
    model = SequentialModel(layer_specs(config))
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3)
    return model, parameters


def largest_difference(config: ModelConfig, positions: range) -> float:
    """Return the largest relative difference from transformers, of logits, loss and gradients."""
    ours, parameters = weights_of(config)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**hugging_face_config(config), attn_implementation="sdpa")
    ).eval()
    weights = {name: logical(p, p.detach()) for name, p in parameters.items()}
    theirs.load_state_dict(to_hugging_face(config, weights))
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(config.vocab_size, (1, len(positions)), generator=generator)
    labels = tokens.roll(-1, dims=1)
    table = attention.rotary_table

    def moved(_: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        return table((positions,), *rest)

    with mock.patch.object(attention, "rotary_table", moved):
        loss = ours(tokens, labels, MicroBatchInfo())
        loss.backward()
        found = run_layers(ours.layers, tokens, info=MicroBatchInfo()).detach()
    ids = torch.arange(positions.start, positions.stop)[None]
    logits = theirs(tokens, position_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(logits[0], labels[0])
    expected.backward()
    gradients = from_hugging_face(config, {n: p.grad for n, p in theirs.named_parameters()})
    differences = [relative(logical(p, p.grad), gradients[n]) for n, p in parameters.items()]
    differences.append(relative(found[..., : config.vocab_size].transpose(0, 1), logits.detach()))
    return max(*differences, relative(loss.detach(), expected.detach()))


def logical(parameter: torch.nn.Parameter, part: Tensor) -> Tensor:
    """Return a logical tensor, given its only part."""
    return sharding_of(parameter).logical_tensor([part]).clone()


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_size", [16, 128])
def test_frequencies_are_those_of_transformers(name: str, head_size: int) -> None:
    scaling = SCALINGS[name]
    for theta in (10_000.0, 500_000.0):
        config = config_of(scaling, rope_theta=theta, head_size=head_size)
        theirs = AutoConfig.for_model(**hugging_face_config(config))
        expected, amplitude = ROPE_INIT_FUNCTIONS[scaling.type](theirs, CPU)
        frequencies = Frequencies(head_size, theta, scaling)
        assert torch.equal(frequencies.on(CPU), expected)
        assert frequencies.amplitude == pytest.approx(amplitude, rel=1e-12)
        assert not torch.equal(expected, Frequencies(head_size, theta).on(CPU))


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama 3.1", "Qwen3"])
def test_8192_positions_agree_with_transformers(name: str) -> None:
    config = config_of(SCALINGS.get(name), layers=1, sequence_length=8192)
    assert largest_difference(config, range(8192)) < 1e-5


@pytest.mark.parametrize("name", ["none", *SCALINGS])
def test_positions_around_130_000_agree_with_transformers(name: str) -> None:
    config = config_of(SCALINGS.get(name), sequence_length=2**17)
    assert largest_difference(config, range(130_000, 130_048)) < 1e-5


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Llama 3.1", {"_llama3": lambda usual, scaling: usual / scaling.factor}),
        ("Qwen3", {"_yarn": lambda base, theta, scaling: 1.0 / (scaling.factor * base)}),
    ],
)
def test_a_wrong_frequency_is_noticed(name: str, fault: dict[str, Any]) -> None:
    config = config_of(SCALINGS[name], sequence_length=2**17)
    with mock.patch.multiple(attention, **fault):
        attention.rotary_table.cache_clear()
        assert largest_difference(config, range(130_000, 130_048)) > 1e-3
    attention.rotary_table.cache_clear()


def test_positions_up_to_a_million_are_exact() -> None:
    table = attention.rotary_table((range(2**20 - 2, 2**20),), Frequencies(2), CPU, None)
    expected = torch.arange(2**20 - 2, 2**20, dtype=torch.float64)  # the first pair turns by 1
    assert torch.allclose(table[0].flatten(), expected.cos().float(), atol=1e-6)


@pytest.mark.parametrize("name", ["none", *SCALINGS])
def test_a_config_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    config = config_of(SCALINGS.get(name))
    AutoConfig.for_model(**hugging_face_config(config)).save_pretrained(tmp_path)
    back = imported_model(AutoConfig.from_pretrained(tmp_path).to_dict())
    scaling = config.rope_scaling
    explicit = scaling and replace(
        scaling, attention_factor=scaling.amplitude if scaling.type == "yarn" else None
    )
    assert back.rope_scaling in (scaling, explicit)
    assert back.rope_theta == config.rope_theta
    assert ModelConfig.from_table(asdict(config)) == config


def test_published_configs_are_read() -> None:
    published = {
        "llama": (  # meta-llama/Llama-3.1-8B, config.json
            {"rope_theta": 500000.0, "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
            SCALINGS["Llama 3.1"],
        ),
        "qwen3": (  # as in the model card of Qwen/Qwen3-4B
            {"rope_theta": 1000000, "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
            SCALINGS["Qwen3"],
        ),
    }  # fmt: skip
    for family, (settings, scaling) in published.items():
        theirs = AutoConfig.for_model(family, **settings)
        found = imported_model(theirs.to_dict())
        assert found.rope_scaling == scaling
        assert found.rope_theta == settings["rope_theta"]


def test_a_missing_factor_of_yarn_is_derived() -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": None,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip
    theirs = AutoConfig.for_model("llama", rope_parameters=rope, max_position_embeddings=16384)
    assert imported_model(theirs.to_dict()).rope_scaling.factor == 4.0


@pytest.mark.parametrize("factor", [0, None, "8"])
def test_an_unusable_factor_is_rejected(factor: Any) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
    theirs = AutoConfig.for_model("llama").to_dict() | {"rope_parameters": rope}
    with pytest.raises(UserError, match=r"factor = .* is not a number of at least 1; .* 8\.0"):
        imported_model(theirs)


def test_mscale_becomes_the_attention_factor() -> None:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 1.0,
        "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    theirs = AutoConfig.for_model("llama", rope_parameters=rope)
    _, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, CPU)
    found = imported_model(theirs.to_dict()).rope_scaling
    assert found.amplitude == pytest.approx(amplitude) != 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.5}, "factor = 0.5 is below 1; use factor = 8.0"),
        ({"type": "yarn"}, "original_sequence_length is missing, .* = 8192"),
        (
            {"type": "yarn", "original_sequence_length": -1},
            "original_sequence_length = -1 is below 1; use original_sequence_length = 8192",
        ),
        (
            {"type": "yarn", "original_sequence_length": 2**24 + 1},
            "original_sequence_length = 16777217 is above 16777216; use "
            "original_sequence_length = 8192",
        ),
        ({"factor": 1e300}, r"factor = 1e\+300 is above 16777216; use factor = 8.0"),
        (
            {"type": "yarn", "original_sequence_length": 8192, "beta_fast": 2.0**25},
            "beta_fast = 33554432.0 is above 16777216; use beta_fast = 32.0",
        ),
        (
            {"type": "yarn", "original_sequence_length": 8192, "attention_factor": 1e9},
            "attention_factor = 1000000000.0 is above 16777216; leave attention_factor out",
        ),
        ({"beta_fast": 8.0}, 'beta_fast = 8.0 has no effect with type = "linear", only with yarn'),
        (
            {"type": "llama3", "original_sequence_length": 8192, "low_frequency_factor": 4.0},
            "low_frequency_factor = 4.0 is not between 0 and high_frequency_factor = 4.0; use "
            "low_frequency_factor = 1.0",
        ),
        (
            {"type": "llama3", "original_sequence_length": 8192, "high_frequency_factor": -4.0},
            "high_frequency_factor = -4.0 is not above 0; use high_frequency_factor = 4.0",
        ),
        (
            {"type": "yarn", "original_sequence_length": 8192, "attention_factor": 0.0},
            "attention_factor = 0.0 is not above 0; leave it out",
        ),
    ],
)
def test_wrong_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RopeScaling(**({"type": "linear", "factor": 4.0} | changes))


def test_scaling_requires_rotary_positions() -> None:
    with pytest.raises(UserError, match='rope_scaling requires positions = "rope"'):
        replace(SHAPES["gpt2"], rope_scaling=SCALINGS["linear"])
    with pytest.raises(UserError, match=r"rope_theta = 1\.0 must be above 1 .* use rope_theta"):
        config_of(SCALINGS["Qwen3"], rope_theta=1.0)


def test_an_unset_type_is_no_scaling() -> None:
    theirs = AutoConfig.for_model("llama").to_dict()
    found = imported_model(theirs | {"rope_parameters": {"rope_type": None, "rope_theta": 1e4}})
    assert found.rope_scaling is None
