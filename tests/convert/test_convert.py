"""Conversion of checkpoints to transformers and back, to other layouts, and rejected inputs."""

import errno
import io
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from models.errors import UserError, why_no_folder
from models.layer_specs import (
    SequentialModel,
    layer_specs,
    logical_parameters,
    run_layers,
)
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import sharding_of
from tests.commands import run_here
from tests.conftest import GPT_SWITCHES, VOCAB_SIZE, changed, small_recipe
from tests.convert.foreign_checkpoints import CONFIGS, random_tensors, write_torch
from tests.convert.megatron_core import arguments
from tests.ranks import join_world, run_ranks, start_ranks
from threefold.checkpoint.compatibility import (
    changed_positions,
    check_initial_weights,
    check_same_model,
)
from threefold.checkpoint.format import FileRecord, Manifest
from threefold.checkpoint.resume import find_initial_weights
from threefold.checkpoint.state import CheckpointReader
from threefold.commands import generate, prepare_data, report
from threefold.commands.convert import main
from threefold.commands.convert import output as command_output
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.convert.files import (
    IMPORTED,
    RESHAPED,
    OutputFiles,
    model_of,
    open_checkpoint,
    output_folder,
)
from threefold.convert.from_hugging_face import import_model, read_config, special_tokens_in
from threefold.convert.reshape import new_recipe, sources_of
from threefold.convert.to_hugging_face import export, find_tokenizer, model_card, special_tokens
from threefold.convert.translation import without_defaults
from threefold.data.dataset import TrainingData
from threefold.prove.shrink import write_corpus
from threefold.prove.training import save, start, train_step
from threefold.run_folder.folder import RunFolder

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied llama": {"model__tie_embeddings": True},
    "qwen3": {"model__qk_norm": True, "model__head_size": 24},
    "mixtral": {
        "model__rope_theta": 1e6,  # Mixtral's own
        "model__experts": {
            "count": 4, "per_token": 2, "ffn_hidden_size": 96, "router": "softmax-after-topk",
        },
    },
    "qwen3_moe": {
        "model__qk_norm": True,
        "model__experts": {
            "count": 4, "per_token": 2, "ffn_hidden_size": 48, "normalize": True, "dense_layers": 1,
        },
    },
    "dots1": {
        "model__qk_norm": True,
        "model__experts": {
            "count": 4, "per_token": 2, "ffn_hidden_size": 48, "shared": 1, "dense_layers": 1,
            "router": "sigmoid", "normalize": True, "output_scale": 2.5, "bias_update": 0.001,
        },
    },
    "gpt2": GPT_SWITCHES,
    "bias-free gpt2": GPT_SWITCHES | {"model__bias": False, "model__activation": "gelu_erf"},
}  # fmt: skip
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "tied llama": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [0],
    },
    "dots1": {
        "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    },
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32},
}  # fmt: skip
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def real_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus, with a tokenizer that transformers can load."""
    folder = tmp_path_factory.mktemp("corpus") / "data"
    write_corpus(folder, VOCAB_SIZE)
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="t1", eos_token="t1"
    ).save_pretrained(folder / "tokenizer")
    return folder


def recipe_of(corpus: Path, **changes: Any) -> Recipe:
    table = changed(small_recipe(corpus), batch__global_sequences=4, **changes)
    return parse_recipe(table, "small")


def train_and_save(recipes: list[Recipe], folder: Path) -> list[float]:
    """Train two steps of each recipe, save a checkpoint, and return the validation losses."""
    world, losses = join_world(), []
    for number, recipe in enumerate(recipes):
        engine, data = start(recipe, world)
        for step in (1, 2):
            train_step(engine, data, step)
        losses.append(engine.evaluate(data.evaluation()))
        save(engine, data, RunFolder(folder / str(number)), step=2)
    return losses


def start_from_weights(recipe: Recipe) -> float:
    """Return the validation loss of the recipe's initial weights."""
    engine, data = start(recipe, join_world())
    found = find_initial_weights(recipe, run=Path("nowhere"))
    engine.load(found.reader(), weights_only=True)
    assert engine.state.updates == 0
    return engine.evaluate(data.evaluation())


@pytest.fixture(scope="module")
def trained(
    real_corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Recipe, CheckpointReader, float]]:
    """Return recipe, checkpoint of two ranks and validation loss for each shape.

    Tied weights are shared by the stages of a pipeline, all others are sharded by tensor ranks.
    """
    folder = tmp_path_factory.mktemp("runs")
    recipes = []
    for changes in SHAPES.values():
        axis = "pipeline" if changes.get("model__tie_embeddings") else "tensor"
        recipes.append(recipe_of(real_corpus, **changes, **{f"layout__{axis}": 2}))
    losses = run_ranks(2, train_and_save, recipes, folder)[0]
    return {
        shape: (recipe, open_checkpoint(folder / str(number)), loss)
        for number, (shape, recipe, loss) in enumerate(zip(SHAPES, recipes, losses, strict=True))
    }


