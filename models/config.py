"""The architecture of a model, every switch spelled out."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from models.errors import UserError

LARGEST_SIZE = 2**24  # far beyond any model; a typing error ends here and not in a hang


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    GPT-2/3 and Llama are two settings of the same switches; `recipes/gpt` and `recipes/llama`
    show both. Sizes are those of the logical model, before any layout splits or pads it.

    Raises:
        UserError: sizes that do not fit each other, with a value that would.
    """

    # For pydantic, which reads a recipe's [model] section into this class.
    __pydantic_config__: ClassVar[dict] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int  # fewer than heads: grouped-query attention (arXiv 2305.13245)
    ffn_hidden_size: int
    vocab_size: int
    sequence_length: int
    norm: Literal["rmsnorm", "layernorm"]
    positions: Literal["rope", "learned"]
    activation: Literal["swiglu", "gelu"]  # gelu: the tanh approximation, as in GPT-2
    bias: bool
    tie_embeddings: bool
    qk_norm: bool = False  # RMSNorm over each head of q and k, as in Qwen3
    head_size: int | None = None  # None: hidden_size / heads
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5
    dropout: float = 0.0  # of the embedding and of what each half of a block adds
    attention_dropout: float = 0.0  # of the attention probabilities
    initial_std: float = 0.02

    def __post_init__(self) -> None:
        for key, field in type(self).__dataclass_fields__.items():
            value = getattr(self, key, None)
            if field.type not in (int, int | None) or value is None:
                continue
            if not 1 <= value <= LARGEST_SIZE:
                raise UserError(f"{key} = {value} is not in 1 .. {LARGEST_SIZE}; use {key} = 1")
        for key in ("rope_theta", "norm_epsilon", "initial_std"):
            if not getattr(self, key) > 0:
                default = type(self).__dataclass_fields__[key].default
                raise UserError(f"{key} = {getattr(self, key)} must be above 0; use {default}")
        for key in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError(
                    f"{key} = {getattr(self, key)} is not a probability below 1; use {key} = 0.1"
                )
        if self.head_size is None and self.hidden_size % self.heads:
            raise UserError(
                f"hidden_size = {self.hidden_size} is not divisible by heads = {self.heads}; "
                f"use hidden_size = {nearest_multiples(self.hidden_size, self.heads)}"
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; "
                f"use kv_heads = {nearest_divisors(self.heads, self.kv_heads)}"
            )
        if self.positions == "rope" and self.attention_head_size % 2:
            raise UserError(
                f"head_size = {self.attention_head_size} is odd and rotary positions turn pairs; "
                f"use head_size = {self.attention_head_size + 1}"
            )

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
    def gate_and_up_size(self) -> int:
        """Columns that go into an MLP's activation: a gated one takes two of each."""
        return 2 * self.ffn_hidden_size if self.activation == "swiglu" else self.ffn_hidden_size

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Rows of the embedding when `tensor_size` ranks hold equal parts of it.

        Each part is a multiple of 64 rows, which matrix units like; the padding rows are zero
        and take no part in the loss.
        """
        multiple = 64 * tensor_size
        return -(-self.vocab_size // multiple) * multiple


def nearest_multiples(value: int, divisor: int) -> str:
    """The multiples of `divisor` around `value`, as a phrase: '248 or 256'."""
    below = value // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


def nearest_divisors(number: int, value: int) -> str:
    """The divisors of `number` around `value`, as a phrase: '4 or 8'."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return " or ".join(str(d) for d in below + above)
