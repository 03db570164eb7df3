"""Performance of GPUs: datasheet values, efficiency in practice, and the files that hold them."""

import platform
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from models.errors import UserError, reason_of, toml_line, toml_value

FOLDER = Path(__file__).with_name("datasheets")
MEASURED_MARK = "Written by `python recipes/sweep.py"  # in the first line of a file
# Device files of the drivers of NVIDIA, also in WSL (dxg), and of AMD (kfd).
DRIVER_FILES = ("dev/nvidia*", "dev/nvhost-*", "dev/dxg", "dev/kfd")
NVIDIA_FILES = "proc/driver/nvidia/gpus/*/information"  # each describes a GPU
EXAMPLES: dict[Any, tuple[tuple[type, ...], str]] = {  # type of a key -> Python types, a value
    str: ((str,), '"H100"'),
    float: ((int, float), "1.5"),
    int: ((int,), "132"),
    list[str]: ((list,), '["H100"]'),
    dict[str, float]: ((dict,), "{ bf16 = 989.0 }"),
}
OTHER_BOARDS = {  # slower boards of similar names, for the MFU of a run; dense peaks in TFLOP/s
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},  # NVIDIA V100 datasheet
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "fp32": 51.0},  # NVIDIA H100 datasheet
    "H100 NVL": {"bf16": 835.0, "fp16": 835.0, "fp32": 60.0},  # NVIDIA H100 datasheet
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Gpu:
    """A GPU model and its usual node, from a file in `datasheets/`.

    Rates are per GPU and, for links, in one direction. An efficiency is the share of the datasheet
    value that large operations reach; a latency is the lower bound of small operations.
    """

    name: str
    device_names: list[str]  # substrings of the driver's name of the device
    peak_tflops: dict[str, float]  # precision -> peak of dense matmuls
    memory_gib: float  # as reported by CUDA
    node_memory_gib: float  # host memory of a usual node
    context_gib: float  # memory of CUDA and NCCL themselves, estimated
    memory_gigabytes_per_second: float
    multiprocessors: int
    node_link_gigabytes_per_second: float
    network_gigabytes_per_second: float
    dollars_per_hour: float
    matmul_efficiency: float  # of large matmuls in 16 bits
    matmul_tile_cost: float  # of a tile's edge, in elements; small tiles read more per FLOP
    matmul_depth_cost: float  # of a tile's start and end, in elements of the inner dimension
    wave_quantization: float  # share of the empty part of the last wave of tiles that costs time
    unaligned_efficiency: float  # of matmuls whose rows are not multiples of 16 bytes
    attention_efficiency: float  # of a fused attention kernel, relative to matmuls
    memory_efficiency: float
    node_link_efficiency: float
    network_efficiency: float
    network_contention: float  # share left when several groups each use several links of a node
    kernel_seconds: float  # between two kernels
    node_link_latency_seconds: float
    network_latency_seconds: float
    straggling: float  # share of time lost to the slowest node, per doubling of the nodes
    # Of large matmuls in 8 and in 4 bits, relative to their own peaks.
    fp8_efficiency: float = 0.7
    fp4_efficiency: float = 0.5
    gpus_per_node: int = 8
    host_link_gigabytes_per_second: float = 0.0  # 0: too slow to hold activations on the host
    linked_gpus: int = 0  # GPUs of several nodes that the links of a node join; 0: those of a node

    @property
    def device(self) -> str:
        """Return the kind of device, as in `torch.device.type`; a CPU has no driver names."""
        return "cuda" if self.device_names else "cpu"


def load_gpu(name: str) -> Gpu:
    """Return the GPU of that name.

    Raises:
        UserError: the name is not known.
    """
    for gpu in gpus():
        if gpu.name == name:
            return gpu
    names = ", ".join(gpu.name for gpu in gpus())
    raise UserError(f'gpu = "{name}" is not known; use one of {names}')


def is_cpu(name: str) -> bool:
    """Return True if a `cluster.gpu` names a CPU: "cpu", or a datasheet without driver names."""
    return name.lower() == "cpu" or any(gpu.name == name and gpu.device == "cpu" for gpu in gpus())


def check_device(name: str, device: str) -> None:
    """Reject measurements on a CPU for the datasheet of a GPU, and the reverse.

    Args:
        name: the recipe's `cluster.gpu`, or --gpu
        device: kind of the measured device, as in `torch.device.type`

    Raises:
        UserError: the datasheet describes another kind of device.
    """
    if device == "cpu" and not is_cpu(name):
        raise UserError(
            f"{name} (--gpu or cluster.gpu) is a GPU, and the ranks run on CPUs; unset "
            f"DS_ACCELERATOR, or use --gpu cpu"
        )
    if device != "cpu" and is_cpu(name):
        raise UserError(
            f"{name} (--gpu or cluster.gpu) is a CPU, and the ranks run on GPUs; use "
            f"DS_ACCELERATOR=cpu, or name the GPU with --gpu"
        )


