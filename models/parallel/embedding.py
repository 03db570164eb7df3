"""The token embedding with its vocabulary split over the tensor axis."""

from torch import Tensor, nn

from models.kernels.embedding import look_up
from models.parallel.collectives import TensorAxis, leave_tensor_region
from models.parallel.layers import column_parallel_matmul
from models.roles import Role
from models.sharding import Sharding, declared_parameter


class VocabParallelEmbedding(nn.Module):
    """One [v/t, h] part of the embedding table; serves as the output layer too.

    s sequence, b micro-batch, h hidden, v padded vocabulary, t tensor ranks. `embed` communicates
    as a row-parallel linear layer does, `logits` as a column-parallel one.

    Rows beyond `vocab_size` are zero and are never looked up. A table that is tied to the output
    layer is an input matrix.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_vocab_size: int,
        axis: TensorAxis,
        role: Role = "input",
    ):
        super().__init__()
        self.axis = axis
        shape = (vocab_size, hidden_size)
        sharding = Sharding(shape, 0, (vocab_size,), padded_vocab_size, role=role)
        self.weight = declared_parameter(sharding, axis.size)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up [b, s] token ids: [s, b, h] (s/t under sequence parallelism)."""
        tokens = tokens.t()  # [s, b]
        if self.axis.size == 1:
            return look_up(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - self.axis.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        x = look_up(local.masked_fill(elsewhere, 0), self.weight)
        return leave_tensor_region(x.masked_fill_(elsewhere.unsqueeze(-1), 0), self.axis)

    def logits(self, x: Tensor) -> Tensor:
        """Project [s, b, h] (s/t under sequence parallelism) to [s, b, v/t]."""
        return column_parallel_matmul(x, self.weight, None, axis=self.axis, deferral=None)
