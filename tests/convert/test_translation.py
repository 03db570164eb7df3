"""Configurations of other programs become recipes that train the same thing.

The configurations are written here in the formats of the programs, with the values of published
ones. `benchmarks/translations.py` has the formulas of the programs; with THREEFOLD_CLONES, a folder
of clones, it also compares the published files.
"""

import os
from pathlib import Path

import pytest

from benchmarks import translations
from models.errors import UserError
from tests.commands import run_here
from threefold.commands import convert
from threefold.config.loading import load_recipe
from threefold.config.phases import PhasePlan
from threefold.convert.foreign_files import Shell, read_foreign
from threefold.convert.foreign_programs import PROGRAMS
from threefold.convert.translation import Translated, translate

NEOX_125M = """
# a comment, Python's constants and commas before brackets, as in GPT-NeoX's files
{ "pipe_parallel_size": 1, "model_parallel_size": 1,
  "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048,
  "max_position_embeddings": 2048, "norm": "layernorm", "pos_emb": "rotary",
  "no_weight_tying": true, "gpt_j_residual": false, "bias_gelu_fusion": false,
  "init_method": "small_init", "output_layer_init_method": "wang_init",
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8,}},
  "min_lr": 0.00006, "zero_optimization": {"stage": 1, "overlap_comm": True,},
  "train_micro_batch_size_per_gpu": 4, "checkpoint_activations": true, "weight_decay": 0.1,
  "fp16": {"enabled": true, "loss_scale": 0, "hysteresis": 2}, "hidden_dropout": 0.0,
  "attention_dropout": 0.0, "train_iters": 320000, "lr_decay_iters": 320000,
  "lr_decay_style": "cosine", "warmup": 0.01, "checkpoint_factor": 10000,
  "eval_interval": 1000, "eval_iters": 10, "log_interval": 100, "hostfile": "/mock_path" }
"""
LLAMA_OF_NEOX = """
num_layers: 32
hidden_size: 4096
intermediate_size: 32768
num_attention_heads: 32
seq_length: 2048
max_position_embeddings: 2048
pos_emb: rotary
no_weight_tying: true
norm: rmsnorm
rms_norm_epsilon: 1.0e-6
use_bias_in_mlp: false
use_bias_in_norms: false
use_bias_in_attn_linear: false
activation: swiglu
mlp_multiple_of: 256
make_vocab_size_divisible_by: 1
tokenizer_type: SPMTokenizer
optimizer: {type: Adam, params: {lr: 3.0e-4, betas: [0.9, 0.95], eps: 1.0e-8}}
train_iters: 1000
lr_decay_style: cosine
train_micro_batch_size_per_gpu: 2
gradient_accumulation_steps: 3
"""
BLOOM = r"""#!/bin/bash
#SBATCH --nodes=24
NNODES=$SLURM_NNODES
GPUS_PER_NODE=8
TP_SIZE=4
#    --not-an-option \
SEQ_LEN=2048
MICRO_BATCH_SIZE=2  # a comment
OPTIMIZER_ARGS=" \
    --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 6e-5 --min-lr 6e-6 \
    --lr-decay-style cosine --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 \
    --clip-grad 1.0 --weight-decay 1e-1 \
    "
if [ $TP_SIZE -gt 4 ]; then
    OPTIMIZER_ARGS="$OPTIMIZER_ARGS --lr 1"
elif [[ "$MICRO_BATCH_SIZE" == "2" ]]; then
    OPTIMIZER_ARGS+=" --hidden-dropout 0"
else
    OPTIMIZER_ARGS+=" --hidden-dropout 1"
fi
config_json="./ds_config.$SLURM_JOB_ID.json"
cat <<EOT > $config_json
{"train_micro_batch_size_per_gpu": $MICRO_BATCH_SIZE, "zero_optimization": {"stage": 0},
 "bf16": {"enabled": true}, "steps_per_print": 2000}
EOT
export LAUNCHER="python -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES"
export CMD=" `pwd`/pretrain_gpt.py --tensor-model-parallel-size $TP_SIZE \
    --pipeline-model-parallel-size 12 --num-layers 70 --hidden-size 14336 \
    --num-attention-heads $((14336 / 128)) --seq-length $SEQ_LEN \
    --max-position-embeddings $SEQ_LEN \
    --micro-batch-size $MICRO_BATCH_SIZE --rampup-batch-size 192 16 9_765_625 \
    --global-batch-size 2048 --train-samples 220_000_000 --init-method-std 0.0048 \
    --embed-layernorm --bf16 --seed 42 --position-embedding-type alibi --checkpoint-activations \
    --pad-vocab-size-to 250880 $OPTIMIZER_ARGS $EXIT_OPTS --deepspeed \
    --deepspeed_config ${config_json} --zero-stage 0 --some-new-option 7"
srun bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
"""
GPT3 = r"""
DATA_PATH=$5
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288 # a comment
    --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    --train-iters 500000
    --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --merge-file x \
    --data-path 0.3 $DATA_PATH 0.7 corpora/wiki
"""
MIXTRAL = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --normalization RMSNorm
--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
--group-query-attention --num-query-groups 8 --rotary-base 1000000 --num-experts 8
--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --tokenizer-type Llama2Tokenizer --micro-batch-size 1
--global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
--lr-decay-style cosine --min-lr 1.0e-5 --lr-warmup-iters 500 --bf16 --expert-model-parallel-size 8
--pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer
""".replace("\n", " ")
NANOTRON = """
data_stages:
- {name: Stable Training Stage, start_training_step: 1, data: {dataset: {dataset_folder: [a/web]}}}
- {name: Annealing (2), start_training_step: 900, data: {dataset: {dataset_folder: [a/math, a/code],
   dataset_weights: [1, 3]}}}
