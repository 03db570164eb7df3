"""Tables of published measurements: each row as a job, and predicted beside what was measured.

A table is a CSV file with a line per run. What decides its time is in these columns, of which all
but those in brackets must be there:

    row_id               a name for the run
    framework            begins as a stack of `software.py`, such as "Megatron-DeepSpeed"
    [arch]               begins with "gpt" (GPT-2's switches) or "llama"
    layers hidden heads [kv_heads] ffn [vocab] seq
    gpu [gpu_mem_gb]     contains a name of `gpus/`, such as "A100"; 40 or 80 tells two apart
    gpus [gpus_per_node]
    [intra_gbps_unidir]  gigabytes/s between GPUs of a node, each GPU, one direction
    [inter_gbps_per_gpu] gigabytes/s between nodes, each GPU, one direction
    precision            contains "bf16" or "fp16"
    [attention_kernel]   contains "flash" or "unfused"
    tp pp [vpp] [cp] [dp]  tensor, pipeline, chunks, context, data ranks
    [zero_stage] [seq_parallel] [recompute]  0 .. 3; 0 or 1; "none", "selective" or "full"
    mbs gbs              sequences of a micro-batch and of a step

and what was measured in step_time_s, mem_gb, mem_kind and oom, all of which may be missing.
Predictions look at the former alone.
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from models.config import ModelConfig
from recipes.planning.hardware import Gpu, gpus
from recipes.planning.job import Job, Machine, Spread
from recipes.planning.memory import GIB, fullest_stage
from recipes.planning.software import STACKS, Software

VOCABULARY = 51200  # Megatron's padded GPT-2 vocabulary
ARCHITECTURES = {  # beginning of the arch column -> switches of ModelConfig
    "llama": {
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
    },
    "gpt": {
        "norm": "layernorm",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
    },
}
NEEDED = {  # columns; others may be missing
    "row_id", "framework", "precision", "gpu", "gpus", "layers", "hidden", "heads", "ffn", "seq",
    "tp", "pp", "mbs", "gbs",
}  # fmt: skip
RECOMPUTATIONS = ("none", "selective", "full")  # from least to most


@dataclass(frozen=True)
class Row:
    """A row of a table, and the job that it describes.

    measured: what the result columns say; for comparison only
    assumed: what the row leaves open, and how it was read
    skipped: why it cannot be predicted; empty otherwise
    """

    row_id: str
    measured: "Measured"
    job: Job | None = None
    assumed: tuple[str, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class Measured:
    """The result columns of a row; None: empty.

    memory_kind: how memory was measured, for instance "nvidia-smi"
    """

    step_seconds: float | None
    memory_gib: float | None
    memory_kind: str
    out_of_memory: bool


def read_table(path: Path) -> list[Row]:
    """All rows of a table.

    Raises:
        ValueError: the file is no table, or lacks a column.
    """
    if missing := NEEDED - columns_of(path):
        raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; it is no table of runs")
    with path.open(newline="", encoding="utf-8") as file:
        return [read_row(cells) for cells in csv.DictReader(file, restval="")]


def is_table_of_runs(path: Path) -> bool:
    """Whether a file has the columns of runs."""
    return columns_of(path) >= NEEDED


def columns_of(path: Path) -> set[str]:
    """The columns of a CSV file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return set(next(csv.reader(file), []))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; use a .csv file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: this is no CSV file: {error}") from None


def read_row(cells: dict[str, str]) -> Row:
    """One row, which may turn out to lack what a prediction needs."""
    reader = _Reader(cells)
    usable = cells.get("usable_for_time", "1") != "0"
    measured = Measured(
        step_seconds=number(cells.get("step_time_s")) if usable else None,
        memory_gib=number(cells.get("mem_gb")),
        memory_kind=cells.get("mem_kind") or "",
        out_of_memory=number(cells.get("oom")) == 1,
    )
    try:
        job = reader.job()
    except ValueError as error:
        return Row(cells["row_id"], measured, None, tuple(reader.assumed), str(error))
    return Row(cells["row_id"], measured, job, tuple(reader.assumed))


def number(cell: str | None) -> float | None:
    """The number that a cell begins with: "4 (presumed)" is 4."""
    found = re.match(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)", cell or "")
    return float(found[1]) if found else None