def validation(data: TrainingData) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and labels of the validation batches, each [n, s]."""
    batches = list(data.evaluation())
    return torch.cat([b.tokens for b in batches]), torch.cat([b.labels for b in batches])


@torch.no_grad()
def our_model(source: CheckpointReader) -> SequentialModel:
    """Return the model of a checkpoint with its weights, in one process."""
    config = model_of(source)
    model = SequentialModel(layer_specs(config))
    for name, parameter in logical_parameters(model, config):
        logical = source.tensor("weights", name)
        parameter.copy_(sharding_of(parameter).local_part(logical, TensorAxis()))
    return model


@torch.no_grad()
def our_logits(source: CheckpointReader, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, v] of a checkpoint's weights, computed in one process."""
    logits = run_layers(our_model(source).layers, tokens, info=MicroBatchInfo())  # [s, b, v]
    return logits.transpose(0, 1)[..., : model_of(source).vocab_size]


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_transformers_opens_the_checkpoint_of_a_parallel_run(
    shape: str, trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path
) -> None:
    recipe, source, loss = trained[shape]
    export(source, tmp_path, dtype="fp32", tokenizer=find_tokenizer(source, None))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__.lower().startswith(shape.split()[-1].replace("_", ""))
    tokens, labels = validation(
        TrainingData(recipe, recipe.parallel_dims(LaunchEnvironment(size=2, local_size=2)), 0)
    )
    got, expected = theirs(tokens).logits, our_logits(source, tokens)
    assert float((got - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert float(F.cross_entropy(got.flatten(0, 1), labels.flatten())) == pytest.approx(loss, 1e-5)
    card = (tmp_path / "README.md").read_text()
    axis = "tensor" if recipe.layout.tensor == 2 else "pipeline"
    assert "2 steps" in card and f"{axis} 2" in card and f"seed | {recipe.seed}" in card
    later = {"name": "later", "start_step": 2, "data": {"train": [{"path": "data/later"}]}}
    manifest = replace(source.manifest, recipe=source.manifest.recipe | {"phase": [later]})
    staged = SimpleNamespace(manifest=manifest, path=source.path)
    assert "data/later (weight 1)" in model_card(staged, "fp32", has_tokenizer=True)  # type: ignore[arg-type]
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert settings["eos_token_id"] == theirs.config.eos_token_id == 1


def test_a_bias_free_gpt2_is_exported_with_biases_of_zero(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("threefold.checkpoint.format.FILE_BYTES", 100_000)
    _, source, _ = trained["bias-free gpt2"]
    for folder in ("theirs", "back"):
        (tmp_path / folder).mkdir()
    export(source, tmp_path / "theirs", dtype="fp32", tokenizer=None)
    index = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    tensors = stored(tmp_path / "theirs")
    assert index["weight_map"].keys() == tensors.keys()
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    biases = [t for name, t in tensors.items() if ".bias" in name and ".ln_" not in name]
    assert len(biases) == 4 * 2 and not any(tensor.any() for tensor in biases)
    assert import_model(tmp_path / "theirs", tmp_path / "back").bias
    tokens = torch.arange(64).view(2, 32) % VOCAB_SIZE
    back = our_logits(open_checkpoint(tmp_path / "back"), tokens)
    assert torch.equal(back, our_logits(source, tokens))


def their_model(family: str, dtype: torch.dtype) -> Any:
    """Return a model of transformers with random weights."""
    model_type = family.split()[-1]
    sizes = {} if model_type == "gpt2" else SIZES
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **sizes, **FAMILIES[family])
    config.bos_token_id = config.eos_token_id = 1
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for parameter in model.parameters():  # including norms and biases
        parameter.data = torch.randn_like(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()  # as `from_pretrained` keeps it
    return model.eval()


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_is_bit_for_bit(family: str, dtype: str, tmp_path: Path) -> None:
    model = their_model(family, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    model.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    (tmp_path / "ours").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "back").mkdir()
    export(open_checkpoint(tmp_path / "ours"), tmp_path / "back", dtype=dtype, tokenizer=None)
    before, after = stored(tmp_path / "theirs"), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


def save_with_head(family: str, folder: Path, head: str) -> None:
    """Save a model whose config ties the embeddings and whose files also have a head."""
    model = their_model(family, torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.clone())
    if head == "another":
        model.lm_head.weight.data[-1, -1] += 1.0
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    if head == "alone":
        file = folder / "model.safetensors"
        tensors = load_file(file)
        (embedding,) = (
            name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))
        )
        del tensors[embedding]
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("head", ["another", "equal", "alone"])
@pytest.mark.parametrize("family", ["tied llama", "gpt2"])
@torch.no_grad()
def test_an_untied_head_is_kept(family: str, head: str, tmp_path: Path) -> None:
    """The files decide as in transformers, even if config.json ties the embeddings."""
    save_with_head(family, tmp_path / "theirs", head)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    (tmp_path / "ours").mkdir()
    (tmp_path / "back").mkdir()
    model = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert model.tie_embeddings == (head != "another")
    source = open_checkpoint(tmp_path / "ours")
    export(source, tmp_path / "back", dtype="fp32", tokenizer=None)
    tokens = torch.arange(64).view(2, 32) % VOCAB_SIZE
    tokens[0, 5] = VOCAB_SIZE - 1
    expected = theirs(tokens).logits
    assert float((our_logits(source, tokens) - expected).abs().max() / expected.abs().max()) <= 1e-5
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(again(tokens).logits, expected)
    assert again.config.tie_word_embeddings == (head != "another")


def test_the_command_reports_an_untied_head(tmp_path: Path) -> None:
    save_with_head("tied llama", tmp_path / "theirs", "another")
    said = convert("from-hf", tmp_path / "theirs", tmp_path / "ours")
    assert "the head is kept, with model.tie_embeddings = false" in said
    assert "tie_embeddings = false\n" in said.partition("[model]")[2]


@pytest.mark.parametrize(
    ("starts", "begins"),
    [([[1]], True), ([[]], False), ([[1], []], False), (None, True), ("corpora", False)],
)
def test_the_exported_tokenizer_begins_texts_as_documents_began(
    starts: Any, begins: bool, real_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`starts` are recorded in the checkpoint; None if not recorded and the corpora are missing."""
    words = {f"t{number}": number for number in range(VOCAB_SIZE)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
        bos_token="t1", eos_token="t2", add_bos_token=True,
    ).save_pretrained(tmp_path / "tokenizer")  # fmt: skip
    their_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "back"):
        (tmp_path / folder).mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    source = open_checkpoint(tmp_path / "ours")
    changes: dict[str, Any] = {"data": {"document_starts": starts}}
    if starts is None or starts == "corpora":
        corpus = real_corpus if starts else tmp_path / "gone"
        changes = {"data": {}, "recipe": recipe_of(corpus).model_dump(mode="json")}
    source = replace(source, manifest=replace(source.manifest, **changes))
    export(source, tmp_path / "back", dtype="fp32", tokenizer=tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer("t5")["input_ids"] == ([1, 5] if begins else [5])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    own = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    assert special_tokens(tmp_path / "tokenizer") == own
    imported = {"bos_token_id": None, "eos_token_id": [7, 8]}
    expected = own | {"eos_token_id": [7, 8]}
    assert special_tokens(tmp_path / "tokenizer", imported) == expected
    said = capsys.readouterr().out
    assert ("the exported tokenizer adds none" in said) != begins
    assert ("the exported tokenizer is unchanged" in said) == (starts is None)


def test_large_models_are_split_into_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("threefold.checkpoint.format.FILE_BYTES", 100_000)
    their_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "back").mkdir()
    export(open_checkpoint(tmp_path / "ours"), tmp_path / "back", dtype="fp32", tokenizer=None)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 2
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    for name, tensor in stored(tmp_path / "theirs").items():
        assert torch.equal(reopened[name], tensor)


def test_names_without_prefix_and_with_old_buffers_are_read(tmp_path: Path) -> None:
    model = their_model("gpt2", torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}, file)
    (tmp_path / "ours").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    source = open_checkpoint(tmp_path / "ours")
    assert torch.equal(source.tensor("weights", "embedding.weight"), tensors["wte.weight"])


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"layout__tensor": 2}),
        ("gpt2", {"layout__pipeline": 2}),
        pytest.param("mixtral", {"layout__tensor": 2}, marks=pytest.mark.long),
    ],
)
@torch.no_grad()
def test_a_run_in_any_layout_starts_from_their_weights(
    family: str, layout: dict[str, int], real_corpus: Path, tmp_path: Path
) -> None:
    model = their_model(family, torch.float32)
    for parameter in model.parameters():
        parameter.data *= 0.1
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    settings = {"model__ffn_hidden_size": 256} if family == "gpt2" else {}
    epsilon = {"model__norm_epsilon": 1e-6 if family == "llama" else 1e-5}
    recipe = recipe_of(
        real_corpus,
        **SHAPES[family],
        **layout,
        **settings,
        **epsilon,
        training__initial_weights=str(tmp_path / "ours"),
    )
    loss = run_ranks(2, start_from_weights, recipe)[0]
    tokens, labels = validation(
        TrainingData(recipe, recipe.parallel_dims(LaunchEnvironment(size=2, local_size=2)), 0)
    )
    expected = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
    assert loss == pytest.approx(float(expected), 1e-5)


def convert(*arguments: object, code: int = 0) -> str:
    """Run the command and return its output."""
    command = ["recipes/convert.py", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        codes, (output,) = start_ranks(1, command, folder=Path(folder), seconds=300)
    assert codes == [code] and "Traceback" not in output, output
    return output


def test_the_command_exports_and_writes_a_text(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path
) -> None:
    run = trained["llama"][1].path.parents[1]
    output = convert("to-hf", run, tmp_path / "hf", "--dtype", "bf16", "--prompt", "t5")
    assert "text generated after 't5'" in output and "t5 t" in output
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    assert "already exists" in convert("to-hf", run, tmp_path / "hf", code=2)
    convert("to-hf", run, tmp_path / "hf", "--overwrite")
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.float32
    output = convert("from-hf", tmp_path / "hf", tmp_path / "weights")
    assert f'initial_weights = "{tmp_path / "weights"}"' in output and "kv_heads = 2" in output
    assert not list(tmp_path.glob("*.incomplete"))


def test_reshape_distributes_the_same_tensors_over_other_files(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path
) -> None:
    source = trained["qwen3"][1]
    output = convert(
        "reshape", source.path, tmp_path / "moved", "--ranks", 3,
        *("--set", "layout.tensor=1", "--set", "layout.pipeline=1"),
        *("--set", "deepspeed=ds_configs/zero3_fp32.json", "--set", "batch.global_sequences=6"),
    )  # fmt: skip
    assert "pipeline 1 x data 3 x tensor 1" in output
    moved = open_checkpoint(tmp_path / "moved")
    assert moved.manifest.layout["data"] == 3 and moved.manifest.samples == 8
    assert moved.manifest.recipe["batch"]["global_sequences"] == 6
    assert len(list((tmp_path / "moved").glob("*.safetensors"))) == 6
    before, after = stored(source.path), stored(tmp_path / "moved")
    assert before.keys() == after.keys() and len(before) == 3 * len(stored_weights(source))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def stored_weights(source: CheckpointReader) -> list[str]:
    return [name for name in source.manifest.tensors if not name.startswith("exp_avg")]


@pytest.mark.parametrize(
    ("overrides", "ranks", "named"),
    [
        (["seed=5"], 4, "changing seed would make it another run"),
        (["model.layers=3"], 4, "changing model.layers would make it another run"),
        (["optimizer.kind=muon"], 4, "changing optimizer.kind would make it another run"),
        (["layout.tensor=3"], 6, "model.heads = 4 is not divisible by layout.tensor = 3"),
        ([], 3, "ranks, not 3;"),
        (["deepspeed=ds_configs/zero3_fp32.json", "layout.pipeline=2"], 4, "zero3"),
    ],
)
def test_an_invalid_reshape_is_rejected(
    overrides: list[str],
    ranks: int,
    named: str,
    trained: dict[str, tuple[Recipe, CheckpointReader, float]],
) -> None:
    with pytest.raises(UserError, match=named):
        new_recipe(trained["llama"][1], overrides, ranks=ranks)


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("llama", {"attention_bias": True}, r"self_attn\.q_proj\.bias is in none of"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu": not supported; .* "silu"'),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu'"),
        ("llama", {"model_type": "gemma"}, "model_type = 'gemma' is not supported"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]: not supported"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = 'dynamic' is not supported; use a model with one of default, linear",
        ),
        ("llama", {"intermediate_size": 100}, r"has the shape \(96, 64\) but config.json implies"),
        ("llama", {"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is in none of"),
        ("llama", {"num_hidden_layers": 1}, "tensors? without a place in a model"),
        (
            "llama",
            {"hidden_act": None},
            "Field 'hidden_act' expected str, got NoneType .*; correct config.json, or write it",
        ),
    ],
)
def test_unsupported_architectures_are_rejected(
    family: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    their_model(family, torch.float32).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with (
        pytest.raises(UserError, match=named),
        output_folder(
            tmp_path / "ours", reading=tmp_path / "theirs", files=IMPORTED, overwrite=False
        ) as folder,
    ):
        import_model(tmp_path / "theirs", folder)
    assert not (tmp_path / "ours").exists() and not list(tmp_path.glob("*.incomplete"))


def test_only_files_that_transformers_loads_are_read(tmp_path: Path) -> None:
    their_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(zeros, tmp_path / "theirs" / "model_ema.safetensors")
    index = {"weight_map": dict.fromkeys(zeros, "model_ema.safetensors")}
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "ours").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    table = open_checkpoint(tmp_path / "ours").tensor("weights", "embedding.weight")
    assert torch.equal(table, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("content", "named"),
    [("{}", "not an index of tensors"), ("{", "not an index of tensors"), (None, "neither model")],
)
def test_a_broken_index_is_rejected(content: str | None, named: str, tmp_path: Path) -> None:
    their_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "a.safetensors")
    if content:
        (tmp_path / "theirs" / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=named):
        import_model(tmp_path / "theirs", tmp_path)


def test_weights_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    model = their_model("llama", torch.float32)
    with torch.no_grad():
        model.lm_head.weight[3, 1:] = -math.inf
    model.save_pretrained(tmp_path)
    (tmp_path / "ours").mkdir()
    with pytest.raises(UserError, match=r": lm_head.weight: 63 of the .* values are NaN or inf"):
        import_model(tmp_path, tmp_path / "ours")


def test_quantized_weights_are_rejected(tmp_path: Path) -> None:
    their_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"{name} is torch.int8"):
        import_model(tmp_path / "theirs", tmp_path)


Trained = dict[str, tuple[Recipe, CheckpointReader, float]]


def files_below(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_an_output_is_never_the_input(trained: Trained, tmp_path: Path) -> None:
    run = shutil.copytree(trained["llama"][1].path.parents[1], tmp_path / "runs" / "small")
    checkpoint = open_checkpoint(run).path
    before = files_below(tmp_path)
    for output in (run, run.parent, checkpoint, checkpoint / "deeper"):
        with (
            pytest.raises(UserError, match="would overwrite"),
            output_folder(output, reading=checkpoint, files=RESHAPED, overwrite=True),
        ):
            raise AssertionError(output)
    assert files_below(tmp_path) == before


@pytest.fixture(scope="module")
def commands(
    trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[object, ...]]:
    """The commands of convert.py that write an output, up to its name."""
    theirs = tmp_path_factory.mktemp("transformers") / "theirs"
    their_model("llama", torch.float32).save_pretrained(theirs)
    checkpoint = trained["llama"][1].path
    copied = shutil.copytree(checkpoint, theirs.parent / "copied")
    config = CONFIGS["llama"]
    megatron = theirs.parent / "megatron"
    write_torch(megatron, config, random_tensors(config), arguments("llama"))
    return {
        "import": ("import", megatron),
        "to-hf": ("to-hf", checkpoint),
        "from-hf": ("from-hf", theirs),
        "average": ("average", checkpoint, copied, "--output"),
        "reshape": ("reshape", "--ranks", 1, "--set", "layout.tensor=1",
                    "--set", "layout.pipeline=1", checkpoint),
    }  # fmt: skip


def run_convert(command: tuple[object, ...], output: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with --overwrite in this process."""
    return run_here(main, *command, output, "--overwrite")


@pytest.mark.parametrize("name", ["to-hf", "from-hf", "import", "average", "reshape"])
def test_overwrite_replaces_only_outputs_of_the_same_command(
    name: str,
    commands: dict[str, tuple[object, ...]],
    trained: Trained,
    real_corpus: Path,
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine"
    assert run_convert(commands[name], mine).returncode == 0
    assert run_convert(commands[name], mine).returncode == 0  # its own output is replaced

    corpus = shutil.copytree(real_corpus, tmp_path / "corpus")
    (corpus / "manifest.json").write_text("{}")
    (corpus / "config.json").write_text("{}")
    run = shutil.copytree(trained["llama"][1].path.parents[1], tmp_path / "run")
    (run / "metrics.jsonl").touch()
    with_notes = shutil.copytree(mine, tmp_path / "with notes")
    (with_notes / "notes.txt").write_text("of a stranger")
    with_folder = shutil.copytree(mine, tmp_path / "with folder")
    (with_folder / "kept").mkdir()
    with_link = shutil.copytree(mine, tmp_path / "with link")
    largest = max(with_link.iterdir(), key=lambda file: file.stat().st_size)
    largest.unlink()
    largest.symlink_to(mine / largest.name)
    downloaded = shutil.copytree(Path(str(commands["from-hf"][1])), tmp_path / "downloaded")
    (downloaded / "README.md").write_text("# Llama")
    targets = [corpus, with_notes, with_folder, with_link, downloaded]
    targets += list((run / "checkpoints").iterdir())
    targets.append(shutil.copytree(trained["llama"][1].path, tmp_path / "copied"))
    for other in commands.keys() - {name}:
        targets.append(tmp_path / other)
        assert run_convert(commands[other], targets[-1]).returncode == 0
    before = files_below(tmp_path)
    for target in targets:
        done = run_convert(commands[name], target)
        assert done.returncode == 2 and f"does not replace {target}" in done.stderr, done
        assert len(done.stderr.splitlines()) == 1
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("name", ["from-hf", "average"])
def test_a_copied_checkpoint_keeps_its_moments(
    name: str, commands: dict[str, tuple[object, ...]], trained: Trained, tmp_path: Path
) -> None:
    copied = shutil.copytree(trained["llama"][1].path, tmp_path / "copied")
    before = files_below(copied)
    refusal = "manifest.json was not written by this command"
    assert refusal in run_convert(commands[name], copied).stderr
    assert files_below(copied) == before


@pytest.mark.parametrize("name", ["to-hf", "from-hf", "import", "average", "reshape"])
def test_overwrite_keeps_what_a_user_has_changed(
    name: str, commands: dict[str, tuple[object, ...]], tmp_path: Path
) -> None:
    """A changed file, an own file under a name of the command, and an output without its marker."""
    mine = tmp_path / "mine"
    assert run_convert(commands[name], mine).returncode == 0
    is_export = name == "to-hf"
    marker = "threefold.json" if is_export else "manifest.json"
    weights = "model.safetensors" if is_export else "weights-00000.safetensors"
    own = "model-00001-of-00002.safetensors" if is_export else "weights-00009.safetensors"
    expected = {}  # folder -> end of the reason in the message
    for changed_file in ["README.md", "config.json", weights] if is_export else [weights]:
        folder = shutil.copytree(mine, tmp_path / f"changed {changed_file}")
        content = bytearray((folder / changed_file).read_bytes())
        content[-3] ^= 1  # the size stays the same
        (folder / changed_file).write_bytes(content)
        expected[folder] = f"its {changed_file} has changed since this command wrote it; move"
    folder = shutil.copytree(mine, tmp_path / "own weights")
    (folder / own).write_bytes(b"of the user")
    expected[folder] = f"it holds {own}, which this command did not write; move"
    folder = shutil.copytree(mine, tmp_path / "without marker")
    (folder / marker).unlink()
    expected[folder] = (
        f"it has no {marker}, in which this command records the files that it writes"
        + (" (an export of an earlier version has none)" if is_export else "")
        + f"; use another folder, or delete this one yourself with rm -r '{folder}'"
    )
    folder = shutil.copytree(mine, tmp_path / "damaged marker")
    text = (folder / marker).read_text()
    (folder / marker).write_text(text.rstrip()[:-1])
    expected[folder] = "is damaged" if is_export else "manifest.json has changed since the save"
    before = files_below(tmp_path)
    for folder, reason in expected.items():
        done = run_convert(commands[name], folder)
        assert done.returncode == 2 and reason in done.stderr, done
        assert len(done.stderr.splitlines()) == 1
    assert files_below(tmp_path) == before
    weights_file = mine / weights
    weights_file.unlink()  # nothing is lost if this output is replaced
    assert run_convert(commands[name], mine).returncode == 0 and weights_file.exists()


def records_of_all(folder: Path) -> dict[str, FileRecord | None]:
    return {file.name: None for file in folder.iterdir()}


ANY_FILES = OutputFiles("config.json", "", records_of_all)


def test_concurrent_writers_of_one_output_do_not_mix(tmp_path: Path) -> None:
    out, reading = tmp_path / "out", tmp_path / "in"
    with output_folder(out, reading=reading, files=ANY_FILES, overwrite=True) as first:
        (first / "config.json").write_text("first")
        with output_folder(out, reading=reading, files=ANY_FILES, overwrite=True) as second:
            (second / "config.json").write_text("second")
            (second / "more").write_text("second")
        assert (out / "more").exists()
    assert [file.read_text() for file in out.iterdir()] == ["first"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_unfinished_output(number: int, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    options = SimpleNamespace(output=tmp_path / "out", overwrite=False)
    signal.signal(number, lambda *_: None)  # it may be ignored, or end the tests
    with (
        pytest.raises(SystemExit, match=str(128 + number)),
        command_output(options, tmp_path / "in", ANY_FILES) as folder,  # type: ignore[arg-type]
    ):
        (folder / "config.json").write_text("half")
        signal.raise_signal(number)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


KILLED = """
import os, signal, sys
from pathlib import Path
from threefold.convert.files import IMPORTED, output_folder
path = Path(sys.argv[1])
with output_folder(path, reading=path.parent / "in", files=IMPORTED, overwrite=False):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_command_removes_what_killed_processes_have_left(tmp_path: Path) -> None:
    out, corpus = tmp_path / "out", tmp_path / "out.incomplete"
    command = [sys.executable, "-c", KILLED, str(out)]
    subprocess.run(command, cwd=REPOSITORY, check=False)
    (left,) = tmp_path.iterdir()
    corpus.mkdir()  # of prepare_data.py
    shutil.copy(left / "lock", corpus)
    (left / "old").mkdir()  # killed before the new output took the place of the old one
    with output_folder(out, reading=tmp_path / "in", files=ANY_FILES, overwrite=True):
        assert left.exists()
    with output_folder(out, reading=tmp_path / "in", files=ANY_FILES, overwrite=True) as other:
        assert not left.exists()
        with output_folder(out, reading=tmp_path / "in", files=ANY_FILES, overwrite=True):
            assert other.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.incomplete"}


def test_a_full_disk_of_the_output_is_named_in_place_of_a_copied_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in" / "tokenizer.json", tmp_path / "out" / "tokenizer.json"
    source.parent.mkdir()
    full = OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))
    with (
        pytest.raises(UserError, match=rf"the disk of {tmp_path} is full \(No space left"),
        output_folder(tmp_path / "out", reading=tmp_path / "in", files=ANY_FILES, overwrite=False),
    ):
        raise full


def test_files_that_appear_during_a_conversion_are_not_deleted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(UserError, match="already exists"),
        output_folder(out, reading=tmp_path / "in", files=ANY_FILES, overwrite=False),
    ):
        out.mkdir()
        (out / "config.json").write_text("of another program")
    assert (out / "config.json").read_text() == "of another program"


def test_special_tokens_are_those_of_the_generation_config(tmp_path: Path) -> None:
    for name, text, expected in (
        ("config.json", '{"bos_token_id": 1, "eos_token_id": 2}', (1, 2)),
        ("generation_config.json", '{"bos_token_id": null, "eos_token_id": [3, 4]}', (1, [3, 4])),
        ("generation_config.json", '{"bos_token_id": "x", "eos_token_id": ["x"]}', (None, None)),
    ):
        (tmp_path / name).write_text(text)
        assert tuple(special_tokens_in(tmp_path).values()) == expected
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"_config\.json cannot be read: .*; save the mod"):
        special_tokens_in(tmp_path)


def test_a_damaged_or_missing_source_is_rejected(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path
) -> None:
    copied = tmp_path / "step-0000002"
    shutil.copytree(trained["llama"][1].path, copied)
    file = copied / "weights-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="has changed since the save"):
        open_checkpoint(copied)
    with pytest.raises(UserError, match="all checkpoints here are damaged"):
        open_checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="nowhere does not exist; use a folder written by"):
        read_config(tmp_path / "nowhere")


def test_only_the_files_that_a_command_reads_are_verified(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    copied = [run / "checkpoints" / f"step-000000{step}" for step in (1, 2)]
    for folder in copied:
        shutil.copytree(trained["llama"][1].path, folder)
    replace(Manifest.read(copied[0]), step=1).write(copied[0])
    for folder in copied:
        moments = folder / "moments-00001.safetensors"
        moments.write_bytes(moments.read_bytes()[:-1] + b"x")
    said = f"{moments} has changed since the save (SHA-256); use another checkpoint"
    newest: tuple[object, ...] = (run, "--last", 2, "--output")
    for name, sources in (("to-hf", copied[1:]), ("average", newest)):
        done = run_here(main, name, *sources, tmp_path / name)
        assert done.returncode == 0 and "damaged" not in done.stderr, done.stderr
    done = run_here(main, "reshape", "--ranks", 1, copied[1], tmp_path / "reshaped")
    assert done.returncode == 2 and said in done.stderr
    weights = copied[1] / "weights-00001.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    for name, sources in (("to-hf", copied[1:]), ("average", (*copied, "--output"))):
        done = run_here(main, name, *sources, tmp_path / "none")
        assert done.returncode == 2 and f"{weights} has changed since the save" in done.stderr


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_an_unwritable_output(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoints = tmp_path / "checkpoints"
    old, new = checkpoints / "step-0000002", checkpoints / "step-0000004"
    shutil.copytree(trained["llama"][1].path, old)
    read = CheckpointReader.tensor

    def deleted_first(source: CheckpointReader, kind: str, name: str) -> torch.Tensor:
        if old.exists():
            old.rename(new)
        return read(source, kind, name)

    monkeypatch.setattr(CheckpointReader, "tensor", deleted_first)
    done = run_here(main, "to-hf", tmp_path, tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr == (
        f"convert.py: {old} was deleted while it was read, because its run keeps only the newest "
        f"checkpoints (checkpoint.keep), now step-0000004; run the command again\n"
    )


def test_a_corpus_is_not_a_checkpoint(tmp_path: Path) -> None:
    for name in ("manifest.json", "pieces.jsonl"):
        (tmp_path / name).write_text("{}")
    said = f"{tmp_path} is a corpus of prepare_data.py, not a checkpoint; use a run folder such"
    for last in (None, 2):
        with pytest.raises(UserError, match=re.escape(said)):
            sources_of([tmp_path], last=last)
    done = run_here(main, "to-hf", tmp_path, tmp_path / "new")
    assert done.returncode == 2 and said in done.stderr
    recipe = parse_recipe(
        changed(small_recipe(tmp_path), training__initial_weights=str(tmp_path)), "test"
    )
    with pytest.raises(UserError, match="the path is a corpus of prepare_data"):
        check_initial_weights(recipe)


def test_what_is_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    """No message says that a file or a link does not exist."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, said in (
        ("file", "is a file, not a folder"),
        ("link", "is a link to nowhere, which does not exist"),
        ("file/inside", f"does not exist, because {tmp_path}/file is a file"),
        ("absent", "does not exist"),
    ):
        assert why_no_folder(tmp_path / name) == said
        for command in (
            (main, "from-hf", tmp_path / name, tmp_path / "out"),
            (report.main, tmp_path / name),
        ):
            done = run_here(*command)
            assert done.returncode == 2 and f"{tmp_path / name} {said}" in done.stderr
    done = run_here(prepare_data.main, "verify", tmp_path / "file")
    assert done.returncode == 2 and "file is a file, not a folder, so it cannot be" in done.stderr


def test_no_command_creates_the_target_of_a_link_to_an_unmounted_disk(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    said = f"{tmp_path}/link is a link to {tmp_path}/unmounted, which does not exist; mount the"
    target, reading = tmp_path / "link" / "x", tmp_path / "in"
    task = ("tasks", "samples", tmp_path / "samples.jsonl")
    for command in ((), task):
        done = run_here(prepare_data.main, *command, "--output", target)
        assert done.returncode == 2 and said in done.stderr and "another --output" in done.stderr
    with (
        pytest.raises(UserError, match=re.escape(said)),
        output_folder(target, reading=reading, files=ANY_FILES, overwrite=False),
    ):
        raise AssertionError
    assert not (tmp_path / "unmounted").exists()


def test_a_run_folder_as_initial_weights_names_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step:07d}").mkdir(parents=True)
    recipe = parse_recipe(
        changed(small_recipe(tmp_path), training__initial_weights=str(tmp_path)), "test"
    )
    said = f"is a run folder, not a checkpoint; use {tmp_path}/checkpoints/step-0000010"
    with pytest.raises(UserError, match=said):
        check_initial_weights(recipe)


UNSAVED = (
    "has not saved a checkpoint yet; use one of an earlier "
    "branch, for example runs/branch/checkpoints/abandoned-20261130T1.0a-step-10000000"
)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("runs/mien", "runs/mien does not exist in {cwd}; did you mean runs/mine?"),
        ("{cwd}/runs/mien", "{cwd}/runs/mien does not exist; use for example {two}"),
        (
            "runs/new",
            "runs/new has no checkpoint: neither manifest.json nor checkpoints/step-...; use for "
            "example {two}",
        ),
        (
            "runs/mine/recipe.toml",
            "runs/mine/recipe.toml is a file, not a run folder or a checkpoint; runs/mine/{saved}",
        ),
        (
            "runs/mine/checkpoints/step-0000003",
            "runs/mine/checkpoints/step-0000003 does not exist in {cwd}; runs/mine/{saved}",
        ),
        ("elsewhere/new", "elsewhere/new does not exist in {cwd}; use for example {two}"),
        ("runs/branch", f"the current branch of runs/branch {UNSAVED}"),
        ("runs/branch/checkpoints", f"the current branch of runs/branch/checkpoints {UNSAVED}"),
    ],
)
def test_a_missing_checkpoint_is_named_with_those_that_exist(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for checkpoint in ("mine/checkpoints/step-0000002", "mine/checkpoints/step-0000004",
                       "other/checkpoints/step-0000001", "new/checkpoints",
                       "branch/checkpoints/abandoned-20261129T1.ff-step-20000000",
                       "branch/checkpoints/abandoned-20261130T1.0a-step-10000000",
                       "branch/checkpoints/abandoned-20261130T1.0a-step-9000000"):  # fmt: skip
        (tmp_path / "runs" / checkpoint).mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "recipe.toml").touch()
    monkeypatch.chdir(tmp_path)
    missing = Path(path.format(cwd=tmp_path))
    for opened in (open_checkpoint, lambda path: sources_of([path], 2)):
        with pytest.raises(UserError) as raised:
            opened(missing)
        assert str(raised.value) == said.format(
            cwd=tmp_path,
            two="runs/mine, runs/other",
            saved="checkpoints has step-0000004, step-0000002",
        )


def test_a_damaged_checkpoint_names_its_run_if_it_has_others(tmp_path: Path) -> None:
    for step in (2, 4):
        folder = tmp_path / "checkpoints" / f"step-{step:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError) as raised:
        open_checkpoint(folder)
    assert str(raised.value) == (
        f"{folder / 'manifest.sha256'} is missing; use another checkpoint, or name {tmp_path} to "
        f"use its newest undamaged one"
    )


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=f"--tokenizer {tmp_path} cannot be loaded: "):
        special_tokens(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    done = run_here(generate.main, tmp_path)
    assert f"generate.py: the tokenizer in {tmp_path} cannot be loaded: " in done.stderr
    assert done.returncode == 2


def test_another_tokenizer_is_rejected(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not the tokenizer that the run was trained with"):
        find_tokenizer(trained["llama"][1], tmp_path)


def test_initial_weights_of_another_model_are_rejected(real_corpus: Path, tmp_path: Path) -> None:
    their_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    assert not Manifest.read(tmp_path / "ours").has_moments
    table = changed(small_recipe(real_corpus), training__initial_weights=str(tmp_path / "ours"))
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(table))
    command = ["recipes/pretrain.py", str(file), "--run-dir", str(tmp_path / "x")]
    codes, outputs = start_ranks(1, command, folder=tmp_path, seconds=120)
    assert codes == [2] and "norm_epsilon = 1e-06 (here 1e-05)" in outputs[0]
    command += ["--resume", str(tmp_path / "ours")]
    codes, outputs = start_ranks(1, command, folder=tmp_path, seconds=120)
    assert codes == [2] and "has only weights and no run to resume" in outputs[0]


def test_the_command_prints_the_section_of_experts(tmp_path: Path) -> None:
    their_model("mixtral", torch.float32).save_pretrained(tmp_path / "theirs")
    said = convert("from-hf", tmp_path / "theirs", tmp_path / "ours")
    section = tomllib.loads(said[said.index("[model]") :])["model"]
    expected = SHAPES["mixtral"]["model__experts"] | {"balance_loss": 0.001}
    assert section["experts"] == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"balance_loss": 0.5, "z_loss": 0.1}, None),
        ({"per_token": 3}, "model.experts.per_token = 2 (here 3)"),
        ({"router": "softmax"}, 'model.experts.router = "softmax-after-topk" (here "softmax")'),
    ],
)
def test_initial_weights_of_other_experts_are_rejected(
    changes: dict[str, Any], named: str | None, real_corpus: Path, tmp_path: Path
) -> None:
    their_model("mixtral", torch.float32).save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    import_model(tmp_path / "theirs", tmp_path / "ours")
    manifest = Manifest.read(tmp_path / "ours")
    table = changed(small_recipe(real_corpus), **SHAPES["mixtral"])
    table["model"]["experts"] |= changes
    recipe = parse_recipe(table, "test")
    if named is None:
        check_same_model("initial_weights", manifest, recipe)
        return
    with pytest.raises(UserError, match=re.escape(named)):
        check_same_model("initial_weights", manifest, recipe)


