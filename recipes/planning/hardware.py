"""Performance of a GPU: its maker's datasheet, and the share of it that is reached."""

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from models.errors import UserError

FOLDER = Path(__file__).parent / "gpus"
OTHER_BOARDS = {  # slower ones of the same names, for the MFU of a run; dense peaks in TFLOP/s
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},  # NVIDIA V100 datasheet
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "fp32": 51.0},  # NVIDIA H100 datasheet
    "H100 NVL": {"bf16": 835.0, "fp16": 835.0, "fp32": 60.0},  # NVIDIA H100 datasheet
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Gpu:
    """One kind of GPU and the node it usually sits in, a file of `gpus/`.

    Rates are per GPU and, for links, in one direction. Efficiencies are what large operations
    reach of a datasheet's number, latencies what small ones cannot go below.
    """

    name: str
    device_names: list[str]  # what the driver's name of such a device contains
    peak_tflops: dict[str, float]  # precision -> dense matrix products
    memory_gib: float  # that CUDA reports
    node_memory_gib: float  # of a usual host, for all of its GPUs
    context_gib: float  # CUDA's and NCCL's own memory, our guess
    memory_gigabytes_per_second: float
    multiprocessors: int
    node_link_gigabytes_per_second: float
    network_gigabytes_per_second: float
    dollars_per_hour: float
    matmul_efficiency: float  # of large matrix products in 16 bits
    matmul_tile_cost: float  # of a tile's edge, in elements: small tiles read more per product
    matmul_depth_cost: float  # of a tile's start and end, in elements of the inner dimension
    wave_quantization: float  # how much of a last, partly filled wave of tiles is waited for
    unaligned_efficiency: float  # of products whose rows are no multiple of 16 bytes
    attention_efficiency: float  # of a fused attention kernel, relative to matrix products
    memory_efficiency: float
    node_link_efficiency: float
    network_efficiency: float
    network_contention: float  # of that, when several groups each use several links of a node
    kernel_seconds: float  # between two kernels
    node_link_latency_seconds: float
    network_latency_seconds: float
    straggling: float  # share of time lost per doubling of the nodes: slowest of many

    @property
    def device(self) -> str:
        """Return the kind of device, as in `torch.device.type`; a CPU has no driver names."""
        return "cuda" if self.device_names else "cpu"


def load_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        UserError: there is none, with the names that there are.
    """
    for gpu in gpus():
        if gpu.name == name:
            return gpu
    names = ", ".join(gpu.name for gpu in gpus())
    raise UserError(f'gpu = "{name}" is not known; use one of {names}')


@cache
def gpus() -> tuple[Gpu, ...]:
    """All GPUs that have a file."""
    return tuple(read_gpu(path) for path in sorted(FOLDER.glob("*.toml")))


def read_gpu(path: Path) -> Gpu:
    """One file of `gpus/`; its efficiency may be that of another one.

    Raises:
        UserError: a key is missing or unknown.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    efficiency = table.pop("efficiency", {})
    if isinstance(efficiency, str):
        file = efficiency.lower().replace("-", "_") + ".toml"
        efficiency = tomllib.loads((FOLDER / file).read_text(encoding="utf-8"))["efficiency"]
    table |= efficiency
    known = {field.name for field in fields(Gpu)}
    if wrong := known ^ set(table):
        raise UserError(f"{path.name}: missing or unknown: {', '.join(sorted(wrong))}")
    return Gpu(**table)


def peak_tflops(device_name: str, precision: str) -> float | None:
    """A device's dense peak in TFLOP/s, None where it is not known (a CPU, an unlisted GPU)."""
    for name, peaks in OTHER_BOARDS.items():
        if name in device_name:
            return peaks.get(precision)
    for gpu in gpus():
        if any(name in device_name for name in gpu.device_names):
            return gpu.peak_tflops.get(precision)
    return None