general: {seed: 42, project: debug, step: null}
model:
  dtype: bfloat16
  init_method: {std: 0.025}
  make_vocab_size_divisible_by: 1
  model_config:
    hidden_act: silu
    hidden_size: 2048
    intermediate_size: 11008
    is_llama_config: true
    num_attention_heads: 16
    num_hidden_layers: 28
    num_key_value_heads: 2
    rms_norm_eps: 1.0e-05
    tie_word_embeddings: true
    vocab_size: 128256
optimizer:
  clip_grad: 1.0
  learning_rate_scheduler: {learning_rate: 3e-4, lr_decay_starting_step: 800, lr_decay_steps: 150,
    lr_decay_style: 1-sqrt, lr_warmup_steps: 20, lr_warmup_style: linear, min_decay_lr: 1.0e-05}
  optimizer_factory: {adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-08, name: adamW}
  weight_decay: 0.01
  zero_stage: 0
parallelism: {dp: 4, pp: 1, tp: 2, tp_mode: REDUCE_SCATTER, pp_engine: 1f1b}
tokens: {batch_accumulation_per_replica: 2, micro_batch_size: 3, sequence_length: 4096,
  train_steps: 1000, val_check_interval: -1, limit_val_batches: 0}
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.3
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
"""
SOURCES = {  # file -> (text, GPUs, tokens of the tokenizer)
    "125m.yml": (NEOX_125M, 8, translations.GPT2),
    "llama.yml": (LLAMA_OF_NEOX, 16, translations.LLAMA2),
    "bloom.slurm": (BLOOM, None, translations.BLOOM),
    "gpt3.sh": (GPT3, None, translations.GPT2),
    "mixtral.args": (MIXTRAL, None, translations.LLAMA2),
    "nanotron.yaml": (NANOTRON, None, 0),
    "titan.toml": (TITAN, 64, 0),
}
EXPECTED = {  # file -> (parameters, first batch, last batch, steps)
    "125m.yml": (162_322_944, 32, 32, 320_000),
    "llama.yml": (6_738_415_616, 96, 96, 1000),  # as meta-llama/Llama-2-7b
    "bloom.slurm": (176_247_242_752, 192, 2048, 115_311),  # BLOOM's, without the norm: 28,672
    "gpt3.sh": (174_615_846_912, 16, 1536, 500_000),
    "mixtral.args": (46_702_792_704, 256, 256, 500_000),  # as mistralai/Mixtral-8x7B-v0.1
    "nanotron.yaml": (2_420_754_432, 24, 24, 1000),
    "titan.toml": (8_030_261_248, 32, 32, 1000),  # as meta-llama/Llama-3.1-8B
}


def translated(folder: Path, name: str, text: str, ranks: int | None = None) -> Translated:
    """Write a configuration and translate it."""
    path = folder / name
    path.write_text(text)
    foreign = read_foreign([path])
    return translate(foreign, PROGRAMS[foreign.program], name=path.stem, ranks=ranks)


def lines_about(result: Translated, key: str) -> list[str]:
    """Return the lines of the report about a key."""
    return [str(line) for line in result.lines if line.key == key]


@pytest.mark.parametrize("name", SOURCES)
def test_parameters_batch_and_rates_are_those_of_the_source(name: str, tmp_path: Path) -> None:
    text, ranks, vocabulary = SOURCES[name]
    result = translated(tmp_path, name, text, ranks)
    source = translations.expected(read_foreign([tmp_path / name]), ranks, vocabulary)
    assert translations.compare(result, source).is_equal
    recipe, plan = result.recipe, PhasePlan(result.recipe)
    first, last = (plan.at(n).recipe.batch.global_sequences for n in (1, recipe.training.steps))
    parameters = translations.parameter_count(recipe.model)
    assert (parameters, first, last, recipe.training.steps) == EXPECTED[name]


@pytest.mark.parametrize("name", SOURCES)
def test_every_key_has_a_line_and_the_recipe_can_be_read(name: str, tmp_path: Path) -> None:
    text, ranks, _ = SOURCES[name]
    result = translated(tmp_path, name, text, ranks)
    foreign = read_foreign([tmp_path / name])
    assert foreign.values.keys() <= {line.key for line in result.lines}
    (target,) = result.write(tmp_path / "recipe.toml", [tmp_path / name])
    assert load_recipe(target) == result.recipe
    header = target.read_text().partition("\nname")[0]
    assert all(line.key in header for line in result.warnings)


def test_what_changes_the_loss_is_named_first_and_nothing_unknown_is_dropped(
    tmp_path: Path,
) -> None:
    result = translated(tmp_path, "bloom.slurm", BLOOM)
    keys = [line.key for line in result.warnings if line.key]
    assert keys == ["embed-layernorm", "position-embedding-type", "some-new-option"]
    assert list(result.lines[: len(result.warnings)]) == result.warnings
    assert lines_about(result, "some-new-option") == [
        "unknown: some-new-option = 7 -> this key is not known here; it may change the loss"
    ]
    assert "ALiBi" in lines_about(result, "position-embedding-type")[0]


@pytest.mark.parametrize(
    ("flags", "precision", "unsupported"),
    [
        ("--fp8-format e4m3 --fp8-recipe blockwise", "fp8", {}),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16",
            "fp8",
            {"first-last-layers-bf16": "the matmuls of all blocks are in FP8"},
        ),
        ("--fp8-format hybrid --fp8-recipe blockwise", "weights", {"fp8-format": "in E5M2"}),
        ("--fp8-format e4m3", "weights", {"fp8-format": "values in earlier steps"}),
        ("--fp8-hybrid", "weights", {"fp8-hybrid": "values in earlier steps"}),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "weights", {"fp8-format": "per 32 elements"}),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "weights", {"fp8-format": "per tensor"}),
        ("--fp8-recipe blockwise", "weights", {}),
    ],
)
def test_only_block_scaled_fp8_becomes_ours(
    flags: str, precision: str, unsupported: dict[str, str], tmp_path: Path
) -> None:
    result = translated(tmp_path, "fp8.args", f"{MIXTRAL} {flags}")
    usual = {line.key for line in translated(tmp_path, "bf16.args", MIXTRAL).warnings}
    warnings = {line.key: line.text for line in result.warnings if line.key not in usual}
    assert result.recipe.training.matmul_precision == precision
    assert warnings.keys() == unsupported.keys()
    assert all(reason in warnings[key] for key, reason in unsupported.items())
    for word in flags.split():
        assert not word.startswith("--") or lines_about(result, word.removeprefix("--"))


def test_a_schedule_and_a_ramp_count_billions_of_samples(tmp_path: Path) -> None:
    text = BLOOM.replace("200_000_000", "2_400_000_000").replace("9_765_625", "1_765_625_000")
    recipe = translated(tmp_path, "bloom.slurm", text).recipe
    assert recipe.batch.ramp and recipe.batch.ramp.samples == 1_765_625_000
    schedule = recipe.optimizer.schedule
    assert (schedule.counts, schedule.steps) == ("sequences", 2_400_000_000)


def test_a_script_is_read_and_never_executed(tmp_path: Path) -> None:
    (tmp_path / "bloom.slurm").write_text(f"touch {tmp_path}/ran; rm -r $HOME\n{BLOOM}")
    foreign = read_foreign([tmp_path / "bloom.slurm"])
    assert not (tmp_path / "ran").exists()
    assert foreign.ranks == 24 * 8 and "not-an-option" not in foreign.values
    assert foreign.values["num-attention-heads"] == 112 and foreign.values["hidden-dropout"] == 0
    assert foreign.deepspeed["bf16.enabled"] is True
    assert foreign.deepspeed["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize(
    ("script", "variable", "value"),
    [
        ("A=1\nB=$((A * (3 + 1) / 2))", "B", "2"),
        ("A=${1:-x/y}", "A", "x/y"),
        ("A=$(date +%s)", "A", "<date>"),
        ("A=(--x 1\n --y 2 # no\n)\nA+=(--z)", "A", "--x 1\n --y 2 \n --z"),
        ('A=a; B="$A-${A}b"', "B", "a-ab"),
        ("A=a; B='$A'", "B", "$A"),
        ("if [ -n \"$X\" ]; then A=1; else A=2; fi", "A", "2"),
        ("if [ -z \"$X\" ] && [ 3 -ge 2 ]\nthen\nA=1\nfi", "A", "1"),
        ("A=0\nfor i in 1 2; do A=$i; done", "A", "0"),
    ],
)  # fmt: skip
def test_the_shell_language_of_scripts(script: str, variable: str, value: str) -> None:
    shell = Shell()
    shell.run(script)
    assert shell.variables[variable] == value


def test_keys_that_several_files_set_take_the_last_value(tmp_path: Path) -> None:
    (tmp_path / "model.yml").write_text(NEOX_125M)
    (tmp_path / "cluster.yml").write_text("train_micro_batch_size_per_gpu: 7\nseed: 3\n")
    foreign = read_foreign([tmp_path / "model.yml", tmp_path / "cluster.yml"])
    assert foreign.values["train_micro_batch_size_per_gpu"] == 7 and foreign.values["seed"] == 3


def test_settings_of_deepspeed_are_written_next_to_the_recipe(tmp_path: Path) -> None:
    text = NEOX_125M.replace('"hysteresis": 2', '"initial_scale_power": 12')
    (tmp_path / "125m.yml").write_text(text)
    target = tmp_path / "mine.toml"
    done = run_here(
        convert.main, "recipe", tmp_path / "125m.yml", "--ranks", 8, "--output", target,
        "--set", "batch.micro_sequences=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"wrote {target}, {tmp_path / 'mine.json'}" in done.stdout
    assert "  LOSS  not supported: output_layer_init_method" in done.stdout
    recipe = load_recipe(target)
    assert recipe.deepspeed == str(tmp_path / "mine.json") and recipe.batch.micro_sequences == 2
    assert '"initial_scale_power": 12' in (tmp_path / "mine.json").read_text()
    again = run_here(convert.main, "recipe", tmp_path / "125m.yml", "--output", target)
    assert again.returncode == 2 and "the file exists" in again.stderr


def test_a_config_of_transformers_gives_the_model(tmp_path: Path) -> None:
    config = (
        '{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "head_dim": 128, '
        '"num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, '
        '"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, '
        '"rope_theta": 1000000, "tie_word_embeddings": true, "hidden_act": "silu", '
        '"quantization_config": {"quant_method": "fp8"}}'
    )
    result = translated(tmp_path, "config.json", config)
    assert translations.parameter_count(result.recipe.model) == 596_049_920
    assert lines_about(result, "hidden_size") == [
        "taken: hidden_size = 1024 -> model.hidden_size = 1024"
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.yml", "num_layers: 12\n", "hidden_size, num_attention_heads, seq_length"),
        ("x.py", "", "configurations in Python are not translated"),
        ("x.toml", "a = ", "is not valid"),
        ("x.toml", "", "x.toml has neither model.name nor model.flavor"),
        (
            "x.toml",
            '[model]\nname = "llama4"\nflavor = "17bx16e"',
            "model.name = llama4 with model.flavor = 17bx16e is not a model that Threefold knows; "
            "use one of llama3 debugmodel",
        ),
        ("x.sh", "echo hello", "no command or variable has --num-layers"),
        (
            "x.yml",
            NEOX_125M.replace('"hidden_size": 768', '"hidden_size": "<H>"'),
            "is not a number",
        ),
        ("x.json", "{}", "model_type"),
        (
            "x.sh",
            MIXTRAL + " --rampup-batch-size 16 16",
            "rampup-batch-size = 16 16: expected three",
        ),
        ("x.sh", MIXTRAL + " --rampup-batch-size 16 10000 100", "that are together at most"),
        ("x.toml", '[model]\nname = "llama3"\n[training]\nsteps = [1, 2]', "steps = 1 2 is not a"),
        (
            "x.toml",
            '[model]\nname = "llama3"\n[parallelism]\ntensor_parallel_degree = 0',
            "tensor_parallel_degree = 0: expected 1 or more",
        ),
        ("x.sh", MIXTRAL + " --window-size a,b", "window-size = a,b: expected tokens before"),
        ("x.sh", MIXTRAL + " --micro-batch-size 0", "micro-batch-size = 0: expected 1 or more"),
        ("x.sh", MIXTRAL + " --lr", "lr = True is not a number"),
        ("x.sh", MIXTRAL + " --step-batch-size-schedule foo", 'such as "0:16 2.4B:320"'),
        ("x.toml", '[model]\nname = "llama3"\n[training]\nsteps = "ten"', "steps = ten is not a"),
        ("x.yaml", NANOTRON + "\ndata_stages: 5\n", "data_stages = 5: expected a list of stages"),
        ("missing.yml", None, "no such file"),
    ],
)
def test_unusable_files_are_rejected(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    done = run_here(convert.main, "recipe", tmp_path / name)
    assert done.returncode == 2 and message in done.stderr


def test_options_that_a_script_hides_are_named_first(tmp_path: Path) -> None:
    hidden = GPT3.rstrip() + ' $EXTRA_ARGS --bf16 $(model_args) --swiglu "$@" --spec a b'
    hidden += " --enable-gpt-oss --valid-data-path 0.5 $A 0.5 $B"
    (tmp_path / "x.sh").write_text(f"source ./common.sh\n{hidden}\n")
    done = run_here(convert.main, "recipe", tmp_path / "x.sh")
    lost = [line for line in done.stdout.splitlines() if line.startswith("  LOSS")]
    for hint in ("<EXTRA_ARGS>", "<model_args>", "$@"):
        assert any(f"not evaluated: {hint} in the training command" in line for line in lost), hint
    assert not any(f"not evaluated: <{name}>" in line for line in lost for name in "AB")
    assert any("enable-gpt-oss" in line for line in lost) and any("spec" in line for line in lost)
    assert "not evaluated: source ./common.sh" in done.stdout


def test_folders_with_one_name_are_several_corpora(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(NANOTRON)
    foreign = read_foreign([tmp_path / "x.yaml"])
    dataset = {"dataset_folder": ["a/tokenized", "b/tokenized"]}
    foreign.values["data_stages"] = [{"name": "one", "data": {"dataset": dataset}}]
    result = translate(foreign, PROGRAMS["nanotron"], name="x", ranks=8)
    paths = [corpus.path for corpus in result.recipe.data.train]
    assert paths == ["data/x/one-tokenized-0", "data/x/one-tokenized-1"]


def test_programs_are_not_mixed(tmp_path: Path) -> None:
    for name in ("125m.yml", "titan.toml"):
        (tmp_path / name).write_text(SOURCES[name][0])
    with pytest.raises(UserError, match="torchtitan"):
        read_foreign([tmp_path / "125m.yml", tmp_path / "titan.toml"])


def test_rules_name_keys_that_exist() -> None:
    """A table with a misspelt key of ours would fail only for the file that sets it."""
    reference = (Path(__file__).parents[2] / "docs/recipe-reference.md").read_text()
    for program in PROGRAMS.values():
        for rule in program.table.values():
            assert not rule.target or f"`{rule.target.rpartition('.')[2]}`" in reference


@pytest.mark.skipif("THREEFOLD_CLONES" not in os.environ, reason="needs clones of the programs")
def test_the_published_configurations_translate(tmp_path: Path) -> None:
    table = translations.rows(Path(os.environ["THREEFOLD_CLONES"]), tmp_path)
    assert len(table) >= 20 and {row[5] for row in table} == {"equal"}
    page = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()
    for row in table:
        assert f"| {' | '.join(row)} |" in page
