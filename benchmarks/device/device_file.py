"""Update of the planner's file of a device from measurements.

Datasheet values stay, and so do values that one device cannot measure: links, network, price.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import rates
from benchmarks.device.fit import fit
from benchmarks.one_step import contestants
from benchmarks.one_step.rows import OUR_ENTRY, Setting
from benchmarks.one_step.shapes import CPU_SHAPES, GPU_SHAPES, PRECISIONS, Shape
from benchmarks.taking_turns import Player, median_seconds, players, take_turns
from models.errors import UserError, toml_value
from threefold.gpus import datasheet
from threefold.gpus.datasheet import Gpu, efficiency_lines, file_of, processor_name, read_gpu
from threefold.plan.job import Machine, job_of
from threefold.plan.time.step import step_time

MEASURED = (  # keys of [efficiency] that can be measured on one device
    "matmul_efficiency", "matmul_tile_cost", "matmul_depth_cost", "wave_quantization",
    "unaligned_efficiency", "attention_efficiency", "memory_efficiency", "kernel_seconds",
)  # fmt: skip
EFFICIENCY = re.compile(r"^(?:#[^\n]*\n)*\[efficiency\].*|^efficiency = [^\n]*\n", re.M | re.S)


def calibrate(
    name: str,
    like: str | None,
    setting: Setting,
    folder: Path,
    *,
    shapes: Sequence[Shape] = (),
) -> dict[str, Any]:
    """Measure this device, write its file, and compare predictions with it to measured steps.

    like: GPU whose file a new device's file is based on
    folder: folder of the files
    shapes: models whose steps are measured; by default those of benchmarks/one_step

    Raises:
        UserError: there is no such file, or it is another device's.
    """
    start = partial(Player, rates.play, cores=setting.cores)
    with players({"rates": start}) as playing:
        player = playing["rates"]
        player.settle()
        (device,), (properties,) = player.ask("name"), player.ask("properties")
        file = file_of(folder, name)
        source = file if file.exists() else file_of(folder, like or name)
        text = source.read_text(encoding="utf-8") if source.exists() else ""
        gpu = checked(source, device, is_new=source != file)
        if source != file:
            names = [device] if setting.cores == () else []
            gpu = replace(gpu, name=name, device_names=names, **properties)
        gpu, fitted = fit(gpu, player, PRECISIONS if setting.cores else ("bf16",))
    file.write_text(rewritten(text, gpu, device), encoding="utf-8")
    shapes = shapes or tuple((CPU_SHAPES if setting.cores else GPU_SHAPES).values())
    steps = predict(read_gpu(file), setting, shapes)
    return {"file": str(file), **fitted, "steps": steps}


def checked(file: Path, device: str, *, is_new: bool) -> Gpu:
    """Return the device of a file, after a check that the measured device matches it.

    Raises:
        UserError: there is no such file, or it is another device's.
    """
    if not file.exists():
        there = ", ".join(gpu.name for gpu in datasheet.gpus())
        raise UserError(f"{file.name} is not there; use --like with one of {there}")
    gpu = read_gpu(file)
    is_cpu = device == "cpu"
    fits = not gpu.device_names if is_cpu else any(each in device for each in gpu.device_names)
    if is_cpu != (not gpu.device_names) or not (fits or is_new):
        means = ", ".join(gpu.device_names) or "a CPU"
        raise UserError(
            f"{file.name} has the datasheet of {means}, and this is {device}; use "
            f"--calibrate-device with a name of its own, and --like with the most similar one's"
        )
    return gpu


def rewritten(text: str, gpu: Gpu, device: str) -> str:
    """Return a file's text with other numbers; comments stay, except those on efficiency."""
    for key in (
        "name", "device_names", "peak_tflops", "memory_gib", "multiprocessors",
        "memory_gigabytes_per_second",
    ):  # fmt: skip
        line = f"{key} = {toml_value(getattr(gpu, key))}"
        escaped = line.replace("\\", "\\\\")
        text = re.sub(rf"^{key} = [^\n#]*[^\n#\s]", escaped, text, flags=re.M)
    head = EFFICIENCY.sub("", text).rstrip()
    processor = f"{processor_name()}, one core" if device == "cpu" else device
    comment = [
        f"Measured on {processor}, with torch {torch.__version__.partition('+')[0]}:",
        f"python benchmarks/step.py --calibrate-device {gpu.name}",
    ]
    lines = efficiency_lines(gpu, comment=comment, measured=MEASURED)
    return head + "\n\n" + "\n".join(lines) + "\n"


def predict(gpu: Gpu, setting: Setting, shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return predicted and measured times of our contestant's steps."""
    found = []
    machine = Machine.of(gpu, gpus=1, gpus_per_node=1)
    for shape in shapes:
        for precision in PRECISIONS if setting.cores else ("bf16",):
            start = partial(
                Player, contestants.play, OUR_ENTRY, shape, precision, {},
                cores=setting.cores,
            )  # fmt: skip
            with players({shape.name: start}) as playing:
                turns = take_turns(playing, warm_up=setting.warm_up, rounds=setting.rounds)
            measured = median_seconds(turns[shape.name][setting.warm_up :])
            predicted = step_time(job_of(shape.recipe(precision), machine)).total
            found.append(
                {
                    "shape": shape.name,
                    "precision": precision,
                    "predicted_seconds": predicted,
                    "measured_seconds": measured,
                    "error": predicted / measured - 1,
                }
            )
    return found
