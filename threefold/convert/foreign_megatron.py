"""Megatron-LM and Megatron-DeepSpeed: their options, and the recipe that follows from them."""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from threefold.config.sections import MAX_SEQUENCES
from threefold.convert.foreign_files import scalar
from threefold.convert.translation import (
    COMMUNICATION,
    DERIVED,
    FILES,
    FREE,
    GPT2_TOKENS,
    KERNELS,
    LLAMA2_TOKENS,
    LOGGING,
    ONE_LATER,
    READING,
    SUMS,
    SUPERVISION,
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
    unfit,
    vocabulary,
)


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
    t.derive(
        "add-qkv-bias", {"model.qkv_bias": True if t.has("add-qkv-bias") and not bias else None}
    )
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
    _fp8_of_megatron(t)
    t.deepspeed |= t.foreign.deepspeed
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping",
                "gradient_accumulation_steps"):  # fmt: skip
        t.deepspeed.pop(key, None)
    for key, path in {"loss-scale": "loss_scale", "loss-scale-window": "loss_scale_window",
                      "hysteresis": "hysteresis", "min-loss-scale": "min_loss_scale",
                      }.items():  # fmt: skip
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


# Scales of Megatron's recipes for FP8 (Transformer Engine's classes of recipes) that differ from
# those of training.matmul_precision = "fp8", which are Transformer Engine's Float8BlockScaling.
OTHER_SCALES = {
    "delayed": "one scale per tensor, from its values in earlier steps",
    "tensorwise": "one scale per tensor",
    "mxfp8": "one scale per 32 elements",
    "custom": "the scales of the user's own code",
}