class _Reader:
    """Reads the cells of a row, and remembers what it had to assume."""

    def __init__(self, cells: dict[str, str]):
        self.cells = cells
        self.assumed: list[str] = []

    def job(self) -> Job:
        """The job of the row.

        Raises:
            ValueError: what is missing, or not modelled.
        """
        software = self.software()
        precision = next((p for p in ("bf16", "fp16") if p in self.cells["precision"]), None)
        if precision is None:
            raise ValueError(f"precision {self.cells['precision'] or 'empty'} is not modelled")
        machine = self.machine()
        job = Job(
            model=self.model(),
            machine=machine,
            spread=self.spread(machine.gpus),
            global_sequences=self.whole("gbs"),
            precision=precision,
            software=software,
            optimizer_group=self.optimizer_group(),
        )
        return self.with_recomputation(job)

    def whole(self, key: str) -> int:
        """A whole number that must be there."""
        found = number(self.cells.get(key))
        if found is None or found != int(found) or found < 1:
            raise ValueError(f"{key} is {self.cells.get(key) or 'empty'}")
        return int(found)

    def usual(self, key: str, usual: float, why: str) -> float:
        """A number that has a usual value."""
        found = number(self.cells.get(key))
        if found is None:
            self.assumed.append(f"{key} = {usual:g} ({why})")
            return usual
        return found

    def software(self) -> Software:
        """The stack whose name the framework begins with, with the row's attention kernel."""
        framework, kernel = self.cells["framework"], self.cells.get("attention_kernel") or ""
        stack = next((s for s in STACKS if framework.startswith(s.framework)), None)
        if stack is None:
            raise ValueError(f"framework {framework or 'empty'} is not modelled")
        if "unfused" in kernel:
            return replace(stack, fused_attention=False, attention_dropout=True)
        return replace(stack, fused_attention=True) if "flash" in kernel else stack

    def gpu(self) -> Gpu:
        """The hardware file of the row's GPU."""
        name, memory = self.cells["gpu"].lower(), number(self.cells.get("gpu_mem_gb"))
        for gpu in gpus():
            family, _, size = gpu.name.lower().partition("-")
            if not re.search(rf"(?<![a-z]){family}(?![0-9])", name):
                continue
            if not size or memory is None or memory == number(size):
                return gpu
        raise ValueError(f"gpu {self.cells['gpu'] or 'empty'} has no hardware file")

    def machine(self) -> Machine:
        """The GPUs and their links."""
        gpu = self.gpu()
        node_link, network = "node_link_gigabytes_per_second", "network_gigabytes_per_second"
        return Machine(
            gpu=gpu,
            gpus=self.whole("gpus"),
            gpus_per_node=int(self.usual("gpus_per_node", 8, "usual")),
            node_link_gigabytes_per_second=self.usual(
                "intra_gbps_unidir", getattr(gpu, node_link), f"a usual {gpu.name} node's"
            ),
            network_gigabytes_per_second=self.usual(
                "inter_gbps_per_gpu", getattr(gpu, network), f"a usual {gpu.name} node's"
            ),
            network_contention=gpu.network_contention,
        )

    def model(self) -> ModelConfig:
        """The shape of the model."""
        arch = self.cells.get("arch") or "gpt"
        switches = next((v for k, v in ARCHITECTURES.items() if arch.startswith(k)), None)
        if switches is None:
            raise ValueError(f"arch {arch} is not modelled")
        heads = self.whole("heads")
        vocabulary = number(self.cells.get("vocab"))
        if vocabulary is None:
            vocabulary = self.usual("vocab", VOCABULARY, "Megatron's GPT-2 vocabulary")
        return ModelConfig(
            layers=self.whole("layers"),
            hidden_size=self.whole("hidden"),
            heads=heads,
            kv_heads=int(self.usual("kv_heads", heads, "as many as heads")),
            ffn_hidden_size=self.whole("ffn"),
            vocab_size=int(vocabulary),
            sequence_length=self.whole("seq"),
            **switches,
        )

    def spread(self, count: int) -> Spread:
        """The layout."""
        tensor, pipeline = self.whole("tp"), self.whole("pp")
        if (number(self.cells.get("kv_heads")) or tensor) % tensor:
            raise ValueError(
                f"kv_heads = {self.cells['kv_heads']} over tp = {tensor} is not modelled"
            )
        context = int(number(self.cells.get("cp")) or 1)
        rest = count // (tensor * pipeline * context)
        data = int(self.usual("dp", rest, "what is left of the GPUs"))
        if tensor * pipeline * context * data != count:
            raise ValueError(
                f"tp x pp x cp x dp = {tensor * pipeline * context * data} and gpus = {count}"
            )
        zero = self.cells.get("zero_stage") or ""
        chunks = int(self.usual("vpp", 1, "no interleaving")) if pipeline > 1 else 1
        return Spread(
            tensor=tensor,
            pipeline=pipeline,
            chunks=chunks,
            context=context,
            data=data,
            zero_stage=int(self.usual("zero_stage", 3 if "FSDP" in zero else 0, "as read")),
            sequence_parallel=number(self.cells.get("seq_parallel")) == 1,
            recompute="none",
            micro_sequences=int(self.usual("mbs", 1, "unstated")),
        )

    def optimizer_group(self) -> int | None:
        """Ranks that share the optimizer's state, where it is not all data ranks."""
        found = re.search(r"zero1=([0-9]+)", self.cells.get("zero_stage") or "")
        return int(found[1]) if found else None

    def with_recomputation(self, job: Job) -> Job:
        """The row's recomputation or, where it is unstated, the least with which the job fits."""
        stated = self.cells.get("recompute") or ""
        choices = {
            each: replace(job, spread=replace(job.spread, recompute=each))
            for each in RECOMPUTATIONS
        }
        for each, choice in choices.items():
            if stated.startswith(each):
                return choice
        memory = job.machine.gpu.memory_gib * GIB
        least = next(
            (each for each, choice in choices.items() if fullest_stage(choice).total <= memory),
            "full",
        )
        self.assumed.append(f"recompute = {least} (the least that fits)")
        return choices[least]
