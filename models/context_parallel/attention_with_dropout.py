"""Attention whose probabilities are dropped, with masks that do not depend on the layout.

b micro-batch, a query heads, g key-value heads, n queries, s sequence, d head size.
"""

import torch
from torch import Tensor

from models.kernels.compile import Function
from models.kernels.dropout import drop_out
from models.parallel.micro_batch_info import MicroBatchInfo, positions_in
from models.parallel.rng import attention_rows, token_positions


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    probability: float,
    info: MicroBatchInfo,
    layer: str,
    first_head: int,
    fuse: Function,
) -> Tensor:
    """Return the attention of q [b, a, n, d] to k and v [b, g, s, d]: [b, a, n, d].

    The probabilities [b, a, n, s] are materialised, because the masks of a fused kernel would
    depend on the layout.

    Args:
        q: queries of the tokens in `info.slices`
        k: keys of whole sequences
        v: values of whole sequences
        probability: of dropping an element
        info: dropout key, documents and slices of the micro-batch
        layer: the name of the layer
        first_head: number of the first query head within the logical model
        fuse: compiles element-wise functions
    """
    (b, a, n, d), (g, s) = q.shape, k.shape[1:3]
    assert info.dropout is not None
    q = q.reshape(b * g, (a // g) * n, d)  # each group's heads under its key and value
    k, v = k.reshape(b * g, s, d), v.reshape(b * g, s, d)
    # The scores are scaled before they are rounded, because fp16 ends at 65504.
    scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=d**-0.5)
    scores = scores.view(b, a, n, s)
    everywhere = token_positions((range(s),), q.device)
    here = everywhere if info.slices is None else token_positions(info.slices, q.device)
    hidden = here[:, None] < everywhere  # the future, [n, s]
    if info.documents is not None:
        starts = everywhere - positions_in(info.documents, q.device).t()  # of documents, [b, s]
        hidden = hidden | (starts[:, None, here, None] != starts[:, None, None, :])  # [b, 1, n, s]
    probabilities = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
    rows = attention_rows(
        probabilities,
        key=info.dropout,
        layer=layer,
        first_head=first_head,
        fuse=fuse,
        slices=info.slices,
    )
    probabilities = drop_out(probabilities, rows, probability, fuse)
    return torch.bmm(probabilities.view(b * g, -1, s), v).view(b, a, n, d)
