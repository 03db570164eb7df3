"""Tables of memory by formula, which papers print: ZeRO's figure 1, Korthikanti's figures 1 and 7.

They have no rows of runs, but a model's name, what is counted, and how much it is.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.cost import block_parameters
from models.errors import UserError
from recipes.planning.inputs.footprint import MEGATRON
from recipes.planning.inputs.job import Spread
from recipes.planning.measured.evaluation import mean, percent
from recipes.planning.measured.row_reader import ARCHITECTURES, number
from recipes.planning.measured.table import columns_of, read_cells
from recipes.planning.memory.activations import activation_bytes, micro_batches_in_flight
from recipes.planning.memory.peak import GIB, state_bytes

# Korthikanti et al. 2022 (arXiv 2205.05198), table 3: layers, hidden, heads, pipeline, chunks,
# micro-batch; tensor is 8, the sequence 2,048.
KORTHIKANTI = {
    "22B": (48, 6144, 64, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 3, 1),
    "530B": (105, 20480, 128, 35, 3, 1),
    "1T": (128, 25600, 160, 64, 1, 1),
}
WAYS = {  # what a row calls it -> sequence parallel, recomputation
    "activations, no recompute, no SP": (False, "none"),
    "activations, SP+selective": (True, "selective"),
    "SP": (True, "none"),
    "selective": (False, "selective"),
    "SP+selective": (True, "selective"),
    "full recompute": (False, "full"),
}


def is_closed_form(path: Path) -> bool:
    """Whether a file has such rows."""
    columns = columns_of(path)
    return {"model", "stage", "gb_per_gpu"} <= set(columns) or {
        "model",
        "what",
        "value",
        "unit",
    } <= set(columns)


def evaluate(path: Path) -> dict[str, Any]:
    """Predict all rows of a table, next to the values that it prints.

    Raises:
        UserError: a model, a quantity or a value that cannot be read, with file and row.
    """
    rows = []
    for row, cells in enumerate(read_cells(path), start=1):
        try:
            predicted, printed = zero(cells) if "stage" in cells else korthikanti(cells)
        except UserError as error:
            raise UserError(f"{path}, row {row}: {error}") from None
        rows.append(
            {
                "row_id": f"{path.stem}-{row:04}",
                "predicted_memory_gb": predicted,
                "measured_memory_gb": printed,
                "memory_error_percent": percent(predicted / printed - 1),
            }
        )
    errors = [abs(row["memory_error_percent"]) for row in rows]
    return {
        "rows": rows,
        "summary": {
            "rows": len(rows),
            "memory_compared": len(rows),
            "memory_mean_absolute_error_percent": mean(errors),
            "memory_max_absolute_error_percent": max(errors, default=None),
            "skipped": 0,
        },
    }


def zero(cells: dict[str, str]) -> tuple[float, float]:
    """Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: GB of 10^9 bytes.

    The model's billions of parameters and the data ranks are in its name ("7.5B, ... Nd=64").
    """
    name = cells["model"]
    size = re.match(r"([0-9]{1,9}(?:\.[0-9]+)?)B", name)
    ranks = re.search(r"Nd=([1-9][0-9]{0,8})(?![0-9])", name)
    if not size or not ranks:
        raise UserError(f'model = "{name}" says no size or no ranks; use "7.5B, Nd=64"')
    if cells["stage"].strip() not in ("0", "1", "2", "3"):
        raise UserError(f'stage = "{cells["stage"]}" is not a ZeRO stage; use 0, 1, 2 or 3')
    # Their gradients are in 16 bits.
    footprint = replace(MEGATRON, gradient=2)
    spread = Spread(data=int(ranks[1]), zero_stage=int(cells["stage"]))
    held = sum(state_bytes(footprint, spread, float(size[1]) * 1e9))
    return held / 1e9, _printed(
        cells, "closed_form_gb" if cells.get("closed_form_gb") else "gb_per_gpu"
    )


def _printed(cells: dict[str, str], key: str) -> float:
    found = number(cells[key])
    if not found:
        raise UserError(f'{key} = "{cells[key]}" is not a number above 0; use 16.6, for example')
    return found


def korthikanti(cells: dict[str, str]) -> tuple[float, float]:
    """Korthikanti et al. 2022 (arXiv 2205.05198), figures 1 (GiB) and 7 (percent), first stage."""
    if cells["model"] not in KORTHIKANTI:
        raise UserError(f'model = "{cells["model"]}" is none of {", ".join(KORTHIKANTI)}')
    layers, hidden, heads, pipeline, chunks, micro_sequences = KORTHIKANTI[cells["model"]]
    model = ModelConfig(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=51200,
        sequence_length=2048,
        **ARCHITECTURES["gpt"],
    )
    base = Spread(
        tensor=8,
        pipeline=pipeline,
        chunks=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        zero_stage=0,
        micro_sequences=micro_sequences,
    )
    flying = micro_batches_in_flight(base, 0, 64 * pipeline) * layers / pipeline

    def activations(way: str) -> float:
        split, recompute = WAYS[way]
        spread = replace(base, sequence_parallel=split, recompute=recompute)
        return flying * activation_bytes(model, spread, MEGATRON, fused_attention=False)

    quantities: dict[str, Callable[[], float]] = {
        "params+optimizer": lambda: sum(
            state_bytes(MEGATRON, base, layers // pipeline * block_parameters(model, 8))
        )
    }
    what, printed = cells["what"], _printed(cells, "value")
    if what in quantities:
        return quantities[what]() / GIB, printed
    if what not in WAYS:
        raise UserError(f'what = "{what}" is none of params+optimizer, {", ".join(WAYS)}')
    if cells["unit"].startswith("%"):
        return 100 * activations(what) / activations("activations, no recompute, no SP"), printed
    return activations(what) / GIB, printed
