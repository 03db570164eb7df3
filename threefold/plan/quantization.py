"""Matmuls in 8 and 4 bits: the formats of their operands, and the layers that stay in 16 bits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from threefold.gpus.datasheet import Gpu


@dataclass(frozen=True, kw_only=True)
class OperandFormat:
    """A format of the operands of matmuls.

    Attributes:
        peak: key of `Gpu.peak_tflops`; empty: matmuls multiply the dequantized operands
        bytes_per_element: of an operand, with its scales
        cast_bytes: bytes that a cast reads and writes per element: an operand of 16 bits becomes a
            copy for the matmul along its rows and one for the matmul along its columns
        casts_weights: True if every pass casts the weights again
    """

    peak: str
    bytes_per_element: float
    cast_bytes: float
    casts_weights: bool = False


# A scale for a whole tensor or for a row needs the maximum, and thus a second read, before the
# cast. Block scales (DeepSeek-V3, arXiv 2412.19437, section 3.3: 1 x 128; OCP Microscaling Formats
# 1.0: 32 elements and a scale of 8 bits; NVFP4: 16 elements, a scale of 8 bits and one for the
# tensor) are found while a tile is in registers. Scales of rows differ from those of columns, so
# that both copies are read and scaled separately.
FORMATS: Mapping[str, OperandFormat] = MappingProxyType(
    {
        "fp8-tensor": OperandFormat(peak="fp8", bytes_per_element=1, cast_bytes=2 + 2 + 2 * 1),
        "fp8-row": OperandFormat(peak="fp8", bytes_per_element=1, cast_bytes=2 * (2 + 2 + 1)),
        "fp8-block": OperandFormat(peak="fp8", bytes_per_element=1 + 4 / 128, cast_bytes=2 + 2 * 1),
        "mxfp8": OperandFormat(peak="fp8", bytes_per_element=1 + 1 / 32, cast_bytes=2 + 2 * 1),
        # Those of Threefold (models/kernels/matmul.py). It casts along rows and along columns in
        # separate kernels, and dequantizes both copies where no matmul takes scales of blocks.
        "fp8-tiles": OperandFormat(
            peak="fp8", bytes_per_element=1 + 4 / 128, cast_bytes=2 * (2 + 1), casts_weights=True
        ),
        "fp8-dequantized": OperandFormat(
            peak="",
            bytes_per_element=1 + 4 / 128,
            cast_bytes=2 * (2 + 1 + 1 + 2),
            casts_weights=True,
        ),
        "nvfp4": OperandFormat(
            peak="fp4", bytes_per_element=0.5 + 1 / 16, cast_bytes=2 + 2 + 2 * 0.5
        ),
    }
)
# Words of a table's precision, in the order in which they are tried.
WORDS = (
    (r"nvfp4|fp4", "nvfp4"),
    (r"mxfp8|fp8[- ]mx$|fp8[- ]mx ", "mxfp8"),
    (r"row ?wise", "fp8-row"),
    (r"block|fp8[- ]sc", "fp8-block"),
    (r"fp8|float8", "fp8-tensor"),
)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The format of the matmuls of blocks; the head, the router and attention stay in 16 bits.

    Attributes:
        kind: a key of `FORMATS`
        wide_layers: number of layers whose matmuls stay in 16 bits; they are assumed to be spread
            over the stages
    """

    kind: str
    wide_layers: int = 0

    @property
    def format(self) -> OperandFormat:
        """The format of the operands."""
        return FORMATS[self.kind]


HOPPER = ("H100", "H200", "H800", "H20")


def own_quantization(gpu: Gpu) -> Quantization:
    """Return the quantization of Threefold's `training.matmul_precision = "fp8"` on a GPU.

    Only on Hopper GPUs torch's matmuls take scales of tiles and blocks
    (`models/kernels/matmul.py`).
    """
    is_hopper = any(word in name for word in HOPPER for name in gpu.device_names)
    return Quantization(
        kind="fp8-tiles" if is_hopper and "fp8" in gpu.peak_tflops else "fp8-dequantized"
    )


def quantization_of(text: str) -> Quantization | None:
    """Return the quantization that a table's precision names; None for 16 or 32 bits.

    "nvfp4 (last 6 of 36 layers bf16)" leaves six layers in 16 bits, and "FP8-CS (FP8-MX)" is the
    format before the bracket: the numbers in brackets of such tables are other runs.
    """
    words = text.lower()
    wide = re.search(r"(\d{1,4}) (?:of \d+ )?layers (?:in )?(?:bf16|fp16|16)", words)
    name = words.split("(")[0]
    kind = next((kind for pattern, kind in WORDS if re.search(pattern, name)), None)
    return Quantization(kind=kind, wide_layers=int(wide[1]) if wide else 0) if kind else None
