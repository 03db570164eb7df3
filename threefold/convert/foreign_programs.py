"""nanotron, torchtitan and transformers, and the table of all programs.

A new key of a program is one line in its table if its meaning needs no other key. What several keys
decide together is in the program's function.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from models.errors import UserError, reason_of, toml_value
from models.hugging_face.config import GPT2_SIZES
from models.hugging_face.config import SIZES as SIZES_OF_HUB
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.convert.foreign_megatron import MEGATRON
from threefold.convert.foreign_neox import NEOX
from threefold.convert.translation import (
    ALL_DECAY,
    COMMUNICATION,
    DERIVED,
    FILES,
    FREE,
    KERNELS,
    LOGGING,
    ONE_LATER,
    READING,
    SUMS,
    TAKEN,
    Program,
    Rule,
    Translation,
    breaks,
    corpora,
    corpus_names,
    free,
    schedule,
    spread,
    takes,
    unfit,
    vocabulary,
    without_defaults,
)

# nanotron.


def _nanotron(t: Translation) -> None:
    at = "model.model_config."
    heads = t.get(f"{at}num_attention_heads")
    t.derive(
        f"{at}num_key_value_heads", {"model.kv_heads": t.get(f"{at}num_key_value_heads") or heads}
    )
    ours = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
    act = t.get(f"{at}hidden_act")
    t.derive(f"{at}hidden_act", {"model.activation": ours.get(act, "swiglu")})
    if act not in ours:
        t.differs(f"{at}hidden_act", f"{act}: ours is swiglu")
    t.recipe["model"] |= {"norm": "rmsnorm", "positions": "rope", "bias": False}
    t.derive(
        f"{at}attention_bias", {"model.qkv_bias": True if t.get(f"{at}attention_bias") else None}
    )
    unit = t.get("model.make_vocab_size_divisible_by", 1) * t.get("parallelism.tp", 1)
    keys = f"{at}vocab_size model.make_vocab_size_divisible_by"
    vocabulary(t, keys, t.get(f"{at}vocab_size"), unit, "")
    t.derive(f"{at}rope_theta", {"model.rope_theta": float(t.get(f"{at}rope_theta"))})
    if factor := t.get(f"{at}rope_seq_len_interpolation_factor"):
        key = f"{at}rope_seq_len_interpolation_factor"
        t.derive(key, {"model.rope_scaling": {"type": "linear", "factor": float(factor)}})
    if every := t.get(f"{at}no_rope_layer"):
        pattern = ["full"] * (every - 1) + ["nope"]
        t.derive(f"{at}no_rope_layer", {"model.attention_pattern": pattern})
    if size := t.get(f"{at}sliding_window_size"):
        settings = {"model.window": {"size": size}, "model.attention_pattern": ["window"]}
        t.derive(f"{at}sliding_window_size", settings)
    if t.has(f"{at}z_loss_enabled"):
        keys = f"{at}z_loss_enabled {at}z_loss_coefficient"
        t.derive(keys, {"model.z_loss": t.get(f"{at}z_loss_coefficient")})
    for key in ("z_loss_enabled", "z_loss_coefficient"):
        t.say(f"{at}{key}", FREE, "switched off")
    if t.has(f"{at}moe_config.num_experts"):
        _experts_of_nanotron(t, f"{at}moe_config.")
    t.derive("model.init_method.std", {"model.initial_std": t.get("model.init_method.std", 0.02)})
    data = t.get("parallelism.dp", 1)
    shards = math.prod(
        t.get(f"parallelism.{axis}", 1) for axis in ("tp", "pp", "context_parallel_size")
    )
    t.ranks = data * shards
    keys = "tokens.micro_batch_size tokens.batch_accumulation_per_replica parallelism.dp"
    spread(
        t,
        keys,
        t.get("tokens.micro_batch_size"),
        t.get("tokens.batch_accumulation_per_replica"),
        shards,
    )
    t.derive(
        "parallelism.tp_mode",
        {"layout.sequence_parallel": t.get("parallelism.tp_mode") == "REDUCE_SCATTER"},
    )
    for axis, target in {
        "context_parallel_size": "context",
        "expert_parallel_size": "expert",
    }.items():
        size = t.get(f"parallelism.{axis}", 1)
        wanted = size > 1 and (axis != "expert_parallel_size" or t.ours("model.experts"))
        t.derive(f"parallelism.{axis}", {f"layout.{target}": size if wanted else None})
    engine = (
        "gpipe"
        if t.get("parallelism.pp_engine") == "afab" and t.get("parallelism.pp", 1) > 1
        else None
    )
    t.derive("parallelism.pp_engine", {"layout.schedule": engine})
    recompute = "full" if t.get("parallelism.recompute_layer") else None
    t.derive("parallelism.recompute_layer", {"layout.recompute": recompute})
    at = "optimizer."
    factory = f"{at}optimizer_factory." if t.has(f"{at}optimizer_factory.name") else at
    betas = [float(t.get(f"{factory}adam_beta{n}")) for n in (1, 2)]
    t.derive(f"{factory}adam_beta1 {factory}adam_beta2", {"optimizer.betas": betas})
    t.derive(f"{factory}adam_eps", {"optimizer.epsilon": t.get(f"{factory}adam_eps")})
    if str(kind := t.get(f"{factory}name", "adamW")).lower() != "adamw":
        t.differs(f"{factory}name", f"{kind}: ours is AdamW")
    t.say(f"{factory}name", DERIVED, "optimizer.kind = adamw")
    _rate_of_nanotron(t)
    check = t.get("tokens.val_check_interval", 0)
    batches = t.get("tokens.limit_val_batches", 0)
    evaluate = check if check > 0 and batches else 0
    t.derive(
        "tokens.val_check_interval tokens.limit_val_batches", {"training.evaluate_every": evaluate}
    )
    t.deepspeed["zero_optimization.stage"] = t.get("optimizer.zero_stage", 0)
    t.derive("optimizer.zero_stage", {}, f"ZeRO-{max(1, t.get('optimizer.zero_stage', 0))}")
    t.precision = {"bfloat16": "bf16", "float16": "fp16"}.get(t.get("model.dtype"), "fp32")
    t.derive("model.dtype", {}, f"deepspeed, {t.precision}")
    if not t.get("optimizer.accumulate_grad_in_fp32", True):
        t.say("optimizer.accumulate_grad_in_fp32", FREE, SUMS)
    t.say("optimizer.accumulate_grad_in_fp32", FREE, SUMS)
    _stages_of_nanotron(t)


def _experts_of_nanotron(t: Translation, at: str) -> None:
    size = t.get(f"{at}moe_intermediate_size")
    experts: dict[str, Any] = {
        "count": t.get(f"{at}num_experts"), "per_token": t.get(f"{at}top_k"),
        "ffn_hidden_size": size, "router": "softmax",
        "balance_loss": float(t.get(f"{at}router_aux_loss_coef", 0.01)),
    }  # fmt: skip
    if t.has(f"{at}enable_shared_expert"):
        experts["shared"] = t.get(f"{at}shared_expert_intermediate_size") // size
    keys = (
        "num_experts top_k moe_intermediate_size router_aux_loss_coef enable_shared_expert "
        "shared_expert_intermediate_size"
    )
    t.derive(" ".join(at + key for key in keys.split()), {"model.experts": experts})
    t.differs(
        f"{at}router_aux_loss_coef",
        "balance_loss counts the tokens of a sequence, not those of a micro-batch",
    )
    if t.get(f"{at}layers", [-1]) != [-1]:
        t.differs(f"{at}layers", "every layer has experts here, apart from the first ones")
    t.say(f"{at}layers", FREE, "all layers")


def _rate_of_nanotron(t: Translation) -> None:
    at = "optimizer.learning_rate_scheduler."
    warmup, steps = t.get(f"{at}lr_warmup_steps") or 0, t.get("tokens.train_steps")
    start = t.get(f"{at}lr_decay_starting_step")
    length = t.get(f"{at}lr_decay_steps")
    if length is None:  # the program subtracts both from the number of steps
        length = steps - warmup - (start or 0)
    start = warmup if start is None else start
    style = t.get(f"{at}lr_decay_style") or "constant"
    keys = "lr_warmup_steps lr_decay_steps lr_decay_starting_step lr_decay_style min_decay_lr"
    schedule(
        t, " ".join(at + key for key in keys.split()), {"1-sqrt": "sqrt"}.get(style, style),
        warmup=warmup, start=start, end=start + length,
        minimum=t.get(f"{at}min_decay_lr") or 0.0,
    )  # fmt: skip
    if warmup and t.get(f"{at}lr_warmup_style", "linear") != "linear":
        t.differs(f"{at}lr_warmup_style", "the warm-up is linear")
    t.say(f"{at}lr_warmup_style", DERIVED, "the warm-up is linear")


def _stages_of_nanotron(t: Translation) -> None:
    stages = t.get("data_stages") or []
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise unfit("data_stages", stages, "a list of stages with name and data")
    phases = []
    for number, stage in enumerate(stages):
        name = re.sub(r"\W+", "-", str(stage.get("name", number)).lower()).strip("-")
        data = stage.get("data") or {}
        dataset = data.get("dataset") or {} if isinstance(data, dict) else None
        if not isinstance(dataset, dict):
            raise unfit(f"data_stages.{number}.data", data, "a table with dataset")
        folders = dataset.get("dataset_folder") or dataset.get("hf_dataset_or_datasets")
        folders = list(folders) if isinstance(folders, list | Mapping) else [folders or "train"]
        weights = dataset.get("dataset_weights") or [1] * len(folders)
        if not isinstance(weights, list) or len(weights) != len(folders):
            raise unfit(
                "dataset_weights", weights, f"a list of {len(folders)}, one for each folder"
            )
        train = [
            {"path": f"data/{t.name}/{name}-{corpus}", "weight": float(weight)}
            for corpus, weight in zip(corpus_names(list(map(str, folders))), weights, strict=True)
        ]
        if number == 0:
            t.derive("data_stages", {"data.train": train}, "prepare the text with prepare_data.py")
        else:
            start = stage.get("start_training_step")
            if not isinstance(start, int):
                raise unfit(
                    f"data_stages.{number}.start_training_step", start, "a step, such as 1000"
                )
            phases.append({"name": name, "start_step": start, "data": {"train": train}})
    steps = t.get("tokens.train_steps")
    if phases := [phase for phase in phases if phase["start_step"] <= steps]:
        t.put("phase", phases)


NANOTRON = Program(
    name="nanotron",
    table={
        **{f"model.model_config.{key}": takes(f"model.{ours}") for key, ours in {
            "num_hidden_layers": "layers", "hidden_size": "hidden_size",
            "num_attention_heads": "heads", "intermediate_size": "ffn_hidden_size",
            "tie_word_embeddings": "tie_embeddings", "rms_norm_eps": "norm_epsilon",
        }.items()},
        "tokens.sequence_length": takes("model.sequence_length"),
        "tokens.train_steps": takes("training.steps"),
        "general.seed": takes("seed"),
        "optimizer.clip_grad": takes("optimizer.gradient_clipping"),
        "optimizer.weight_decay": takes("optimizer.weight_decay"),
        "optimizer.learning_rate_scheduler.learning_rate": takes("optimizer.learning_rate"),
        "parallelism.tp": takes("layout.tensor"),
        "parallelism.pp": takes("layout.pipeline"),
        "checkpoints.checkpoint_interval": takes("checkpoint.every"),
        "general.project": takes("tracking.project"),
        "model.model_config._use_doc_masking": takes("data.separate_documents"),
        "model.model_config.rope_scaling": breaks("write [model.rope_scaling] yourself"),
        "model.model_config.moe_num_experts": breaks("these experts drop tokens; ours is dense", 1),
        "model.init_method.use_mup": breaks('spectral muP is not parametrization = "mup"'),
        "model.init_method.path": breaks("convert.py from-hf and training.initial_weights do this"),
        "model.init_method.scaling_method": breaks(
            "output projections are scaled by the depth", "NUM_LAYERS"
        ),
        "optimizer.weight_decay_exclude_named_params": breaks("norms and biases have no decay", []),
        **free("part of moe_num_experts", "model.model_config.moe_capacity_factor "
               "model.model_config.num_experts_per_tok"),
        **free(KERNELS, "model.model_config._attn_implementation "
               "model.model_config._fused_rms_norm "
               "model.model_config._fused_rotary_emb model.model_config._use_qkv_packed "
               "model.model_config.pretraining_tp model.model_config.use_cache "
               "model.model_config.rope_interleaved model.model_config.flex_attention_mask "
               "optimizer.torch_adam_is_fused optimizer.optimizer_factory.torch_adam_is_fused "
               "model.model_config.moe_config.token_dispatcher_type"),
        "doremi.domain_names": breaks("the weights of corpora are constant"),
        "doremi.ref_model_resume_checkpoint_path": breaks("the weights of corpora are constant"),
        "lighteval.*": Rule(reason="tasks are scored by [evaluation]; see docs/evaluation.md"),
        "s3_upload.*": Rule(reason=FILES),
        "data.*": Rule(reason=READING),
        "model.model_config.interleaved_rotary": Rule(reason=KERNELS),
        "tokens.limit_test_batches": Rule(reason="there is no test set"),
        "parallelism.moe_layer_recompute": Rule(reason="layout.recompute covers experts"),
        **free("a name, or not read in training", "model.model_config.bos_token_id "
               "model.model_config.eos_token_id model.model_config.pad_token_id "
               "model.model_config.initializer_range model.model_config.is_llama_config "
               "model.model_config.is_qwen2_config model.model_config.is_llamoe_config "
               "model.model_config.max_position_embeddings general.run general.step "
               "general.benchmark_csv_path general.consumed_train_samples "
               "general.ignore_sanity_checks lighteval"),
        **free(COMMUNICATION, "model.ddp_bucket_cap_mb parallelism.tp_linear_async_communication "
               "parallelism.tp_recompute_allgather"),
        **free(LOGGING, "logging.iteration_step_info_interval logging.log_level "
               "logging.log_level_replica metrics_logging profiler profiler.profiler_export_path"),
        **free(FILES, "checkpoints.checkpoints_path checkpoints.resume_checkpoint_path "
               "checkpoints.checkpoints_path_is_shared_file_system checkpoints.save_initial_state "
               "checkpoints.save_final_state checkpoints.load_lr_scheduler "
               "checkpoints.load_optimizer s3_upload"),
        **free(READING, "tokenizer.tokenizer_max_length tokenizer.tokenizer_name_or_path "
               "tokenizer.tokenizer_revision"),
    },
    defaults={
        "model.model_config.rms_norm_eps": 1e-6, "model.model_config.hidden_act": "silu",
        "model.model_config.rope_theta": 10000.0, "model.model_config.tie_word_embeddings": False,
        "model.model_config.z_loss_coefficient": 1e-4, "optimizer.adam_beta1": 0.9,
        "optimizer.adam_beta2": 0.95, "optimizer.adam_eps": 1e-8,
        "optimizer.optimizer_factory.adam_beta1": 0.9, "optimizer.optimizer_factory.adam_eps": 1e-8,
        "optimizer.optimizer_factory.adam_beta2": 0.95, "general.seed": 42,
        "model.model_config.moe_config.top_k": 2,
        "model.model_config.moe_config.moe_intermediate_size": 1408,
        "model.model_config.moe_config.shared_expert_intermediate_size": 5632,
    },
    derive=_nanotron,
    required=(
        "model.model_config.num_hidden_layers", "model.model_config.hidden_size",
        "model.model_config.num_attention_heads", "model.model_config.vocab_size",
        "tokens.sequence_length", "tokens.micro_batch_size", "tokens.train_steps",
        "optimizer.learning_rate_scheduler.learning_rate",
    ),
    differences=(ONE_LATER, ALL_DECAY),
)  # fmt: skip


# torchtitan, whose TOML files name a size of a model.

# (name, size) -> our recipe with its architecture, and what torchtitan changes in it.
LLAMA3 = {
    "rope_theta": 500000.0, "initial_std": 0.02, "norm_epsilon": 1e-5,
    "rope_scaling": {"type": "llama3", "factor": 8.0, "original_sequence_length": 8192},
}  # fmt: skip
TINY_LLAMA3 = {
    **LLAMA3, "layers": 6, "hidden_size": 256, "heads": 16, "kv_heads": 16, "ffn_hidden_size": 768,
    "vocab_size": 2048, "tie_embeddings": False, "head_size": None,
}  # fmt: skip
QWEN3 = {"rope_theta": 1000000.0, "initial_std": 0.02, "norm_epsilon": 1e-6, "rope_scaling": None}
SIZES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("llama3", "debugmodel"): ("llama/8b", TINY_LLAMA3),
    ("llama3", "8B"): ("llama/8b", LLAMA3),
    ("llama3", "70B"): ("llama/70b", LLAMA3),
    ("llama3", "405B"): ("llama/405b", LLAMA3),
    **{("qwen3", size): (f"qwen3/{size.lower()}", QWEN3)
       for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    ("deepseek_v3", "16B"): ("deepseek/v2-lite", {"norm_epsilon": 1e-5, "initial_std": 0.02}),
    ("deepseek_v3", "671B"): (
        "deepseek/v3", {"norm_epsilon": 1e-5, "initial_std": 0.02, "prediction": None}
    ),
}  # fmt: skip
TITAN_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v", "dualpipev": "dualpipev",
}  # fmt: skip


def _torchtitan(t: Translation) -> None:
    name, size = str(t.get("model.name")), str(t.get("model.flavor"))
    if (name, size) not in SIZES:
        raise UserError(
            f"model.name = {name} with model.flavor = {size} is not a model that Threefold knows; "
            f"use one of {', '.join(f'{a} {b}' for a, b in SIZES)}, or copy a recipe of its family"
        )
    recipe, changes = SIZES[name, size]
    model = load_recipe(REPOSITORY / "recipes" / f"{recipe}.toml").model
    plain = without_defaults(model) | changes | {"sequence_length": t.get("training.seq_len")}
    if experts := plain.get("experts"):
        plain["experts"] = {k: v for k, v in experts.items() if k not in ("balance_loss", "z_loss")}
    t.recipe["model"] = {key: value for key, value in plain.items() if value is not None}
    text = f"{name} {size}, as recipes/{recipe}.toml"
    for key in ("model.name", "model.flavor", "training.seq_len"):
        t.say(key, DERIVED, text)
    if experts:
        t.differs(
            "model.flavor", "the program balances every router by a bias; see [model.experts]"
        )
    axes = {
        axis: t.get(f"parallelism.{axis}_parallel_degree", 1)
        for axis in ("tensor", "pipeline", "context")
    }
    for axis, degree in axes.items():
        t.derive(f"parallelism.{axis}_parallel_degree", {f"layout.{axis}": degree})
    expert = t.get("parallelism.expert_parallel_degree", 1) if experts else None
    t.derive("parallelism.expert_parallel_degree", {"layout.expert": expert})
    t.derive("parallelism.tensor_parallel_degree", {"layout.sequence_parallel": axes["tensor"] > 1})
    kind = str(t.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    if axes["pipeline"] > 1:
        t.derive(
            "parallelism.pipeline_parallel_schedule",
            {"layout.schedule": TITAN_SCHEDULES.get(kind, "1f1b")},
        )
    t.say("parallelism.pipeline_parallel_schedule", FREE, "no pipeline")
    replicas, shard = (
        t.get(f"parallelism.data_parallel_{k}_degree") for k in ("replicate", "shard")
    )
    shards = math.prod(axes.values())
    if t.ranks is None and shard > 0:
        t.ranks = replicas * shard * shards
    local, total = t.get("training.local_batch_size"), t.get("training.global_batch_size")
    micro = (
        t.get("parallelism.pipeline_parallel_microbatch_size") if axes["pipeline"] > 1 else local
    )
    keys = (
        "training.local_batch_size training.global_batch_size "
        "parallelism.pipeline_parallel_microbatch_size"
    )
    if total > 0:
        t.derive(keys, {"batch.global_sequences": total, "batch.micro_sequences": micro})
    else:
        spread(t, keys, micro, local // micro, shards)
    mode = t.get("activation_checkpoint.mode")
    mode = mode if mode in ("none", "full", "selective") else "selective"
    t.derive(
        "activation_checkpoint.mode activation_checkpoint.selective_ac_option",
        {"layout.recompute": mode},
    )
    betas = [t.get("optimizer.beta1"), t.get("optimizer.beta2")]
    t.derive("optimizer.beta1 optimizer.beta2", {"optimizer.betas": betas})
    if str(kind := t.get("optimizer.name")).lower() not in ("adamw",):
        t.differs("optimizer.name", f"{kind}: ours is AdamW")
    t.say("optimizer.name", DERIVED, "optimizer.kind = adamw")
    at = "lr_scheduler."
    steps = t.get(f"{at}total_steps") or t.get("training.steps")
    warmup = min(t.get(f"{at}warmup_steps"), steps)
    ratio = t.get(f"{at}decay_ratio")
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    keys = "warmup_steps decay_ratio decay_type min_lr_factor total_steps"
    schedule(  # one more step, in which the rate would reach its minimum
        t, " ".join(at + key for key in keys.split()),
        t.get(f"{at}decay_type") if decay else "constant", warmup=warmup,
        start=steps + 1 - decay, end=steps + 1,
        minimum=t.get("optimizer.lr") * t.get(f"{at}min_lr_factor"),
    )  # fmt: skip
    evaluate = t.get("validation.freq") if t.get("validation.enable") else 0
    t.derive("validation.enable validation.freq", {"training.evaluate_every": evaluate})
    batches = t.get("validation.steps") if evaluate and t.get("validation.steps", -1) > 0 else None
    t.derive("validation.steps", {"training.evaluation_batches": batches})
    whole = t.get("parallelism.fsdp_reshard_after_forward") != "never"
    stage = 1 if shard == 1 else 3 if whole else 2
    if replicas > 1 and shard > 1:
        t.derive("parallelism.data_parallel_shard_degree", {"layout.dp_shard": shard})
    t.deepspeed["zero_optimization.stage"] = stage
    keys = "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward"
    limited = stage > 2 and (axes["pipeline"] > 1 or (expert or 1) > 1 or t.ours("layout.dp_shard"))
    t.derive(
        " ".join(f"parallelism.{key}" for key in keys.split()),
        {},
        f"ZeRO-{2 if limited else stage}",
    )
    if t.has("training.dataset"):
        corpora(t, "training.dataset training.dataset_path", [(1, t.get("training.dataset"))])
    t.precision = (
        "bf16" if t.get("training.mixed_precision_param", "bfloat16") == "bfloat16" else "fp32"
    )
    t.say("training.mixed_precision_param", DERIVED, f"deepspeed, {t.precision}")


TORCHTITAN = Program(
    name="torchtitan",
    table={
        "optimizer.lr": takes("optimizer.learning_rate"),
        "optimizer.eps": takes("optimizer.epsilon"),
        "optimizer.weight_decay": takes("optimizer.weight_decay"),
        "training.steps": takes("training.steps"),
        "training.max_norm": takes("optimizer.gradient_clipping"),
        "checkpoint.interval": takes("checkpoint.every"),
        "compile.enable": takes("training.compile"),
        "debug.seed": takes("seed"),
        "debug.deterministic": takes("training.deterministic"),
        "model.converters": breaks("float8 has one scale per tensor or row, mx one per 32 "
               'elements; training.matmul_precision = "fp8" has scales of 1 x 128 '
               "and 128 x 128", []),
        "training.seed": takes("seed"),
        "training.enable_cpu_offload": Rule(reason="weights and optimizer state stay on the GPU"),
        **free("part of model.converters", "quantize.linear.float8.enable_fsdp_float8_all_gather "
               "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp "
               "quantize.linear.float8.filter_fqns quantize.grouped_mm.float8.fqns "
               "quantize.linear.float8.recipe_name quantize.linear.mx.recipe_name "
               "quantize.linear.mx.filter_fqns quantize.grouped_mm.mx.fqns"),
        **free(LOGGING, "job.dump_folder job.description job.print_config job.config_file "
               "profiling.enable_profiling profiling.save_traces_folder profiling.profile_freq "
               "profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder "
               "metrics.log_freq metrics.enable_tensorboard metrics.save_tb_folder "
               "metrics.enable_wandb metrics.disable_color_printing "
               "model.print_after_conversion"),
        **free(KERNELS, "compile.components compile.backend optimizer.implementation "
               "optimizer.early_step_in_backward"),
        **free(COMMUNICATION, "parallelism.enable_async_tensor_parallel "
               "parallelism.disable_loss_parallel parallelism.expert_tensor_parallel_degree "
               "parallelism.context_parallel_rotate_method parallelism.enable_compiled_autograd "
               "comm.init_timeout_seconds comm.train_timeout_seconds comm.trace_buf_size "
               "training.gc_freq"),
        **free(FILES, "checkpoint.enable checkpoint.folder checkpoint.last_save_model_only "
               "checkpoint.export_dtype checkpoint.async_mode checkpoint.keep_latest_k "
               "checkpoint.enable_checkpoint checkpoint.last_save_in_hf"),
        **free(READING, "model.hf_assets_path model.tokenizer_path validation.dataset "
               "validation.local_batch_size validation.seq_len"),
    },
    defaults={
        "model.name": "llama3", "model.flavor": "debugmodel", "optimizer.name": "AdamW",
        "optimizer.lr": 8e-4, "optimizer.beta1": 0.9, "optimizer.beta2": 0.95,
        "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.1, "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear", "lr_scheduler.min_lr_factor": 0.0,
        "training.local_batch_size": 8, "training.global_batch_size": -1, "training.seq_len": 2048,
        "training.max_norm": 1.0, "training.steps": 10000, "checkpoint.interval": 500,
        "parallelism.data_parallel_replicate_degree": 1, "validation.freq": 10,
        "parallelism.data_parallel_shard_degree": -1, "activation_checkpoint.mode": "selective",
        "parallelism.pipeline_parallel_microbatch_size": 1, "training.compile": False,
    },
    derive=_torchtitan,
    numbers=(
        "training.steps training.seq_len training.local_batch_size training.global_batch_size "
        "optimizer.lr lr_scheduler.warmup_steps lr_scheduler.decay_ratio "
        "lr_scheduler.min_lr_factor "
        "parallelism.tensor_parallel_degree parallelism.pipeline_parallel_degree "
        "parallelism.context_parallel_degree parallelism.data_parallel_shard_degree "
        "parallelism.data_parallel_replicate_degree "
        "parallelism.pipeline_parallel_microbatch_size"
    ),
    differences=(
        ALL_DECAY,
        "the program draws embeddings with standard deviation 1, other weights truncated and by "
        "the depth of their layer; here all have model.initial_std",
    ),
)  # fmt: skip

# transformers, whose config.json has a model only.


def _transformers(t: Translation) -> None:
    # Importing transformers takes seconds, and the other programs do not need it.
    from transformers import AutoConfig

    from threefold.convert.from_hugging_face import imported_config

    values = dict(t.foreign.values)
    kind = values.pop("model_type")
    values.pop("quantization_config", None)
    t.say("quantization_config", FREE, "of the weights; a recipe has only the architecture")
    try:
        theirs = AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers' configs raise many classes
        raise UserError(
            f"transformers rejects the configuration: {reason_of(error)}; use a model without code "
            f"of its own"
        ) from None
    model = without_defaults(imported_config(theirs.to_dict()))
    t.recipe["model"] = model
    names = {theirs: ours for sizes in (SIZES_OF_HUB, GPT2_SIZES) for ours, theirs in sizes.items()}
    for key in t.foreign.values:
        if key in names and names[key] in model:
            t.say(key, TAKEN, f"model.{names[key]} = {toml_value(model[names[key]])}")
        t.say(key, DERIVED, "[model]")


TRANSFORMERS = Program(
    name="transformers",
    table=free(
        "not part of the training of a model",
        "architectures bos_token_id eos_token_id pad_token_id transformers_version torch_dtype "
        "dtype "
        "use_cache pretraining_tp max_window_layers _name_or_path task_specific_params auto_map "
        "output_router_logits",
    ),
    defaults={},
    derive=_transformers,
    required=("model_type",),
)

PROGRAMS = {
    "neox": NEOX, "megatron": MEGATRON, "nanotron": NANOTRON, "torchtitan": TORCHTITAN,
    "transformers": TRANSFORMERS,
}  # fmt: skip
