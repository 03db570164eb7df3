"""Comparison of predictions with tables of measurements, and with published closed forms.

Their rows do not describe runs. Each row names a model and a quantity, and gives its value.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.cost import block_parameters
from models.errors import UserError
from threefold.plan.calibration import fit
from threefold.plan.calibration.fit import Calibration, mean
from threefold.plan.calibration.runs_table import (
    architecture_switches,
    columns_of,
    is_table_of_runs,
    number,
    read_cells,
    read_table,
)
from threefold.plan.job import JobLayout
from threefold.plan.memory.activations import activation_bytes, micro_batches_in_flight
from threefold.plan.memory.model_states import state_bytes
from threefold.plan.memory.peak import GIB
from threefold.plan.software import MEGATRON

# Korthikanti et al. 2022 (arXiv 2205.05198), table 3: layers, hidden, heads, pipeline, chunks,
# micro-batch; tensor is 8, the sequence 2,048.
KORTHIKANTI_MODELS = {
    "22B": (48, 6144, 64, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 3, 1),
    "530B": (105, 20480, 128, 35, 3, 1),
    "1T": (128, 25600, 160, 64, 1, 1),
}
ACTIVATION_QUANTITIES = {  # quantity of a row -> sequence parallelism, recomputation
    "activations, no recompute, no SP": (False, "none"),
    "activations, SP+selective": (True, "selective"),
    "SP": (True, "none"),
    "selective": (False, "selective"),
    "SP+selective": (True, "selective"),
    "full recompute": (False, "full"),
}


def is_closed_form(path: Path) -> bool:
    """Return True if a file has the columns of a table of memory by formula."""
    columns = columns_of(path)
    return {"model", "stage", "gb_per_gpu"} <= set(columns) or {
        "model",
        "what",
        "value",
        "unit",
    } <= set(columns)


def evaluate(path: Path) -> dict[str, Any]:
    """Predict all rows of a table, and compare them with its values.

    Raises:
        UserError: the model, the quantity or the value of a row cannot be read.
    """
    rows: list[dict[str, Any]] = []
    errors: list[float] = []
    for row, cells in enumerate(read_cells(path), start=1):
        try:
            predicted, printed = zero(cells) if "stage" in cells else korthikanti(cells)
        except UserError as error:
            raise UserError(f"{path}, row {row}: {error}") from None
        deviation = 100 * (predicted / printed - 1)
        errors.append(abs(deviation))
        rows.append(
            {
                "row_id": f"{path.stem}-{row:04}",
                "predicted_memory_gb": predicted,
                "measured_memory_gb": printed,
                "memory_error_percent": deviation,
            }
        )
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
    """Return the predicted and the printed value of a row of ZeRO's figure 1.

    Rajbhandari et al. 2020 (arXiv 1910.02054), in GB of 10^9 bytes. The model's name contains its
    number of parameters in billions and the number of data ranks ("7.5B, ... Nd=64").
    """
    name = cells["model"]
    size = re.match(r"([0-9]{1,9}(?:\.[0-9]+)?)B", name)
    ranks = re.search(r"Nd=([1-9][0-9]{0,8})(?![0-9])", name)
    if not size or not ranks:
        raise UserError(
            f'model = "{name}" lacks the size or the number of ranks; use "7.5B, Nd=64"'
        )
    if cells["stage"].strip() not in ("0", "1", "2", "3"):
        raise UserError(f'stage = "{cells["stage"]}" is not a ZeRO stage; use 0, 1, 2 or 3')
    # The paper's gradients have 16 bits.
    footprint = replace(MEGATRON, gradient=2)
    layout = JobLayout(data=int(ranks[1]), zero_stage=int(cells["stage"]))
    held = sum(state_bytes(footprint, layout, float(size[1]) * 1e9))
    return held / 1e9, _printed(
        cells, "closed_form_gb" if cells.get("closed_form_gb") else "gb_per_gpu"
    )


def _printed(cells: dict[str, str], key: str) -> float:
    found = number(cells[key])
    if not found:
        raise UserError(f'{key} = "{cells[key]}" is not a number above 0; use 16.6, for example')
    return found


def korthikanti(cells: dict[str, str]) -> tuple[float, float]:
    """Return the predicted and the printed value of a row of Korthikanti's figures 1 and 7.

    Korthikanti et al. 2022 (arXiv 2205.05198): GiB (figure 1) or percent (figure 7) of the first
    stage.
    """
    if cells["model"] not in KORTHIKANTI_MODELS:
        raise UserError(
            f'model = "{cells["model"]}" is not known; use one of {", ".join(KORTHIKANTI_MODELS)}'
        )
    layers, hidden, heads, pipeline, virtual_stages, micro_sequences = KORTHIKANTI_MODELS[
        cells["model"]
    ]
    model = ModelConfig(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=51200,
        sequence_length=2048,
        **architecture_switches("gpt"),
    )
    base = JobLayout(
        tensor=8,
        pipeline=pipeline,
        virtual_stages=virtual_stages,
        schedule="interleaved" if virtual_stages > 1 else "1f1b",
        zero_stage=0,
        micro_sequences=micro_sequences,
    )
    kept_blocks = micro_batches_in_flight(base, 0, 64 * pipeline) * layers / pipeline

    def activations(quantity: str) -> float:
        split, recompute = ACTIVATION_QUANTITIES[quantity]
        layout = replace(base, sequence_parallel=split, recompute=recompute)
        return kept_blocks * activation_bytes(model, layout, MEGATRON, fused_attention=False)

    quantity, printed = cells["what"], _printed(cells, "value")
    if quantity == "params+optimizer":
        parameters = layers // pipeline * block_parameters(model, 8)
        return sum(state_bytes(MEGATRON, base, parameters)) / GIB, printed
    if quantity not in ACTIVATION_QUANTITIES:
        names = ", ".join(ACTIVATION_QUANTITIES)
        raise UserError(f'what = "{quantity}" is not known; use one of params+optimizer, {names}')
    if cells["unit"].startswith("%"):
        whole = activations("activations, no recompute, no SP")
        return 100 * activations(quantity) / whole, printed
    return activations(quantity) / GIB, printed


# Comparison of predictions with one table of measurements, or with all tables of a folder.


def compare(path: Path, factors: Calibration) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Predict the runs of a table, or of all tables in a folder.

    Returns:
        name -> rows and errors of each table, and the files that are not tables

    Raises:
        UserError: there is no table, or a table cannot be read.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    left_out = [file for file in files if path.is_dir() and not is_table(file)]
    results = {file.stem: compared(file, factors) for file in files if file not in left_out}
    if not results:
        raise UserError(f"{path}: the folder has no table of runs; use another folder")
    return results, left_out


def compared(path: Path, factors: Calibration) -> dict[str, Any]:
    """Return the rows and the errors of a table."""
    if is_closed_form(path):
        return evaluate(path)
    rows = read_table(path)
    predictions = fit.predict(rows, factors)
    return {
        "rows": [fit.row_table(each) for each in predictions],
        "summary": fit.summary(rows, predictions),
    }


def is_table(path: Path) -> bool:
    """Return True if a file is a table of runs or of memory by formula."""
    return is_closed_form(path) or is_table_of_runs(path)