def gpus_of_name(name: str) -> list[Gpu]:
    """Return the GPUs that a name may mean which others have chosen, as in a published table.

    "H100" does not mean a datasheet such as "H100-links", which describes one cluster.
    """
    if exact := [gpu for gpu in gpus() if gpu.name == name]:
        return exact
    found = [
        gpu
        for gpu in published_gpus()
        if re.search(rf"(?<![a-z]){gpu.name.split('-')[0]}(?![0-9])", name, re.IGNORECASE)
    ]
    starts = tuple(f"{gpu.name}-" for gpu in found)
    words = name.lower()
    return [
        gpu
        for gpu in found
        if not gpu.name.startswith(starts)
        or all(part in words for part in gpu.name.lower().split("-"))
    ]


@cache
def published_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs whose datasheet was not written by `sweep.py links` for one cluster."""
    paths = sorted(FOLDER.glob("*.toml"))
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in paths}
    shipped = [path for path in paths if MEASURED_MARK not in texts[path].partition("\n")[0]]
    return tuple(map(read_gpu, shipped))


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return all GPUs with a file in `datasheets/`."""
    return tuple(read_gpu(path) for path in sorted(FOLDER.glob("*.toml")))


def read_gpu(path: Path) -> Gpu:
    """Read a datasheet file; its efficiency may be the name of another GPU.

    Raises:
        UserError: the file is not valid TOML, a key is missing or unknown, or a value has the
            wrong type.
    """
    table = _read_toml(path)
    efficiency = table.pop("efficiency", {})
    if isinstance(efficiency, str):
        other = FOLDER / (efficiency.lower().replace("-", "_") + ".toml")
        if not other.is_file():
            raise UserError(
                f'{path.name}: efficiency = "{efficiency}": there is no {other.name}; use the name '
                f"of a GPU whose file has one, such as H100, or a section [efficiency]"
            )
        efficiency = _read_toml(other).get("efficiency")
    if not isinstance(efficiency, dict):
        raise UserError(
            f"{path.name}: efficiency is not a table; add an [efficiency] section like the one in "
            f"h100.toml"
        )
    table |= efficiency
    known = {field.name for field in fields(Gpu)}
    required = {field.name for field in fields(Gpu) if field.default is MISSING}
    if wrong := (required - set(table)) | (set(table) - known):
        raise UserError(f"{path.name}: missing or unknown: {', '.join(sorted(wrong))}")
    for field in fields(Gpu):
        if field.name in table:
            _check_type(path, field.name, table[field.name], field.type)
    return Gpu(**table)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; remove it, or replace it with a datasheet"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path.name}: this is not valid TOML: {reason_of(error)}; compare it with h100.toml "
            f"in the same folder"
        ) from None


def _check_type(path: Path, key: str, value: Any, wanted: Any) -> None:
    types, example = EXAMPLES[wanted]
    contents = value.values() if wanted == dict[str, float] and isinstance(value, dict) else value
    inner = {dict[str, float]: (int, float), list[str]: (str,)}.get(wanted)
    right = isinstance(value, types) and not isinstance(value, bool)
    if right and inner is not None:
        right = all(isinstance(item, inner) and not isinstance(item, bool) for item in contents)
    if not right:
        raise UserError(
            f"{path.name}: {toml_line(key, value)} has the wrong type; write {key} = {example}"
        )


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Return a device's dense peak in TFLOP/s; None for a CPU or an unlisted GPU."""
    for name, peaks in OTHER_BOARDS.items():
        if name in device_name:
            return peaks.get(precision)
    gpu = gpu_of_device(device_name)
    return gpu.peak_tflops.get(precision) if gpu else None


def gpu_of_device(device_name: str) -> Gpu | None:
    """Return the GPU with the driver's name of a device; None for a CPU or an unlisted GPU."""
    return next((g for g in gpus() if any(name in device_name for name in g.device_names)), None)


def machine_has_gpu(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return True unless processes of this machine certainly find no GPU; needs no torch.

    Args:
        environment: `os.environ`
        root: the folder that holds dev/ and proc/
    """
    chosen = environment.get("DS_ACCELERATOR")
    if chosen or environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return chosen == "cuda"
    return any(any(root.glob(pattern)) for pattern in DRIVER_FILES)


def device_names_of_machine(root: Path = Path("/")) -> list[str]:
    """Return the driver's names of this machine's NVIDIA GPUs; needs no torch.

    root: the folder that holds proc/
    """
    texts = [
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(root.glob(NVIDIA_FILES))
    ]
    names = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in texts]
    return [name[1] for name in names if name]


# Text of datasheet files that are written from measurements.

EFFICIENCIES = (  # keys of [efficiency], in the order of a file
    "matmul_efficiency", "fp8_efficiency", "fp4_efficiency", "matmul_tile_cost",
    "matmul_depth_cost", "wave_quantization", "unaligned_efficiency", "attention_efficiency",
    "memory_efficiency", "kernel_seconds", "node_link_efficiency", "network_efficiency",
    "network_contention", "node_link_latency_seconds", "network_latency_seconds", "straggling",
)  # fmt: skip


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a datasheet."""
    return folder / (name.lower().replace("-", "_") + ".toml")


def datasheet_text(gpu: Gpu, *, comment: Sequence[str], measured: Sequence[str]) -> str:
    """Return a whole datasheet.

    Args:
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