def test_changed_positions_are_described(real_corpus: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    theirs = their_model("llama", torch.float32)
    theirs.config.rope_parameters = scaling
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    model = import_model(tmp_path / "theirs", tmp_path / "ours")
    manifest = Manifest.read(tmp_path / "ours")
    start = {"model__norm_epsilon": 1e-6}
    same = start | {
        "model__rope_theta": 5e5,
        "model__rope_scaling": without_defaults(model.rope_scaling),
    }
    for changes, expected in (
        (same, ""),
        (start | {"model__rope_theta": 1e4}, "rope_scaling.factor = 8.0 (here not set)"),
        (same | {"model__sequence_length": 64}, "model.sequence_length = 32 (here 64)"),
        (same | {"model__rope_theta": 1e6}, "model.rope_theta = 500000.0 (here 1000000.0)"),
    ):
        recipe = parse_recipe(changed(small_recipe(real_corpus), **changes), "test")
        check_same_model("initial_weights", manifest, recipe)
        described = changed_positions(manifest, recipe)
        assert expected in described and bool(expected) == bool(described)
        of_yarn = ("beta_", "attention_factor", "truncate")
        assert not any(key in described for key in of_yarn)


@pytest.fixture(scope="module")
def exported(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An export whose tokenizer has a chat template with one word before each message."""
    folder, source = tmp_path_factory.mktemp("exported"), trained["llama"][1]
    export(source, folder, dtype="fp32", tokenizer=find_tokenizer(source, None))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ ' t7 ' if message.role == 'user' else ' t8 ' }}"
        "{{ message.content }}{% if 't0' in message.content %}{{ raise_exception('no t0') }}"
        "{% endif %}{% endfor %} t8"
    )
    return folder


@torch.no_grad()
def most_likely(folder: Path, text: str, count: int) -> str:
    """Return the most likely tokens after a text, one forward pass for each."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([[int(word[1:]) for word in text.split()]])
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    return " ".join(f"t{token}" for token in tokens[0, -count:])


def test_text_from_a_run_is_transformers_text(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], exported: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The source is the run's newest checkpoint, a checkpoint or an export; no file is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    checkpoint = trained["llama"][1].path
    expected = most_likely(exported, "t5 t9", 12)
    for model in (checkpoint.parents[1], checkpoint, exported):
        words = [model, "--prompt", "t5 t9", "--max-tokens", 12]
        for choice in (["--temperature", 0], ["--top-p", 1e-6]):
            done = run_here(generate.main, *words, *choice)
            assert (done.returncode, done.stdout) == (0, f"t5 t9 {expected}\n"), done.stderr
    random = [run_here(generate.main, *words, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert random[0] == random[1] != random[2] and expected not in random[0]
    assert not list(tmp_path.iterdir())


def test_a_text_that_ends_at_once_is_reported(exported: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    file = model / "generation_config.json"
    first = most_likely(exported, "t5 t9", 1)
    settings = json.loads(file.read_text()) | {"eos_token_id": int(first[1:])}
    file.write_text(json.dumps(settings))
    words = [model, "--prompt", "t5 t9", "--temperature", 0, "--max-tokens", 12]
    done = run_here(generate.main, *words)
    assert (done.returncode, done.stderr) == (0, "the model ended the text after 1 of 12 tokens\n")
    positions = AutoConfig.from_pretrained(exported).max_position_embeddings
    done = run_here(generate.main, exported, *words[1:-1], 1000)
    reached = f"the text reached the {positions} positions of the model after {positions - 2} of"
    assert (done.returncode, done.stderr) == (0, f"{reached} 1000 tokens\n")


def test_a_prompt_that_is_not_utf_8_is_rejected(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt is answered."""
    lines = io.TextIOWrapper(io.BytesIO(b"t5 \xff\nt3\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", lines)
    done = run_here(generate.main, exported, "--temperature", 0, "--max-tokens", 3)
    assert (done.returncode, done.stdout) == (0, f"{most_likely(exported, 't3', 3)}\n")
    assert done.stderr == (
        "generate.py: the prompt has bytes that are not UTF-8; use a text in UTF-8\n"
    )


def test_a_tokenizer_comes_from_another_folder(
    trained: dict[str, tuple[Recipe, CheckpointReader, float]], exported: Path, tmp_path: Path
) -> None:
    expected = f"t5 t9 {most_likely(exported, 't5 t9', 3)}\n"
    model = tmp_path / "model"
    shutil.copytree(exported, model, ignore=shutil.ignore_patterns("*token*"))
    for source in (model, trained["llama"][1].path):
        words = [source, "--prompt", "t5 t9", "--temperature", 0, "--max-tokens", 3]
        done = run_here(generate.main, *words, "--tokenizer", exported)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr
        absent = run_here(generate.main, *words, "--tokenizer", tmp_path / "absent")
        assert absent.returncode == 2 and f"{tmp_path / 'absent'}" in absent.stderr
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokenizer.add_tokens([f"more{number}" for number in range(1000)])
    tokenizer.save_pretrained(tmp_path / "larger")
    done = run_here(generate.main, model, "--prompt", "t5", "--tokenizer", tmp_path / "larger")
    assert done.returncode == 2 and "embeddings, and the model has" in done.stderr


def test_a_larger_tokenizer_is_not_exported(exported: Path, tmp_path: Path) -> None:
    run_here(main, "from-hf", exported, tmp_path / "weights")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    tokenizer.add_tokens([f"more{number}" for number in range(1000)])
    tokenizer.save_pretrained(tmp_path / "larger")
    words = ["to-hf", tmp_path / "weights", tmp_path / "out", "--tokenizer"]
    done = run_here(main, *words, tmp_path / "larger")
    assert (
        done.returncode == 2
        and f"{tmp_path / 'larger'} needs 1,250 embeddings, and the model has 250" in done.stderr
    )
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("prompt", ["", "t5 " * 32])
def test_a_prompt_is_checked_before_the_export(
    prompt: str, trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path
) -> None:
    done = run_here(main, "to-hf", trained["llama"][1].path, tmp_path / "out", "--prompt", prompt)
    said = f"--prompt has {len(prompt.split())} tokens and the model has 32 positions"
    assert done.returncode == 2 and said in done.stderr
    assert not list(tmp_path.iterdir())


def test_prompts_are_read_until_the_end(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("t5 t9\n\n" + "t5 " * 32 + "\nt3\n"))
    done = run_here(generate.main, exported, "--temperature", 0, "--max-tokens", 3)
    expected = [most_likely(exported, text, 3) for text in ("t5 t9", "t3")]
    assert (done.returncode, done.stdout.split("\n")) == (0, [*expected, ""])
    assert done.stderr == (
        "generate.py: the prompt has 32 tokens and the model has 32 positions; use a text of 1 to "
        "31 tokens\n"
    )


def test_an_answer_follows_the_conversation_in_the_template(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("t5 t9\nt0\nt3\n" + "t2 " * 17))
    done = run_here(generate.main, exported, "--chat", "--temperature", 0, "--max-tokens", 3)
    first = most_likely(exported, "t7 t5 t9 t8", 3)
    second = most_likely(exported, f"t7 t5 t9 t8 {first} t7 t3 t8", 3)
    assert done.stdout == f"{first}\n{second}\n"
    rejected, too_long = done.stderr.splitlines()
    assert f"the chat template of {exported} rejects the conversation: no t0" in rejected
    assert "the prompt with the conversation before it has 34 tokens" in too_long


@pytest.mark.parametrize("where", ["input", "threefold.convert.text_generation.export"])
def test_ctrl_c_leaves_quietly(
    where: str, trained: dict[str, tuple[Recipe, CheckpointReader, float]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(where if "." in where else f"builtins.{where}", interrupt)
    done = run_here(generate.main, trained["llama"][1].path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "\n", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("removed", "files", "options", "message"),
    [
        ("", {}, ["--temperature", "x"], "invalid temperature x: expected 0 to 100, such as 0.7"),
        ("", {}, ["--top-p", "0"], "invalid share 0: expected more than 0 and at most 1, such as"),
        ("", {}, ["--seed", "-1"], "invalid seed -1: expected 0 to 4294967295, such as 7"),
        ("", {}, ["--prompt", ""], "--prompt has 0 tokens and the model has 32 positions; use a"),
        ("*", {}, [], "has no checkpoint"),
        ("*t[oe][km]*", {}, [], "has no file of a tokenizer, such as tokenizer.json"),
        ("chat*", {}, ["--chat"], "--chat needs a chat template, and the tokenizer of"),
        ("", {"config.json": '{"model_type": "gpt9"}'}, [], "cannot be loaded: "),
        ("", {"model.safetensors": "cut"}, [], "cannot be loaded: "),
        ("", {"config.json": '{"auto_map": {"AutoConfig": "x.A"}}', "x.py": "1/0"}, [], "loaded: "),
    ],
)  # fmt: skip
def test_a_model_without_text_is_named(
    removed: str, files: dict[str, str], options: list[str], message: str, exported: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    for file in model.glob(removed or "nothing"):
        file.unlink()
    for name, text in files.items():
        (model / name).write_text(text)
    done = run_here(generate.main, model, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
