"""What a GPU can do, from its maker's datasheet."""

PEAK_TFLOPS: dict[str, dict[str, float]] = {
    # dense matrix products, no sparsity; fp32 without TF32, which we do not switch on
    # part of the device's name -> precision -> TFLOP/s
    # the longer names first: a PCIe board is slower than the SXM module of the same name
    "V100-PCIE": {"fp16": 112.0, "fp32": 14.0},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "fp32": 51.0},
    "H100 NVL": {"bf16": 835.0, "fp16": 835.0, "fp32": 60.0},
    "V100": {"fp16": 125.0, "fp32": 15.7},  # NVIDIA V100 datasheet, SXM2
    "A100": {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5},  # NVIDIA A100 datasheet
    "H100": {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},  # NVIDIA H100 datasheet, SXM5
    "H200": {"bf16": 989.4, "fp16": 989.4, "fp32": 66.9},  # NVIDIA H200 datasheet, SXM
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "fp32": 75.0},  # NVIDIA DGX B200 datasheet
    "MI300X": {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4},  # AMD MI300X datasheet
}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """A device's dense peak in TFLOP/s, None where it is not known (a CPU, an unlisted GPU)."""
    for name, peaks in PEAK_TFLOPS.items():
        if name in device_name:
            return peaks.get(precision)
    return None
