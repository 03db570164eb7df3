"""The architecture of a model, with every switch spelled out: sizes, positions, experts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

from models.errors import STRICT_SECTION, UserError, toml_value

# Scaling of rotary positions, to continue training on longer sequences.

MAX_SIZE = 2**24  # far beyond any model, so that a typing error is reported instead of a hang
MAX_LAYERS = 10_000  # likewise; the time of a plan grows with the layers
FP8_TILE = 128  # elements with one scale, and side of a block of a weight, in FP8
SCALING_KEYS = {  # keys of each type besides `type` and `factor`
    "linear": (),
    "llama3": ("original_sequence_length", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("original_sequence_length", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary positions, to continue training on longer sequences.

    Rotary positions rotate each pair of columns of a head at its own frequency. Lower frequencies
    keep the angles of new positions within the range seen in training. Weights that were trained
    with scaling need the same section at every sequence length. Other models need it only for
    sequences longer than those of their training.

    Raises:
        UserError: keys are inconsistent; the message gives a value that works.
    """

    __pydantic_config__: ClassVar[dict] = STRICT_SECTION

    type: Literal["linear", "llama3", "yarn"]
    """"linear" divides all frequencies by `factor` (arXiv 2306.15595). "llama3" (Llama 3.1) and
    "yarn" (arXiv 2309.00071) divide the low ones, keep the high ones and interpolate between them;
    "yarn" also multiplies rotated queries and keys by `attention_factor`."""
    factor: float
    """Divisor of the frequencies, such as the new length divided by the original one."""
    original_sequence_length: int | None = None
    """Sequence length that the model was first trained on; required for llama3 and yarn."""
    low_frequency_factor: float = 1.0
    """Frequencies that make fewer than this number of turns within `original_sequence_length` are
    divided by `factor` (llama3)."""
    high_frequency_factor: float = 4.0
    """Frequencies that make more than this number of turns within `original_sequence_length` are
    kept (llama3)."""
    beta_fast: float = 32.0
    """Frequencies that make more than this number of turns within `original_sequence_length` are
    kept (yarn)."""
    beta_slow: float = 1.0
    """Frequencies that make fewer than this number of turns within `original_sequence_length` are
    divided by `factor` (yarn)."""
    attention_factor: float | None = None
    """Factor by which rotated queries and keys are multiplied; by default 0.1 ln(factor) + 1
    (yarn)."""
    truncate: bool = True
    """Round the bounds of the interpolated frequencies to whole pairs of columns (yarn)."""

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise UserError(f"factor = {self.factor} is below 1; use factor = 8.0")
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if key not in ("type", "factor", *SCALING_KEYS[self.type]) and value != field.default:
                types = " and ".join(kind for kind, keys in SCALING_KEYS.items() if key in keys)
                raise UserError(
                    f'{key} = {value} has no effect with type = "{self.type}", only with {types}; '
                    f"leave {key} out"
                )
        self._check_limit()
        original = self.original_sequence_length
        if original is None and self.type != "linear":
            raise UserError(
                f'original_sequence_length is missing, and type = "{self.type}" requires it; use '
                f"the length that the model was first trained on, such as "
                f"original_sequence_length = 8192"
            )
        if original is not None and original < 1:
            raise UserError(
                f"original_sequence_length = {original} is below 1; use "
                f"original_sequence_length = 8192"
            )
        for low, high in (
            ("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast"),
        ):  # fmt: skip
            if not getattr(self, high) > 0:
                default = type(self).__dataclass_fields__[high].default
                raise UserError(
                    f"{high} = {getattr(self, high)} is not above 0; use {high} = {default}"
                )
            if not 0 < getattr(self, low) < getattr(self, high):
                raise UserError(
                    f"{low} = {getattr(self, low)} is not between 0 and {high} = "
                    f"{getattr(self, high)}; use {low} = {getattr(self, high) / 4}"
                )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise UserError(
                f"attention_factor = {self.attention_factor} is not above 0; leave it out"
            )

    def _check_limit(self) -> None:
        examples = {"factor": 8.0, "original_sequence_length": 8192}
        for field in fields(self):
            key, value = field.name, getattr(self, field.name)
            if not isinstance(value, int | float) or value <= MAX_SIZE:
                continue
            works = examples.get(key, field.default)
            advice = f"leave {key} out" if works is None else f"use {key} = {works}"
            raise UserError(f"{key} = {value} is above {MAX_SIZE}; {advice}")

    @property
    def amplitude(self) -> float:
        """The factor by which rotated queries and keys are each multiplied (arXiv 2309.00071)."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0


# Attention that differs between layers.

MIN_FACTOR = 1e-6  # of scores, embeddings and logits
# The gradient of c tanh(x / c) is 0 in fp32 beyond x = 9c. Scores and logits of initial weights are
# near 1, so a model with a smaller cap would not train.
MIN_SOFT_CAP = 0.1
# Far beyond any model, so that a typing error is reported; frequencies of a base far below 1
# overflow in fp32.
ROPE_THETA_LIMITS = (1.0, 1e12)

AttentionKind = Literal["full", "window", "nope"]


def check_factor(
    key: str, value: float, *, least: float = MIN_FACTOR, works: str = "leave {} out"
) -> None:
    """Check a factor of values or of a loss, which would overflow in fp32 far above MAX_SIZE.

    works: the advice, with {} in place of the key

    Raises:
        UserError: it is outside of the limits.
    """
    if not least <= value <= MAX_SIZE:
        raise UserError(f"{key} = {value} is not in {least:g} .. {MAX_SIZE}; {works.format(key)}")


@dataclass(frozen=True, kw_only=True)
class Window:
    """Sliding-window attention, in the layers that `attention_pattern` calls "window".

    Raises:
        UserError: a value is not valid; the message gives one that works.
    """

    __pydantic_config__: ClassVar[dict] = STRICT_SECTION

    size: int
    """Number of keys that a query sees: its own and those before it (arXiv 2004.05150)."""
    rope_theta: float | None = None
    """Base of the rotary positions of these layers; by default `model.rope_theta`."""
    rope_scaled: bool = True
    """Apply `model.rope_scaling` to these layers, too. It also counts if only a later phase adds
    `rope_scaling`."""

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise UserError(f"size = {self.size} is not in 1 .. {MAX_SIZE}; use size = 4096")
        if self.rope_theta is not None:
            check_rope_theta(self.rope_theta)


def check_rope_theta(theta: float) -> None:
    """Check the base of rotary positions.

    Raises:
        UserError: it is outside of the limits.
    """
    least, most = ROPE_THETA_LIMITS
    if not least <= theta <= most:
        raise UserError(
            f"rope_theta = {theta} is not in {least:g} .. {most:g}; use rope_theta = 10000.0"
        )


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Queries, and keys and values, are projected from latent vectors with an RMSNorm each. A head of
    queries and keys has `model.head_size` columns from the latents and `rotary_size` rotated ones;
    those of the keys are the same for all heads.

    Raises:
        UserError: a value is not valid; the message gives one that works.
    """

    __pydantic_config__: ClassVar[dict] = STRICT_SECTION

    query_rank: int | None = None
    """Size of the latent of the queries, such as 1536 in DeepSeek-V3; leave it out to project
    queries from the activations, as in DeepSeek-V2-Lite."""
    key_value_rank: int
    """Size of the latent of keys and values, such as 512."""
    rotary_size: int
    """Rotated columns of a head of queries, and of the keys of all heads, such as 64."""
    value_size: int
    """Columns of a head of values, such as 128; at most `head_size` + `rotary_size`."""

    def __post_init__(self) -> None:
        for key in ("query_rank", "key_value_rank", "rotary_size", "value_size"):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= MAX_SIZE:
                nearest = min(max(value, 1), MAX_SIZE)
                raise UserError(f"{key} = {value} is not in 1 .. {MAX_SIZE}; use {key} = {nearest}")
        if self.rotary_size % 2:
            raise UserError(
                f"rotary_size = {self.rotary_size} is odd and rotary positions turn pairs; use "
                f"rotary_size = {self.rotary_size + 1}"
            )


