"""Text of datasheet files that are written from measurements."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from models.errors import toml_value
from threefold.gpus.datasheet import Gpu

EFFICIENCIES = (  # keys of [efficiency], in the order of a file
    "matmul_efficiency", "matmul_tile_cost", "matmul_depth_cost", "wave_quantization",
    "unaligned_efficiency", "attention_efficiency", "memory_efficiency", "kernel_seconds",
    "node_link_efficiency", "network_efficiency", "network_contention",
    "node_link_latency_seconds", "network_latency_seconds", "straggling",
)  # fmt: skip


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a datasheet."""
    return folder / (name.lower().replace("-", "_") + ".toml")


def datasheet_text(gpu: Gpu, *, comment: Sequence[str], measured: Sequence[str]) -> str:
    """Return a whole datasheet.

    Args:
        gpu: the values
        comment: lines at the top
        measured: keys of [efficiency] that were measured
    """
    heads = [field.name for field in fields(gpu) if field.name not in EFFICIENCIES]
    lines = [f"# {line}" for line in comment]
    lines += [f"{key} = {toml_value(getattr(gpu, key))}" for key in heads]
    lines += ["", *efficiency_lines(gpu, comment=["Measured:"], measured=measured)]
    return "\n".join(lines) + "\n"


def efficiency_lines(gpu: Gpu, *, comment: Iterable[str], measured: Sequence[str]) -> list[str]:
    """Return the section [efficiency]: first the measured keys, then the others.

    Args:
        gpu: the values
        comment: lines before the section
        measured: keys that were measured
    """
    kept = [key for key in EFFICIENCIES if key not in measured]
    return [
        *(f"# {line}" for line in comment),
        "[efficiency]",
        *(f"{key} = {toml_value(rounded(getattr(gpu, key)))}" for key in measured),
        "# Not measured:",
        *(f"{key} = {toml_value(getattr(gpu, key))}" for key in kept),
    ]


def rounded(value: float, digits: int = 3) -> float:
    """Round to `digits` significant digits, because more are not reproducible."""
    return float(f"{value:.{digits}g}")


def processor_name() -> str:
    """Return the CPU's name."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
