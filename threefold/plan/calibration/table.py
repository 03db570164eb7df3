"""Tables of measured runs: each row describes a job and its measured time and memory.

A table is a CSV file with a line per run. These columns describe the job; columns in brackets are
optional:

    row_id               a name for the run
    framework            begins with a `framework` of `software.py`, such as "Megatron-DeepSpeed"
    [arch]               begins with "gpt" (GPT-2's switches) or "llama"
    layers hidden heads [kv_heads] [head_size] ffn [vocab] seq
    [tie_embeddings] [qk_norm]  0 or 1
    [params_b]           billions of parameters, only to label pictures
    gpu [gpu_mem_gb]     contains a name of `gpus/`, such as "A100"; memory selects the variant
    gpus [gpus_per_node]
    [intra_gbps_unidir]  gigabytes/s between GPUs of a node, each GPU, one direction
    [inter_gbps_per_gpu] gigabytes/s between nodes, each GPU, one direction
    precision            contains "bf16", "fp16" or "fp32"
    [attention_kernel]   contains "flash" or "unfused"
    tp pp [vpp] [cp] [dp]  tensor, pipeline, chunks, context, data ranks
    [experts] [experts_per_token] [expert_ffn] [shared_experts] [dense_layers] [ep] [etp]
    [ep_overlap]         mixture of experts, the ranks that divide the experts, the tensor ranks
                         that divide each expert, and 1 if other passes hide the exchanges
    [cp_kind]            "gather", "ring" (default) or "ulysses"
    [schedule] [layers_per_stage]  a schedule of Threefold; blocks of each virtual stage, "3 4 4"
    [zero_stage] [seq_parallel] [recompute]  0 .. 3; 0 or 1; "none", "selective" or "full"
    [recompute_interval]  blocks that are recomputed together
    mbs gbs              sequences of a micro-batch and of a step

The optional columns step_time_s, mfu_pct, mem_gb (GiB) and oom hold the measurements; predictions
do not read them. If a row has an MFU and no time, the time is computed from the MFU with the FLOPs
of `models.cost.flops_per_token`. If mem_kind says "reserved" or "allocated", mem_gb excludes the
memory of CUDA and NCCL. usable_for_time = 0 excludes a row's time from the comparison. A number may
be followed by words. A row with a cell that cannot be read is skipped.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from models.cost import flops_per_token
from models.errors import UserError, reason_of
from threefold.plan.calibration.runs_table import RowReader, is_no, is_yes, number
from threefold.plan.job import Job

REQUIRED_COLUMNS = {
    "row_id", "framework", "precision", "gpu", "gpus", "layers", "hidden", "heads", "ffn", "seq",
    "tp", "pp", "mbs", "gbs",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A row of a table and its job.

    Attributes:
        measured: the result columns, for comparison only
        job: the described job; None if the row is skipped
        assumed: values assumed for unstated cells
        skipped: reason why the row cannot be predicted; empty otherwise
        parameters: the number of parameters that the row states; None if it states none
    """

    row_id: str
    measured: "Measured"
    job: Job | None = None
    assumed: tuple[str, ...] = ()
    skipped: str = ""
    parameters: int | None = None


@dataclass(frozen=True)
class Measured:
    """The result columns of a row; None for an empty cell.

    Attributes:
        by_allocator: True if the memory is that of the caching allocator, without CUDA and NCCL
    """

    step_seconds: float | None
    memory_gib: float | None
    out_of_memory: bool
    by_allocator: bool = False


def read_table(path: Path) -> list[Row]:
    """Read all rows of a table.

    Raises:
        UserError: the file is not a table, or lacks a column.
    """
    if missing := REQUIRED_COLUMNS - columns_of(path):
        columns = ", ".join(sorted(missing))
        raise UserError(f"{path}: missing columns: {columns}; it is not a table of runs")
    return [read_row(cells) for cells in read_cells(path)]


def read_cells(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dictionaries column -> cell; missing cells are empty.

    Raises:
        UserError: the file is not valid CSV.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file, restval=""))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: this is not valid CSV: {reason_of(error)}") from None


def is_table_of_runs(path: Path) -> bool:
    """Return True if a file has the required columns of a table of runs."""
    return columns_of(path) >= REQUIRED_COLUMNS


def columns_of(path: Path) -> set[str]:
    """Return the columns of a CSV file.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return set(next(csv.reader(file), []))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; use a .csv file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: this is not valid CSV: {reason_of(error)}") from None


def read_row(cells: dict[str, str]) -> Row:
    """Read one row; it is marked as skipped if it does not describe a job."""
    reader = RowReader(cells)
    usable = not (cells.get("usable_for_time") and is_no(cells["usable_for_time"]))
    measured = Measured(
        step_seconds=(number(cells.get("step_time_s")) or None) if usable else None,
        memory_gib=number(cells.get("mem_gb")) or None,
        out_of_memory=is_yes(cells.get("oom")),
        by_allocator=any(word in cells.get("mem_kind", "") for word in ("reserved", "allocated")),
    )
    stated = reader.cell("step_time_s")
    try:
        job = reader.job()
        if stated and "unstated" not in stated and not number(stated):
            raise UserError(f"step_time_s is {stated}")
    except UserError as error:
        return Row(reader.cell("row_id"), measured, None, tuple(reader.assumed), str(error))
    if usable and measured.step_seconds is None:
        measured = replace(measured, step_seconds=seconds_of_mfu(job, cells))
    billions = number(cells.get("params_b"))
    return Row(
        reader.cell("row_id"),
        measured,
        job,
        tuple(reader.assumed),
        parameters=round(1e9 * billions) if billions else None,
    )


def seconds_of_mfu(job: Job, cells: dict[str, str]) -> float | None:
    """Return the step time that corresponds to the row's MFU; None if the row has no MFU.

    The FLOPs are those of the model without recomputation: 6 per weight of a matmul and token, and
    12 layers x hidden x sequence per token for attention, as nanotron and Megatron count them.

    Args:
        job: the job of the row
        cells: mfu_pct, and gpu_peak_tflops if the MFU refers to another peak than the datasheet's
    """
    share = number(cells.get("mfu_pct"))
    if not share:
        return None
    peak = number(cells.get("gpu_peak_tflops")) or job.machine.gpu.peak_tflops[job.precision]
    flops = flops_per_token(job.model) * job.tokens_per_step
    return flops / (share / 100 * peak * 1e12 * job.machine.gpus)