def _fp8_of_megatron(t: Translation) -> None:
    of_older_versions = next((name for name in ("hybrid", "e4m3") if t.has(f"fp8-{name}")), None)
    format_of_values, recipe = t.get("fp8-format", of_older_versions), t.get("fp8-recipe")
    exceptions = ("first-last-layers-bf16", "no-fp8-wgrad")
    if format_of_values is None or recipe in OTHER_SCALES:
        for key in ("fp8-recipe", *exceptions):
            t.say(key, FREE, "the recipe has no matmuls in FP8")
    if format_of_values is None:
        return
    wrong = ""
    if recipe != "blockwise":
        wrong = f"FP8 with {OTHER_SCALES.get(recipe, f'the scales of {recipe}')}"
    elif format_of_values != "e4m3":
        wrong = f"FP8 with gradients in E5M2 ({format_of_values})"
    elif t.precision == "fp16":
        wrong = "FP8 with weights in fp16"
    if wrong:
        ours = "has scales of 1 x 128 and 128 x 128, values in E4M3, and weights in bf16 or fp32"
        for key in ("fp8-format", "fp8-hybrid", "fp8-e4m3"):
            if t.has(key):
                t.differs(key, f'{wrong}; training.matmul_precision = "fp8" {ours}')
        t.say("fp8-recipe", DERIVED, "see fp8-format")
        return
    settings = {"training.matmul_precision": "fp8"}
    t.derive("fp8-format fp8-recipe fp8-e4m3", settings, "scales of 1 x 128 and 128 x 128")
    if t.has("first-last-layers-bf16"):
        t.differs("first-last-layers-bf16", "the matmuls of all blocks are in FP8")
    if t.has("no-fp8-wgrad"):
        t.differs("no-fp8-wgrad", "weight gradients are matmuls in FP8, too, except for experts")


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
    table_of_positions(t, "max-position-embeddings", "seq-length", ours == "rope")
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
    if not isinstance(left, int):
        raise unfit("window-size", t.get("window-size"), "tokens before and after, such as 128,0")
    every = t.get("window-attn-skip-freq", 0)
    settings: dict[str, Any] = {
        "model.window": {"size": left + 1},
        "model.attention_pattern": ["window"],
    }
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
            t.differs(
                key, "balance_loss counts the tokens of a sequence, not those of a micro-batch"
            )
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
        "tokenizer-type vocab-size make-vocab-size-divisible-by pad-vocab-size-to "
        "padded-vocab-size "
        "vocab-file merge-file"
    )
    if padded := t.get("pad-vocab-size-to", t.get("padded-vocab-size")):
        t.derive(keys, {"model.vocab_size": padded})
        return
    kind = t.get("tokenizer-type", "GPT2BPETokenizer" if t.has("merge-file") else None)
    known = {"GPT2BPETokenizer": GPT2_TOKENS, "Llama2Tokenizer": LLAMA2_TOKENS}.get(str(kind))
    tokens: int | None = t.get("vocab-size") or known
    multiple = t.get("make-vocab-size-divisible-by") * t.get("tensor-model-parallel-size", 1)
    if tokens and t.has("vocab-size") and kind == "NullTokenizer":
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
    t.derive(
        "context-parallel-size ds-sequence-parallel-size",
        {"layout.context": layout["layout.context"]},
    )
    keys = "expert-model-parallel-size moe-expert-parallel-size"
    t.derive(keys, {"layout.expert": layout["layout.expert"]})
    if (
        t.has("num-layers-per-virtual-pipeline-stage")
        and t.get("pipeline-model-parallel-size", 1) > 1
    ):
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
        words = t.get("rampup-batch-size")
        numbers = [scalar(str(word)) for word in (words if isinstance(words, list) else [words])]
        if len(numbers) != 3 or not all(isinstance(n, int) and n > 0 for n in numbers):
            raise unfit("rampup-batch-size", words, "three positive numbers, such as 16 16 1000000")
        start, step, samples = numbers
        if start + step > batch:
            most = f"a start and an increment that are together at most {batch}"
            raise unfit("rampup-batch-size", words, most)
        ramp = {"start_sequences": start, "increment": step, "samples": samples}
        t.derive("rampup-batch-size", {"batch.ramp": ramp})
        count = (batch - start) // step
        return [(n * samples / count, start + n * step) for n in range(count + 1)]
    if not t.has("step-batch-size-schedule"):
        return [(0, batch)]
    text = str(t.get("step-batch-size-schedule"))
    words = text.replace(",", " ").split()
    number = r"\d+(\.\d+)?[KMBT]?"
    if not all(re.fullmatch(f"{number}:{number}", word, re.I) for word in words):
        example = 'pairs of tokens and a batch, such as "0:16 2.4B:320"'
        raise unfit("step-batch-size-schedule", text, example)
    pairs = [word.split(":") for word in words]
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

    style, minimum = t.get("lr-decay-style"), t.get("min-lr")
    decay = in_samples("decay") or (samples if t.get("train-iters") is None else steps * batch)
    warmup = in_samples("warmup") or t.get("lr-warmup-fraction", 0) * decay
    annealing = in_samples("wsd-decay") if style == "WSD" else None
    shape = (
        {"minus_sqrt": "sqrt"}.get(wsd := t.get("lr-wsd-decay-style"), wsd) if annealing else style
    )
    if shape not in ("cosine", "linear", "constant", "sqrt"):
        shape = "linear"
        t.differs("lr-wsd-decay-style" if annealing else "lr-decay-style", "ours is linear")
    start = decay - annealing if annealing else warmup
    bounds = [value / batch for value in (warmup, start, decay)]
    exact = all(math.isclose(value, round(value), abs_tol=1e-6) for value in bounds)
    text, counts = "", "steps"
    if len(levels) > 1 or not exact:
        counts = "sequences" if decay <= MAX_SEQUENCES else "steps"
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
        "calculate-per-token-loss": Rule(reason="the loss is the mean over the tokens of the "
               "batch"),
        "eod-mask-loss": breaks("every position counts in the loss"),
        "reset-position-ids": breaks("positions continue over documents"),
        "fp8-param-gather": Rule(reason="weights are gathered in the type of the weights"),
        **free("belongs to --fp8-recipe delayed", "fp8-amax-history-len fp8-amax-compute-algo "
               "fp8-margin fp8-interval"),
        **free("belongs to first-last-layers-bf16", "num-layers-at-start-in-bf16 "
               "num-layers-at-end-in-bf16"),
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
            ("mos", "kd", "load-teacher", "num-layers-teacher", "num-experts-teacher",
             "hidden-size-teacher", "num-attention-heads-teacher", "kd-beta-ce", "kd-alpha-ce",
             "kd-temp"),
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
        "softmax-type": breaks("for learnable, set model.attention_sinks = true", "vanilla"),
        "enable-gpt-oss": breaks("it sets YaRN; write [model] as in recipes/gpt-oss/20b.toml"),
        "spec": breaks("it replaces layers; compare [model] with that specification"),
        "rope-type": breaks("set model.rope_scaling yourself", "rope"),
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
               "use-legacy-models ds-fused-adam disable-mem-efficient-ln "
               "export-force-local-attention rotary-interleaved cuda-graph-impl "
               "fp32-residual-connection deprecated-use-mcore-models"),
        **free(COMMUNICATION, "overlap-grad-reduce overlap-param-gather moe-token-dispatcher-type "
               "distributed-backend ddp-impl no-async-tensor-model-parallel-allreduce "
               "sync-tp-duplicated-parameters pp-partition-method no-pipeline-parallel "
               "no-contiguous-buffers-in-local-ddp no-scatter-gather-tensors-in-pipeline "
               "deepspeed-activation-checkpointing partition-activations "
               "contigious-checkpointing cpu-optimizer overlap-p2p-communication "
               "moe-shared-expert-overlap moe-layer-recompute enable-expert-tensor-parallelism "
               "expert-tensor-parallel-size create-moe-param-group "
               "ddp-bucket-size init-model-with-meta-device no-gradient-reduce-div-fusion "
               "use-custom-fsdp fsdp-double-buffer use-nccl-ub"),
        **free(SUMS, "accumulate-allreduce-grads-in-fp32 initial-loss-scale"),
        **free(LOGGING, "log-interval tensorboard-dir tensorboard-queue-size "
               "tensorboard-log-interval "
               "log-timers-to-tensorboard log-batch-size-to-tensorboard log-params-norm "
               "log-validation-ppl-to-tensorboard log-optimizer-states-to-tensorboard "
               "log-throughput log-num-zeros-in-grad log-memory-to-tensorboard timing-log-level "
               "timing-log-option wandb-exp-name wandb-save-dir wandb-entity profile "
               "profile-step-start profile-step-end profile-ranks log-level log-level-replica "
               "log-progress log-path codecarbon-dir moe-per-layer-logging use-pytorch-profiler"),
        **free(FILES, "save load no-load-optim no-load-rng no-save-optim no-save-rng ckpt-format "
               "use-checkpoint-args exit-on-missing-checkpoint override-opt-param-scheduler "
               "use-checkpoint-opt-param-scheduler async-save dist-ckpt-strictness "
               "ckpt-fully-parallel-save ckpt-fully-parallel-load dist-ckpt-format "
               "no-load-lr-state "
               "auto-detect-ckpt-format no-ckpt-fully-parallel-save "
               "no-use-tokenizer-model-from-checkpoint-args"),
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
        **free("DeepSpeed is always used", "deepspeed local-rank lazy-mpu-init "
               "use-cpu-initialization "
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
        "optimizer": "adam", "make-vocab-size-divisible-by": 128, "fp8-recipe": "delayed",
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