# The experts of a mixture-of-experts model.

MAX_PREDICTIONS = 64  # far beyond any model
MAX_EXPERTS = 2**14  # far beyond any model, so that a typing error is reported
Router = Literal["softmax", "softmax-after-topk", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts: each layer has several MLPs (experts), and each token uses a few of them.

    The number of tokens of an expert is not limited, so that no token is dropped.

    Raises:
        UserError: sizes are inconsistent; the message gives a value that works.
    """

    __pydantic_config__: ClassVar[dict] = STRICT_SECTION

    count: int
    """Number of routed experts in each layer."""
    per_token: int
    """Routed experts that compute each token."""
    ffn_hidden_size: int
    """Size of the activations inside one expert."""
    shared: int = 0
    """Shared experts, which compute every token. They form one MLP whose activations have
    `shared` x `ffn_hidden_size` columns."""
    dense_layers: int = 0
    """First layers that have a dense MLP of `model.ffn_hidden_size` instead of experts."""
    router: Router = "softmax"
    """Weights of the experts' outputs: probabilities among all experts ("softmax", as in OLMoE and
    Qwen3), probabilities among the chosen ones ("softmax-after-topk", as in Mixtral), or the
    sigmoid of each logit ("sigmoid", as in DeepSeek-V3). With "sigmoid", each expert has a bias
    that counts for the choice of the experts, but not for the weights."""
    normalize: bool = False
    """Divide the weights of a token by their sum, as Qwen3 and DeepSeek-V3 do."""
    groups: int = 1
    """Groups of adjacent experts into which the experts are divided; a divisor of `count`. The
    experts of a token are chosen in its best `groups_per_token` groups, by the sum of a group's two
    highest preferences (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). More than 1 requires
    `router = "sigmoid"`."""
    groups_per_token: int = 1
    """Groups in which the experts of a token may be."""
    output_scale: float = 1.0
    """Factor of the weights of the experts' outputs, such as 2.5 in DeepSeek-V3."""
    bias_update: float = 0.0
    """With `router = "sigmoid"`, amount by which each step raises the bias of an expert with fewer
    tokens of the global batch than the mean, and lowers that of one with more (arXiv 2408.15664,
    algorithm 1). The mean of the layer's changes is then subtracted. 0.001 is typical."""
    balance_loss: float = 0.0
    """Factor of the loss that balances the experts, such as 0.01. It is defined per layer and
    sequence (arXiv 2412.19437, equation 17), so that it does not depend on the layout, and it is
    not part of the reported loss."""
    z_loss: float = 0.0
    """Factor of the mean squared logsumexp of the router's logits, such as 0.001 (arXiv 2202.08906,
    equation 5). It is not part of the reported loss."""

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MAX_EXPERTS:
            raise UserError(
                f"count = {self.count} is not in 2 .. {MAX_EXPERTS}; use "
                f"count = 8, or leave the section out for a dense model"
            )
        if not 1 <= self.per_token <= self.count:
            raise UserError(
                f"per_token = {self.per_token} is not in 1 .. count = "
                f"{self.count}; use per_token = {min(2, self.count)}"
            )
        if not 1 <= self.ffn_hidden_size <= MAX_SIZE:
            raise UserError(
                f"ffn_hidden_size = {self.ffn_hidden_size} is not in 1 .. {MAX_SIZE}; use "
                f"ffn_hidden_size = 1024"
            )
        if self.shared_ffn_hidden_size > MAX_SIZE:
            raise UserError(
                f"shared = {self.shared} experts have more than {MAX_SIZE} columns; use shared = 1"
            )
        for key in ("shared", "dense_layers", "balance_loss", "z_loss", "bias_update"):
            check_factor(key, getattr(self, key), least=0, works="use {} = 0")
        check_factor("output_scale", self.output_scale, works="use {} = 1.0")
        self._check_groups()
        if self.normalize and self.router == "softmax-after-topk":
            raise UserError(
                f'normalize = true has no effect with router = "{self.router}", '
                f"whose weights already have the sum 1; leave normalize out"
            )
        if self.bias_update and not self.has_bias:
            raise UserError(
                f"bias_update = {self.bias_update} has no effect with router = "
                f'"{self.router}", which has no bias; leave bias_update out, or use '
                f'router = "sigmoid"'
            )

    def _check_groups(self) -> None:
        groups, most = self.groups, self.groups_per_token
        if not 1 <= groups <= self.count // 2 or self.count % groups:
            valid = [n for n in range(1, self.count // 2 + 1) if self.count % n == 0]
            raise UserError(
                f"groups = {groups} does not divide count = {self.count} into groups of at least 2 "
                f"experts; use groups = {min(valid, key=lambda n: abs(n - groups))}"
            )
        if not 1 <= most <= groups:
            raise UserError(
                f"groups_per_token = {most} is not in 1 .. groups = {groups}; use "
                f"groups_per_token = {min(max(1, most), groups)}"
            )
        if most * (self.count // groups) < self.per_token:
            raise UserError(
                f"groups_per_token = {most} groups of {self.count // groups} experts have fewer "
                f"than per_token = {self.per_token} experts; use groups_per_token = "
                f"{-(-self.per_token * groups // self.count)}"
            )
        if groups > 1 and self.router != "sigmoid":
            raise UserError(
                f'groups = {groups} requires router = "sigmoid", not "{self.router}"; leave groups '
                f"out"
            )

    @property
    def has_bias(self) -> bool:
        """True if each expert has a bias for the choice of experts."""
        return self.router == "sigmoid"

    @property
    def weights_sum_to_one(self) -> bool:
        """True if the weights of a token's experts have the sum 1 before they are scaled."""
        return self.normalize or self.router == "softmax-after-topk"

    @property
    def shared_ffn_hidden_size(self) -> int:
        """Size of the activations inside the shared experts; 0 without any."""
        return self.shared * self.ffn_hidden_size


# Modules that predict further tokens.


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Each module predicts the token after that of the module before it. It has a layer like the last
    one of the model, and shares the embedding and the output matrix with the model.

    Raises:
        UserError: a value is not valid; the message gives one that works.
    """

    __pydantic_config__: ClassVar[dict] = STRICT_SECTION

    depth: int = 1
    """Number of modules, and of tokens that are predicted beyond the next one."""
    loss_weight: float = 0.3
    """Weight of the modules' mean loss in training; DeepSeek-V3 starts with 0.3. The reported loss
    does not include it."""

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= MAX_PREDICTIONS:
            raise UserError(
                f"depth = {self.depth} is not in 1 .. {MAX_PREDICTIONS}; use depth = 1, or leave "
                f"the section out to predict one token"
            )
        check_factor("loss_weight", self.loss_weight, works="use {} = 0.3")


# The activation of an MLP.

Activation = Literal["swiglu", "geglu", "clamped_swiglu", "gelu", "gelu_erf", "squared_relu"]
GATED = ("swiglu", "geglu", "clamped_swiglu")

# The sizes of the base model, at which every parametrization is the standard one.

Parametrization = Literal["standard", "mup", "completep"]

REQUIRED: dict[str, tuple[str, ...]] = {
    "standard": (),
    "mup": ("base_hidden_size",),
    "completep": ("base_hidden_size", "base_layers"),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "standard": (),
    "mup": ("base_head_size",),
    "completep": ("base_head_size",),
}


def check_base_sizes(
    parametrization: Parametrization,
    given: Mapping[str, int | None],
    own: Mapping[str, int],
) -> None:
    """Check that the sizes of the base model are those that the parametrization reads.

    Args:
        given: the sizes of the base model by key; None: not given
        own: the sizes of the model itself by the same keys

    Raises:
        UserError: a required size is missing, or a size has no effect.
    """
    required = REQUIRED[parametrization]
    for key in required:
        if given[key] is None:
            raise UserError(
                f'{key} is missing and required with parametrization = "{parametrization}"; use '
                f"that of the model whose learning rate was tuned, such as {key} = {own[key]}"
            )
    for key, value in given.items():
        if value is None or key in (*required, *OPTIONAL[parametrization]):
            continue
        others = [other for other in REQUIRED if key in (*REQUIRED[other], *OPTIONAL[other])]
        choices = " or ".join(f'"{other}"' for other in others)
        raise UserError(
            f'{key} = {value} has no effect with parametrization = "{parametrization}"; leave it '
            f"out, or use parametrization = {choices}"
        )


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
    """Normalisation of each half of a layer, and before the output."""
    positions: Literal["rope", "learned"]
    """Rotary position embeddings, or learned ones that are added to the tokens."""
    activation: Activation
    """Activation of the MLP: "gelu" is the tanh approximation, as in GPT-2; "gelu_erf" is exact, as
    in nanoGPT; "squared_relu" as in Primer (arXiv 2109.08668). Gated ones have a second matrix:
    "swiglu", as in Llama; "geglu" with the tanh approximation, as in Gemma (arXiv 2002.05202);
    "clamped_swiglu", as in GPT-OSS."""
    bias: bool
    """Give linear layers a bias, those of experts and routers included."""
    tie_embeddings: bool
    """Use the token embedding as the output matrix too."""
    qkv_bias: bool | None = None
    """Give the projections to queries, keys and values a bias, as in Qwen2; by default `bias`."""
    attention_output_bias: bool | None = None
    """Give the output projection of attention a bias; by default `bias`."""
    norm_placement: Literal["before", "after", "both"] = "before"
    """Norms of the input of each half of a layer ("before"), of its output ("after", as in OLMo 2),
    or of both, as in Gemma."""
    qk_norm: bool = False
    """Apply RMSNorm to queries and keys, as in Qwen3."""
    qk_norm_over: Literal["head", "projection"] = "head"
    """Apply the RMSNorm of `qk_norm` to each head, as in Qwen3, or to all heads together, as in
    OLMo 2."""
    head_size: int | None = None
    """Columns of one attention head; by default hidden_size / heads. With `latent`, those of a
    query or key that are not rotated."""
    attention_pattern: tuple[AttentionKind, ...] = ("full",)
    """Attention of the layers, repeated from the first layer on: "full"; "window", a sliding
    window; or "nope", full without positions (arXiv 2305.19466). For example, OLMo 3 has
    `["window", "window", "window", "full"]`."""
    window: Window | None = None
    """The sliding window of the layers that `attention_pattern` calls "window"."""
    attention_sinks: bool = False
    """Give each head a learned logit that takes part in the softmax without a value, as in GPT-OSS
    (arXiv 2309.17453)."""
    attention_scale: float | None = None
    """Factor of the attention scores; by default head_size^-0.5, with `latent`
    (head_size + rotary_size)^-0.5."""
    attention_soft_cap: float | None = None
    """Limit c of the attention scores, which become c tanh(score / c), as in Gemma 2; at least 0.1,
    because scores far above the limit have no gradient."""
    latent: Latents | None = None
    """Multi-head latent attention in place of separate keys and values, as in DeepSeek-V3."""
    rope_theta: float = 10000.0
    """Base of the rotary position embeddings."""
    rope_scaling: RopeScaling | None = None
    """Scale rotary positions for sequences longer than those of the original training."""
    partial_rotary_factor: float = 1.0
    """Share of the columns of a head that are rotated, the first ones; 0.5 in GLM-4.5. The number
    of columns is rounded down, as in transformers, and must be even."""
    embedding_multiplier: float = 1.0
    """Factor of the embedded tokens, such as the square root of the hidden size in Gemma."""
    logit_soft_cap: float | None = None
    """Limit c of the logits, which become c tanh(logit / c), as in Gemma 2; at least 0.1, because
    logits far above the limit have no gradient."""
    z_loss: float = 0.0
    """Factor of the mean squared logsumexp of the logits, such as 1e-5 (PaLM, arXiv 2204.02311,
    section 5). It is not part of the reported loss."""
    experts: Experts | None = None
    """Mixture of experts in place of the MLPs."""
    prediction: Prediction | None = None
    """Modules that predict further tokens in training."""
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
            most = MAX_LAYERS if key in ("layers", "base_layers") else MAX_SIZE
            if not 1 <= value <= most:
                nearest = min(max(value, 1), most)
                raise UserError(f"{key} = {value} is not in 1 .. {most}; use {key} = {nearest}")
        check_rope_theta(self.rope_theta)
        for key in ("norm_epsilon", "initial_std"):
            if not 0 < getattr(self, key) <= MAX_SIZE:
                default = type(self).__dataclass_fields__[key].default
                raise UserError(
                    f"{key} = {getattr(self, key)} is not above 0 and at most {MAX_SIZE}; use "
                    f"{key} = {default}"
                )
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
        self._check_attention()
        if self.prediction is not None:
            self._check_prediction()
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
        if self.positions == "rope" and self.latent is None and self.attention_head_size % 2:
            raise UserError(
                f"head_size = {self.attention_head_size} is odd and rotary positions turn pairs; "
                f"use head_size = {self.attention_head_size + 1}"
            )

    def _check_attention(self) -> None:
        """Check the keys about attention that differs between layers."""
        if self.latent is not None:
            self._check_latent()
        pattern = self.attention_pattern
        has_window = self.window is not None
        if not 1 <= len(pattern) <= self.layers:
            fitting = shortest_pattern(pattern[: self.layers])
            if not fitting or ("window" in fitting) != has_window:
                fitting = example_pattern(self.layers, has_window=has_window)
            raise UserError(
                f"attention_pattern has {len(pattern)} entries for layers = {self.layers}; use "
                f"attention_pattern = {toml_value(fitting)}"
            )
        if ("window" in pattern) != has_window:
            problem = "window is set" if has_window else 'attention_pattern has "window"'
            remedy = "add [model.window] with size = 4096"
            if has_window:
                mixed = toml_value(("window", *pattern)[: self.layers])
                remedy = f"leave window out, or use attention_pattern = {mixed}"
            if self.latent is not None:
                remedy = "leave window out"
            missing = "window is missing" if self.window is None else "no layer has it"
            raise UserError(f"{problem}, but {missing}; {remedy}")
        share = self.partial_rotary_factor
        rotary_keys = {
            'attention_pattern has "nope", which': "nope" in pattern,
            f"partial_rotary_factor = {share}": share != 1,
            "window.rope_theta": self.window is not None and self.window.rope_theta is not None,
            f"rope_theta = {self.rope_theta}": self.rope_theta != WITHOUT_ROTATION["rope_theta"],
        }
        for what, is_used in rotary_keys.items():
            if is_used and self.positions != "rope":
                raise UserError(
                    f'{what} requires positions = "rope", not "{self.positions}"; leave it out'
                )
        self._check_effect_of_rotation()
        size, columns = self.attention_head_size, int(self.attention_head_size * share)
        if not 0 < share <= 1 or (share != 1 and (columns % 2 or not columns)):
            nearest = min(max(2, columns // 2 * 2), size)
            works = nearest / size
            if int(size * works) < nearest:  # such as 30 / 44
                works = math.nextafter(works, 1)
            problem = f"of head_size = {size} is {columns} columns, not an even number of them"
            raise UserError(
                f"partial_rotary_factor = {share} "
                f"{problem if 0 < share <= 1 else 'is not above 0 and at most 1'}; use "
                f"partial_rotary_factor = {works}"
            )
        if self.qk_norm_over != "head" and not self.qk_norm:
            raise UserError(
                f'qk_norm_over = "{self.qk_norm_over}" has no effect with qk_norm = false; use '
                f"qk_norm = true"
            )
        for key, least in {
            "attention_scale": MIN_FACTOR, "attention_soft_cap": MIN_SOFT_CAP,
            "logit_soft_cap": MIN_SOFT_CAP, "embedding_multiplier": MIN_FACTOR, "z_loss": 0.0,
        }.items():  # fmt: skip
            if getattr(self, key) is not None:
                check_factor(key, getattr(self, key), least=least)

    def _check_effect_of_rotation(self) -> None:
        """Check that the keys about rotary positions have an effect.

        `window.rope_scaled` has one without `rope_scaling`, too: a later phase may add scaling.
        """
        is_rotated = set(self.attention_pattern) != {"nope"}
        for key, default in () if is_rotated else WITHOUT_ROTATION.items():
            if (value := getattr(self, key)) != default:
                written = key if key == "rope_scaling" else f"{key} = {value}"
                raise UserError(
                    f'{written} has no effect with attention_pattern = ["nope"]; leave {key} out'
                )
        if self.window is None:
            return
        theta, scaling = self.window.rope_theta, self.rope_scaling
        is_yarn = scaling is not None and scaling.type == "yarn" and self.window.rope_scaled
        if is_yarn and theta is not None and theta <= 1:
            raise UserError(
                f'window.rope_theta = {theta} must be above 1 with rope_scaling.type = "yarn"; use '
                f"window.rope_theta = 10000.0"
            )

    def _check_heads(self) -> None:
        hidden_size, heads, kv_heads = self.hidden_size, self.heads, self.kv_heads
        if self.head_size is None and hidden_size % heads:
            unit = 2 if self.positions == "rope" else 1  # rotary positions turn pairs of columns
            works = f"heads = {nearest_divisors(hidden_size // unit, heads)}"
            if hidden_size % unit:
                works = f"hidden_size = {nearest_multiples(hidden_size, unit * heads)}"
            raise UserError(
                f"heads = {heads} does not divide hidden_size = {hidden_size}; use {works}"
            )
        if heads % kv_heads:
            raise UserError(
                f"kv_heads = {kv_heads} does not divide heads = {heads}; use kv_heads = "
                f"{nearest_divisors(heads, kv_heads)}"
            )

    def _check_experts(self, experts: Experts) -> None:
        if experts.dense_layers >= self.layers:
            fewer = " or fewer" if self.layers > 1 else ""
            raise UserError(
                f"experts.dense_layers = {experts.dense_layers} leaves none of layers = "
                f"{self.layers} for experts; use experts.dense_layers = {self.layers - 1}{fewer}"
            )
        if self.bias and experts.has_bias:
            others = ", with qkv_bias = true for biases of the attention"
            raise UserError(
                f'bias = true is not supported with experts.router = "{experts.router}", whose '
                f"bias balances the experts; use bias = false{'' if self.latent else others}"
            )

    def _check_latent(self) -> None:
        """Check the keys that cannot be combined with latent attention."""
        only = {
            "positions": "rope", "kv_heads": self.heads, "attention_pattern": ("full",),
            "qk_norm": False, "partial_rotary_factor": 1.0, "attention_sinks": False,
            "attention_soft_cap": None, "parametrization": "standard", "bias": False,
            "qkv_bias": False, "attention_output_bias": False,
        }  # fmt: skip
        for key, value in only.items():
            own = getattr(self, key)
            if value is False and not own:  # such as a missing qkv_bias
                continue
            if own != value:
                remedy = f"use {key} = {toml_value(value)}"
                if value is None or self.__dataclass_fields__[key].default == value:
                    remedy = f"leave {key} out"
                if key == "attention_pattern" and self.window is not None:
                    remedy = "leave attention_pattern and window out"
                raise UserError(f"{key} = {toml_value(own)} is not possible with latent; {remedy}")
        if self.head_size is None:
            raise UserError("head_size is missing and required with latent; use head_size = 128")
        assert self.latent is not None
        if self.latent.value_size > self.score_size:
            raise UserError(
                f"latent.value_size = {self.latent.value_size} is above head_size + "
                f"latent.rotary_size = {self.score_size}, the columns of a key; use "
                f"latent.value_size = {self.score_size}"
            )

    def _check_prediction(self) -> None:
        """Check the keys that cannot be combined with modules that predict further tokens."""
        for key, value in {"positions": "rope", "parametrization": "standard"}.items():
            if getattr(self, key) != value:
                raise UserError(
                    f'{key} = "{getattr(self, key)}" is not possible with prediction; use '
                    f'{key} = "{value}", or leave prediction out'
                )

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "ModelConfig":
        """Return the configuration in a [model] section, such as that of a checkpoint.

        Raises:
            UserError: sizes are inconsistent.
        """
        sections = {
            "rope_scaling": RopeScaling, "experts": Experts, "window": Window,
            "latent": Latents, "prediction": Prediction,
        }  # fmt: skip
        given = {
            key: kind(**table[key]) for key, kind in sections.items() if table.get(key) is not None
        }
        if "attention_pattern" in table:
            given["attention_pattern"] = tuple(table["attention_pattern"])
        return cls(**{**table, **given})

    def attention_kind(self, layer: int) -> AttentionKind:
        """Return the attention of a layer, counted from 0.

        The layers of prediction modules follow the others, and are like the last one.
        """
        return self.attention_pattern[min(layer, self.layers - 1) % len(self.attention_pattern)]

    def window_size(self, layer: int) -> int | None:
        """Return the number of keys that a query of a layer sees; None: all earlier ones."""
        if self.window is None or self.attention_kind(layer) != "window":
            return None
        return self.window.size

    @property
    def has_rotary_layers(self) -> bool:
        """True if a layer has rotary positions."""
        return self.positions == "rope" and set(self.attention_pattern) != {"nope"}

    @property
    def rotary_columns(self) -> int:
        """Columns of a head that rotary positions turn: the first ones, with `latent` the last."""
        if self.latent is not None:
            return self.latent.rotary_size
        return int(self.attention_head_size * self.partial_rotary_factor)

    @property
    def has_qkv_bias(self) -> bool:
        """True if the projections to queries, keys and values have a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_attention_output_bias(self) -> bool:
        """True if the output projection of attention has a bias."""
        return self.bias if self.attention_output_bias is None else self.attention_output_bias

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts; they follow the dense ones."""
        return 0 if self.experts is None else self.layers - self.experts.dense_layers

    @property
    def prediction_depth(self) -> int:
        """Number of modules that predict further tokens."""
        return 0 if self.prediction is None else self.prediction.depth

    @property
    def routed_layers(self) -> int:
        """Number of layers with experts, those of prediction modules included."""
        return 0 if self.experts is None else self.expert_layers + self.prediction_depth

    @property
    def copies_embedding(self) -> bool:
        """True if the last stage of a pipeline holds the embedding, too."""
        return self.tie_embeddings or self.prediction is not None

    @property
    def has_dense_layers(self) -> bool:
        """True if a layer has a dense MLP, of `ffn_hidden_size`."""
        return self.expert_layers < self.layers

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer, counted from 0, has experts in place of its MLP.

        The layers of prediction modules follow the others, and are like the last one.
        """
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def attention_head_size(self) -> int:
        """Columns of one attention head."""
        return self.head_size or self.hidden_size // self.heads

    @property
    def score_size(self) -> int:
        """Columns of a head of queries or keys, whose products are the attention scores."""
        return self.attention_head_size + (self.latent.rotary_size if self.latent else 0)

    @property
    def value_head_size(self) -> int:
        """Columns of a head of values."""
        return self.latent.value_size if self.latent else self.attention_head_size

    @property
    def query_size(self) -> int:
        """Columns of all queries."""
        return self.heads * self.score_size

    @property
    def attention_output_size(self) -> int:
        """Columns of the attention of all heads, before its output projection."""
        return self.heads * self.value_head_size

    @property
    def latent_columns(self) -> int:
        """Columns from which keys and values are computed: their latent and the rotated key."""
        return self.latent.key_value_rank + self.latent.rotary_size if self.latent else 0

    @property
    def key_value_size(self) -> int:
        """Columns of all keys, and of all values; without latents, whose sizes differ."""
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
        return 2 * size if self.activation in GATED else size

    @property
    def uniform_models(self) -> tuple["ModelConfig", ...]:
        """For each layer, the same model with all layers like this one.

        The only model of a model whose layers are alike is that model itself.
        """
        return _uniform_models(self)

    def padded_vocab_size(self, tensor_size: int) -> int:
        """Return the rows of the embedding, padded so that `tensor_size` ranks hold equal parts.

        Each part is a multiple of 64 rows, as matrix units require for full speed. The padding rows
        are zero and do not affect the loss.
        """
        multiple = 64 * tensor_size
        return -(-self.vocab_size // multiple) * multiple


@lru_cache
def _uniform_models(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Return `ModelConfig.uniform_models`; layers of a kind share one object."""
    kinds = [(model.has_experts(n), model.attention_kind(n)) for n in range(model.layers)]
    if len(set(kinds)) == 1:
        return (model,) * model.layers
    of_kind = {kind: _uniform(model, *kind) for kind in dict.fromkeys(kinds)}
    return tuple(of_kind[kind] for kind in kinds)


# The values of keys that have no effect in layers without rotary positions.
WITHOUT_ROTATION: dict[str, Any] = {
    key: ModelConfig.__dataclass_fields__[key].default
    for key in ("rope_theta", "rope_scaling", "partial_rotary_factor")
}


def _uniform(model: ModelConfig, has_experts: bool, attention: AttentionKind) -> ModelConfig:
    experts = None
    if has_experts and model.experts is not None:
        experts = replace(model.experts, dense_layers=0)
    return replace(
        model,
        experts=experts,
        attention_pattern=(attention,),
        window=model.window if attention == "window" else None,
        **(WITHOUT_ROTATION if attention == "nope" else {}),
    )


def example_pattern(layers: int, *, has_window: bool) -> tuple[AttentionKind, ...]:
    """Return a valid `attention_pattern` for a message."""
    windows: tuple[AttentionKind, ...] = ("window", "full")
    return windows[:layers] if has_window else ("full",)


def shortest_pattern(kinds: Sequence[AttentionKind]) -> tuple[AttentionKind, ...]:
    """Return the shortest `attention_pattern` that gives the layers these kinds of attention."""
    layers = tuple(kinds)
    lengths = range(1, len(layers) + 1)
    return next((layers[:n] for n in lengths if layers[n:] == layers[:-n]), ())


def nearest_multiples(value: int, divisor: int, *, most: int = MAX_SIZE) -> str:
    """Return the multiples of `divisor` around `value` as a phrase: '248 or 256'.

    most: the largest value of the key; a larger `divisor` is the only multiple named
    """
    below = min(value, most) // divisor * divisor
    multiples = [n for n in (below, below + divisor) if 0 < n <= most]
    return " or ".join(str(n) for n in multiples) or f"{divisor}"


def nearest_divisors(number: int, value: int, *, least: int = 1) -> str:
    """Return the divisors of `number` around `value`, from `least` on, as a phrase: '4 or 8'."""
    below = (n for n in range(min(value, number), least - 1, -1) if number % n == 0)
    above = (n for n in range(value + 1, number + 1) if number % n == 0)
    return " or ".join(str(n) for n in (next(below, 0), next(above, 0)) if n)
