"""The keys of other programs: a table and a function for each, from which recipes are translated.

A new key is one line in a table if its meaning needs no other key. What several keys decide
together is in the program's function. Formulas are those of the program's source at the version
that `docs/coming-from.md` names.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from models.errors import UserError, reason_of, toml_value
from models.hugging_face.config import GPT2_SIZES
from models.hugging_face.config import SIZES as SIZES_OF_HUB
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.sections import MAX_COUNT
from threefold.convert.foreign_files import scalar
from threefold.convert.translation import (
    ASSUMED,
    DERIVED,
    FREE,
    TAKEN,
    Program,
    Rule,
    Translation,
    breaks,
    free,
    takes,
)

LOGGING = "metrics go to metrics.jsonl and Weights & Biases; see docs/run-folder-and-metrics.md"
KERNELS = "kernels are chosen here; the result is the same"
COMMUNICATION = "communication is organised here; the result is the same"
FILES = "the run folder holds checkpoints and logs"
START = "hosts come from Slurm or a hostfile; see docs/multi-node-and-slurm.md"
READING = "corpora are read by memory map in one process; see docs/data.md"
SUPERVISION = "launch.py and [supervision] do this; see docs/fault-tolerance.md"
RANDOM = "random numbers depend on a token's position and the seed, never on a rank"
SUMS = "gradients are accumulated and summed in fp32"
ONE_LATER = (
    "the program uses the learning rate of n completed steps in step n + 1, so its first step has "
    "the rate 0; here step n has the rate of n"
)
SHIFT_OF_NEOX = ONE_LATER.replace("rate 0;", "rate of the first step twice;")
ALL_DECAY = "the program's weight decay includes norms and biases; here they have none"
GPT2_TOKENS, LLAMA2_TOKENS, NEOX_TOKENS = 50257, 32000, 50277  # of the tokenizers of these names


# Parts that several programs share.


def spread(t: Translation, keys: str, micro: int, accumulation: int | None, shards: int) -> None:
    """Set the batch of a program that counts micro-batches per data rank.

    Args:
        accumulation: micro-batches per step and data rank
        shards: ranks that share a data rank
    """
    ranks = t.ranks
    if ranks is None:
        ranks = shards
        t.note(ASSUMED, f"the global batch is that of {ranks} GPUs, the fewest; use --ranks N")
    batches = accumulation or 1
    sequences = micro * batches * (ranks // shards)
    text = f"{micro} x {batches} micro-batches x {ranks // shards} data ranks of {ranks} GPUs"
    t.derive(keys, {"batch.global_sequences": sequences, "batch.micro_sequences": micro}, text)


def vocabulary(t: Translation, keys: str, tokens: int, multiple: int, text: str) -> None:
    """Set the vocabulary with the rows of padding, which take part in the source's softmax."""
    size = -(-tokens // multiple) * multiple
    about = f"{text}{tokens:,} tokens, in multiples of {multiple}" if size != tokens else text
    t.derive(keys, {"model.vocab_size": size}, about)


def schedule(
    t: Translation,
    keys: str,
    shape: str,
    *,
    warmup: float,
    start: float,
    end: float,
    minimum: float,
    counts: str = "steps",
    text: str = "",
) -> None:
    """Set the schedule: warm-up, constant until `start`, then down to the minimum at `end`.

    Args:
        shape: "cosine", "linear", "sqrt" or "constant"
        warmup, start, end: steps or sequences, as `counts` says; they are rounded
    """
    warmup, start, end = (round(steps) for steps in (warmup, start, end))
    values: dict[str, Any] = {"warmup_steps": warmup, "decay": shape}
    if shape != "constant":
        values |= {"steps": end, "minimum_learning_rate": minimum}
        if start > warmup or shape == "sqrt":
            values |= {"decay": "wsd", "decay_steps": end - start, "decay_shape": shape}
    if counts != "steps":
        values["counts"] = counts
    t.derive(keys, {"optimizer.schedule": values}, text)


def corpora(t: Translation, keys: str, paths: Sequence[tuple[float, str]]) -> None:
    """Set the corpora, whose files prepare_data.py has to write anew."""
    names = [PurePath(path).name.strip("<>") or f"corpus-{n}" for n, (_, path) in enumerate(paths)]
    names = [name if names.count(name) == 1 else f"{name}-{n}" for n, name in enumerate(names)]
    train = [
        {"path": f"data/{t.name}/{name}", "weight": float(weight)}
        for name, (weight, _) in zip(names, paths, strict=True)
    ]
    t.derive(keys, {"data.train": train}, "prepare the text with prepare_data.py")


# GPT-NeoX.


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
    t.derive("intermediate_size expansion_factor mlp_multiple_of", {"model.ffn_hidden_size": columns}, text)
    ours = {"gelu": "gelu" if fused else "gelu_erf", "swiglu": "swiglu", "geglu": "geglu"}
    text = "the fused kernel is the tanh approximation" if activation == "gelu" and fused else ""
    t.derive("activation bias_gelu_fusion", {"model.activation": ours.get(activation, "gelu")}, text)
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
    t.derive("use_bias_in_attn_linear", {"model.qkv_bias": other, "model.attention_output_bias": other})
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
    _table_of_positions(t, "max_position_embeddings", "seq_length", rotary)
    kinds = {kind for kinds, _ in t.get("attention_config") or [] for kind in kinds}
    if kinds <= {"global", "flash"}:
        t.say("attention_config", FREE, KERNELS)
    else:
        t.differs("attention_config", f"{', '.join(sorted(kinds))}: every layer has full attention")
    if t.has("sliding_window_width"):
        window = {"size": t.get("sliding_window_width")}
        t.derive("sliding_window_width", {"model.window": window, "model.attention_pattern": ["window"]})
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
        t.derive(keys, {"model.vocab_size": size}, f"{who}'s {tokens:,}, in multiples of {multiple}")
    stages = max(1, t.get("pipe_parallel_size"))
    t.derive("pipe_parallel_size", {"layout.pipeline": stages})
    recompute = "full" if t.get("checkpoint_activations") else None
    interval = t.get("checkpoint_num_layers") if recompute else None
    t.derive("checkpoint_activations", {"layout.recompute": recompute})
    t.derive("checkpoint_num_layers", {"layout.recompute_interval": interval if interval != 1 else None})
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
    t.say("optimizer.type", DERIVED, "optimizer.kind = adamw, as the program's Adam decouples decay")
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
    enabled = [name for name in ("bf16", "fp16") if t.get(f"{name}.enabled") or t.get(f"{name}.{name}")]
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
        "moe_num_experts": breaks("Megablocks' experts are not translated; write [model.experts]", 1),
        "train_impl": breaks("only the next token is predicted", "normal"),
        "pack_impl": breaks("documents are packed", "packed"),
        "te_fp8_format": breaks("matrix products are in the recipe's precision"),
        **free("part of te_fp8_format", "te_fp8_wgrad te_fp8_amax_history_len "
               "te_fp8_amax_compute_algo te_fp8_margin te_fp8_mha"),
        "finetune": breaks("training.initial_weights starts from weights"),
        "load": Rule(reason=FILES),
        "opt_pos_emb_offset": breaks("positions begin with 0", 0),
        "use_shared_fs": Rule(reason=FILES),
        "fp32_allreduce": Rule(reason=SUMS),
        **free(KERNELS, "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion "
               "rope_fusion layernorm_fusion rmsnorm_fusion bias_dropout_fusion use_flashattn_swiglu "
               "attention_softmax_in_fp32 fp16_lm_cross_entropy rotary_save_freqs_buffer "
               "fused_kernels_build_path te_columnparallel te_rowparallel te_layernorm_mlp te_mha"),
        **free(COMMUNICATION, "output_layer_parallelism partition_activations synchronize_each_layer "
               "contiguous_checkpointing checkpoint_in_cpu pipe_partition_method distributed_backend "
               "deepspeed_activation_checkpointing deepspeed profile_backward"),
        **free(LOGGING, "log_interval steps_per_print wall_clock_breakdown log_dir tensorboard_dir "
               "use_wandb wandb_group wandb_team wandb_host wandb_run_name use_comet comet_workspace "
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
        **free("evaluation of a trained model", "text_gen_type maximum_tokens prompt_end temperature "
               "top_p top_k num_samples sample_input_file sample_output_file recompute eval_tasks"),
    },
    defaults={
        "seed": 1234, "weight_decay": 0.1, "norm": "layernorm", "layernorm_epsilon": 1e-5,
        "rms_norm_epsilon": 1e-8, "pos_emb": "learned", "rotary_pct": 1.0, "rotary_emb_base": 10000,
        "activation": "gelu", "mlp_multiple_of": 1, "use_bias_in_norms": True,
        "use_bias_in_mlp": True, "use_bias_in_attn_linear": True, "init_method": "normal",
        "output_layer_init_method": "scaled_normal", "init_method_std": 0.02, "warmup": 0.01,
        "min_lr": 0.0, "lr_decay_style": "linear", "pipe_parallel_size": 0, "model_parallel_size": 1,
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


def _table_of_positions(t: Translation, key: str, length: str, rotary: bool) -> None:
    """Report the number of positions, which is the size of a table if they are learned."""
    if not rotary and t.get(key) not in (None, t.get(length)):
        t.differs(key, f"the table of positions has {t.get(length)} rows, as {length}")
    t.say(key, FREE, "rotary positions have no table" if rotary else "model.sequence_length")


# Megatron-LM and Megatron-DeepSpeed.


def _megatron(t: Translation) -> None:
    hidden, heads = t.get("hidden-size"), t.get("num-attention-heads")
    gated = t.has("swiglu")
    size = t.get("ffn-hidden-size") or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    t.derive("ffn-hidden-size", {"model.ffn_hidden_size": size})
    groups = t.get("num-key-value-heads") or (
        t.get("num-query-groups", heads) if t.has("group-query-attention") else heads
    )
    keys = "group-query-attention num-query-groups num-key-value-heads"
    t.derive(keys, {"model.kv_heads": groups})
    if t.has("multi-latent-attention"):
        _latent_of_megatron(t)
    elif t.has("kv-channels"):
        columns = t.get("kv-channels")
        t.derive("kv-channels", {"model.head_size": columns if columns * heads != hidden else None})
    rms = str(t.get("normalization")).lower() == "rmsnorm"
    t.derive("normalization", {"model.norm": "rmsnorm" if rms else "layernorm"})
    activation = "gelu_erf" if t.has("no-bias-gelu-fusion") else "gelu"
    for key, name in {"swiglu": "swiglu", "squared-relu": "squared_relu", "openai-gelu": "gelu",
                      "quick-geglu": "clamped_swiglu"}.items():  # fmt: skip
        activation = name if t.has(key) else activation
    keys = "swiglu squared-relu openai-gelu quick-geglu no-bias-gelu-fusion"
    t.derive(keys, {"model.activation": activation})
    bias = not t.has("disable-bias-linear")
    t.derive("disable-bias-linear", {"model.bias": bias})
    t.derive("add-qkv-bias", {"model.qkv_bias": True if t.has("add-qkv-bias") and not bias else None})
    untied = t.has("untie-embeddings-and-output-weights")
    t.derive("untie-embeddings-and-output-weights", {"model.tie_embeddings": not untied})
    if t.has("qk-layernorm") and not t.has("multi-latent-attention"):
        t.derive("qk-layernorm", {"model.qk_norm": True})
        if not rms:
            t.differs("qk-layernorm", "queries and keys have an RMSNorm here, not a LayerNorm")
    _positions_of_megatron(t)
    _window_of_megatron(t)
    _experts_of_megatron(t)
    _vocabulary_of_megatron(t)
    _layout_of_megatron(t)
    _batch_and_rate_of_megatron(t)
    betas = [float(t.get("adam-beta1")), float(t.get("adam-beta2"))]
    t.derive("adam-beta1 adam-beta2", {"optimizer.betas": betas})
    if str(kind := t.get("optimizer")).lower() != "adam":
        t.differs("optimizer", f"{kind}: ours is AdamW")
    t.say("optimizer", DERIVED, "optimizer.kind = adamw")
    batches = t.get("eval-iters")
    every = t.get("eval-interval") if batches else 0
    settings = {"training.evaluate_every": every, "training.evaluation_batches": batches or None}
    t.derive("eval-interval eval-iters", settings)
    if t.has("data-path"):
        words = t.get("data-path")
        words = words if isinstance(words, list) else [words]
        pairs = [(scalar(a), b) for a, b in zip(words[::2], words[1::2], strict=False)]
        blended = len(words) % 2 == 0 and all(isinstance(a, int | float) for a, _ in pairs)
        corpora(t, "data-path", pairs if blended else [(1, str(word)) for word in words])
    t.precision = next((kind for kind in ("bf16", "fp16") if t.has(kind)), "fp32")
    t.derive("bf16 fp16", {}, f"deepspeed, {t.precision}")
    t.deepspeed |= t.foreign.deepspeed
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping",
                "gradient_accumulation_steps"):  # fmt: skip
        t.deepspeed.pop(key, None)
    for key, path in {"loss-scale": "loss_scale", "loss-scale-window": "loss_scale_window",
                      "hysteresis": "hysteresis", "min-loss-scale": "min_loss_scale"}.items():  # fmt: skip
        if t.has(key) and t.precision == "fp16":
            t.deepspeed.setdefault(f"fp16.{path}", t.get(key))
        t.say(key, DERIVED, f"DeepSpeed's fp16.{path}, unless its JSON has it")
    if t.has("grad-reduce-in-bf16"):
        t.deepspeed["communication_data_type"] = "bf16"
        t.say("grad-reduce-in-bf16", DERIVED, "DeepSpeed's communication_data_type")
    stage = t.get("zero-stage", t.foreign.deepspeed.get("zero_optimization.stage", 0))
    if t.get("data-parallel-sharding-strategy") == "optim_grads_params":
        stage = 3
    t.deepspeed["zero_optimization.stage"] = stage
    keys = "zero-stage use-distributed-optimizer data-parallel-sharding-strategy use-megatron-fsdp"
    t.derive(keys, {}, f"ZeRO-{max(1, stage)}" + ("" if stage else ", whose updates are the same"))
    config = t.get("deepspeed-config")
    known = "in the script" if t.foreign.deepspeed else "not in the script; see zero-stage"
    t.say("deepspeed-config", DERIVED, f"{config}, {known}")


def _latent_of_megatron(t: Translation) -> None:
    latent = {
        "query_rank": t.get("q-lora-rank"), "key_value_rank": t.get("kv-lora-rank", 512),
        "rotary_size": t.get("qk-pos-emb-head-dim", 64), "value_size": t.get("v-head-dim", 128),
    }  # fmt: skip
    keys = "multi-latent-attention q-lora-rank kv-lora-rank qk-pos-emb-head-dim v-head-dim"
    t.derive(keys, {"model.latent": {key: n for key, n in latent.items() if n is not None}})
    t.derive("qk-head-dim", {"model.head_size": t.get("qk-head-dim", 128)})
    t.say("kv-channels", FREE, "model.latent")
    t.say("qk-layernorm", DERIVED, "the latents have norms")
    t.differs(
        "rotary-scaling-factor",
        "the program scales the rotary positions of latent attention (YaRN); write "
        "[model.rope_scaling] and attention_scale yourself",
    )
    for key in ("mscale", "mscale-all-dim"):
        t.say(key, FREE, "part of rotary-scaling-factor")


def _positions_of_megatron(t: Translation) -> None:
    kind = t.get("position-embedding-type")
    rotary = kind == "rope" or t.has("use-rotary-position-embeddings")
    if t.has("no-position-embedding") and not rotary and kind != "alibi":
        kind = "none"
    ours = "learned" if kind == "learned_absolute" and not rotary else "rope"
    keys = "position-embedding-type use-rotary-position-embeddings no-position-embedding"
    t.derive(keys, {"model.positions": ours})
    _table_of_positions(t, "max-position-embeddings", "seq-length", ours == "rope")
    base = t.get("rotary-base", t.get("rotary-position-embeddings-theta", 10000))
    if rotary or kind in ("yarn", "mrope"):
        t.derive("rotary-base rotary-position-embeddings-theta", {"model.rope_theta": float(base)})
        if (share := t.get("rotary-percent", 1.0)) != 1 and not t.has("multi-latent-attention"):
            t.derive("rotary-percent", {"model.partial_rotary_factor": float(share)})
        if t.has("use-rope-scaling"):
            scaling = {
                "type": "llama3", "factor": float(t.get("rope-scaling-factor", 8.0)),
                "original_sequence_length": 8192,
            }  # fmt: skip
            t.derive("use-rope-scaling rope-scaling-factor", {"model.rope_scaling": scaling})
        if t.has("rotary-seq-len-interpolation-factor"):
            factor = float(t.get("rotary-seq-len-interpolation-factor"))
            scaling = {"type": "linear", "factor": factor}
            t.derive("rotary-seq-len-interpolation-factor", {"model.rope_scaling": scaling})
    elif kind == "none":
        t.derive(keys, {"model.attention_pattern": ["nope"]})
    elif kind == "alibi":
        t.differs("position-embedding-type", "ALiBi: ours are rotary positions")
    if kind in ("yarn", "mrope", "relative"):
        t.differs("position-embedding-type", f"{kind}: write [model.rope_scaling] yourself")
    for key in ("rotary-percent", "rotary-base", "rotary-position-embeddings-theta",
                "rope-scaling-factor"):  # fmt: skip
        t.say(key, FREE, "the default, or no rotary positions")


def _window_of_megatron(t: Translation) -> None:
    if not t.has("window-size"):
        return
    left = scalar(str(t.get("window-size")).strip("()").split(",")[0])
    every = t.get("window-attn-skip-freq", 0)
    settings: dict[str, Any] = {"model.window": {"size": left + 1}, "model.attention_pattern": ["window"]}
    if isinstance(every, int) and every > 1:
        settings["model.attention_pattern"] = ["window"] * (every - 1) + ["full"]
    elif every:
        t.differs("window-attn-skip-freq", "a list of layers: write attention_pattern yourself")
    t.derive("window-size window-attn-skip-freq", settings)


def _experts_of_megatron(t: Translation) -> None:
    count = t.get("num-experts")
    if isinstance(count, list) or count in (None, 1):
        if isinstance(count, list):
            t.differs("num-experts", "layers with different numbers of experts: ours are dense")
        t.say("num-experts", FREE, "a dense model")
        for key in list(t.foreign.values):
            if key.startswith(("moe-", "expert-")) or key in ("topk", "mlp-type", "mos", "kd"):
                t.say(key, FREE, "the model has no experts")
        return
    sigmoid = t.get("moe-router-score-function") == "sigmoid"
    softmax = "softmax" if t.has("moe-router-pre-softmax", "deepspeed") else "softmax-after-topk"
    size = t.get("moe-ffn-hidden-size") or t.ours("model.ffn_hidden_size")
    shared = t.get("moe-shared-expert-intermediate-size", 0)
    if (drops := t.has("deepspeed")) and not t.has("disable-moe-token-dropping"):
        t.differs("num-experts", "DeepSpeed drops tokens above an expert's capacity; ours never do")
    experts: dict[str, Any] = {
        "count": count,
        "per_token": t.get("moe-router-topk", t.get("topk", 1 if drops else 2)),
        "ffn_hidden_size": size, "shared": shared // size,
        "router": "sigmoid" if sigmoid else softmax,
    }  # fmt: skip
    if sigmoid and experts["per_token"] > 1:
        experts["normalize"] = True
    balance = t.get("moe-aux-loss-coeff", t.get("moe-loss-coeff", 0))
    kind = t.get("moe-router-load-balancing-type", "aux_loss")
    if balance and kind in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        experts["balance_loss"] = float(balance)
        if kind != "seq_aux_loss":
            key = "moe-aux-loss-coeff" if t.has("moe-aux-loss-coeff") else "moe-loss-coeff"
            t.differs(key, "balance_loss counts the tokens of a sequence, not those of a micro-batch")
    if kind == "sinkhorn":
        t.differs("moe-router-load-balancing-type", "the router chooses the largest probabilities")
    if t.has("moe-z-loss-coeff"):
        experts["z_loss"] = t.get("moe-z-loss-coeff")
    if t.has("moe-router-topk-scaling-factor"):
        experts["output_scale"] = float(t.get("moe-router-topk-scaling-factor"))
    if t.has("moe-router-num-groups"):
        experts |= {"groups": t.get("moe-router-num-groups"),
                    "groups_per_token": t.get("moe-router-group-topk", 1)}  # fmt: skip
    if sigmoid and t.has("moe-router-enable-expert-bias"):
        experts["bias_update"] = t.get("moe-router-bias-update-rate", 1e-3)
    frequency = str(t.get("moe-layer-freq", t.get("expert-interval", 1)))
    if "*" in frequency or "[" in frequency:
        pattern = _pattern(frequency)
        experts["dense_layers"] = pattern.index(1) if 1 in pattern else 0
        if 0 in pattern[experts["dense_layers"] :]:
            t.differs("moe-layer-freq", "dense layers come before those with experts")
    elif frequency != "1":
        key = "moe-layer-freq" if t.has("moe-layer-freq") else "expert-interval"
        t.differs(key, "every layer has experts here, apart from the first ones")
    keys = (
        "num-experts moe-router-topk topk moe-ffn-hidden-size moe-shared-expert-intermediate-size "
        "moe-router-score-function moe-router-pre-softmax moe-aux-loss-coeff moe-loss-coeff "
        "moe-router-load-balancing-type moe-z-loss-coeff moe-router-topk-scaling-factor "
        "moe-router-num-groups moe-router-group-topk moe-router-enable-expert-bias "
        "moe-router-bias-update-rate moe-layer-freq expert-interval"
    )
    t.derive(keys, {"model.experts": experts})
    if shared % size:
        t.differs("moe-shared-expert-intermediate-size", f"ours is a multiple of {size}")


def _pattern(text: str) -> list[int]:
    """Return the layers in a text such as "([0]*1+[1]*26)": 1 for a layer with experts."""
    layers: list[int] = []
    for part in text.strip("()\"' ").replace(" ", "").split("+"):
        values, _, times = part.partition("*")
        layers += [int(n) for n in values.strip("[]").split(",") if n] * int(times or 1)
    return layers


def _vocabulary_of_megatron(t: Translation) -> None:
    keys = (
        "tokenizer-type vocab-size make-vocab-size-divisible-by pad-vocab-size-to padded-vocab-size "
        "vocab-file merge-file"
    )
    if padded := t.get("pad-vocab-size-to", t.get("padded-vocab-size")):
        t.derive(keys, {"model.vocab_size": padded})
        return
    kind = t.get("tokenizer-type", "GPT2BPETokenizer" if t.has("merge-file") else None)
    known = {"GPT2BPETokenizer": GPT2_TOKENS, "Llama2Tokenizer": LLAMA2_TOKENS}.get(str(kind))
    tokens = t.get("vocab-size") or known
    multiple = t.get("make-vocab-size-divisible-by") * t.get("tensor-model-parallel-size", 1)
    if t.has("vocab-size") and kind == "NullTokenizer":
        tokens += 1  # the end of a document
    if tokens is None:
        tokens = GPT2_TOKENS
        text = f"the tokenizer {kind} decides it; GPT-2's has {tokens:,} tokens"
        t.assume("model.vocab_size", -(-tokens // multiple) * multiple, text)
    vocabulary(t, keys, tokens, multiple, "")


def _layout_of_megatron(t: Translation) -> None:
    experts = t.get("expert-model-parallel-size", t.get("moe-expert-parallel-size"))
    context = t.get("context-parallel-size", t.get("ds-sequence-parallel-size", 1))
    layout: dict[str, Any] = {
        "layout.context": context if context > 1 else None,
        "layout.expert": experts if experts and t.ours("model.experts") else None,
    }
    t.derive("context-parallel-size ds-sequence-parallel-size", {"layout.context": layout["layout.context"]})
    keys = "expert-model-parallel-size moe-expert-parallel-size"
    t.derive(keys, {"layout.expert": layout["layout.expert"]})
    if t.has("num-layers-per-virtual-pipeline-stage") and t.get("pipeline-model-parallel-size", 1) > 1:
        per_stage = t.get("num-layers") // t.get("pipeline-model-parallel-size")
        chunks = per_stage // t.get("num-layers-per-virtual-pipeline-stage")
        settings = {"layout.schedule": "interleaved", "layout.virtual_stages": chunks}
        t.derive("num-layers-per-virtual-pipeline-stage", settings if chunks > 1 else {})
    if t.has("enable-zbh1-pipeline") and t.get("pipeline-model-parallel-size", 1) > 1:
        t.derive("enable-zbh1-pipeline", {"layout.schedule": "zb-h1"})
    granularity = t.get("recompute-granularity", t.get("activations-checkpoint-granularity"))
    if t.has("recompute-activations") and granularity is None:
        granularity = "selective"
    if t.has("checkpoint-activations", "activations-checkpoint-method") and granularity is None:
        granularity = "full"
    interval = t.get("recompute-num-layers", t.get("checkpoint-num-layers", 1))
    settings = {
        "layout.recompute": granularity,
        "layout.recompute_interval": interval if granularity == "full" and interval > 1 else None,
    }
    keys = (
        "recompute-granularity activations-checkpoint-granularity recompute-activations "
        "checkpoint-activations activations-checkpoint-method recompute-method "
        "recompute-num-layers checkpoint-num-layers recompute-modules"
    )
    t.derive(keys, settings)


def _levels(t: Translation, batch: int, length: int) -> list[tuple[float, int]]:
    """Return (samples after which a batch begins, its size), in order."""
    if t.has("rampup-batch-size"):
        start, step, samples = (int(word) for word in t.get("rampup-batch-size"))
        ramp = {"start_sequences": start, "increment": step, "samples": samples}
        t.derive("rampup-batch-size", {"batch.ramp": ramp})
        count = (batch - start) // step
        return [(n * samples / count, start + n * step) for n in range(count + 1)]
    if not t.has("step-batch-size-schedule"):
        return [(0, batch)]
    pairs = [word.split(":") for word in str(t.get("step-batch-size-schedule")).replace(",", " ").split()]
    return sorted((_number(tokens) // length, _number(size)) for tokens, size in pairs)


def _number(text: str) -> int:
    """Return the number in a text such as "2.4B"."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1].upper())
    return int(float(text[:-1]) * unit) if unit else int(float(text))


class _Growth:
    """The steps of a run whose batch grows."""

    def __init__(self, levels: Sequence[tuple[float, int]]):
        self.parts: list[tuple[int, int, int]] = []  # (steps, samples before, batch)
        steps = samples = 0
        for (_, size), (end, _) in pairwise([*levels, (math.inf, 0)]):
            self.parts.append((steps, samples, size))
            if end < math.inf and end > samples:
                count = math.ceil((end - samples) / size)
                steps, samples = steps + count, samples + count * size

    def steps(self, samples: float) -> float:
        """Return the steps after which `samples` samples are read."""
        first, before, size = max(part for part in self.parts if part[1] <= samples)
        return first + (samples - before) / size


def _batch_and_rate_of_megatron(t: Translation) -> None:
    length, micro = t.get("seq-length"), t.get("micro-batch-size", t.get("batch-size", 1))
    shards = math.prod(
        t.get(f"{axis}-parallel-size", 1) for axis in ("tensor-model", "pipeline-model", "context")
    )
    keys = "global-batch-size micro-batch-size batch-size"
    if batch := t.get("global-batch-size"):
        t.derive(keys, {"batch.global_sequences": batch, "batch.micro_sequences": micro})
    else:
        spread(t, keys, micro, 1, shards)
        batch = t.ours("batch.global_sequences")
    levels = _levels(t, batch, length)
    growth = _Growth(levels)
    if t.has("step-batch-size-schedule"):
        (_, first), *later = levels
        t.put("batch.global_sequences", first)
        phases = [
            {"name": f"batch-{size}", "start_step": math.ceil(growth.steps(start)) + 1,
             "batch": {"global_sequences": size}}
            for start, size in later
        ]  # fmt: skip
        t.derive("step-batch-size-schedule", {"phase": phases})
    samples = t.get("train-samples")
    if tokens := t.get("train-tokens"):
        samples = min(samples or math.inf, tokens / length)
    if (steps := t.get("train-iters")) is None and samples is not None:
        steps = int(growth.steps(samples))
    t.derive("train-iters train-samples train-tokens", {"training.steps": steps})
    schedule_keys = (
        "lr-decay-style min-lr lr-warmup-fraction lr-warmup-iters lr-warmup-samples "
        "lr-warmup-tokens lr-decay-iters lr-decay-samples lr-decay-tokens lr-wsd-decay-style "
        "lr-wsd-decay-iters lr-wsd-decay-samples"
    )
    if steps is None or not t.has("lr"):
        for key in filter(t.has, schedule_keys.split()):
            t.differs(key, "the files set no lr, or no number of steps; write [optimizer.schedule]")
        return

    def in_samples(name: str) -> float | None:
        """Return the samples of lr-NAME-iters, -samples or -tokens; None if none is given."""
        factors = {"iters": batch, "samples": 1, "tokens": 1 / length}
        values = {t.get(f"lr-{name}-{unit}"): factor for unit, factor in factors.items()}
        return next((value * factor for value, factor in values.items() if value is not None), None)

    style, minimum, peak = t.get("lr-decay-style"), t.get("min-lr"), t.get("lr")
    decay = in_samples("decay") or (samples if t.get("train-iters") is None else steps * batch)
    warmup = in_samples("warmup") or t.get("lr-warmup-fraction", 0) * decay
    annealing = in_samples("wsd-decay") if style == "WSD" else None
    shape = {"minus_sqrt": "sqrt"}.get(wsd := t.get("lr-wsd-decay-style"), wsd) if annealing else style
    if shape not in ("cosine", "linear", "constant", "sqrt"):
        shape = "linear"
        t.differs("lr-wsd-decay-style" if annealing else "lr-decay-style", "ours is linear")
    start = decay - annealing if annealing else warmup
    bounds = [value / batch for value in (warmup, start, decay)]
    exact = all(math.isclose(value, round(value), abs_tol=1e-6) for value in bounds)
    text, counts = "", "steps"
    if len(levels) > 1 or not exact:
        counts = "sequences" if decay <= MAX_COUNT else "steps"
        text = "samples of the source, rounded to steps" if counts == "steps" else ""
    if counts == "sequences":
        bounds = [warmup, start, decay]
    schedule(
        t, schedule_keys, shape, warmup=bounds[0], start=bounds[1], end=bounds[2],
        minimum=minimum, counts=counts, text=text,
    )  # fmt: skip
    if len(levels) > 1 and counts == "steps":
        t.differs("lr-decay-style", "the program counts samples, and the batch grows")


MEGATRON = Program(
    name="Megatron",
    table={
        "num-layers": takes("model.layers"),
        "hidden-size": takes("model.hidden_size"),
        "num-attention-heads": takes("model.heads"),
        "seq-length": takes("model.sequence_length"),
        "hidden-dropout": takes("model.dropout"),
        "attention-dropout": takes("model.attention_dropout"),
        "init-method-std": takes("model.initial_std"),
        "layernorm-epsilon": takes("model.norm_epsilon"),
        "norm-epsilon": takes("model.norm_epsilon"),
        "softmax-scale": takes("model.attention_scale"),
        "seed": takes("seed"),
        "lr": takes("optimizer.learning_rate"),
        "adam-eps": takes("optimizer.epsilon"),
        "weight-decay": takes("optimizer.weight_decay"),
        "clip-grad": takes("optimizer.gradient_clipping"),
        "save-interval": takes("checkpoint.every"),
        "tensor-model-parallel-size": takes("layout.tensor"),
        "model-parallel-size": takes("layout.tensor"),
        "pipeline-model-parallel-size": takes("layout.pipeline"),
        "sequence-parallel": takes("layout.sequence_parallel"),
        "wandb-project": takes("tracking.project"),
        "reset-attention-mask": takes("data.separate_documents"),
        "embed-layernorm": breaks("the embedding has no norm here; the model lacks its weights"),
        "apply-residual-connection-post-layernorm": breaks("residuals begin before the norm"),
        "lr-warmup-init": breaks("the warm-up begins with 0", 0),
        "decoupled-lr": breaks("all parameters have one learning rate"),
        "decoupled-min-lr": breaks("all parameters have one learning rate"),
        "start-weight-decay": breaks("weight decay is constant"),
        "end-weight-decay": breaks("weight decay is constant"),
        "weight-decay-incr-style": breaks("weight decay is constant", "constant"),
        "calculate-per-token-loss": Rule(reason="the loss is the mean over the tokens of the batch"),
        "eod-mask-loss": breaks("every position counts in the loss"),
        "reset-position-ids": breaks("positions continue over documents"),
        "fp8-format": breaks("matrix products are in the recipe's precision"),
        "fp8-hybrid": breaks("matrix products are in the recipe's precision"),
        "fp8-e4m3": breaks("matrix products are in the recipe's precision"),
        "fp8-param-gather": Rule(reason="weights are gathered in the recipe's precision"),
        "fp8-amax-history-len": Rule(reason="no fp8"),
        "fp8-amax-compute-algo": Rule(reason="no fp8"),
        "curriculum-learning": breaks("sequences grow in [[phase]] tables only"),
        "data-efficiency-curriculum-learning": breaks("sequences grow in [[phase]] tables only"),
        "random-ltd": breaks("no token skips a layer"),
        "mtp-num-layers": breaks("write [model.prediction] yourself"),
        "multi-latent-attention": breaks("write [model.latent] yourself"),
        "moe-expert-capacity-factor": breaks("no token is dropped"),
        "moe-train-capacity-factor": breaks("no token is dropped"),
        "moe-min-capacity": breaks("no token is dropped"),
        "moe-input-jitter-eps": breaks("the router has no noise", 0),
        "mlp-type": breaks("a residual expert is not supported", "standard"),
        **dict.fromkeys(
            "mos kd load-teacher num-layers-teacher num-experts-teacher hidden-size-teacher "
            "num-attention-heads-teacher kd-beta-ce kd-alpha-ce kd-temp".split(),
            breaks("distillation is not supported"),
        ),
        "use-bnb-optimizer": breaks("the optimizer's state has 32 bits"),
        "is-hybrid-model": breaks("layers with a state space are not supported"),
        "hybrid-override-pattern": breaks("layers with a state space are not supported"),
        "no-rope-freq": breaks("write attention_pattern yourself"),
        "disable-moe-token-dropping": Rule(reason="no token is dropped"),
        "glu-linear-offset": Rule(reason="part of clamped_swiglu"),
        "activation-func-clamp-value": Rule(reason="part of clamped_swiglu, whose limit is 7"),
        "script": breaks(
            "only causal language models are trained", "pretrain_gpt.py", "pretrain_llama.py"
        ),
        "loss-on-targets-only": breaks("every position counts in the loss"),
        "pretrained-checkpoint": breaks("training.initial_weights starts from weights"),
        "softmax-type": breaks("set model.attention_sinks yourself", "vanilla"),
        "finetune": breaks("training.initial_weights starts from weights"),
        "universal-checkpoint": Rule(reason="every checkpoint resumes in every layout"),
        "apply-layernorm-1p": Rule(reason="the same function, with weights around 1"),
        "init-method-xavier-uniform": breaks("weights are drawn from a normal distribution"),
        **free(KERNELS, "attention-backend use-flash-attn use-flash-attn-v1 use-flash-attn-v2 "
               "use-flash-attn-triton no-masked-softmax-fusion no-bias-swiglu-fusion "
               "no-bias-dropout-fusion no-rope-fusion cross-entropy-loss-fusion "
               "cross-entropy-fusion-impl transformer-impl attention-softmax-in-fp32 "
               "no-persist-layer-norm no-gradient-accumulation-fusion moe-grouped-gemm "
               "moe-permute-fusion moe-router-dtype abort-on-unmet-fused-kernel-constraints "
               "fp16-lm-cross-entropy no-query-key-layer-scaling apply-query-key-layer-scaling "
               "disable-bf16-reduced-precision-matmul te-rng-tracker use-mcore-models "
               "use-legacy-models ds-fused-adam disable-mem-efficient-ln rope-type "
               "export-force-local-attention enable-gpt-oss rotary-interleaved cuda-graph-impl "
               "fp32-residual-connection deprecated-use-mcore-models spec"),
        **free(COMMUNICATION, "overlap-grad-reduce overlap-param-gather moe-token-dispatcher-type "
               "distributed-backend ddp-impl no-async-tensor-model-parallel-allreduce "
               "sync-tp-duplicated-parameters pp-partition-method no-pipeline-parallel "
               "no-contiguous-buffers-in-local-ddp no-scatter-gather-tensors-in-pipeline "
               "deepspeed-activation-checkpointing partition-activations "
               "contigious-checkpointing cpu-optimizer overlap-p2p-communication "
               "moe-shared-expert-overlap moe-layer-recompute enable-expert-tensor-parallelism expert-tensor-parallel-size create-moe-param-group "
               "ddp-bucket-size init-model-with-meta-device no-gradient-reduce-div-fusion "
               "use-custom-fsdp fsdp-double-buffer use-nccl-ub"),
        **free(SUMS, "accumulate-allreduce-grads-in-fp32 initial-loss-scale"),
        **free(LOGGING, "log-interval tensorboard-dir tensorboard-queue-size tensorboard-log-interval "
               "log-timers-to-tensorboard log-batch-size-to-tensorboard log-params-norm "
               "log-validation-ppl-to-tensorboard log-optimizer-states-to-tensorboard "
               "log-throughput log-num-zeros-in-grad log-memory-to-tensorboard timing-log-level "
               "timing-log-option wandb-exp-name wandb-save-dir wandb-entity profile "
               "profile-step-start profile-step-end profile-ranks log-level log-level-replica "
               "log-progress log-path codecarbon-dir moe-per-layer-logging use-pytorch-profiler"),
        **free(FILES, "save load no-load-optim no-load-rng no-save-optim no-save-rng ckpt-format "
               "use-checkpoint-args exit-on-missing-checkpoint override-opt-param-scheduler "
               "use-checkpoint-opt-param-scheduler async-save dist-ckpt-strictness "
               "ckpt-fully-parallel-save ckpt-fully-parallel-load dist-ckpt-format no-load-lr-state "
               "auto-detect-ckpt-format no-ckpt-fully-parallel-save no-use-tokenizer-model-from-checkpoint-args"),
        **free(READING, "split num-workers valid-num-workers data-impl data-cache-path mock-data "
               "no-create-attention-mask-in-dataloader no-mmap-bin-files tiktoken-pattern "
               "dataloader-type mmap-warmup tokenizer-model tokenizer-name-or-path "
               "train-weighted-split-paths-path valid-weighted-split-paths-path "
               "test-weighted-split-paths-path train-weighted-split-paths "
               "valid-weighted-split-paths skip-train-iteration-range "
               "tokenizer-prompt-format tokenizer-hf-include-special-tokens trust-remote-code"),
        "moe-token-drop-policy": Rule(reason="no token is dropped"),
        **free(SUPERVISION, "exit-interval exit-duration-in-mins exit-signal-handler "
               "kill-switch-path distributed-timeout-minutes manual-gc manual-gc-interval "
               "empty-unused-memory-level check-for-nan-in-loss-and-grad "
               "no-check-for-nan-in-loss-and-grad check-weight-hash-across-dp-replicas-interval"),
        **free("DeepSpeed is always used", "deepspeed local-rank lazy-mpu-init use-cpu-initialization "
               "use-gloo-process-groups cpu-torch-adam"),
        **free("evaluation of a trained model", "inference moe-eval-capacity-factor skip-train "
               "inference-max-seq-length inference-max-requests reset-progress"),
        "data-parallel-random-init": breaks("every data rank has the same weights"),
        "use-tutel": Rule(reason=KERNELS),
    },
    defaults={
        "position-embedding-type": "learned_absolute", "normalization": "LayerNorm",
        "hidden-dropout": 0.1, "attention-dropout": 0.1, "init-method-std": 0.02, "seed": 1234,
        "layernorm-epsilon": 1e-5, "adam-beta1": 0.9, "adam-beta2": 0.999, "adam-eps": 1e-8,
        "weight-decay": 0.01, "clip-grad": 1.0, "min-lr": 0.0, "lr-decay-style": "linear",
        "lr-wsd-decay-style": "exponential", "eval-interval": 1000, "eval-iters": 100,
        "optimizer": "adam", "make-vocab-size-divisible-by": 128,
    },
    derive=_megatron,
    required=("num-layers", "hidden-size", "num-attention-heads", "seq-length"),
    numbers=(
        "ffn-hidden-size micro-batch-size global-batch-size train-iters train-samples "
        "train-tokens lr min-lr lr-warmup-fraction lr-warmup-iters lr-warmup-samples "
        "lr-warmup-tokens lr-decay-iters lr-decay-samples lr-decay-tokens lr-wsd-decay-iters "
        "lr-wsd-decay-samples tensor-model-parallel-size pipeline-model-parallel-size "
        "context-parallel-size ds-sequence-parallel-size make-vocab-size-divisible-by vocab-size "
        "num-layers-per-virtual-pipeline-stage rotary-base adam-beta1 adam-beta2 "
        "moe-ffn-hidden-size moe-shared-expert-intermediate-size zero-stage"
    ),
    differences=(ONE_LATER,),
)  # fmt: skip


# nanotron.


def _nanotron(t: Translation) -> None:
    at = "model.model_config."
    heads = t.get(f"{at}num_attention_heads")
    t.derive(f"{at}num_key_value_heads", {"model.kv_heads": t.get(f"{at}num_key_value_heads") or heads})
    ours = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
    act = t.get(f"{at}hidden_act")
    t.derive(f"{at}hidden_act", {"model.activation": ours.get(act, "swiglu")})
    if act not in ours:
        t.differs(f"{at}hidden_act", f"{act}: ours is swiglu")
    t.recipe["model"] |= {"norm": "rmsnorm", "positions": "rope", "bias": False}
    t.derive(f"{at}attention_bias", {"model.qkv_bias": True if t.get(f"{at}attention_bias") else None})
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
    shards = math.prod(t.get(f"parallelism.{axis}", 1) for axis in ("tp", "pp", "context_parallel_size"))
    t.ranks = data * shards
    keys = "tokens.micro_batch_size tokens.batch_accumulation_per_replica parallelism.dp"
    spread(t, keys, t.get("tokens.micro_batch_size"), t.get("tokens.batch_accumulation_per_replica"), shards)
    t.derive("parallelism.tp_mode", {"layout.sequence_parallel": t.get("parallelism.tp_mode") == "REDUCE_SCATTER"})
    for axis, target in {"context_parallel_size": "context", "expert_parallel_size": "expert"}.items():
        size = t.get(f"parallelism.{axis}", 1)
        wanted = size > 1 and (axis != "expert_parallel_size" or t.ours("model.experts"))
        t.derive(f"parallelism.{axis}", {f"layout.{target}": size if wanted else None})
    engine = "gpipe" if t.get("parallelism.pp_engine") == "afab" and t.get("parallelism.pp", 1) > 1 else None
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
    settings = {"training.evaluate_every": evaluate}
    t.derive("tokens.val_check_interval tokens.limit_val_batches", settings)
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
    phases = []
    for number, stage in enumerate(stages):
        name = re.sub(r"\W+", "-", str(stage.get("name", number)).lower()).strip("-")
        dataset = (stage.get("data") or {}).get("dataset") or {}
        folders = dataset.get("dataset_folder") or dataset.get("hf_dataset_or_datasets")
        folders = list(folders) if isinstance(folders, list | Mapping) else [folders or "train"]
        weights = dataset.get("dataset_weights") or [1] * len(folders)
        train = [
            {"path": f"data/{t.name}/{name}-{PurePath(str(folder)).name}", "weight": float(weight)}
            for folder, weight in zip(folders, weights, strict=True)
        ]
        if number == 0:
            t.derive("data_stages", {"data.train": train}, "prepare the text with prepare_data.py")
        else:
            start = stage["start_training_step"]
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
        "model.model_config.moe_num_experts": breaks("these experts drop tokens; ours are dense", 1),
        "model.init_method.use_mup": breaks('spectral muP is not parametrization = "mup"'),
        "model.init_method.path": breaks("convert.py from-hf and training.initial_weights do this"),
        "model.init_method.scaling_method": breaks("output projections are scaled by the depth", "NUM_LAYERS"),
        "optimizer.weight_decay_exclude_named_params": breaks("norms and biases have no decay", []),
        **free("part of moe_num_experts", "model.model_config.moe_capacity_factor "
               "model.model_config.num_experts_per_tok"),
        **free(KERNELS, "model.model_config._attn_implementation model.model_config._fused_rms_norm "
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
    ("deepseek_v3", "671B"): ("deepseek/v3", {"norm_epsilon": 1e-5, "initial_std": 0.02, "prediction": None}),
}  # fmt: skip
TITAN_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved",
    "zbvzerobubble": "zb-v", "dualpipev": "dualpipev",
}  # fmt: skip


def _torchtitan(t: Translation) -> None:
    name, size = t.get("model.name"), t.get("model.flavor")
    recipe, changes = SIZES.get((name, size), ("llama/8b", {}))
    model = load_recipe(REPOSITORY / "recipes" / f"{recipe}.toml").model
    plain = _plain(model) | changes | {"sequence_length": t.get("training.seq_len")}
    if experts := plain.get("experts"):
        plain["experts"] = {k: v for k, v in experts.items() if k not in ("balance_loss", "z_loss")}
    t.recipe["model"] = {key: value for key, value in plain.items() if value is not None}
    text = f"{name} {size}, as recipes/{recipe}.toml"
    for key in ("model.name", "model.flavor", "training.seq_len"):
        t.say(key, DERIVED, text)
    if (name, size) not in SIZES:
        sizes = ", ".join(f"{a} {b}" for a, b in SIZES)
        t.differs("model.flavor", f"ours is Llama 3 8B; known are {sizes}")
    if experts:
        t.differs("model.flavor", "the program balances every router by a bias; see [model.experts]")
    axes = {axis: t.get(f"parallelism.{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline", "context")}
    for axis, degree in axes.items():
        t.derive(f"parallelism.{axis}_parallel_degree", {f"layout.{axis}": degree})
    expert = t.get("parallelism.expert_parallel_degree", 1) if experts else None
    t.derive("parallelism.expert_parallel_degree", {"layout.expert": expert})
    t.derive("parallelism.tensor_parallel_degree", {"layout.sequence_parallel": axes["tensor"] > 1})
    kind = str(t.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    if axes["pipeline"] > 1:
        t.derive("parallelism.pipeline_parallel_schedule", {"layout.schedule": TITAN_SCHEDULES.get(kind, "1f1b")})
    t.say("parallelism.pipeline_parallel_schedule", FREE, "no pipeline")
    replicas, shard = (t.get(f"parallelism.data_parallel_{k}_degree") for k in ("replicate", "shard"))
    shards = math.prod(axes.values())
    if t.ranks is None and shard > 0:
        t.ranks = replicas * shard * shards
    local, total = t.get("training.local_batch_size"), t.get("training.global_batch_size")
    micro = t.get("parallelism.pipeline_parallel_microbatch_size") if axes["pipeline"] > 1 else local
    keys = "training.local_batch_size training.global_batch_size parallelism.pipeline_parallel_microbatch_size"
    if total > 0:
        t.derive(keys, {"batch.global_sequences": total, "batch.micro_sequences": micro})
    else:
        spread(t, keys, micro, local // micro, shards)
    mode = t.get("activation_checkpoint.mode")
    mode = mode if mode in ("none", "full", "selective") else "selective"
    t.derive("activation_checkpoint.mode activation_checkpoint.selective_ac_option", {"layout.recompute": mode})
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
        t, " ".join(at + key for key in keys.split()), t.get(f"{at}decay_type"), warmup=warmup,
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
    t.derive(" ".join(f"parallelism.{key}" for key in keys.split()), {}, f"ZeRO-{2 if limited else stage}")
    if t.has("training.dataset"):
        corpora(t, "training.dataset training.dataset_path", [(1, t.get("training.dataset"))])
    t.precision = "bf16" if t.get("training.mixed_precision_param", "bfloat16") == "bfloat16" else "fp32"
    t.say("training.mixed_precision_param", DERIVED, f"deepspeed, {t.precision}")


def _plain(section: Any) -> dict[str, Any]:
    """Return a dataclass as a table of TOML, without defaults."""
    table = {}
    for key, field in type(section).__dataclass_fields__.items():
        value = getattr(section, key)
        if value is not None and value != field.default:
            nested = hasattr(value, "__dataclass_fields__")
            table[key] = _plain(value) if nested else list(value) if isinstance(value, tuple) else value
    return table


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
        "model.converters": breaks("matrix products are in the recipe's precision", []),
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
    try:
        theirs = AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers' configs raise many classes
        raise UserError(
            f"transformers rejects the configuration: {reason_of(error)}; use a model without code "
            f"of its own"
        ) from None
    model = _plain(imported_config(theirs.to_dict()))
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
        "architectures bos_token_id eos_token_id pad_token_id transformers_version torch_dtype dtype "
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
