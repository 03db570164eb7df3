"""Shapes of models and batches, precisions, and their recipes."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from models.config import ModelConfig
from models.cost import attention_multiply_adds, flops_per_token
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from threefold.config.recipe import Recipe
from threefold.runtime.processes import has_compiler

PRECISIONS = ("fp32", "bf16")
INITIAL_STD = 0.06  # large enough for attention to affect the first losses, which are compared


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model and its batch.

    base: recipe that the shape modifies
    sizes: keys of [model] that differ from the base, a section as an inline table
    """

    base: Path = DEFAULT_RECIPE
    sizes: tuple[tuple[str, int | str], ...]
    micro_sequences: int
    micro_batches: int = 1

    @property
    def name(self) -> str:
        """A name such as "hidden 512 x 8, sequence 512, vocabulary 4096"."""
        model = self.recipe("fp32").model
        own = "" if self.base == DEFAULT_RECIPE else f"{self.base.parent.name} {self.base.stem}, "
        return (
            f"{own}hidden {model.hidden_size} x {model.layers}, "
            f"sequence {model.sequence_length}, vocabulary {model.vocab_size}"
        )

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        length = self.recipe("fp32").model.sequence_length
        return length * self.micro_sequences * self.micro_batches

    def recipe(self, precision: str, *, zero_stage: int = 1, more: tuple[str, ...] = ()) -> Recipe:
        """Return the recipe for our engine, on one process unless `more` changes the layout.

        Its kernels are compiled where the machine has a compiler.
        """
        settings = {
            **{f"model.{key}": size for key, size in self.sizes},
            "model.initial_std": INITIAL_STD,
            "layout.tensor": 1,
            "layout.pipeline": 1,
            "layout.expert": 1,
            "batch.micro_sequences": self.micro_sequences,
            "batch.global_sequences": self.micro_sequences * self.micro_batches,
            "training.compile": "true" if can_compile() else "false",
            "deepspeed": f"ds_configs/zero{zero_stage}_{precision}.json",
        }
        if load_recipe(self.base).cluster:
            settings |= {"cluster.nodes": 1, "cluster.gpus_per_node": 1}
        overrides = [f"{key}={value}" for key, value in settings.items()]
        return load_recipe(self.base, [*overrides, *more])


@cache
def can_compile() -> bool:
    """Return True if this machine has a compiler for torch.compile."""
    return has_compiler()


def cpu_shape(
    hidden_size: int,
    layers: int,
    vocab_size: int,
    *,
    micro_sequences: int = 2,
    micro_batches: int = 1,
    sequence_length: int = 512,
) -> Shape:
    """Return a shape with heads of 64 and an MLP of 8/3 of the hidden size, in multiples of 64."""
    sizes = {
        "hidden_size": hidden_size,
        "layers": layers,
        "vocab_size": vocab_size,
        "sequence_length": sequence_length,
        "heads": hidden_size // 64,
        "kv_heads": hidden_size // 64,
        "ffn_hidden_size": -(-8 * hidden_size // (3 * 64)) * 64,
    }
    return Shape(
        sizes=tuple(sizes.items()), micro_sequences=micro_sequences, micro_batches=micro_batches
    )


CPU_SHAPES = {
    "512x8-4k": cpu_shape(512, 8, 4096),
    "512x8-32k": cpu_shape(512, 8, 32768),
    "1024x4-4k": cpu_shape(1024, 4, 4096),
    "1024x4-32k": cpu_shape(1024, 4, 32768),
}
GPU_SHAPES = {
    "llama-1b": Shape(
        base=REPOSITORY / "recipes" / "llama" / "1b.toml",
        sizes=(("sequence_length", 4096),),
        micro_sequences=2,
    )
}
GPU_EXPERT_SHAPE = Shape(  # four of its 16 layers, which fit on one GPU
    base=REPOSITORY / "recipes" / "olmoe" / "1b-7b.toml",
    sizes=(("layers", 4),),
    micro_sequences=4,
    micro_batches=4,
)
CPU_MEMORY_SHAPES = {"512x8-128k": cpu_shape(512, 8, 131072)}
OVERHEAD_SHAPE = cpu_shape(512, 7, 2048, micro_sequences=1, micro_batches=4)  # 25 M parameters
TENSOR_SHAPE = cpu_shape(1024, 4, 4096)
CONTEXT_SHAPE = cpu_shape(512, 2, 4096, micro_sequences=1, micro_batches=4, sequence_length=4096)
# As TENSOR_SHAPE, with half as many layers: each token uses 2 of 8 experts, which have half of the
# MLP's columns.
EXPERTS = (
    "{ count = 8, per_token = 2, ffn_hidden_size = 1408, normalize = true, balance_loss = 0.01 }"
)
DENSE = cpu_shape(1024, 2, 4096, micro_batches=2)
EXPERT_SHAPE = replace(DENSE, sizes=(*DENSE.sizes, ("experts", EXPERTS)))
LATENT_SHAPES = {  # latent attention and experts
    "tiny-mla": Shape(
        base=REPOSITORY / "recipes" / "tiny-mla.toml", sizes=(), micro_sequences=4, micro_batches=2
    )
}
SHAPES = CPU_SHAPES | GPU_SHAPES | CPU_MEMORY_SHAPES | LATENT_SHAPES


def with_batch(shape: Shape, micro_sequences: int | None, micro_batches: int | None) -> Shape:
    """Return the shape with another batch, if one is given."""
    return replace(
        shape,
        micro_sequences=micro_sequences or shape.micro_sequences,
        micro_batches=micro_batches or shape.micro_batches,
    )


def step_flops(model: ModelConfig, tokens: int) -> dict[str, float]:
    """Return the FLOPs of a step, with attention counted as half (unmasked) and in full."""
    full = flops_per_token(model) * tokens
    masked = 3 * 2 * model.layers * attention_multiply_adds(model) / 2 * tokens
    return {"causal": full - masked, "full": full}
