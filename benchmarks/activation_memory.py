"""Measure the activation memory of a block, and compare it with published formulas.

One rank of eight tensor ranks runs a stack of blocks of the 22B model of Korthikanti et al. 2022
(arXiv 2205.05198, table 3) forward and backward under fake tensors: no memory is used, every
allocation is counted. The growth of the peak per block stands next to their formula (section 4; s
sequence, b micro-batch, h hidden, a heads, t tensor ranks, in bytes of bf16), so that memory held
only once per step, such as that of the block being recomputed, does not count.

    python benchmarks/activation_memory.py
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # avoids DeepSpeed's message about its search

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.attention import ModelAxes
from models.config import ModelConfig
from models.layer_specs import run_layers
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo
from models.transformer import Block
from threefold.runtime.output import stdout_for_json
from threefold.trace.fake_cluster import empty_tables
from threefold.trace.trace import AllocationCounter

MODEL = ModelConfig(
    layers=48,
    hidden_size=6144,
    heads=64,
    kv_heads=64,
    ffn_hidden_size=4 * 6144,
    vocab_size=51200,
    sequence_length=2048,
    norm="layernorm",
    positions="learned",
    activation="gelu",
    bias=True,
    tie_embeddings=True,
    dropout=0.1,
    attention_dropout=0.1,
)
S, B, H, A = MODEL.sequence_length, 4, MODEL.hidden_size, MODEL.heads
BLOCKS = 1  # the peak of this number of blocks is compared with that of twice the number
FORMULAS = {  # (sequence parallel, recomputation) -> bytes per block over t tensor ranks
    (False, "none"): lambda t: S * B * H * (10 + 24 / t + 5 * A * S / (H * t)),
    (True, "none"): lambda t: S * B * H / t * (34 + 5 * A * S / H),
    (False, "selective"): lambda t: S * B * H * (10 + 24 / t),
    (True, "selective"): lambda t: S * B * H / t * 34,
    (False, "full"): lambda t: S * B * H * 2,
    (True, "full"): lambda t: S * B * H * 2 / t,
}


def peak_bytes(blocks: int, tensor: int, sequence_parallel: bool, recompute: str) -> int:
    """Return the peak bytes of a forward and a backward pass beyond weights and gradients."""
    group = dist.group.WORLD if tensor > 1 else None
    axis = TensorAxis(group, 0, tensor, sequence_parallel)
    with empty_tables(), FakeTensorMode(), torch.device("cpu"):
        torch.set_default_dtype(torch.bfloat16)
        layers = [
            Block(MODEL, ModelAxes(tensor=axis), number=i, recompute_core=recompute == "selective")
            for i in range(blocks)
        ]
        torch.set_default_dtype(torch.float32)
        for layer in layers:
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(forget_gradient)
        length = S // tensor if sequence_parallel else S
        x = torch.empty(length, B, H, dtype=torch.bfloat16, requires_grad=True)
        interval = 1 if recompute == "full" else 0
        held = [x, *(parameter for layer in layers for parameter in layer.parameters())]
        counter = AllocationCounter()
        counter.ignore(held)
        with counter:
            info = MicroBatchInfo(dropout=MaskKey(seed=0, samples=range(B)))
            y = run_layers(layers, x, info=info, recompute_interval=interval)
            y.backward(torch.empty_like(y))
        return counter.peak


def forget_gradient(parameter: torch.nn.Parameter) -> None:
    """Free a weight's gradient at once, because it is not an activation."""
    parameter.grad = None


def rows() -> list[dict[str, Any]]:
    """Return the counted and the predicted memory per block on one and on eight tensor ranks."""
    found = []
    for tensor in (1, 8):
        if tensor > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor)
        for (split, recompute), formula in FORMULAS.items():
            if split and tensor == 1:
                continue
            few, many = (peak_bytes(n, tensor, split, recompute) for n in (BLOCKS, 2 * BLOCKS))
            counted = (many - few) / BLOCKS
            found.append(
                {
                    "tensor": tensor,
                    "sequence_parallel": split,
                    "recompute": recompute,
                    "counted_mib": counted / 2**20,
                    "formula_mib": formula(tensor) / 2**20,
                    "counted_over_formula": counted / formula(tensor),
                }
            )
    dist.destroy_process_group()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with stdout_for_json(options.json):
        table = rows()
    if options.json:
        print(json.dumps({"rows": table}))
        return
    print("| tensor | sequence parallel | recompute | MiB per block | formula | ratio | of none |")
    print("|---|---|---|---|---|---|---|")
    none = {
        row["tensor"]: row["counted_mib"] for row in reversed(table) if row["recompute"] == "none"
    }
    for row in table:
        split = "yes" if row["sequence_parallel"] else "no"
        print(
            f"| {row['tensor']} | {split} | {row['recompute']} | {row['counted_mib']:.1f} | "
            f"{row['formula_mib']:.1f} | {row['counted_over_formula']:.3f} | "
            f"{row['counted_mib'] / none[row['tensor']]:.3f} |"
        )


if __name__ == "__main__":
    main()
