"""A step of an imported model against the class of transformers that it comes from."""

import copy
import tomllib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from models.config import ModelConfig, Prediction, RopeScaling
from models.errors import UserError
from models.hugging_face.config import hugging_face_config
from models.hugging_face.families import BY_NAME
from models.hugging_face.weights import counterparts
from models.layer_specs import logical_parameters, run_layers, vocabulary_tables
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import sharding_of
from tests.conftest import VOCAB_SIZE, each_in_turn
from tests.convert.test_convert import our_model, stored
from tests.models.test_transformer import gradients_from_hugging_face, relative
from threefold.commands.convert import from_hf
from threefold.config.loading import parse_recipe
from threefold.convert.files import model_of, open_checkpoint
from threefold.convert.from_hugging_face import import_model, imported_config, read_config
from threefold.convert.to_hugging_face import export, their_config

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
FOUR_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
FAMILIES: dict[str, dict[str, Any]] = {  # model_type, variant -> settings; windows of 16
    "llama": {"attention_bias": True, "mlp_bias": True},
    "arcee": {"mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {
        "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2,
        "attention_bias": True, "head_dim": 24,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "sliding_window": 16,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "olmo3, truncate": {  # which transformers does not read here
        "sliding_window": 16,
        "rope_parameters": dict.fromkeys(
            ("full_attention", "sliding_attention"),
            YARN | {
                "rope_theta": 1e4, "original_max_position_embeddings": 48, "truncate": False,
            },
        ),
    },
    "smollm3, nope": {"no_rope_layers": [0, 0, 0, 0]},
    "smollm3": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "phi3": {  # rotates 4 of 16 columns, which are 0.3 x 16 rounded down
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.3,
        },
    },
    "phi3, windows": {"sliding_window": 16},
    "phi3, full": {"sliding_window": None},
    "gemma3_text": {
        "sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
                        "sliding_attention"],
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "mixtral": FOUR_EXPERTS | {"sliding_window": 16},
    "gpt_oss": FOUR_EXPERTS | {
        "sliding_window": 16, "head_dim": 24,
        "rope_parameters": YARN | {"rope_theta": 15e4, "truncate": False},
    },
    "deepseek_v2": {
        "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1,  # as in DeepSeek-V2-Lite
    },
    "deepseek_v3": {
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1, "num_key_value_heads": 4,
        "n_group": 4, "topk_group": 2,
        "rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.0},
    },
    "dots1": {
        "sliding_window": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 48, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "glm4_moe": {
        "head_dim": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": True,
        "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "attention_bias": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
        },
    },
}  # fmt: skip
QUICK = (
    "olmo2", "olmo3", "smollm3, nope", "phi3", "gemma3_text", "gpt_oss", "deepseek_v3", "glm4_moe",
)  # fmt: skip
# Variants that an export writes as an earlier class, with the same logits.
EXPORTED_AS = {"phi3, windows": "mistral", "phi3, full": "llama"}


def their_model(family: str) -> Any:
    """Return a model of transformers with random weights, of which every norm and bias counts."""
    torch.manual_seed(0)
    settings = SIZES | FAMILIES[family]
    config = AutoConfig.for_model(family.split(",")[0], vocab_size=VOCAB_SIZE, **settings)
    config.bos_token_id = config.eos_token_id = 1
    config.pad_token_id = None  # the embedding of a padding token has no gradient
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            tensor.data = torch.randn_like(tensor) * 0.2 + ("gemma" not in family)
        elif "inv_freq" not in name and "embed_scale" not in name:
            tensor.data = torch.randn_like(tensor) * (0.3 if tensor.dim() < 2 else 0.15)
    return model.eval()


