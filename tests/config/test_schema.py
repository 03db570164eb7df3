"""Every bad recipe is rejected with one message that names the key and a value that works."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from models.errors import UserError
from tests.conftest import changed, shipped_configs, shipped_recipes
from tests.ranks import start_ranks
from threefold.config import loading
from threefold.config.deepspeed_json import build_deepspeed_config, zero_stage
from threefold.config.loading import REPOSITORY, load_recipe, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe

TINY = REPOSITORY / "recipes" / "tiny.toml"

# --set overrides of tiny.toml, number of ranks, and two parts of the message: key, working value
BAD: list[tuple[str, int, str, str]] = [
    # the model
    (
        "model.heads=7", 2, "model.heads = 7 does not divide hidden_size = 192",
        "use heads = 6 or 8",
    ),
    ("model.kv_heads=4", 2, "model.kv_heads = 4", "use kv_heads = 3 or 6"),
    ("model.layers=0", 2, "model.layers = 0", "use layers = 1"),
    ("model.layers=10001", 2, "= 10001 is not in 1 .. 10000", "use layers = 10000"),
    ("model.hidden_size=99999999999999", 2, "model.hidden_size = 99999999999999", "= 16777216"),
    ("model.layers=six", 2, 'model.layers = "six"', "layers = 4"),
    ("model.layers=4.5", 2, "model.layers = 4.5", "layers = 4"),
    ("model.bias=1", 2, "model.bias = 1", "bias = false"),
    ("model.norm=batchnorm", 2, 'model.norm = "batchnorm"', "'rmsnorm' or 'layernorm'"),
    ("model.activation=relu", 2, 'model.activation = "relu"', "'gelu_erf' or 'squared_relu'"),
    ("model.dropout=1.5", 2, "model.dropout = 1.5", "use dropout = 0.1"),
    ("model.attention_dropout=1", 2, "attention_dropout = 1.0", "use attention_dropout = 0.1"),
    ("model.head_size=33", 2, "model.head_size = 33", "use head_size = 34"),
    ("model.rope_theta=0.99", 2, "model.rope_theta = 0.99 is not in 1", "use rope_theta = 10000.0"),
    ("model.rope_theta=2e12", 2, "model.rope_theta = 2000000000000.0", "use rope_theta = 10000.0"),
    (
        'model.window={size=64,rope_theta=1e-300};model.attention_pattern=["window"]', 2,
        "model.window.rope_theta = 1e-300", "use rope_theta = 10000.0",
    ),
    ("model.z_loss=1e39", 2, "model.z_loss = 1e+39 is not in 0 .. 16777216", "leave z_loss out"),
    ("model.sinks=true", 2, "unknown key model.sinks", "did you mean model.attention_sinks?"),
    ("model.partial_rotary_factor=1.1", 2, "= 1.1 is not above 0 and at most 1", "factor = 1.0"),
    (
        "model.head_size=44;model.partial_rotary_factor=0.71", 2,
        "partial_rotary_factor = 0.71 of head_size = 44 is 31 columns", "= 0.6818181818181819",
    ),
    (
        "model.rope_scaling.factor=0.5;model.rope_scaling.type=linear", 2,
        "model.rope_scaling.factor = 0.5 is below 1", "use factor = 8.0",
    ),
    (
        "model.rope_scaling={type = 'yarn', factor = 2.0, original_sequence_length = 16777217}", 2,
        "model.rope_scaling.original_sequence_length = 16777217 is above 16777216", "= 8192",
    ),
    ("model.rope_scaling.factor=2", 2, "model.rope_scaling.type is missing", 'type = "llama3"'),
    (
        "model.rope_scaling.factr=2;model.rope_scaling.type=linear;model.rope_scaling.factor=2", 2,
        "unknown key model.rope_scaling.factr", "did you mean model.rope_scaling.factor?",
    ),
    ("model.sliding_window=64", 2, "model.sliding_window = 64", "did you mean model.window.size?"),
    ("model.window.size=64.5", 2, "model.window.size = 64.5", "size = 4096"),
    ("model.window={}", 2, "model.window.size is missing", "size = 4096"),
    (
        'model.latent={key_value_rank=8,rotary_size="x",value_size=8}', 2,
        'model.latent.rotary_size = "x"', "rotary_size = 64",
    ),
    (
        "model.window.size=64;model.attention_pattern=[1]", 2,
        "model.attention_pattern.0 = 1", '; for example attention_pattern = ["window", "full"]',
    ),
    (
        "model.window.size=64;model.layers=1;model.attention_pattern=['windows']", 2,
        'model.attention_pattern.0 = "windows"', '; for example attention_pattern = ["window"]',
    ),
    (
        "model.window.size=64;model.attention_pattern=[]", 2,
        "model.attention_pattern has 0 entries", 'use attention_pattern = ["window", "full"]',
    ),
    (
        'model.attention_pattern=["full","full","full","full","full"]', 2,
        "model.attention_pattern has 5 entries", 'use attention_pattern = ["full"]',
    ),
    (
        'model.window.size=64;model.attention_pattern=["nope","full","window","nope","full"]', 2,
        "model.attention_pattern has 5 entries",
        'use attention_pattern = ["nope", "full", "window"]',
    ),
    (
        'model.window.size=64;model.attention_pattern=["full","full","full","full","window"]', 2,
        "model.attention_pattern has 5 entries", 'use attention_pattern = ["window", "full"]',
    ),
    (
        'model.window.size=64;model.attention_pattern=["nope"]', 2,
        "model.window is set, but no layer has it", 'out, or use attention_pattern = ["window", "n',
    ),
    (
        'model.window={size=64,rope_theta=1.0};model.attention_pattern=["window"];'
        "model.rope_scaling={type='yarn',factor=2.0,original_sequence_length=256}", 2,
        "model.window.rope_theta = 1.0 must be above 1", "use window.rope_theta = 10000.0",
    ),
    (
        'model.attention_pattern=["nope"];model.partial_rotary_factor=0.5', 2,
        "model.partial_rotary_factor = 0.5 has no effect with attention_pattern",
        "leave partial_rotary_factor out",
    ),
    (
        'model.attention_pattern=["nope"];model.rope_theta=5e5', 2,
        "model.rope_theta = 500000.0 has no effect with attention_pattern", "leave rope_theta out",
    ),
    (
        "model.positions=learned;model.rope_theta=5e5", 2,
        "model.rope_theta = 500000.0 requires positions", "leave it out",
    ),
    ("model.attention_scale=1e300", 2, "attention_scale = 1e+300", "leave attention_scale out"),
    ("model.attention_soft_cap=-1", 2, "attention_soft_cap = -1", "leave attention_soft_cap out"),
    ("model.logit_soft_cap=0.09", 2, "= 0.09 is not in 0.1 .. 1677721", "leave logit_soft_cap out"),
    ("model.embedding_multiplier=0", 2, "multiplier = 0", "leave embedding_multiplier out"),
    ("model.hiden_size=192", 2, "unknown key model.hiden_size", "did you mean model.hidden_size?"),
    # the layout
    ("layout.tensor=4", 8, "model.heads = 6 is not divisible by layout.tensor = 4", "tensor = 2"),
    ("layout.tensor=3", 6, "model.kv_heads = 2 is not divisible by layout.tensor", "tensor = 2"),
    (
        "layout.context=3", 6,
        "model.sequence_length = 256 is not divisible by 2 x layout.context = 6",
        "use model.sequence_length = 252 or 258",
    ),
    (
        "layout.context=8;layout.sequence_parallel=true;layout.tensor=4;model.kv_heads=4;"
        "model.heads=8;model.sequence_length=48",
        64, "is not divisible by layout.tensor = 4 x layout.context = 8", "= 32 or 64",
    ),
    (
        "layout.context=4;layout.context_attention=ulysses", 8,
        "layout.context = 4 does not divide model.kv_heads / layout.tensor = 2",
        "use layout.context_attention",
    ),
    (
        "layout.context_attention=ring", 2,
        'layout.context_attention = "ring" has no effect with layout.context = 1',
        'use layout.context_attention = "gather", or layout.context = 2 or more',
    ),
    ("layout.context=2", 3, "x layout.context = 2 needs a multiple of", "use 4 ranks"),
    (
        "layout.context=8;layout.context_attention=ulysses;model.hidden_size=384;model.heads=12;"
        "model.kv_heads=12", 16,
        "layout.context = 8 does not divide model.kv_heads", "use layout.context_attention = ",
    ),
    (
        "layout.context=2;layout.context_attention=ulysses;model.heads=3;model.kv_heads=3", 4,
        "layout.context = 2 does not divide model.kv_heads",
        'needs; use layout.context_attention = "gather"',
    ),
    (
        "layout.tensor=3;layout.context=4;layout.context_attention=ulysses;model.heads=12;"
        "model.kv_heads=4", 12,
        "model.kv_heads = 4 is not divisible by layout.tensor = 3", "use layout.tensor = 2 or 4",
    ),
    (
        "layout.context=100000000", 2, "not divisible by 2 x layout.context = 200000000",
        'use layout.context = 1 with layout.context_attention = "gather"',
    ),
    ("layout.pipeline=5", 5, "layout.pipeline = 5", "use layout.pipeline = 4"),
    ("layout.pipeline=0", 2, "layout.pipeline = 0", "pipeline = 2"),
    ("layout.recompute=some", 2, 'layout.recompute = "some"', "'none', 'selective' or 'full'"),
    ("layout.recompute_interval=2", 2, "layout.recompute_interval = 2", 'recompute = "full"'),
    (
        "layout.schedule=gpip", 2,
        'layout.schedule = "gpip"',
        "'1f1b', 'interleaved', 'zb-h1', 'zb-v', 'dualpipev' or 'gpipe'",
    ),
    (
        "layout.schedule=dualpipev;layout.pipeline=1", 2,
        'layout.schedule = "dualpipev" needs two stages or more', "use layout.pipeline = 2 or more",
    ),
    (
        "layout.schedule=zb-h1;layout.pipeline=1", 2,
        'layout.schedule = "zb-h1" needs two stages or more', 'or layout.schedule = "1f1b"',
    ),
    (
        "layout.schedule=interleaved;layout.virtual_stages=1", 2,
        "layout.virtual_stages = 1 is not possible with", "use layout.virtual_stages = 2 or more",
    ),
    (
        "tracking.timeline_step=300", 2,
        "tracking.timeline_step = 300 comes after training.steps = 200", "timeline_step = 200",
    ),
    (
        "tracking.profile_step=300", 2,
        "tracking.profile_step = 300 comes after training.steps = 200", "profile_step = 200",
    ),
    (
        "layout.chunks=2", 2,
        "layout.chunks is now layout.virtual_stages", "use layout.virtual_stages = 2",
    ),
    (
        "layout.shard_group=1", 2,
        "layout.shard_group is now layout.dp_shard", "use layout.dp_shard = 1",
    ),
    (
        "layout.virtual_stages=2", 2,
        "layout.virtual_stages = 2 is not possible with", "use layout.virtual_stages = 1",
    ),
    (
        "layout.schedule=zb-v;layout.virtual_stages=3", 2,
        "layout.virtual_stages = 3 is not possible with", "use layout.virtual_stages = 2",
    ),
    (
        "layout.schedule=interleaved;layout.virtual_stages=3", 2,
        "layout.pipeline = 2 with 3 virtual stages each", "use model.layers = 6 or more",
    ),
    (
        "layout.layers_per_stage=[3,2]", 2,
        "layout.layers_per_stage = [3, 2] assigns 5 layers to 2 virtual", "= [2, 2]",
    ),
    (
        "layout.layers_per_stage=[1,1,2]", 2,
        "layout.layers_per_stage = [1, 1, 2] assigns 4 layers to 3 virtual", "or leave it out",
    ),
    ("layout.layers_per_stage=[4,0]", 2, "layout.layers_per_stage", "1"),
    (
        "layout.schedule=dualpipev;layout.pipeline=4", 4,
        "layout.pipeline = 4 with 2 virtual stages each", "use layout.pipeline = 2",
    ),
    (
        "layout.schedule=dualpipev;model.layers=3", 2,
        "layout.pipeline = 2 with 2 virtual stages each", "use model.layers = 4 or more",
    ),
    (
        "layout.schedule=dualpipev;batch.micro_sequences=16", 2,
        'layout.schedule = "dualpipev" needs 4 micro-batches', "use batch.global_sequences = 64",
    ),
    ("layout.stages=2", 2, "unknown key layout.stages", "are tensor, pipeline"),
    ("layout.heads=8", 2, "unknown key layout.heads", "did you mean model.heads?"),
    (
        "model.sequence_length=255;layout.tensor=2;layout.sequence_parallel=true", 4,
        "model.sequence_length = 255 is not divisible by layout.tensor = 2", "254 or 256",
    ),
    # the world
    ("layout.tensor=2", 6, "layout.tensor = 2 x layout.pipeline = 2", "use 4 ranks"),
    ("batch.global_sequences=12", 8, "batch.global_sequences = 12", "= 16"),
    (
        'cluster={nodes = 4, gpus_per_node = 8, gpu = "H100"}', 2,
        "cluster.nodes = 4", "--set cluster.nodes=1 --set cluster.gpus_per_node=2",
    ),
    ('cluster={nodes = 4, gpu = "H100"}', 2, "cluster.gpus_per_node is missing", "= 8"),
    # matmuls in FP8
    ("training.matmul_precision=fp4", 2, 'training.matmul_precision = "fp4"', "fp8"),
    (
        "training.matmul_precision=fp8;layout.tensor=2;layout.pipeline=1", 2,
        "columns of the queries = 192 is not divisible by 128 x layout.tensor = 256",
        "use layout.tensor = 1",
    ),
    (
        "training.matmul_precision=fp8;layout.tensor=8;layout.pipeline=1;model.heads=8;"
        "model.kv_heads=8;model.head_size=64", 8,
        "columns of the queries = 512 is not divisible", "use layout.tensor = 4",
    ),
    (
        "training.matmul_precision=fp8;layout.tensor=2;layout.pipeline=1;model.head_size=128;"
        "model.ffn_hidden_size=576", 2,
        "model.ffn_hidden_size = 576 is not divisible", "use layout.tensor = 1",
    ),
    (
        "training.matmul_precision=fp8;layout.context=2;layout.pipeline=1", 2,
        "model.sequence_length = 256 is not divisible by 128 x 4", "sequence_length = 512",
    ),
    (
        "training.matmul_precision=fp8;deepspeed=ds_configs/zero1_fp16.json", 2,
        'training.matmul_precision = "fp8" with weights in fp16', "ds_configs/zero1_bf16.json",
    ),
    # the batch, the optimizer, the run
    ("batch.micro_sequences=3", 2, "batch.global_sequences = 32", "30 or 33"),
    ("batch.micro_sequences=0", 2, "batch.micro_sequences = 0", "micro_sequences = 4"),
    ("optimizer.learning_rate=fast", 2, 'optimizer.learning_rate = "fast"', "0.004"),
    ("optimizer.learning_rate=nan", 2, "optimizer.learning_rate = nan", "0.004"),
    ("optimizer.betas=[0.9]", 2, "optimizer.betas.1", "betas = [0.9, 0.95]"),
    ("optimizer.betas=[0.9, 1.0]", 2, "optimizer.betas.1 = 1.0", "betas = [0.9, 0.95]"),
    ("optimizer.lr=1e-3", 2, "unknown key optimizer.lr", "learning_rate"),
    (
        "optimizer.average.decay=0.99999;optimizer.average.every=4", 2,
        "optimizer.average.decay = 0.99999 ", "decay = 0.9999 and optimizer.average.every = 40,",
    ),
    ("optimizer.schedule.decay=sqrt", 2, 'optimizer.schedule.decay = "sqrt"', "'wsd'"),
    ("optimizer.schedule.decay=wsd", 2, "optimizer.schedule.decay_steps = 0", "decay_steps = 1"),
    (
        "optimizer.schedule.decay=wsd;optimizer.schedule.decay_steps=190", 2,
        "optimizer.schedule.warmup_steps", "use training.steps = 2",
    ),
    (
        "optimizer.schedule.minimum_learning_rate=1", 2,
        "optimizer.schedule.minimum_learning_rate = 1.0", "use 0.0004",
    ),
    ("optimizer.schedule.steps=0", 2, "optimizer.schedule.steps = 0", "leave steps out"),
    (
        "optimizer.schedule.steps=40", 2,
        "optimizer.schedule.steps = 40 leaves no steps for the decay", "steps = 41 or more",
    ),
    (
        "optimizer.schedule={warmup_steps=0,decay=\"constant\",steps=9}", 2,
        "optimizer.schedule.steps = 9 has no effect", "leave it out",
    ),
    (
        "optimizer.schedule={warmup_steps=5,decay=\"wsd\",decay_steps=30,steps=20}", 2,
        "do not fit into optimizer.schedule.steps = 20", "use optimizer.schedule.steps = 35",
    ),
    (
        "checkpoint.keep_best=2;training.evaluate_every=0", 2,
        "checkpoint.keep_best = 2 needs validation losses", "use training.evaluate_every = 50",
    ),
    (
        "checkpoint.keep_best=2;checkpoint.every=75", 2,
        "checkpoint.every = 75 is not a multiple", "use checkpoint.every = 50 or 100",
    ),
    ("checkpoint.keep_best=-1", 2, "checkpoint.keep_best = -1", "keep_best = 0"),
    ("checkpoint.also_at=[1,0]", 2, "checkpoint.also_at.1 = 0", "also_at = "),
    ("checkpoint.also_at=5", 2, "checkpoint.also_at = 5", "also_at = "),
    ("checkpoint.room_seconds=-1", 2, "checkpoint.room_seconds = -1", "room_seconds = 1800"),
    ("training.steps=-5", 2, "training.steps = -5", "steps = "),
    ("training.compare_replicas_every=-1", 2, "training.compare_replicas_every = -1", "= 100"),
    ("training.compile=1.0", 2, "training.compile = 1.0", "true, false or 'auto'"),
    ("training.compile=0", 2, "training.compile = 0", "true, false or 'auto'"),
    ('data.tokenizer=""', 2, 'data.tokenizer = "": ', 'for example tokenizer = "data/'),
    ('data.train=[{path=""}]', 2, 'data.train.0.path = "": ', 'for example path = "data/'),
    ('data.validation=""', 2, 'data.validation = "" is neither a path', "data/web/validation"),
    ("data.validation={}", 2, "data.validation = {  } is neither a path", "data/web/validation"),
    ('data.validation={a=""}', 2, 'data.validation.a = "" is not a path', "data/web/validation"),
    ('training.initial_weights=""', 2, 'initial_weights = "": ', "leave initial_weights out"),
    ('data.tokenizer="a\\u0000b"', 2, "data.tokenizer", "remove"),
    ("training.compile=yes", 2, 'training.compile = "yes"', "true, false or 'auto'"),
    ("training.deterministic=1", 2, "training.deterministic = 1", "= false"),
    ("training.epochs=3", 2, "unknown key training.epochs", "are steps, evaluate_every"),
    ("checkpoint.keep=0", 2, "checkpoint.keep = 0", "keep = 2"),
    ("tracking.mode=on", 2, 'tracking.mode = "on"', "'offline'"),
    ("data.train=[]", 2, "data.train = []", "train = "),
    ("data.validation=data/stdlib/train", 2, 'data.validation = "data/stdlib/train"', "of its own"),
    ("data.validation=./data/stdlib/train", 2, "data.validation", "of its own"),
    ("data.validation={ a = 'data/stdlib/train' }", 2, "data.validation.a = ", "of its own"),
    ("data.validation={ a = 'x', b = './x' }", 2, 'data.validation = { a = "x"', "under one name"),
    ("data.validation={ 'a b' = 'x' }", 2, 'the name "a b"', "for example { code = "),
    ("data.validation={ a = 3 }", 2, "data.validation.a = 3", "for example { code = "),
    ("data.validation=3", 2, "data.validation = 3 is neither", "use a path"),
    ("evaluation.every=3", 2, "evaluation.every = 3 has no effect", 'name = "next_line"'),
    ("evaluation.tasks=[{ name = 'a/b', path = 'x' }]", 2, 'tasks.0.name = "a/b"', 'name = "a-b"'),
    ("evaluation.tasks=[{ name = 'a' }]", 2, "evaluation.tasks.0.path is missing", "path = "),
    ("evaluation.tasks=[{ name = 'a', path = 'x' }, { name = 'a', path = 'y' }]", 2,
     "evaluation.tasks has a name twice: a, a;", "another name"),
    ("training.position_losses=3", 2, "training.position_losses = 3 does not divide", "= 2 or 4"),
    ("data.separate_documents=yes", 2, 'data.separate_documents = "yes"', "= false"),
    ("data.train=[{path='x', wait=1}]", 2, "unknown key data.train.0.wait", "are path, weight"),
    ("data.train=[{path='x'}, {path='./x'}]", 2, "names a corpus twice", "use each path once"),
    ("tracking.project=a/b", 2, 'tracking.project = "a/b"', 'project = "a-b"'),
    ("name=../elsewhere", 2, 'name = "../elsewhere"', 'name = "elsewhere"'),
    ("seed=-1", 2, "seed = -1", "seed = 1234"),
    ("layuot.tensor=2", 2, "unknown section [layuot]; ", "did you mean layout?"),
    ("checkpoint.keep=true", 2, "checkpoint.keep = true: ", "keep = 2"),
    ("seed={ x = true }", 2, "[seed]: input should be a valid integer", "seed = 1234"),
    ("layout.layers_per_stage=[1, 2]", 2, "layout.layers_per_stage = [1, 2] assigns", "= [2, 2]"),
    ("steps=[true, 'a']", 2, 'unknown key steps = [true, "a"]; ', "did you mean training.steps?"),
    ("steps=5", 2, "unknown key steps", "did you mean training.steps?"),
    ("model=5", 2, "model = 5", "layers = 4"),
    ("data.train.x=2", 2, "data.train is a value", "--set data.train=..."),
    ("name=2024-01-01", 2, "2024-01-01 is a date", 'write "2024-01-01"'),
    ("model.rope_theta=inf", 2, "model.rope_theta = inf", "rope_theta = 10000.0"),
    ("model.head_size=big", 2, 'model.head_size = "big"', "leave head_size out"),
    ("seed.x=5", 2, "--set seed.x=5: seed is a value", "--set seed=..."),
    ("training.steps", 2, "--set training.steps", "--set section.key=value"),
    # ZeRO and precision
    (
        "layout.reduce_every=2", 2,
        "layout.reduce_every = 2 has no effect with ZeRO-1", "layout.reduce_every = 0",
    ),
    (
        "layout.dp_shard=4;layout.pipeline=1;layout.tensor=1", 6,
        "layout.dp_shard = 4 does not divide the 6 ranks", "layout.dp_shard = 3 or 6",
    ),
    (
        "layout.dp_shard=1;deepspeed=ds_configs/zero3_fp32.json;layout.pipeline=1", 2,
        "layout.dp_shard = 1 with ZeRO-3", 'deepspeed = "ds_configs/zero2_fp32.json"',
    ),
    (
        "deepspeed=ds_configs/zero2_fp32.json;layout.reduce_every=9", 4,
        "layout.reduce_every = 9 is more than the 4 micro-batches", "layout.reduce_every = 4",
    ),
    (
        "deepspeed=ds_configs/zero2_fp32.json;layout.reduce_every=-1", 4,
        "layout.reduce_every = -1", "reduce_every = 0",
    ),
    (
        "deepspeed=ds_configs/zero3_bf16.json", 4,
        "gather its weights again for both passes", 'deepspeed = "ds_configs/zero2_bf16.json"',
    ),
    ("deepspeed=ds_configs/zero9.json", 2, 'deepspeed = "ds_configs/zero9.json"', "zero1_fp32"),
    (
        'phase=[{name="a",start_step=9,model={sequence_length=""}},'
        '{name="b",start_step=12,batch={global_sequences=8}}]', 2,
        'phase "a": model.sequence_length = "" is not an integer', "sequence_length = 4096",
    ),
    (
        'phase=[{name="a",start_step=9,batch={global_sequences="x"}},'
        '{name="b",start_step=12,batch={global_sequences=8}}]', 2,
        'phase "a": batch.global_sequences = "x" is not an integer', "global_sequences = 32",
    ),
    ("deepspeed=Makefile", 2, 'deepspeed = "Makefile": this is not valid JSON', "zero1_fp32"),
]  # fmt: skip


def rejection(path: Path, overrides: list[str], ranks: int) -> str:
    """Return the message of the rejected recipe."""
    with pytest.raises(UserError) as rejected:
        recipe = load_recipe(path, overrides)
        dims = recipe.parallel_dims(LaunchEnvironment(size=ranks, local_size=ranks))
        build_deepspeed_config(recipe, dims)
    return str(rejected.value)


def test_the_advice_for_a_node_of_six_ranks_divides_the_heads_too() -> None:
    changes = ["layout.tensor=4", "layout.pipeline=1", "model.heads=12", "model.kv_heads=4"]
    recipe = load_recipe(TINY, changes)
    with pytest.raises(UserError, match=r"does not divide the 6 ranks .* use layout.tensor = 2$"):
        recipe.parallel_dims(LaunchEnvironment(size=12, local_size=6))
    with pytest.raises(UserError, match=r"not divisible by layout.tensor = 4; use .* = 2$"):
        load_recipe(TINY, ["layout.tensor=4", 'cluster={nodes=1,gpus_per_node=6,gpu="H100"}'])


@pytest.mark.parametrize(("overrides", "ranks", "key", "works"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_recipe_is_rejected(overrides: str, ranks: int, key: str, works: str) -> None:
    message = rejection(TINY, overrides.split(";"), ranks)
    assert key in message
    assert works in message.partition(key)[2]
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.bias=true"],
            'bias = true is not supported with experts.router = "sigmoid", whose bias balances the '
            "experts; use bias = false",
        ),
        (
            ["model.qkv_bias=true"],
            "qkv_bias = true is not possible with latent; use qkv_bias = false",
        ),
        (
            ["model.attention_pattern=['nope']"],
            'attention_pattern = ["nope"] is not possible with latent; leave attention_pattern out',
        ),
        (
            ["model.attention_pattern=['window']", "model.window.size=64"],
            'attention_pattern = ["window"] is not possible with latent; leave attention_pattern '
            "and window out",
        ),
        (["model.window.size=64"], "window is set, but no layer has it; leave window out"),
        (["model.kv_heads=3"], "kv_heads = 3 is not possible with latent; use kv_heads = 6"),
        (
            ["model.positions=learned"],
            'positions = "learned" is not possible with latent; use positions = "rope"',
        ),
        (["model.attention_sinks=true"], "attention_sinks = true is not possible with latent;"),
    ],
)
def test_a_key_that_latent_attention_lacks_is_rejected(overrides: list[str], message: str) -> None:
    rejected = rejection(TINY.with_name("tiny-mla.toml"), overrides, 2)
    assert f" model.{message}" in rejected
    assert "qkv_bias = true" not in rejected.partition("; ")[2]


OVERLAP = (
    "layout.pipeline=2;layout.schedule=dualpipev;layout.expert_overlap=true;"
    "batch.global_sequences=96"
)
MIXTURE = "model.experts={count=8,per_token=2,ffn_hidden_size=64};layout.pipeline=1"


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (f"{MIXTURE};layout.expert=2;layout.dp_shard=3", 8),
        (f"{MIXTURE};layout.expert=2;layout.dp_shard=4", 8),
        (f"{MIXTURE};layout.expert=3", 8),
        (f"{MIXTURE};{OVERLAP};layout.expert=2", 2),
        (f"{MIXTURE};{OVERLAP};layout.expert=4", 6),
        (f"{MIXTURE};{OVERLAP};layout.expert=4", 4),
        (f"{MIXTURE};{OVERLAP};layout.expert=5;model.experts.count=15", 6),
        (f"{MIXTURE};{OVERLAP};layout.expert=2;layout.context=3;model.sequence_length=96", 6),
    ],
)
def test_every_advice_for_experts_works(overrides: str, ranks: int) -> None:
    """All alternatives of the message are tried, each with the other settings as they were."""
    given = overrides.split(";")
    advice = rejection(TINY, given, ranks).partition("; use ")[2]
    for alternative in advice.split(", or "):
        size = int(re.findall(r"(\d+) ranks", alternative)[0]) if "ranks" in alternative else ranks
        advised = re.findall(r"(layout\.\w+) = (\w+)", alternative)
        assert advised or size != ranks
        world = LaunchEnvironment(size=size, local_size=size)
        load_recipe(TINY, [*given, *(f"{key}={value}" for key, value in advised)]).parallel_dims(
            world
        )


def test_no_size_above_the_limit_is_suggested() -> None:
    message = rejection(
        TINY, ["model.hidden_size=16777215", "model.heads=11", "model.kv_heads=1"], 2
    )
    assert message.endswith("= 16777215; use hidden_size = 16777200")
    batch = ["batch.global_sequences=999999999", "batch.micro_sequences=2"]
    assert rejection(TINY, batch, 2).endswith("= 999999998 or 1000000000")
    batch = ["batch.global_sequences=1000000000", "batch.micro_sequences=3"]
    assert rejection(TINY, batch, 2).endswith("= 999999999")


@pytest.mark.parametrize(
    ("overrides", "ranks", "works"),
    [
        ("layout.pipeline=4", 6, "4 ranks"),
        ("layout.schedule=zb-v", 3, "2 ranks"),
        ("layout.schedule=dualpipev;batch.global_sequences=16", 5, "2 ranks"),
        (
            "layout.context=2;layout.context_attention=ring", 2,
            "4 ranks",
        ),
        (
            "layout.context=2;layout.context_attention=ring;layout.pipeline=1", 1,
            "2 ranks",
        ),
        ("layout.tensor=2;layout.layers_per_stage=[3,1]", 2, "4 ranks"),
        (
            'cluster={nodes = 1, gpus_per_node = 3, gpu = "H100"}', 3,
            "2 ranks (cluster.nodes x cluster.gpus_per_node)",
        ),
    ],
)  # fmt: skip
def test_the_advice_for_an_indivisible_world_works(overrides: str, ranks: int, works: str) -> None:
    given = overrides.split(";")
    message = rejection(TINY, given, ranks)
    assert message.partition("; use ")[2] == works
    count = int(works.partition(" ranks")[0])
    more = [f"cluster.gpus_per_node={count}"] if "cluster" in overrides else []
    load_recipe(TINY, [*given, *more]).parallel_dims(
        LaunchEnvironment(size=count, local_size=count)
    )


@pytest.mark.parametrize(
    "overrides",
    ["model.rope_scaling=5", "model=5", "batch=5", "optimizer.schedule=5", "data.train=[]"],
)
def test_the_example_of_a_section_works_when_pasted(overrides: str) -> None:
    message = rejection(TINY, [overrides], 2)
    key, _, example = message.partition("; for example ")[2].partition(" = ")
    section = overrides.partition("=")[0].rpartition(".")[0]
    table = tomllib.loads(f"[{section}]\n{key} = {example}" if section else f"{key} = {example}")
    assert table
    load_recipe(TINY, [f"{section}.{key}={example}".lstrip(".")])


@pytest.mark.parametrize(
    ("override", "words", "works"),
    [
        ("name=café", "letters A to Z and a to z, digits, dots, hyphens and", 'name = "cafe"'),
        ("name=my run (2)", "begin with a letter or digit", 'name = "my-run--2"'),
        ("name=日本", "begin with a letter or digit", 'name = "tiny"'),
        ("tracking.project=a/b", "other than / \\ # ? % and :", 'project = "a-b"'),
    ],
)
def test_a_name_with_other_characters_has_a_proposal(override: str, words: str, works: str) -> None:
    message = rejection(TINY, [override], 2)
    assert words in message and message.endswith(f"; for example {works}")
    key = override.partition("=")[0]
    load_recipe(TINY, [f"{key}={works.partition(' = ')[2]}"])


def test_the_characters_of_every_pattern_are_known_in_words() -> None:
    patterns = set(re.findall(r'"pattern": ("[^"]*")', json.dumps(Recipe.model_json_schema())))
    assert len(patterns) >= 3
    assert {json.loads(pattern) for pattern in patterns} == set(loading.CHARACTERS)


def test_the_example_of_every_list_has_an_entry() -> None:
    """An empty list, the default of some keys, would not show what the key takes."""
    lists = [key for key, value in loading._defaults(Recipe).items() if isinstance(value, tuple)]
    assert {"phase", "checkpoint.also_at", "tracking.tags"} < set(lists)
    for key in lists:
        message = rejection(TINY, [f"{key}=5"], 2)
        example = message.rpartition("; for example ")[2].partition(" = ")[2]
        assert len(tomllib.loads(f"value = {example}")["value"]) > 0, message
        if key != "phase":  # a later phase of this recipe
            load_recipe(TINY, [f"{key}={example}"])


def test_the_unmodified_recipe_of_the_table_is_valid() -> None:
    recipe = load_recipe(TINY)
    build_deepspeed_config(recipe, recipe.parallel_dims(LaunchEnvironment(size=2, local_size=2)))
    assert len(BAD) >= 25


def test_a_missing_key_or_section_is_named(tmp_path: Path) -> None:
    table = tomllib.loads(TINY.read_text())
    for key, example in (
        ("model__layers", "layers = 4"),
        ("batch", "batch = { global_"),
        ("seed", "1234"),
    ):
        file = tmp_path / "bad.toml"
        file.write_text(tomli_w.dumps(changed(table, **{key: None})))
        message = rejection(file, [], 2)
        assert f"{file}: {key.replace('__', '.')} is missing" in message and example in message


def test_all_problems_are_reported_at_once() -> None:
    message = rejection(TINY, ["model.layers=no", "batch.micro_sequences=no", "seed=no"], 2)
    assert "3 problems" in message
    assert all(key in message for key in ("model.layers", "batch.micro_sequences", "seed"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model = [", "this is not valid TOML"),
        ("\x00", "this is not valid TOML"),
        (None, "no such recipe; use for example "),
        ('name = "x', "this is not valid TOML: "),
        ("a = 1\n b = cosine # or", 'line 2: b = cosine # or: text needs quotes: b = "cosine"'),
        ("a = False", "line 1: a = False: true and false are lowercase: a = false"),
        ("a = 7b", "this is not valid TOML: "),
        ("a = [cosine]", "this is not valid TOML: "),
        ("a = 60 000", "line 1: a = 60 000: a number has no spaces or commas: a = 60_000"),
        ("a = 1,000,", "line 1: a = 1,000,: a number has no spaces or commas: a = 1_000"),
        (
            "a = 1,5 # or",
            "line 1: a = 1,5 # or: use a decimal point, not a comma: a = 1.5",
        ),
        ("a = -0,1", "line 1: a = -0,1: use a decimal point, not a comma: a = -0.1"),
        (
            "a = .1",
            "line 1: a = .1: the point needs digits on both sides: a = 0.1",
        ),
        (
            "a = 5.e3",
            "line 1: a = 5.e3: the point needs digits on both sides: a = 5.0e3",
        ),
        ("a = -Inf", "line 1: a = -Inf: TOML writes them inf and nan: a = -inf"),
        ("a = None", "line 1: a = None: TOML has no None; remove this line if a may be missing"),
        ("a = 1, b = 2,", "this is not valid TOML: "),
        ("a = 4e-3,", "line 1: a = 4e-3,: remove the comma after the value: a = 4e-3"),
        ("a = 'x' , # b", "line 1: a = 'x' , # b: remove the comma after the value: a = 'x'"),
        ("[model\na = 1", "line 1: [model: a section needs closing brackets: [model]"),
        ("[" * 10**5 + "]", "this is not valid TOML: "),  # in less than hours
        ("a = 1\n\n# b\na = 2", "line 4: a is given twice, first in line 1; remove one of them"),
        ("[a]\nb = 1\n[c]\nb = 1\n[a]", "line 5: [a] is given twice, first in line 1; remove"),
        (
            "[a]\nb = 1\n'c=#' = [\n2]\nb = [\n1,\n2]",
            "line 5: a.b is given twice, first in line 2; ",
        ),
        (
            "[[a]]\nb = 1\n[[a]]\nb = 1\nb = 2",
            "line 5: a.b is given twice, first in line 4; remove",
        ),
        ("[[a]]\n[a.b]\n[[a]]\nb.c = 1\n[a.b]", "line 5: [a.b] is given twice; remove one of them"),
        ("[a]\nb = { c = 1, c = 2 }", "line 2: a.b.c is given twice; remove one of them"),
        ("a = 1\n[a]", "line 2: [a] is given twice; remove one of them"),
        ("'#' = 1\n'#' = 1", "line 2: '#' is given twice, first in line 1; remove one of them"),
    ],
)
def test_a_file_that_is_not_a_recipe_is_rejected(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "bad.toml"
    if text is not None:
        file.write_text(text)
    assert rejection(file, [], 2).startswith(f"{file}: {named}")


@pytest.mark.parametrize(
    ("override", "example"),
    [
        ("optimizer.learning_rate=.003", "learning_rate = 0.003"),
        ("optimizer.learning_rate=0,002", "learning_rate = 0.002"),
        ("optimizer.learning_rate=Inf", "learning_rate = 0.004"),
        ("training.steps=1,000", "steps = 1_000"),
        ("training.steps=1,5", "steps = 200"),
    ],
)
def test_a_number_in_another_spelling_is_an_example(override: str, example: str) -> None:
    assert rejection(TINY, [override], 2).endswith(f"; for example {example}")
    key = override.partition("=")[0]
    load_recipe(TINY, [f"{key.rpartition('.')[0]}.{example}"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("recipes/tinny.toml", "did you mean {recipes}/tiny.toml?"),
        ("recipes/llama/7b", "did you mean {recipes}/llama/7b.toml?"),
        ("llama-7b", "did you mean {recipes}/llama/7b.toml?"),
        ("experiments/my-mdoel.toml", "did you mean experiments/my-model.toml?"),
    ],
)
def test_a_misspelt_recipe_is_recognized(
    path: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "my-model.toml").touch()
    message = rejection(Path(path), [], 1)
    assert message == f"{path}: no such recipe; " + said.format(recipes=REPOSITORY / "recipes")


def test_a_folder_or_an_unknown_name_lists_a_few_recipes() -> None:
    for path, reason in ((Path("nothing-like-it"), "no such recipe"), (TINY.parent, "is a folder")):
        message = rejection(path, [], 1)
        assert reason in message and message.count(".toml") == 4 and message.endswith(" more")


@pytest.mark.parametrize(
    ("change", "named", "works"),
    [
        ({"gradient_clipping": 7.0}, "gradient_clipping = 7.0", '"gradient_clipping": "auto"'),
        ({"gradient_clipping": True}, "gradient_clipping = true", "optimizer.gradient_clipping = "),
        ({"train_batch_size": 8}, "train_batch_size", "batch.global_sequences = 32"),
        ({"train_batch_size": {"a": 1}}, "train_batch_size", "batch.global_sequences = 32"),
        ({"gradient_accumulation_steps": 5}, "gradient_accumulation_steps = 5", "data ranks = 8"),
        ({"optimizer": {"type": "Lion"}}, 'optimizer.type = "Lion"', 'optimizer.kind = "adamw"'),
        ({"optimizer": {"params": {"amsgrad": True}}}, "amsgrad = true", "use [optimizer]"),
        ({"optimizer": None}, "optimizer = null should be an object", "remove it"),
        ({"scheduler": {"params": {"warmup_type": "log"}}}, "warmup_type", "[optimizer.schedule]"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage = 0", "use 1"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage = true", "use 1"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "offload_optimizer",
            "remove it",
        ),
        (
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "compute_grad_norm = false is not supported: clipping",
            "remove it",
        ),
        ({"data_types": {"grad_accum_dtype": "foo"}}, 'grad_accum_dtype = "foo"', '"fp32"'),
        ({"communication_data_type": "fp8"}, 'communication_data_type = "fp8"', 'use "fp32"'),
        ({"zero_optimization": 1}, "zero_optimization = 1 should be an object", '{"stage": 1}'),
        ({"bf_16": {"enabled": True}}, "unknown key bf_16", "did you mean bf16?"),
        ({"bf16": {"enable": True}}, 'bf16 lacks "enabled"', '"bf16": {"enabled": true}'),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "bf16 and fp16 are both enabled",
            "use bf16 alone",
        ),
    ],
)
def test_a_deepspeed_config_with_keys_of_the_recipe_is_rejected(
    tmp_path: Path, change: dict[str, Any], named: str, works: str
) -> None:
    file = tmp_path / "bad.json"
    config = json.loads((REPOSITORY / "ds_configs" / "zero1_fp32.json").read_text())
    file.write_text(json.dumps(config | change))
    message = rejection(TINY, [f'deepspeed="{file}"'], 2)
    assert named in message and works in message and str(file) in message


@pytest.mark.parametrize(
    ("named", "expected"), [({}, "fp32"), ({"communication_data_type": "bf16"}, "bf16")]
)
def test_gradients_are_summed_in_fp32_by_default(
    tmp_path: Path, named: dict[str, str], expected: str
) -> None:
    config = json.loads((REPOSITORY / "ds_configs" / "zero1_bf16.json").read_text())
    assert config.pop("communication_data_type") == "fp32"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | named))
    recipe = load_recipe(TINY, [f'deepspeed="{file}"'])
    dims = recipe.parallel_dims(LaunchEnvironment(size=2, local_size=2))
    assert build_deepspeed_config(recipe, dims)["communication_data_type"] == expected


def test_tied_embeddings_suit_every_type_of_the_sums_of_gradients(tmp_path: Path) -> None:
    config = json.loads((REPOSITORY / "ds_configs" / "zero1_fp16.json").read_text())
    file = tmp_path / "own.json"
    for types in ({}, {"grad_accum_dtype": "fp32"}, {"grad_accum_dtype": "fp16"}):
        file.write_text(json.dumps(config | {"data_types": types}))
        tied = ["model.tie_embeddings=true", "layout.pipeline=2", f'deepspeed="{file}"']
        recipe = load_recipe(TINY, tied)
        build_deepspeed_config(
            recipe, recipe.parallel_dims(LaunchEnvironment(size=2, local_size=2))
        )


def test_overrides_have_toml_values_and_bare_words_are_strings() -> None:
    recipe = load_recipe(
        TINY,
        [
            "optimizer.learning_rate=5e-4",
            "name=tiny2",
            'tracking.tags=["a", "b"]',
            "layout.tensor=2",
        ],
    )
    assert recipe.optimizer.learning_rate == 5e-4
    assert (recipe.name, recipe.tracking.tags, recipe.layout.tensor) == ("tiny2", ("a", "b"), 2)


def test_the_recipe_of_an_older_run_has_the_former_names_of_keys(tmp_path: Path) -> None:
    phase = 'phase=[{name="more", start_step=9, layout={virtual_stages=4}}]'
    settings = ["layout.schedule=interleaved", "layout.dp_shard=1", "model.layers=8", phase]
    recipe = load_recipe(TINY, settings)
    older = recipe.toml().replace("virtual_stages", "chunks").replace("dp_shard", "shard_group")
    recorded, own = tmp_path / "recipe.toml", tmp_path / "own.toml"
    own.write_text(older)
    recorded.write_text(older.replace("phase", "stage"))
    assert "stage = " in recorded.read_text() or "[[stage]]" in recorded.read_text()
    assert load_recipe(recorded) == recipe
    with pytest.raises(UserError, match=r"layout.chunks is now layout.virtual_stages"):
        load_recipe(own)


def test_a_new_schedule_resets_virtual_stages_and_layers_per_stage(tmp_path: Path) -> None:
    folded = ["layout.schedule=zb-v", "layout.layers_per_stage=[1,1,1,1]"]
    resolved = tmp_path / "recipe.toml"
    resolved.write_text(load_recipe(TINY, folded).toml())
    assert load_recipe(resolved).layout.virtual_stages == 2
    other = load_recipe(resolved, ["layout.schedule=1f1b"]).layout
    assert (other.schedule, other.virtual_stages, other.layers_per_stage) == ("1f1b", 1, None)
    more = ["layout.schedule=interleaved", "layout.virtual_stages=3", "model.layers=6"]
    assert load_recipe(resolved, more).layout.virtual_stages == 3
    with pytest.raises(UserError, match=r"layout.virtual_stages = 2 is not possible with"):
        load_recipe(resolved, ["layout.schedule=1f1b", "layout.virtual_stages=2"])


def test_the_resolved_recipe_reproduces_itself() -> None:
    recipe = load_recipe(TINY, ["model.qk_norm=true", "training.steps=77"])
    assert parse_recipe(tomllib.loads(recipe.toml()), "again") == recipe


def test_a_recipe_is_frozen() -> None:
    recipe = load_recipe(TINY)
    for target, key in ((recipe, "seed"), (recipe.layout, "tensor"), (recipe.model, "layers")):
        with pytest.raises((ValueError, AttributeError)):
            setattr(target, key, 5)


def test_every_shipped_recipe_and_config_is_valid() -> None:
    for path in shipped_recipes():
        recipe = load_recipe(path)
        assert isinstance(recipe, Recipe)
        layout = recipe.layout
        ranks = layout.pipeline * layout.tensor * max(layout.context, layout.expert)
        world = LaunchEnvironment(size=ranks, local_size=ranks)
        if recipe.cluster:
            local = recipe.cluster.gpus_per_node
            world = LaunchEnvironment(size=recipe.cluster.nodes * local, local_size=local)
        build_deepspeed_config(recipe, recipe.parallel_dims(world))
    for path in shipped_configs():
        overrides = ["layout.pipeline=1", f'deepspeed="{path}"']
        recipe = load_recipe(TINY, overrides)
        build_deepspeed_config(recipe, recipe.parallel_dims(LaunchEnvironment()))


@pytest.mark.parametrize(
    ("overrides", "zero", "group"),
    [
        ([], 2, 1),
        (["layout.schedule=interleaved", "batch.global_sequences=64"], 2, 2),  # of two stages
        (["layout.reduce_every=3"], 2, 3),
        (["layout.schedule=interleaved", "batch.global_sequences=64"], 1, 0),
    ],
)
def test_gradients_are_reduced_after_groups_of_micro_batches(
    overrides: list[str], zero: int, group: int
) -> None:
    names = ["layout.pipeline=2", f"deepspeed=ds_configs/zero{zero}_fp32.json", *overrides]
    assert load_recipe(TINY, names).layout.micro_batches_per_reduction(zero) == group


@pytest.mark.parametrize(("ranks", "tensor", "stage"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (4, 2, 2)])
def test_zero_2_on_one_data_rank_is_zero_1(ranks: int, tensor: int, stage: int) -> None:
    layout = ("layout.pipeline=1", f"layout.tensor={tensor}")
    recipe = load_recipe(
        REPOSITORY / "recipes" / "tiny.toml", ["deepspeed=ds_configs/zero2_fp32.json", *layout]
    )
    dims = recipe.parallel_dims(LaunchEnvironment(size=ranks, local_size=ranks))
    assert zero_stage(build_deepspeed_config(recipe, dims)) == stage


def test_two_ranks_print_one_message_and_no_traceback(tmp_path: Path) -> None:
    command = ["recipes/pretrain.py", "--set", "model.heads=7"]
    codes, outputs = start_ranks(2, command, folder=tmp_path, seconds=60, forked=False)
    assert codes == [2, 2]
    assert outputs[0].count("model.heads = 7 does not divide hidden_size = 192") == 1
    assert outputs[0].count("\n") == 1
    assert outputs[1].startswith("pretrain.py: rank 1: ") or "heads = 7" in outputs[1]


def test_the_best_checkpoints_need_a_validation_set(small: dict[str, Any], corpus: Path) -> None:
    task = {"name": "next_line", "path": str(corpus / "task")}
    for tasks, every in ((None, 0), ([task], 20)):
        table = changed(
            small,
            data__validation=None,
            training__evaluate_every=every,
            checkpoint__every=20,
            checkpoint__keep_best=2,
            evaluation={"tasks": tasks} if tasks else {},
        )
        with pytest.raises(UserError, match=r"no data\.validation; use checkpoint\.keep_best = 0"):
            parse_recipe(table, "small")
