"""The parts of `make gpu`, in order of importance; each has a process and a time limit."""

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
    Part("environment", "Machine and matrix products", "tests.gpu.environment:environment", 60),
    Part("losses", "fp32 on the GPU and on the CPU", "tests.gpu.training:fp32_losses", 90),
    Part("precisions", "Precisions and ZeRO stages", "tests.gpu.training:precisions", 90),
    Part("deterministic", "Deterministic runs", "tests.gpu.training:deterministic", 60),
    Part("resume", "Kill and resume", "tests.gpu.training:resume", 70),
    Part("export", "Export to transformers", "tests.gpu.export:export", 60),
    Part("layouts", "Pipeline schedules and tensor parallelism", "tests.gpu.training:layouts", 420),
    Part("step", "Speed and memory of llama/1b", "tests.gpu.speed:step", 110),
    Part("transformers", "Beside transformers", "tests.gpu.speed:beside_transformers", 150),
    Part("device", "The planner's file", "tests.gpu.speed:device_file", 150),
)
BY_NAME = {part.name: part for part in PARTS}
