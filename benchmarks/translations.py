"""Compare translated recipes with their sources: parameters, global batch and learning rate.

    python benchmarks/translations.py CLONES              # every configuration in PUBLISHED
    python benchmarks/translations.py CLONES --markdown   # the table of docs/coming-from.md

CLONES is a folder with clones of the repositories, named as on GitHub: CLONES/EleutherAI/gpt-neox,
and so on. The expected numbers are computed here from the source's own formulas, which share only
the parser of files with the translation. The exit code is 1 if a number differs.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from models.cost import parameter_count
from models.errors import UserError
from threefold.config.phases import PhasePlan
from threefold.convert.foreign_files import Foreign, read_foreign
from threefold.convert.foreign_programs import PROGRAMS
from threefold.convert.translation import Translated, translate

Values = Mapping[str, Any]
MAX_STEPS = 1500  # whose batches and rates are compared
RATE_TOLERANCE = 2e-5  # of the peak; warm-up and decay in samples are rounded to steps


@dataclass(frozen=True)
class Expected:
    """The numbers of a source that its recipe must have, from the formulas of its program.

    Attributes:
        parameters: of the model, with the padding of its vocabulary
        missing: parameters that no recipe can have, such as the norm of BLOOM's embedding
        batch: sequences of a step, counted from 1
        rate: learning rate after a number of completed steps
    """

    parameters: int
    batch: Callable[[int], int]
    rate: Callable[[int], float]
    missing: int = 0


# Parameters.


def transformer(
    *,
    layers: int,
    hidden: int,
    ffn: int,
    vocabulary: int,
    queries: int,
    keys: int,
    gated: bool,
    biases: tuple[bool, bool],
    norm_bias: bool,
    tied: bool,
    positions: int = 0,
    head_norms: int = 0,
    experts: int = 0,
    dense: int = 0,
    dense_ffn: int = 0,
    shared: int = 0,
    attention: int | None = None,
) -> int:
    """Return the parameters of a transformer, matrix by matrix.

    Args:
        queries, keys: columns of the queries, and of the keys
        biases: of the attention's matrices, and of the MLP's
        head_norms: parameters of norms of queries and keys, of a layer
        experts: of a layer; 0: a dense model
        dense: first layers without experts, with an MLP of `dense_ffn` columns
        shared: columns of the shared experts
        attention: parameters of a layer's attention, if it is not the usual one
    """
    norm = hidden * (2 if norm_bias else 1)

    def mlp(columns: int) -> int:
        inner = columns * (2 if gated else 1)
        return hidden * inner + columns * hidden + (inner + hidden if biases[1] else 0)

    if attention is None:
        attention = hidden * (queries + 2 * keys) + queries * hidden + head_norms
        attention += queries + 2 * keys + hidden if biases[0] else 0
    usual = mlp(ffn)
    if experts:
        usual = experts * mlp(ffn) + experts * hidden + (mlp(shared) if shared else 0)
    blocks = (layers - dense) * usual + dense * mlp(dense_ffn) + layers * (attention + 2 * norm)
    return blocks + norm + vocabulary * hidden * (1 if tied else 2) + positions * hidden


def padded(tokens: int, multiple: int) -> int:
    """Return the rows of an embedding."""
    return multiple * math.ceil(tokens / multiple)


# GPT-NeoX (megatron/model/transformer.py, learning_rates.py, neox_arguments/arguments.py).


def of_neox(v: Values, ranks: int | None, vocabulary: int) -> Expected:
    """Return what a configuration of GPT-NeoX trains; `vocabulary`: if it does not say itself."""
    hidden, layers, heads = v["hidden_size"], v["num_layers"], v["num_attention_heads"]
    gated = v.get("activation") == "swiglu"
    ffn = v.get("intermediate_size") or 4 * hidden
    ffn = int(ffn * 2 / 3) // 2 if gated else ffn
    ffn = padded(ffn, v.get("mlp_multiple_of", 1))
    tensor, pipeline = v.get("model_parallel_size", 1), max(1, v.get("pipe_parallel_size", 0))
    multiple = v.get("make_vocab_size_divisible_by", 128) * tensor
    rms = "rms" in v.get("norm", "layernorm")
    parameters = transformer(
        layers=layers, hidden=hidden, ffn=ffn, vocabulary=padded(vocabulary, multiple),
        queries=hidden,
        keys=hidden * (v.get("num_kv_heads") or heads) // heads,
        gated=gated, norm_bias=not rms, tied=not v.get("no_weight_tying", False),
        biases=(v.get("use_bias_in_attn_linear", True), v.get("use_bias_in_mlp", True)),
        positions=v["max_position_embeddings"] if v.get("pos_emb", "learned") == "learned" else 0,
    )  # fmt: skip
    data = (ranks or tensor * pipeline) // (tensor * pipeline)
    micro, accumulation = (
        v.get("train_micro_batch_size_per_gpu", 1),
        v.get("gradient_accumulation_steps", 1),
    )
    batch = v.get("train_batch_size") or micro * accumulation * data
    peak, low = v["optimizer.params.lr"], v.get("min_lr", 0.0)
    end = v.get("lr_decay_iters") or v["train_iters"]
    warmup = v.get("warmup", 0.01) * end

    def rate(n: int) -> float:
        if n <= warmup:
            return peak * n / warmup
        return low + (peak - low) / 2 * (math.cos(math.pi * (n - warmup) / (end - warmup)) + 1)

    assert v["lr_decay_style"] == "cosine"
    return Expected(parameters, lambda step: batch, rate)


# Megatron (arXiv 2104.04473, equation 2; optimizer_param_scheduler.py and
# num_microbatches_calculator.py).


def of_megatron(v: Values, vocabulary: int) -> Expected:
    """Return what a command of Megatron-LM or Megatron-DeepSpeed trains."""
    hidden, layers, heads = v["hidden-size"], v["num-layers"], v["num-attention-heads"]
    gated, bias = "swiglu" in v, "disable-bias-linear" not in v
    ffn = v.get("ffn-hidden-size") or 4 * hidden
    size = v.get("kv-channels") or hidden // heads
    groups = v.get("num-key-value-heads") or (
        v["num-query-groups"] if "group-query-attention" in v else heads
    )
    experts = v.get("num-experts") or 0
    rotary = v.get("position-embedding-type") == "rope" or "use-rotary-position-embeddings" in v
    learned = not rotary and v.get("position-embedding-type") != "alibi"
    rms = str(v.get("normalization", "LayerNorm")).lower() == "rmsnorm"
    multiple = v.get("make-vocab-size-divisible-by", 128) * v.get("tensor-model-parallel-size", 1)
    rows = v.get("pad-vocab-size-to") or padded(vocabulary, multiple)
    missing = 2 * hidden if "embed-layernorm" in v else 0
    parameters = missing + transformer(
        layers=layers, hidden=hidden, ffn=v.get("moe-ffn-hidden-size", ffn), vocabulary=rows,
        queries=heads * size, keys=groups * size, gated=gated, biases=(bias, bias),
        norm_bias=not rms, tied="untie-embeddings-and-output-weights" not in v,
        positions=v["max-position-embeddings"] if learned else 0, experts=experts,
        head_norms=2 * size if "qk-layernorm" in v else 0,
    )  # fmt: skip
    if not gated and not experts and learned and v.get("tied", True) and groups == heads:
        formula = 12 * layers * hidden**2 * (
            1 + 13 / (12 * hidden) + (rows + v["max-position-embeddings"]) / (12 * layers * hidden)
        )  # fmt: skip
        if ffn == 4 * hidden:
            assert math.isclose(parameters, formula + 2 * hidden + missing, rel_tol=1e-9)
    last, length = v["global-batch-size"], v["seq-length"]

    def size_at(read: int) -> int:
        """The batch of a step before which `read` samples are read."""
        if "rampup-batch-size" in v:
            start, step, samples = (int(word) for word in v["rampup-batch-size"])
            steps = int(read / (samples / ((last - start) // step)))
            return last if read > samples else min(last, start + steps * step)
        if "step-batch-size-schedule" in v:
            units = {"K": 1e3, "M": 1e6, "B": 1e9}
            batch = 0
            for pair in v["step-batch-size-schedule"].split():
                tokens, size = pair.split(":")
                bound = (
                    int(float(tokens[:-1]) * units[tokens[-1]])
                    if tokens[-1] in units
                    else int(tokens)
                )
                batch = int(size) if read >= bound // length else batch
            return batch
        return last

    runs = [(1, 0, size_at(0))]  # (first step, samples before it, batch) of each batch size
    while runs[-1][2] < last:
        first, read, size_now = runs[-1]
        while size_at(read) == size_now:
            first, read = first + 1, read + size_now
        runs.append((first, read, size_at(read)))

    def run_of(step: int) -> tuple[int, int, int]:
        return max(run for run in runs if run[0] <= step)

    def samples(n: int) -> int:
        first, read, size_now = run_of(max(1, n))
        return read + (n - first + 1) * size_now

    def span(name: str) -> float | None:
        for unit, factor in (("iters", last), ("samples", 1), ("tokens", 1 / length)):
            if f"lr-{name}-{unit}" in v:
                return v[f"lr-{name}-{unit}"] * factor
        return None

    decay = span("decay") or v["train-iters"] * last
    warmup = span("warmup") or v.get("lr-warmup-fraction", 0) * decay
    peak, low = v["lr"], v.get("min-lr", 0.0)
    assert v["lr-decay-style"] == "cosine"

    def rate(n: int) -> float:
        read = samples(n)
        if warmup > 0 and read <= warmup:
            return peak * read / warmup
        if read > decay:
            return low
        share = (read - warmup) / (decay - warmup)
        return low + (peak - low) * 0.5 * (math.cos(math.pi * share) + 1)

    return Expected(parameters, lambda step: run_of(step)[2], rate, missing)


# nanotron (src/nanotron/models, helpers.py: lr_scheduler_builder).


def of_nanotron(v: Values) -> Expected:
    """Return what a configuration of nanotron trains."""
    m = {
        key.removeprefix("model.model_config."): n for key, n in v.items() if "model_config." in key
    }
    hidden, heads = m["hidden_size"], m["num_attention_heads"]
    keys = hidden // heads * (m.get("num_key_value_heads") or heads)
    multiple = v["model.make_vocab_size_divisible_by"] * v["parallelism.tp"]
    parameters = transformer(
        layers=m["num_hidden_layers"], hidden=hidden, ffn=m["intermediate_size"],
        vocabulary=padded(m["vocab_size"], multiple), queries=hidden, keys=keys, gated=True,
        biases=(False, False), norm_bias=False, tied=m["tie_word_embeddings"],
    )  # fmt: skip
    batch = (
        v["tokens.micro_batch_size"]
        * v["tokens.batch_accumulation_per_replica"]
        * v["parallelism.dp"]
    )
    at = "optimizer.learning_rate_scheduler."
    warmup, start, length = (
        v.get(f"{at}lr_{k}") for k in ("warmup_steps", "decay_starting_step", "decay_steps")
    )
    if length is None:
        length = v["tokens.train_steps"] - (warmup or 0) - (start or 0)
    start = (warmup or 0) if start is None else start
    peak, low, style = v[f"{at}learning_rate"], v[f"{at}min_decay_lr"], v[f"{at}lr_decay_style"]

    def rate(n: int) -> float:
        if n <= (warmup or 0):
            return peak * n / max(1, warmup or 0)
        if n < start:
            return peak
        if n >= start + length:
            return low
        x = (n - start) / length
        fall = {
            "cosine": (1 + math.cos(math.pi * x)) / 2,
            "linear": 1 - x,
            "1-sqrt": 1 - math.sqrt(x),
        }
        return low + (peak - low) * fall[style]

    return Expected(parameters, lambda step: batch, rate)


# torchtitan (models/*/__init__.py, components/lr_scheduler.py, at 76d5c72e~1).

# (layers, dim, heads, key-value heads, head size, ffn, vocabulary, tied)
LLAMA3 = {  # ffn = int(8 dim / 3) x multiplier, in multiples
    "8B": (32, 4096, 32, 8, 128, padded(int(1.3 * int(8 * 4096 / 3)), 1024), 128256, False),
    "70B": (80, 8192, 64, 8, 128, padded(int(1.3 * int(8 * 8192 / 3)), 4096), 128256, False),
    "405B": (126, 16384, 128, 8, 128, padded(int(1.2 * int(8 * 16384 / 3)), 4096), 128256, False),
}
QWEN3 = {
    "0.6B": (28, 1024, 16, 8, 128, 3072, 151936, True),
    "1.7B": (28, 2048, 16, 8, 128, 6144, 151936, True),
    "32B": (64, 5120, 64, 8, 128, 25600, 151936, False),
}


def of_torchtitan(v: Values, ranks: int | None) -> Expected:
    """Return what a TOML file of torchtitan trains."""
    name, flavor = v["model.name"], v["model.flavor"]
    if name == "deepseek_v3":
        assert flavor == "16B"
        h, heads, nope, rotary, value, rank = 2048, 16, 128, 64, 128, 512
        attention = h * heads * (nope + rotary) + h * (rank + rotary) + rank
        attention += rank * heads * (nope + value) + heads * value * h
        parameters = transformer(
            layers=27, hidden=h, ffn=1408, vocabulary=102400, queries=0, keys=0, gated=True,
            biases=(False, False), norm_bias=False, tied=False, experts=64, dense=1,
            dense_ffn=10944, shared=2 * 1408, attention=attention,
        )  # fmt: skip
    else:
        sizes = {"llama3": LLAMA3, "qwen3": QWEN3}[name][flavor]
        layers, dim, heads, groups, size, ffn, vocabulary, tied = sizes
        parameters = transformer(
            layers=layers, hidden=dim, ffn=ffn, vocabulary=vocabulary, queries=heads * size,
            keys=groups * size, gated=True, biases=(False, False), norm_bias=False, tied=tied,
            head_norms=2 * size if name == "qwen3" else 0,
        )  # fmt: skip
    shards = math.prod(
        v.get(f"parallelism.{a}_parallel_degree", 1) for a in ("tensor", "pipeline", "context")
    )
    total = v.get("training.global_batch_size", -1)
    batch = total if total > 0 else v["training.local_batch_size"] * ((ranks or shards) // shards)
    at = "lr_scheduler."
    steps, peak = v["training.steps"], v["optimizer.lr"]
    warmup, low = v[f"{at}warmup_steps"], v.get(f"{at}min_lr_factor", 0.0)
    decay = steps - warmup
    if f"{at}decay_ratio" in v:
        decay = min(round(steps * v[f"{at}decay_ratio"]), steps - warmup)
    stable = steps + 1 - warmup - decay
    kind = v.get(f"{at}decay_type", "linear")

    def rate(step: int) -> float:
        current = step - 1  # torchtitan counts from 0
        if current < warmup:
            return peak * (current + 1) / warmup
        if current < warmup + stable:
            return peak
        x = (current + 1 - warmup - stable) / decay
        fall = {
            "linear": 1 - x,
            "sqrt": 1 - math.sqrt(x),
            "cosine": (1 + math.cos(math.pi * x)) / 2,
        }
        return peak * (low + (1 - low) * fall[kind])

    return Expected(parameters, lambda step: batch, rate)


def expected(foreign: Foreign, ranks: int | None, vocabulary: int) -> Expected:
    """Return what the content of configuration files trains.

    vocabulary: tokens of the tokenizer that the files name
    """
    match foreign.program:
        case "neox":
            return of_neox(foreign.values, ranks, vocabulary)
        case "megatron":
            return of_megatron(foreign.values, vocabulary)
        case "nanotron":
            return of_nanotron(foreign.values)
    return of_torchtitan(foreign.values, ranks)


@dataclass(frozen=True)
class Comparison:
    """The differences of a recipe from its source.

    Attributes:
        parameters: of the recipe minus those of the source
        batches: steps whose global batch differs
        rate: largest difference of the learning rates of the same step, relative to the peak
    """

    parameters: int
    batches: int
    rate: float

    @property
    def is_equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.parameters and not self.batches and self.rate <= RATE_TOLERANCE


def compare(translated: Translated, source: Expected) -> Comparison:
    """Compare a recipe with its source, at up to MAX_STEPS steps and around each change."""
    recipe, plan = translated.recipe, PhasePlan(translated.recipe)
    steps = recipe.training.steps
    numbers = {*range(1, steps + 1, -(-steps // MAX_STEPS)), steps}
    for segment in plan.segments:
        numbers |= {n for n in (segment.first, segment.last) if 1 <= n <= steps}
    wrong, worst = 0, 0.0
    for n in numbers:
        segment = plan.at(n)
        wrong += segment.recipe.batch.global_sequences != source.batch(n)
        worst = max(worst, abs(segment.learning_rate(n) - source.rate(n)))
    own = parameter_count(recipe.model) + source.missing
    return Comparison(own - source.parameters, wrong, worst / recipe.optimizer.learning_rate)


# The published configurations, at the versions that docs/coming-from.md names.

GPT2, NEOX20B, LLAMA2, BLOOM = 50257, 50277, 32000, 250680
TITAN = "76d5c72e259311b22ed98bef716d22fff5ab32f7~1"  # the last version with TOML files
REPOSITORIES = {
    "GPT-NeoX": "EleutherAI/gpt-neox",
    "BigScience": "bigscience-workshop/bigscience",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "Megatron-DeepSpeed": "deepspeedai/Megatron-DeepSpeed",
    "nanotron": "huggingface/nanotron",
    "torchtitan": "pytorch/torchtitan",
}
# (repository, files, GPUs, tokens of the tokenizer)
PUBLISHED: tuple[tuple[str, tuple[str, ...], int | None, int], ...] = (
    ("GPT-NeoX", ("configs/125M.yml",), 8, GPT2),
    ("GPT-NeoX", ("configs/1-3B.yml",), 64, GPT2),
    ("GPT-NeoX", ("configs/13B.yml",), 128, GPT2),
    ("GPT-NeoX", ("configs/175B.yml",), 512, GPT2),
    ("GPT-NeoX", ("configs/20B.yml",), 96, NEOX20B),
    ("GPT-NeoX", ("configs/pythia/160M.yml",), 32, NEOX20B),
    ("GPT-NeoX", ("configs/pythia/6-9B.yml",), 128, NEOX20B),
    ("GPT-NeoX", ("configs/llama/7B.yml", "configs/llama/train_config.yml"), 256, GPT2),
    ("BigScience", ("train/tr1-13B-base/tr1-13B-round1.slurm",), None, GPT2),
    ("BigScience", ("train/tr3-1B3-baseline/tr3m-1B3-pile.slurm",), None, GPT2),
    ("BigScience", ("train/tr8-104B-wide/tr8b-104B-pile.slurm",), None, GPT2),
    ("BigScience", ("train/tr11-176B-ml/tr11-176B-ml.slurm",), None, BLOOM),
    ("BigScience", ("train/tr11-176B-ml/smaller_models/tr11b-1B3-ml.slurm",), None, BLOOM),
    ("Megatron-LM", ("examples/gpt3/train_gpt3_175b_distributed.sh",), None, GPT2),
    ("Megatron-LM", ("examples/llama/train_llama3_8b_h100_fp8.sh",), None, 128257),
    ("Megatron-LM", ("examples/mixtral/train_mixtral_8x7b_distributed.sh",), None, LLAMA2),
    ("Megatron-DeepSpeed", ("examples/pretrain_gpt3_175B.sh",), None, GPT2),
    ("Megatron-DeepSpeed", ("examples_deepspeed/rebase/ds_pretrain_gpt_125M.sh",), None, GPT2),
    ("Megatron-DeepSpeed", ("examples_deepspeed/rebase/ds_pretrain_gpt_1.3B.sh",), None, GPT2),
    ("Megatron-DeepSpeed", ("examples_deepspeed/rebase/ds_pretrain_gpt_13B.sh",), None, GPT2),
    ("nanotron", ("examples/config_tiny_llama.yaml",), None, 0),
    ("nanotron", ("examples/config_qwen.yaml",), None, 0),
    ("nanotron", ("examples/config_resume_training.yaml",), None, 0),
    ("nanotron", ("examples/mup/configs/sp_350m_llama_config.yaml",), None, 0),
    ("torchtitan", ("torchtitan/models/llama3/train_configs/llama3_8b.toml",), 64, 0),
    ("torchtitan", ("torchtitan/models/llama3/train_configs/llama3_70b.toml",), 256, 0),
    ("torchtitan", ("torchtitan/models/llama3/train_configs/llama3_405b.toml",), 128, 0),
    ("torchtitan", ("torchtitan/models/qwen3/train_configs/qwen3_0.6b.toml",), 8, 0),
    ("torchtitan", ("torchtitan/models/qwen3/train_configs/qwen3_32b.toml",), 64, 0),
    ("torchtitan", ("torchtitan/models/deepseek_v3/train_configs/deepseek_v3_16b.toml",), 64, 0),
)


def files_of(clones: Path, program: str, files: tuple[str, ...], folder: Path) -> list[Path]:
    """Return copies of the files of a repository, at the version that has them."""
    clone, version = clones / REPOSITORIES[program], TITAN if program == "torchtitan" else "HEAD"
    paths = []
    for file in files:
        text = subprocess.run(
            ["git", "-C", clone, "show", f"{version}:{file}"], capture_output=True, check=True
        ).stdout
        paths.append(folder / Path(file).name)
        paths[-1].write_bytes(text)
    return paths


def rows(clones: Path, folder: Path) -> list[tuple[str, ...]]:
    """Return a row for each published configuration: file, numbers, and what differs."""
    table: list[tuple[str, ...]] = []
    for program, files, ranks, vocabulary in PUBLISHED:
        paths = files_of(clones, program, files, folder)
        foreign = read_foreign(paths)
        source = expected(foreign, ranks, vocabulary)
        result = translate(foreign, PROGRAMS[foreign.program], name=paths[0].stem, ranks=ranks)
        comparison = compare(result, source)
        steps = result.recipe.training.steps
        differing = dict.fromkeys(line.key for line in result.warnings if line.key)
        table.append((
            program,
            " + ".join(f"`{path.name}`" for path in paths),
            f"{source.parameters:,}",
            " to ".join(dict.fromkeys(f"{source.batch(n):,}" for n in (1, steps))),
            f"{steps:,}",
            "equal" if comparison.is_equal else str(comparison),
            ", ".join(differing) or "-",
        ))  # fmt: skip
    return table


def main() -> int:
    """Print the comparison of every published configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", type=Path, help="folder with OWNER/NAME of each repository")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    options = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            table = rows(options.clones, Path(folder))
        except UserError as problem:
            print(f"translations.py: {problem}", file=sys.stderr)
            return 2
    head = ("source", "configuration", "parameters", "batch", "steps", "compared", "not supported")
    if options.markdown:
        print("\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *table)))
    else:
        print("\n".join("  ".join(row) for row in (head, *table)))
    return 0 if all(row[5] == "equal" for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
