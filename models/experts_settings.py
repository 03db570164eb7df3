"""The experts of a mixture-of-experts model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from models.errors import STRICT_SECTION, UserError
from models.rope_scaling import MAX_SIZE

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
    output_scale: float = 1.0
    """Factor of the weights of the experts' outputs, such as 2.5 in DeepSeek-V3."""
    bias_update: float = 0.0
    """With `router = "sigmoid"`, amount by which each step raises the bias of an expert with fewer
    tokens of the global batch than the mean, and lowers that of one with more (arXiv 2408.15664,
    algorithm 1); 0.001 is typical."""
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
            if getattr(self, key) < 0:
                raise UserError(f"{key} = {getattr(self, key)} is below 0; use {key} = 0")
        if self.output_scale <= 0:
            raise UserError(
                f"output_scale = {self.output_scale} is not above 0; use output_scale = 1.0"
            )
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
