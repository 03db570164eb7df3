"""The parts of `make gpu`, in order of importance: each in a process of its own, with a budget.

The budgets of the parts that one GPU runs add up to `MINUTES` at most, so that a part that hangs
does not take the time of those that follow it.
"""

from dataclasses import dataclass

MINUTES = 10.0  # of all parts together, on one GPU


@dataclass(frozen=True)
class Part:
    """One part of the checks.

    function: "module:function", imported in the part's process
    seconds: time limit, after which the part is ended
    """

    name: str
    title: str
    function: str
    seconds: float


PARTS = (
    Part("environment", "Machine and matrix products", "tests.gpu.environment:environment", 30),
    Part("losses", "fp32 on the GPU and on the CPU", "tests.gpu.training:fp32_losses", 60),
    Part("step", "Speed and memory of llama/1b", "tests.gpu.speed:step", 80),
    Part("device", "The planner's file", "tests.gpu.speed:device_file", 110),
    Part("layouts", "Pipeline schedules and tensor parallelism", "tests.gpu.training:layouts", 420),
    Part("kernels", "Kernels against references", "tests.gpu.kernels:kernels", 60),
    Part("precisions", "Precisions and ZeRO stages", "tests.gpu.training:precisions", 60),
    Part("resume", "Kill and resume", "tests.gpu.training:resume", 45),
    Part("transformers", "Beside transformers", "tests.gpu.speed:beside_transformers", 90),
    Part("deterministic", "Deterministic runs", "tests.gpu.training:deterministic", 35),
    Part("export", "Export to transformers", "tests.gpu.export:export", 30),
)
BY_NAME = {part.name: part for part in PARTS}
