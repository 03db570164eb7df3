"""GPT-NeoX: its keys, and the recipe that follows from them."""

import math

from threefold.convert.translation import (
    COMMUNICATION,
    DERIVED,
    FILES,
    FREE,
    GPT2_TOKENS,
    KERNELS,
    LLAMA2_TOKENS,
    LOGGING,
    NEOX_TOKENS,
    READING,
    SHIFT_OF_NEOX,
    START,
    SUMS,
    Program,
    Rule,
    Translation,
    breaks,
    corpora,
    free,
    schedule,
    spread,
    table_of_positions,
    takes,
    vocabulary,
)


def _neox(t: Translation) -> None:
    hidden, heads, layers = (t.get(k) for k in ("hidden_size", "num_attention_heads", "num_layers"))
    t.derive("num_kv_heads", {"model.kv_heads": t.get("num_kv_heads") or heads})
    activation, fused = t.get("activation"), t.get("bias_gelu_fusion")
    size = t.get("intermediate_size") or int((t.get("expansion_factor") or 4) * hidden)
    unit = t.get("mlp_multiple_of")
    gated = activation in ("geglu", "swiglu", "reglu", "glu", "bilinear")
    columns = int(size * 2 / 3) // 2 if gated else size
    columns = -(-columns // unit) * unit
    text = "a third of intermediate_size, in multiples of mlp_multiple_of" if gated else ""
    t.derive(
        "intermediate_size expansion_factor mlp_multiple_of",
        {"model.ffn_hidden_size": columns},
        text,
    )
    ours = {"gelu": "gelu" if fused else "gelu_erf", "swiglu": "swiglu", "geglu": "geglu"}
    text = "the fused kernel is the tanh approximation" if activation == "gelu" and fused else ""
    t.derive(
        "activation bias_gelu_fusion", {"model.activation": ours.get(activation, "gelu")}, text
    )
    if activation not in ours or activation == "geglu":
        t.differs("activation", f"{activation}: ours is {ours.get(activation, 'gelu')}, with tanh")
    rms = "rms" in t.get("norm")
    t.derive("norm", {"model.norm": "rmsnorm" if rms else "layernorm"})
    if t.get("norm") not in ("layernorm", "rmsnorm", "te_rmsnorm", "te_layernorm"):
        t.differs("norm", "only LayerNorm and RMSNorm are supported")
    epsilon = "rms_norm_epsilon" if rms else "layernorm_epsilon"
    t.derive(epsilon, {"model.norm_epsilon": t.get(epsilon)})
    for key in {"rms_norm_epsilon", "layernorm_epsilon"} - {epsilon}:
        t.say(key, FREE, "of another norm")
    bias = t.get("use_bias_in_mlp")
    attention = t.get("use_bias_in_attn_linear")
    t.derive("use_bias_in_mlp", {"model.bias": bool(bias)})
    other = None if attention == bias else bool(attention)
    t.derive(
        "use_bias_in_attn_linear", {"model.qkv_bias": other, "model.attention_output_bias": other}
    )
    if not t.get("use_bias_in_norms") and not rms:
        t.differs("use_bias_in_norms", "a LayerNorm without bias is not supported")
    t.say("use_bias_in_norms", FREE, "as here")
    t.derive("no_weight_tying", {"model.tie_embeddings": not t.get("no_weight_tying")})
    positions = t.get("pos_emb")
    rotary = positions != "learned"
    t.derive("pos_emb", {"model.positions": "rope" if rotary else "learned"})
    if positions == "rotary":
        t.derive("rotary_emb_base", {"model.rope_theta": float(t.get("rotary_emb_base"))})
        if (share := t.get("rotary_pct")) != 1:
            t.derive("rotary_pct", {"model.partial_rotary_factor": float(share)})
    elif positions == "none":
        t.derive("pos_emb", {"model.attention_pattern": ["nope"]})
    elif rotary:
        t.differs("pos_emb", f"{positions} positions: ours are rotary")
    for key in ("rotary_emb_base", "rotary_pct"):
        t.say(key, FREE, "the default, or no rotary positions")
    table_of_positions(t, "max_position_embeddings", "seq_length", rotary)
    kinds = {kind for kinds, _ in t.get("attention_config") or [] for kind in kinds}
    if kinds <= {"global", "flash"}:
        t.say("attention_config", FREE, KERNELS)
    else:
        t.differs("attention_config", f"{', '.join(sorted(kinds))}: every layer has full attention")
    if t.has("sliding_window_width"):
        window = {"size": t.get("sliding_window_width")}
        t.derive(
            "sliding_window_width", {"model.window": window, "model.attention_pattern": ["window"]}
        )
    init, output = t.get("init_method"), t.get("output_layer_init_method")
    deviation = math.sqrt(2 / (5 * hidden)) if init == "small_init" else t.get("init_method_std")
    text = "sqrt(2 / (5 hidden_size))" if init == "small_init" else ""
    t.derive("init_method init_method_std", {"model.initial_std": deviation}, text)
    if init not in ("normal", "small_init"):
        t.differs("init_method", f"{init}: ours is a normal distribution")
    if output == "scaled_normal":
        t.say("output_layer_init_method", DERIVED, "as model.initial_std / sqrt(2 layers)")
    else:
        theirs = 2 / layers / math.sqrt(hidden) if output == "wang_init" else deviation
        t.differs(
            "output_layer_init_method",
            f"standard deviation {theirs:.3g} of the output projections; ours "
            f"{deviation / math.sqrt(2 * layers):.3g}",
        )
    kind, unit = t.get("tokenizer_type"), t.get("make_vocab_size_divisible_by")
    multiple = unit * t.get("model_parallel_size", 1)
    tokens = {"GPT2BPETokenizer": GPT2_TOKENS, "SPMTokenizer": LLAMA2_TOKENS}.get(kind, NEOX_TOKENS)
    who = {GPT2_TOKENS: "GPT-2", LLAMA2_TOKENS: "Llama 2", NEOX_TOKENS: "GPT-NeoX-20B"}[tokens]
    keys = "tokenizer_type make_vocab_size_divisible_by vocab_file merge_file"
    if kind == "GPT2BPETokenizer":
        vocabulary(t, keys, tokens, multiple, "GPT-2's ")
    else:
        size = -(-tokens // multiple) * multiple
        text = f"the files do not say how many tokens it has; {who}'s has {tokens:,}"
        t.assume("model.vocab_size", size, text)
        t.derive(
            keys, {"model.vocab_size": size}, f"{who}'s {tokens:,}, in multiples of {multiple}"
        )
    stages = max(1, t.get("pipe_parallel_size"))
    t.derive("pipe_parallel_size", {"layout.pipeline": stages})
    recompute = "full" if t.get("checkpoint_activations") else None
    interval = t.get("checkpoint_num_layers") if recompute else None
    t.derive("checkpoint_activations", {"layout.recompute": recompute})
    t.derive(
        "checkpoint_num_layers", {"layout.recompute_interval": interval if interval != 1 else None}
    )
    shards = stages * t.get("model_parallel_size", 1)
    keys = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"
    micro, total = t.get("train_micro_batch_size_per_gpu"), t.get("train_batch_size")
    if total:
        micro = micro or 1
        t.derive(keys, {"batch.global_sequences": total, "batch.micro_sequences": micro})
    elif micro:
        spread(t, keys, micro, t.get("gradient_accumulation_steps"), shards)
    t.derive("optimizer.params.lr", {"optimizer.learning_rate": t.get("optimizer.params.lr")})
    t.derive("optimizer.params.betas", {"optimizer.betas": t.get("optimizer.params.betas")})
    t.derive("optimizer.params.eps", {"optimizer.epsilon": t.get("optimizer.params.eps")})
    if str(kind := t.get("optimizer.type")).lower() not in ("adam", "adamw"):
        t.differs("optimizer.type", f"{kind}: ours is AdamW")
    t.say(
        "optimizer.type", DERIVED, "optimizer.kind = adamw, as the program's Adam decouples decay"
    )
    _rate_of_neox(t)
    if t.get("checkpoint_scale") == "log":
        factor, step, saves = t.get("checkpoint_factor"), 1.0, list[int]()
        while step < (t.get("train_iters") or 1) and factor > 1:
            saves, step = [*saves, int(step)], step * factor
        t.derive("checkpoint_factor checkpoint_scale", {"checkpoint.also_at": sorted(set(saves))})
    elif t.has("checkpoint_factor"):
        t.derive("checkpoint_factor", {"checkpoint.every": t.get("checkpoint_factor")})
    t.say("checkpoint_scale", DERIVED, "checkpoint.every")
    if saves := [step for step in t.get("extra_save_iters") or [] if step > 0]:
        t.derive("extra_save_iters", {"checkpoint.also_at": saves}, "the start is not saved")
    if t.has("data_path"):
        corpora(t, "data_path", [(1, str(t.get("data_path")))])
    if t.has("train_data_paths"):
        paths = t.get("train_data_paths")
        weights = t.get("train_data_weights") or [1] * len(paths)
        corpora(t, "train_data_paths train_data_weights", list(zip(weights, paths, strict=True)))
    _precision_of_neox(t)


def _rate_of_neox(t: Translation) -> None:
    steps, style = t.get("train_iters"), t.get("lr_decay_style")
    if steps is None:
        return
    end = t.get("lr_decay_iters") or math.floor(steps * t.get("lr_decay_fraction", 1))
    minimum = t.get("min_lr")
    keys = "warmup lr_decay_style lr_decay_iters lr_decay_fraction min_lr"
    shape = style if style in ("cosine", "linear", "constant") else "linear"
    warmup = t.get("warmup") * end
    schedule(t, keys, shape, warmup=warmup, start=warmup, end=end, minimum=minimum)
    if style == "exponential" or (style == "linear" and minimum):
        t.differs("lr_decay_style", f"{style} of the program, down to min_lr: ours is a line to it")
    if shape == "cosine" and end < steps:
        t.differs("lr_decay_iters", "the program's cosine rises again after the decay; ours stays")


def _precision_of_neox(t: Translation) -> None:
    kind = {"bfloat16": "bf16", "fp16": "fp16", "fp32": "fp32"}.get(t.get("precision"))
    enabled = [
        name for name in ("bf16", "fp16") if t.get(f"{name}.enabled") or t.get(f"{name}.{name}")
    ]
    t.precision = kind or (enabled[0] if enabled else "fp32")
    t.say("precision", DERIVED, f"deepspeed, {t.precision}")
    blocks = ("zero_optimization.", "fp16.", "bf16.", "data_types.")
    single = ("communication_data_type", "prescale_gradients", "gradient_predivide_factor")
    for name, value in t.foreign.values.items():
        key = name.removeprefix("deepspeed_extra_args.")
        if key.startswith(blocks) or key in single or key != name:
            t.deepspeed[key] = value
    for key in ("fp16.fp16", "fp16.type", "bf16.bf16"):
        if t.deepspeed.pop(key, None) is not None:
            t.say(key, DERIVED, f"precision {t.precision}")
    stage = t.get("zero_optimization.stage", 0)
    if "zero_optimization.stage" in t.foreign.values:
        text = f"ZeRO-{max(1, stage)}" + (", whose updates are the same" if not stage else "")
        t.say("zero_optimization.stage", DERIVED, text)


NEOX = Program(
    name="GPT-NeoX",
    table={
        "num_layers": takes("model.layers"),
        "hidden_size": takes("model.hidden_size"),
        "num_attention_heads": takes("model.heads"),
        "seq_length": takes("model.sequence_length"),
        "hidden_dropout": takes("model.dropout"),
        "attention_dropout": takes("model.attention_dropout"),
        "seed": takes("seed"),
        "weight_decay": takes("optimizer.weight_decay"),
        "optimizer.params.weight_decay": takes("optimizer.weight_decay"),
        "gradient_clipping": takes("optimizer.gradient_clipping"),
        "train_iters": takes("training.steps"),
        "eval_interval": takes("training.evaluate_every"),
        "eval_iters": takes("training.evaluation_batches"),
        "keep_last_n_checkpoints": takes("checkpoint.keep"),
        "model_parallel_size": takes("layout.tensor"),
        "sequence_parallel": takes("layout.sequence_parallel"),
        "wandb_project": takes("tracking.project"),
        "gpt_j_residual": breaks("attention and MLP of a layer run one after the other here"),
        "gpt_j_tied": breaks("each half of a layer has a norm of its own here"),
        "use_qk_layernorm": breaks("queries and keys have an RMSNorm here, not a LayerNorm"),
        "apply_query_key_layer_scaling": Rule(reason="it changes rounding only"),
        "num_unique_layers": breaks("layers do not share weights"),
        "soft_prompt_tuning": breaks("prompts are not trained"),
        "sparsity_config": breaks("attention is not sparse", {}),
        "use_mup": breaks('its rule is not that of parametrization = "mup"; set the key yourself'),
        "eod_mask_loss": breaks("every position counts in the loss"),
        "curriculum_learning": breaks("sequences grow in [[phase]] tables only", {}),
        "use_bnb_optimizer": breaks("the optimizer's state has 32 bits"),
        "moe_num_experts": breaks("these experts are not translated; write [model.experts]", 1),
        "train_impl": breaks("only the next token is predicted", "normal"),
        "pack_impl": breaks("documents are packed", "packed"),
        "te_fp8_format": breaks("FP8 with one scale per tensor, from its values in earlier steps; "
               'training.matmul_precision = "fp8" has scales of 1 x 128 and 128 x 128'),
        **free("part of te_fp8_format", "te_fp8_wgrad te_fp8_amax_history_len "
               "te_fp8_amax_compute_algo te_fp8_margin te_fp8_mha"),
        "finetune": breaks("training.initial_weights starts from weights"),
        "load": Rule(reason=FILES),
        "opt_pos_emb_offset": breaks("positions begin with 0", 0),
        "use_shared_fs": Rule(reason=FILES),
        "fp32_allreduce": Rule(reason=SUMS),
        **free(KERNELS, "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion "
               "rope_fusion layernorm_fusion rmsnorm_fusion bias_dropout_fusion "
               "use_flashattn_swiglu "
               "attention_softmax_in_fp32 fp16_lm_cross_entropy rotary_save_freqs_buffer "
               "fused_kernels_build_path te_columnparallel te_rowparallel te_layernorm_mlp te_mha"),
        **free(COMMUNICATION, "output_layer_parallelism partition_activations "
               "synchronize_each_layer "
               "contiguous_checkpointing checkpoint_in_cpu pipe_partition_method "
               "distributed_backend "
               "deepspeed_activation_checkpointing deepspeed profile_backward"),
        **free(LOGGING, "log_interval steps_per_print wall_clock_breakdown log_dir tensorboard_dir "
               "use_wandb wandb_group wandb_team wandb_host wandb_run_name use_comet "
               "comet_workspace "
               "comet_project comet_experiment_name comet_tags comet_others log_grad_norm "
               "log_param_norm log_gradient_noise_scale log_optimizer_states tensorboard "
               "wandb_init_all_ranks flops_profiler comms_logger profile profile_step_start "
               "profile_step_stop memory_profiling memory_profiling_path"),
        **free(FILES, "save checkpoint_validation_with_forward_pass no_save_optim no_save_rng "
               "no_load_optim no_load_rng use_checkpoint_lr_scheduler override_lr_scheduler"),
        **free(START, "hostfile launcher deepspeed_slurm deepspeed_mpi master_addr master_port "
               "num_nodes num_gpus global_num_gpus include exclude no_ssh_check account comment"),
        **free(READING, "data_impl num_workers split mmap_warmup short_seq_prob do_train do_valid "
               "do_test test_data_paths valid_data_paths test_data_weights valid_data_weights "
               "dataset_impl"),
        **free("evaluation of a trained model", "text_gen_type maximum_tokens prompt_end "
               "temperature "
               "top_p top_k num_samples sample_input_file sample_output_file recompute eval_tasks"),
    },
    defaults={
        "seed": 1234, "weight_decay": 0.1, "norm": "layernorm", "layernorm_epsilon": 1e-5,
        "rms_norm_epsilon": 1e-8, "pos_emb": "learned", "rotary_pct": 1.0, "rotary_emb_base": 10000,
        "activation": "gelu", "mlp_multiple_of": 1, "use_bias_in_norms": True,
        "use_bias_in_mlp": True, "use_bias_in_attn_linear": True, "init_method": "normal",
        "output_layer_init_method": "scaled_normal", "init_method_std": 0.02, "warmup": 0.01,
        "min_lr": 0.0, "lr_decay_style": "linear", "pipe_parallel_size": 0,
        "model_parallel_size": 1,
        "make_vocab_size_divisible_by": 128, "tokenizer_type": "GPT2BPETokenizer",
        "gradient_clipping": 1.0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "optimizer.type": "Adam", "optimizer.params.lr": 1e-3, "optimizer.params.eps": 1e-8,
        "optimizer.params.betas": [0.9, 0.999], "eval_interval": 1000, "eval_iters": 100,
        "checkpoint_num_layers": 1, "gradient_accumulation_steps": 1,
    },
    derive=_neox,
    required=("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    numbers=(
        "intermediate_size expansion_factor mlp_multiple_of make_vocab_size_divisible_by "
        "model_parallel_size pipe_parallel_size train_micro_batch_size_per_gpu "
        "gradient_accumulation_steps train_batch_size train_iters lr_decay_iters "
        "lr_decay_fraction warmup min_lr optimizer.params.lr optimizer.params.eps "
        "init_method_std checkpoint_factor"
    ),
    differences=(SHIFT_OF_NEOX,),
)  # fmt: skip
