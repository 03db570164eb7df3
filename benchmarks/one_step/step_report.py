"""Text output of the step benchmark."""

from collections.abc import Callable, Mapping
from typing import Any

MAX_KERNEL_NAME = 60  # characters


def print_row(row: Mapping[str, Any]) -> None:
    """Print a table of the contestants, and the ratios."""
    rates = ", ".join(f"{name} {rate:.3g}" for name, rate in row["matmul_tflops"].items())
    print(f"{row['shape']}, {row['precision']}; matrix products measured, TFLOP/s: {rates}")
    print(
        f"{'':<34}{'s':>8}{'tokens/s':>10}{'TFLOP/s':>9}{'in full':>9}{'MFU':>7}{'in full':>9}"
        f"{'sheet':>7}{'in full':>9}{'GB':>7}  matrix products by"
    )
    for name, each in row["contestants"].items():
        products = ", ".join(f"{by} {part:.0%}" for by, part in each["gemm"].items())
        print(
            f"{name:<34}{each['seconds']:8.3f}{each['tokens_per_second']:10,.0f}"
            f"{each['tflops']:9.3g}{each['tflops_full']:9.3g}{percent(each['mfu_measured']):>7}"
            f"{percent(each['mfu_measured_full']):>9}{percent(each['mfu_datasheet']):>7}"
            f"{percent(each['mfu_datasheet_full']):>9}{each['memory_gb']:7.2f}  {products}"
        )
    ratios = {key: value for key, value in row.items() if key.startswith("over_")}
    known = {key: value for key, value in ratios.items() if value is not None}
    print(", ".join(f"{key} {value:.3f}" for key, value in known.items()), end="")
    print(f", memory {row['memory_over_transformers']:.3f} of theirs", end="")
    if row["engine_overhead"] is not None:
        print(f", engine {row['engine_overhead']:+.1%} over a bare loop", end="")
    print()
    for name, each in row["contestants"].items():
        print_kernels(name, each.get("kernels", []))
    print(flush=True)


def print_kernels(contestant: str, kernels: list[dict[str, Any]]) -> None:
    """Print the slowest kernels of a contestant."""
    if kernels:
        print(f"\n{contestant}")
    for kernel in kernels:
        print(
            f"{kernel['share']:7.1%}{1000 * kernel['seconds']:10.2f} ms{kernel['calls']:8d} x  "
            f"{kernel['name'][:MAX_KERNEL_NAME]}"
        )


def print_overhead(row: Mapping[str, Any]) -> None:
    """Print the overhead of an engine in one line."""
    print(
        f"{row['shape']}, {row['precision']}, {row['engine']}: {row['seconds']:.3f} s a "
        f"step with tracking and data, {row['bare_seconds']:.3f} s in a bare loop: "
        f"{row['engine_overhead']:+.1%}",
        flush=True,
    )


def print_two_ranks(found: Mapping[str, Any]) -> None:
    """Print a line for each layout of two ranks."""
    for precision, each in found.items():
        for name, speed_up in each["speed_up"].items():
            print(
                f"{each['shape']}, {precision}, two ranks, {name}: "
                f"{each['seconds'][name]:.3f} s a step, one process "
                f"{each['seconds']['one_process']:.3f} s: {speed_up:.3f} times as fast",
                flush=True,
            )


def print_file(calibrated: Mapping[str, Any]) -> None:
    """Print the written file and the planner's errors with it."""
    print(
        f"{calibrated['file']}: {calibrated['products']} matrix products, predicted with a mean "
        f"error of {calibrated['mean_error']:.1%}"
    )
    for step in calibrated["steps"]:
        print(
            f"{step['shape']}, {step['precision']}: predicted {step['predicted_seconds']:.3f} s, "
            f"measured {step['measured_seconds']:.3f} s: {step['error']:+.1%}"
        )


def percent(share: float | None) -> str:
    """Format a share of a peak; empty if the peak is not known."""
    return "" if share is None else f"{share:.1%}"


PRINT: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "rows": print_row,
    "memory": print_row,
    "overhead": print_overhead,
    "tensor_parallel": print_two_ranks,
    "context_parallel": print_two_ranks,
    "expert_parallel": print_two_ranks,
}