@pytest.mark.parametrize("family", each_in_turn(FAMILIES, QUICK))
def test_a_step_of_an_imported_model_is_that_of_transformers(
    family: str, tmp_path: Path, small: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = their_model(family)
    theirs.generation_config.eos_token_id = [1, 3]  # several may end a text
    (tmp_path / "back").mkdir()
    theirs.save_pretrained(tmp_path / "theirs")
    from_hf(Namespace(folder=tmp_path / "theirs", output=tmp_path / "ours", overwrite=False))
    printed = tomllib.loads(capsys.readouterr().out.partition("needs:\n")[2])
    source = open_checkpoint(tmp_path / "ours")
    config = model_of(source)
    assert parse_recipe(small | {"model": printed["model"]}, "printed").model == config
    tokens = torch.randint(VOCAB_SIZE, (2, 60), generator=torch.Generator().manual_seed(2))
    labels = tokens.roll(-1, 1)
    model = our_model(source)
    parameters = dict(logical_parameters(model, config))
    loss = model(tokens, labels, MicroBatchInfo())
    loss.backward()
    logits = theirs(tokens).logits
    with torch.no_grad():
        ours = run_layers(model.layers, tokens, info=MicroBatchInfo())[..., :VOCAB_SIZE]
        assert relative(ours.transpose(0, 1), logits.detach()) <= 1e-5
    their_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    their_loss.backward()
    assert float(loss.detach()) == pytest.approx(float(their_loss.detach()), 1e-6)
    found = {
        name: sharding_of(parameter).logical_tensor([torch.as_tensor(parameter.grad)])
        for name, parameter in parameters.items()
    }
    expected = gradients_of(theirs, config, tmp_path / "gradients")
    assert found.keys() == expected.keys()
    for name in found:
        if not name.endswith("router.bias") or expected[name].any():
            # A norm of queries or keys has a sum in which most terms cancel.
            limit = 2e-5 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1e-5
            assert relative(found[name], expected[name]) <= limit, name
    export(source, tmp_path / "back", dtype="fp32", tokenizer=None)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert back.config.model_type == EXPORTED_AS.get(family, theirs.config.model_type)
    ends = [(of.bos_token_id, of.eos_token_id) for of in (back.config, back.generation_config)]
    assert ends == [(1, [1, 3])] * 2
    assert "add one with --tokenizer FOLDER" in capsys.readouterr().out
    assert "AutoTokenizer" not in (tmp_path / "back" / "README.md").read_text()
    if hasattr(back.config, "num_nextn_predict_layers"):
        assert back.config.num_nextn_predict_layers == 0
    with torch.no_grad():
        assert relative(back(tokens).logits, logits.detach()) <= 1e-5


def gradients_of(model: Any, config: ModelConfig, folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of a model of transformers under our names.

    transformers splits joined tensors when it writes a file, so the gradients are written as if
    they were weights.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0 if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    theirs = stored(folder)
    family = BY_NAME[model.config.model_type]
    for counterpart in counterparts(
        config, family
    ).values():  # a bias that is a buffer has no gradient
        for part in counterpart.names:
            if part.endswith("e_score_correction_bias"):
                theirs[part] = torch.zeros_like(theirs[part])
    return gradients_from_hugging_face(config, theirs, family)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_modules_that_predict_further_tokens_are_imported_and_exported(
    family: str, tmp_path: Path
) -> None:
    theirs = their_model(family)
    for folder in ("theirs", "ours", "back"):
        (tmp_path / folder).mkdir()
    theirs.config.num_nextn_predict_layers = 1
    theirs.save_pretrained(tmp_path / "theirs")
    # The module as a model of its own, with one layer, whose inputs are those of the module.
    predicting = copy.deepcopy(theirs.model)
    layer = predicting.layers[-1]
    layer.self_attn.layer_idx = 0
    predicting.layers, predicting.config.num_hidden_layers = torch.nn.ModuleList([layer]), 1
    for parameter in predicting.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    norms = {name: torch.randn(64) * 0.2 + 1 for name in ("enorm", "hnorm")}
    projection = torch.randn(64, 128) * 0.1
    predicting.save_pretrained(tmp_path / "module")
    module = {
        name.removeprefix("model.").replace("layers.0.", ""): tensor
        for name, tensor in stored(tmp_path / "module").items()
    }
    module["shared_head.norm.weight"] = module.pop("norm.weight")
    module |= {
        "enorm.weight": norms["enorm"],
        "hnorm.weight": norms["hnorm"],
        "eh_proj.weight": projection,
        "embed_tokens.weight": theirs.model.embed_tokens.weight.detach().clone(),
        "shared_head.head.weight": theirs.lm_head.weight.detach().clone(),
    }
    files = stored(tmp_path / "theirs")
    files |= {f"model.layers.4.{name}": tensor.contiguous() for name, tensor in module.items()}
    save_file(files, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})

    config = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert config.prediction_depth == 1
    source = open_checkpoint(tmp_path / "ours")
    model = our_model(source)
    tokens = torch.randint(VOCAB_SIZE, (2, 62), generator=torch.Generator().manual_seed(2))
    labels = torch.stack([tokens[:, 1:61], tokens[:, 2:]], dim=-1)
    tokens = tokens[:, :60]
    loss = model(tokens, labels, MicroBatchInfo())

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        rms = (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
        return x / rms * norms[name]

    with torch.no_grad():
        h = theirs.model(tokens).last_hidden_state
        later = theirs.model.embed_tokens(labels[..., 0])
        x = torch.cat([norm("enorm", later), norm("hnorm", h)], dim=-1) @ projection.T
        logits = theirs.lm_head(predicting(inputs_embeds=x, use_cache=False).last_hidden_state)
        first = F.cross_entropy(theirs.lm_head(h).flatten(0, 1), labels[..., 0].flatten())
        second = F.cross_entropy(logits.flatten(0, 1), labels[..., 1].flatten())
    assert float(loss.detach()) == pytest.approx(float(first), 1e-6)
    (sums,) = (t.prediction_sums for t in vocabulary_tables(model) if t.prediction_sums is not None)
    assert float(sums[0, 0] / sums[0, 1]) == pytest.approx(float(second), 1e-6)

    export(source, tmp_path / "back", dtype="fp32", tokenizer=None)
    back = stored(tmp_path / "back")
    assert back.keys() == files.keys()
    assert all(torch.equal(back[name], files[name]) for name in files)
    settings = AutoConfig.from_pretrained(tmp_path / "back")
    assert settings.num_nextn_predict_layers == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_other_classes_have_no_predictions(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    their_model("llama").save_pretrained(tmp_path / "theirs")
    config, _ = read_config(tmp_path / "theirs")
    predicting = replace(config, prediction=Prediction(depth=2))
    assert counterparts(predicting) == counterparts(config)


def test_a_config_that_transformers_rejects_is_a_users_error() -> None:
    scaled = {"model_type": "phi3", "rope_parameters": YARN | {"rope_type": "linear"}}
    with pytest.raises(
        UserError, match=r"as Phi3ForCausalLM: .* must be one of .*, got linear; use"
    ):
        their_config(scaled)


LATENT_YARN = {
    "type": "yarn", "factor": 8.0, "original_sequence_length": 16, "attention_factor": None,
}  # fmt: skip


@pytest.mark.parametrize("attention_factor", [None, 1.0, 1.2**-0.5])
@pytest.mark.parametrize("relative_scale", [None, 1.0, 1.2])
def test_the_scales_of_yarn_are_those_of_transformers(
    attention_factor: float | None, relative_scale: float | None
) -> None:
    """transformers takes mscale = 0, which an export may need, for a missing one."""
    settings = SIZES | FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "vocab_size": 99}
    model = imported_config(their_config(settings).to_dict())
    scaling = RopeScaling(**LATENT_YARN | {"attention_factor": attention_factor})
    scale = relative_scale and relative_scale * model.score_size**-0.5
    model = replace(model, rope_scaling=scaling, attention_scale=scale)
    theirs = their_config(hugging_face_config(model, BY_NAME["deepseek_v3"]))
    _, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    assert amplitude == pytest.approx(scaling.amplitude)
    attention = DeepseekV3Attention(theirs, layer_idx=0)
    assert attention.scaling == pytest.approx(scale or model.score_size**-0.5)


def test_a_scale_that_yarn_cannot_express_is_rejected() -> None:
    settings = SIZES | FAMILIES["deepseek_v3"] | {"model_type": "deepseek_v3", "vocab_size": 99}
    model = imported_config(their_config(settings).to_dict())
    same = RopeScaling(**LATENT_YARN | {"factor": 1.0})
    with pytest.raises(UserError, match=r"attention_scale = 0\.5 .* use a factor above 1"):
        hugging_face_config(replace(model, rope_scaling=same, attention_scale=0.5))


def test_biases_of_routers_stay_in_fp32(tmp_path: Path) -> None:
    """In bf16, biases that differ by steps of the router's update would become equal."""
    for folder in ("theirs", "ours", "back"):
        (tmp_path / folder).mkdir()
    their_model("deepseek_v3").save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export(open_checkpoint(tmp_path / "ours"), tmp_path / "back", dtype="bf16", tokenizer=None)
    before, after = stored(tmp_path / "theirs"), stored(tmp_path / "back")
    biases = [name for name in after if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(torch.equal(after[name], before[name]) for name in biases)
    others = {tensor.dtype for name, tensor in after.items() if name not in biases}
    assert others == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    assert torch.equal(model.state_dict()[biases[0]], before[biases[0]])
