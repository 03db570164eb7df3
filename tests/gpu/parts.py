"""The parts of `make gpu`, in the order in which they run: correctness first, then speed."""

from dataclasses import dataclass

MINUTES = 8.0  # of the usual parts together, on one GPU
ALL_MINUTES = 20.0  # of all parts


@dataclass(frozen=True)
class Part:
    """One part of the checks, in a process of its own.

    function: "module:function", imported in the part's process
    seconds: time limit, after which the part is ended
    argument: passed to the function unless it is empty
    side_by_side: True for a part that measures no speed, so that others may run at the same time
    usual: True for a part that runs unless others are named
    """

    name: str
    title: str
    function: str
    seconds: float
    argument: str = ""
    side_by_side: bool = False
    usual: bool = True


def _step(shape: str) -> Part:
    title = f"Speed and memory of llama/1b, {shape.replace('x', ' x ')}"
    return Part(f"step-{shape}", title, "tests.gpu.speed:step", 120, argument=shape)


def _layouts(ranks: str) -> Part:
    title = f"Schedules and axes on {ranks} ranks"
    return Part(f"layouts-{ranks}", title, "tests.gpu.training:layouts", 200, argument=ranks)


PARTS = (
    Part("losses", "fp32 on the GPU and on the CPU", "tests.gpu.training:fp32_losses", 180,
         side_by_side=True),
    Part("kernels", "Kernels against references", "tests.gpu.kernels:kernels", 180,
         side_by_side=True),
    Part("precisions", "Precisions and ZeRO stages", "tests.gpu.training:precisions", 180,
         side_by_side=True),
    Part("resume", "Kill and resume", "tests.gpu.training:resume", 180, side_by_side=True),
    Part("recipes", "Other models", "tests.gpu.training:recipes", 200, side_by_side=True),
    Part("deterministic", "Deterministic runs", "tests.gpu.training:deterministic", 180,
         side_by_side=True),
    Part("export", "Export to transformers", "tests.gpu.export:export", 180, side_by_side=True),
    _layouts("2"),
    _layouts("4"),
    Part("environment", "Machine and matrix products", "tests.gpu.environment:environment", 60),
    _step("4x4"),
    _step("2x8"),
    _step("8x2"),
    Part("step-experts", "Speed and memory of OLMoE, four layers",
         "tests.gpu.speed:step_with_experts", 120),
    Part("nanogpt", "nanoGPT's recipe for Shakespeare", "tests.gpu.nanogpt:shakespeare", 300,
         usual=False),
    Part("device", "The planner's file", "tests.gpu.speed:device_file", 240, usual=False),
    Part("transformers", "Compared with transformers", "tests.gpu.speed:compared_with_transformers",
         180, usual=False),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}
