"""The architecture of a model, with every switch spelled out."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from models.base_sizes import Parametrization, check_base_sizes
from models.errors import STRICT_SECTION, UserError
from models.experts_settings import Experts
from models.rope_scaling import MAX_SIZE, RopeScaling


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    GPT-2/3 and Llama are two settings of the same switches; `recipes/gpt` and `recipes/llama`
    show both. Sizes are those of the logical model, before any layout splits or pads it.

    Raises:
        UserError: sizes are inconsistent; the message gives a value that works.
    """

    __pydantic_config__: ClassVar[dict] = STRICT_SECTION

    layers: int
    """Number of transformer layers (blocks)."""
    hidden_size: int
    """Size of the activations between layers."""
    heads: int
    """Number of attention heads."""
    kv_heads: int
    """Number of key and value heads;
    fewer than `heads` is grouped-query attention (arXiv 2305.13245).
    """
    ffn_hidden_size: int
    """Size of the activations inside the MLP."""
    vocab_size: int
    """Number of tokens in the vocabulary, before padding."""
    sequence_length: int
    """Tokens per sequence, in training and validation."""
    norm: Literal["rmsnorm", "layernorm"]
    """Normalisation before each half of a layer and before the output."""
    positions: Literal["rope", "learned"]
    """Rotary position embeddings, or learned ones that are added to the tokens."""
    activation: Literal["swiglu", "gelu"]
    """Activation of the MLP; "gelu" is the tanh approximation, as in GPT-2."""
    bias: bool
    """Give linear layers a bias."""
    tie_embeddings: bool
    """Use the token embedding as the output matrix too."""
    qk_norm: bool = False
    """Apply RMSNorm to each head of queries and keys, as in Qwen3."""
    head_size: int | None = None
    """Columns of one attention head; by default hidden_size / heads."""
    rope_theta: float = 10000.0
    """Base of the rotary position embeddings."""
    rope_scaling: RopeScaling | None = None
    """Scale rotary positions for sequences longer than those of the original training."""
    experts: Experts | None = None
    """Mixture of experts in place of the MLPs."""
    norm_epsilon: float = 1e-5
    """Small number in the denominator of the norms."""
    dropout: float = 0.0
    """Dropout probability of the embedding and of the output of each half of a layer."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention probabilities."""
    initial_std: float = 0.02
    """Standard deviation of the initial weights."""
    parametrization: Parametrization = "standard"
    """Rule that scales initial weights, updates and the forward pass with the size of the model:
    "mup" keeps the best learning rate when the width changes (arXiv 2203.03466), "completep" also
    when the depth changes (arXiv 2505.01618).
    """
    base_hidden_size: int | None = None
    """Hidden size of the model whose learning rate was tuned, for "mup" and "completep"."""
    base_layers: int | None = None
    """Number of layers of the model whose learning rate was tuned, for "completep"."""
    base_head_size: int | None = None
    """Head size of the model whose learning rate was tuned, for "mup" and "completep";
    by default that of this model.
    """

    def __post_init__(self) -> None:
        for key, field in type(self).__dataclass_fields__.items():
            value = getattr(self, key, None)
            if field.type not in (int, int | None) or value is None:
                continue
            if not 1 <= value <= MAX_SIZE:
                raise UserError(f"{key} = {value} is not in 1 .. {MAX_SIZE}; use {key} = 1")
        for key in ("rope_theta", "norm_epsilon", "initial_std"):
            if not getattr(self, key) > 0:
                default = type(self).__dataclass_fields__[key].default
                raise UserError(f"{key} = {getattr(self, key)} must be above 0; use {default}")
        for key in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError(
                    f"{key} = {getattr(self, key)} is not a probability below 1; use {key} = 0.1"
                )
        self._check_heads()
        if self.rope_scaling and self.positions != "rope":
            raise UserError(
                f'rope_scaling requires positions = "rope", not "{self.positions}"; leave '
                f"rope_scaling out"
            )
        is_yarn = self.rope_scaling is not None and self.rope_scaling.type == "yarn"
        if is_yarn and self.rope_theta <= 1:  # YaRN divides by its logarithm
            raise UserError(
                f'rope_theta = {self.rope_theta} must be above 1 with rope_scaling.type = "yarn"; '
                f"use rope_theta = 10000.0"
            )
        if self.experts is not None:
            self._check_experts(self.experts)
        check_base_sizes(
            self.parametrization,
            {
                "base_hidden_size": self.base_hidden_size,
                "base_layers": self.base_layers,
                "base_head_size": self.base_head_size,
            },
            {
                "base_hidden_size": self.hidden_size,
                "base_layers": self.layers,
                "base_head_size": self.attention_head_size,
            },
        )
        if self.positions == "rope" and self.attention_head_size % 2:
            raise UserError(
                f"head_size = {self.attention_head_size} is odd and rotary positions turn pairs; "
                f"use head_size = {self.attention_head_size + 1}"
            )

    def _check_heads(self) -> None:
        hidden_size, heads, kv_heads = self.hidden_size, self.heads, self.kv_heads
        divides = self.head_size is not None or hidden_size % heads == 0
        if divides and heads % kv_heads == 0:
            return
        unit = 2 if self.positions == "rope" else 1  # rotary positions turn pairs of columns
        sizes = f"hidden_size = {nearest_multiples(hidden_size, unit * heads)}"
        groups = f"kv_heads = {nearest_divisors(heads, kv_heads)}"
        if divides:
            raise UserError(f"kv_heads = {kv_heads} does not divide heads = {heads}; use {groups}")
        if heads % kv_heads:
            multiples = range(kv_heads, hidden_size + 1, kv_heads)
            fitting = [number for number in multiples if hidden_size % (unit * number) == 0]
            works = f"heads = {_around(fitting, heads)}" if fitting else f"{sizes} and {groups}"
            raise UserError(
                f"heads = {heads} does not divide hidden_size = {hidden_size}, and is not a "
                f"multiple of kv_heads = {kv_heads}; use {works}"
            )
        raise UserError(
            f"hidden_size = {hidden_size} is not divisible by heads = {heads}; use {sizes}"
        )

    def _check_experts(self, experts: Experts) -> None:
        if experts.dense_layers >= self.layers:
            fewer = " or fewer" if self.layers > 1 else ""
            raise UserError(
                f"experts.dense_layers = {experts.dense_layers} leaves none of layers = "
                f"{self.layers} for experts; use experts.dense_layers = {self.layers - 1}{fewer}"
            )
        if self.bias:
            raise UserError("bias = true is not supported with experts; use bias = false")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "ModelConfig":
        """Return the configuration in a [model] section, such as that of a checkpoint.

        Raises:
            UserError: sizes are inconsistent.
        """
        sections = {"rope_scaling": RopeScaling, "experts": Experts}
        given = {key: kind(**table[key]) for key, kind in sections.items() if table.get(key)}
        return cls(**{**table, **given})

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts; they follow the dense ones."""
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        """True if a layer has a dense MLP, of `ffn_hidden_size`."""
        return self.expert_layers < self.layers

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, counted from 0, has experts in place of its MLP."""
        return layer >= self.layers - self.expert_layers

    @property
    def attention_head_size(self) -> int:
        """Columns of one attention head."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def query_size(self) -> int:
        """Columns of all queries."""
        return self.heads * self.attention_head_size

    @property
    def key_value_size(self) -> int:
        """Columns of all keys, and of all values."""
        return self.kv_heads * self.attention_head_size

    @property
    def mlp_size(self) -> int:
        """Size of the activations inside the MLP of a layer that computes every token.

        In a layer with experts it is that of the shared experts, 0 without any.
        """
        return self.ffn_hidden_size if self.experts is None else self.experts.shared_ffn_hidden_size

    @property
    def gate_and_up_size(self) -> int:
        """Columns of the input of the activation in the MLP that computes every token."""
        return self.activation_columns(self.mlp_size)

    def activation_columns(self, size: int) -> int:
        """Return the columns of the input of an activation with `size` output columns.

        A gated activation takes two per output column.
        """
        return 2 * size if self.activation == "swiglu" else size

    @property
    def dense(self) -> "ModelConfig":
        """The same model without experts, whose layers are those before the first experts."""
        return self if self.experts is None else _without_experts(self)

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Return the rows of the embedding, padded so that `tensor_size` ranks hold equal parts.

        Each part is a multiple of 64 rows, as matrix units require for full speed. The padding rows
        are zero and do not affect the loss.
        """
        multiple = 64 * tensor_size
        return -(-self.vocab_size // multiple) * multiple


@lru_cache
def _without_experts(model: ModelConfig) -> ModelConfig:
    return replace(model, experts=None)


def nearest_multiples(value: int, divisor: int, *, most: int = MAX_SIZE) -> str:
    """Return the multiples of `divisor` around `value` as a phrase: '248 or 256'.

    most: the largest value of the key; a larger `divisor` is the only multiple named
    """
    below = min(value, most) // divisor * divisor
    multiples = [n for n in (below, below + divisor) if 0 < n <= most]
    return " or ".join(str(n) for n in multiples) or f"{divisor}"


def nearest_divisors(number: int, value: int) -> str:
    """Return the divisors of `number` around `value` as a phrase: '4 or 8'."""
    return _around([d for d in range(1, number + 1) if number % d == 0], value)


def _around(numbers: list[int], value: int) -> str:
    """Return the ascending numbers around `value` as a phrase: '4 or 8'."""
    below = [number for number in numbers if number <= value][-1:]
    above = [number for number in numbers if number > value][:1]
    return " or ".join(map(str, below + above))
