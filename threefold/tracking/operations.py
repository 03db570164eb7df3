"""The operations of a profiled step, compared with the planner's seconds for the same kernels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from models.errors import counted
from threefold.gpus.datasheet import Gpu
from threefold.plan.software import THREEFOLD
from threefold.plan.time.block import BACKWARD_SLOWER, fused_attention_seconds, matmul_seconds

BACKWARD_MATMULS = 2.5  # per matmul of attention's forward pass (arXiv 2307.08691, section 4.1)
FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # position of a matmul's first factor
COMMUNICATION = ("nccl:", "gloo:", "c10d::", "record_param_comms")
KINDS = ("matmul", "attention", "communication", "other")
MAX_OPERATIONS = 40

Shapes = tuple[tuple[int, ...], ...]  # of the tensor arguments; () for other arguments


@dataclass(frozen=True)
class Operation:
    """All calls of an operation with the same shapes in a step, on one rank.

    Attributes:
        name: name in torch, such as "aten::mm"
        shapes: shapes of its arguments
        calls: number of calls
        seconds: time of all calls, without the operations that they call; on a GPU, the time of
            the kernels
    """

    name: str
    shapes: Shapes
    calls: int
    seconds: float

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self._first_factor is not None:
            return "matmul"
        if self.name.startswith(COMMUNICATION):
            return "communication"
        return "attention" if self._is_attention else "other"

    @property
    def _first_factor(self) -> int | None:
        """Position of a matmul's first factor among its arguments; None for other operations."""
        return FIRST_FACTOR.get(self.name.removeprefix("aten::").removesuffix("_"))

    @property
    def _is_attention(self) -> bool:
        # Without aten::scaled_dot_product_attention, which only calls one of the others.
        return self.name.startswith("aten::_") and "_attention" in self.name

    def planned_seconds(self, gpu: Gpu, precision: str) -> float | None:
        """Return the planner's seconds for one call; None if it has no formula for the operation.

        Attention is counted with a causal mask over whole sequences, as the planner does.
        """
        if precision not in gpu.peak_tflops:
            return None
        if self._first_factor is not None:
            factors = self.shapes[self._first_factor :][:2]
            if len(factors) < 2 or any(len(shape) < 2 for shape in factors):
                return None
            (*batches, rows, inner), (*_, columns) = factors
            batch = prod(batches)
            if not batch * rows * inner * columns:
                return None
            seconds = matmul_seconds(
                gpu, precision, rows=rows, columns=columns, inner=inner, batch=batch
            )
            return seconds / THREEFOLD.era
        return self._planned_attention(gpu, precision) if self._is_attention else None

    def _planned_attention(self, gpu: Gpu, precision: str) -> float | None:
        backward = "_backward" in self.name
        # The first argument of the backward pass is the output's gradient.
        tensors = self.shapes[1:3] if backward else self.shapes[:2]
        if len(tensors) < 2 or any(len(shape) != 4 for shape in tensors):
            return None  # for example sequences of several lengths in one tensor
        q, k = tensors
        # [b, heads, s, d] in scaled_dot_product_attention, [b, s, heads, d] in kernels below it
        keys = k[2] if "scaled_dot_product" in self.name else k[1]
        flops = 4 * prod(q) * keys / 2
        seconds = fused_attention_seconds(gpu, precision, flops=flops) / THREEFOLD.attention
        return seconds * (BACKWARD_MATMULS * BACKWARD_SLOWER if backward else 1) / THREEFOLD.era


def operations_table(
    operations: Iterable[Operation], *, title: str, gpu: Gpu | None, precision: str
) -> str:
    """Return the most expensive operations as text, after the sums of each kind.

    Args:
        operations: the operations of a step on one rank
        title: the first line
        gpu: datasheet of the device, for the planner's numbers; None if there is none
        precision: "fp32", "bf16" or "fp16"
    """
    found = sorted(operations, key=lambda each: -each.seconds)
    total = sum(each.seconds for each in found)
    planned = [each.planned_seconds(gpu, precision) if gpu else None for each in found]
    lines = [title, ""]
    for kind in KINDS:
        lines += _sum_of_kind(kind, found, planned, total)
    if gpu is None:
        lines += ["", "The planner has no datasheet for this device."]
    lines += ["", f"{'seconds':>9} {'share':>6} {'calls':>6} {'us/call':>9} {'planned':>9} "
              f"{'ratio':>6}  operation"]  # fmt: skip
    for each, seconds in list(zip(found, planned, strict=True))[:MAX_OPERATIONS]:
        call = each.seconds / each.calls
        plan, ratio = f"{seconds * 1e6:.1f}" if seconds else "", ""
        if seconds:
            ratio = f"{call / seconds:.2f}"
        shapes = " x ".join(str(list(shape)) for shape in each.shapes if shape)
        lines.append(
            f"{each.seconds:9.4f} {_share(each.seconds, total)} {each.calls:6} {call * 1e6:9.1f} "
            f"{plan:>9} {ratio:>6}  {each.name} {shapes}".rstrip()
        )
    if len(found) > MAX_OPERATIONS:
        rest = sum(each.seconds for each in found[MAX_OPERATIONS:])
        lines.append(
            f"{rest:9.4f} {_share(rest, total)}  {counted(len(found) - MAX_OPERATIONS, 'other')}"
        )
    return "\n".join(lines) + "\n"


def _sum_of_kind(
    kind: str, found: Sequence[Operation], planned: Sequence[float | None], total: float
) -> list[str]:
    """Return the line of a kind: its seconds, and the ratio to the planner's if there are any."""
    own = [(each, plan) for each, plan in zip(found, planned, strict=True) if each.kind == kind]
    if not own:
        return []
    seconds = sum(each.seconds for each, _ in own)
    line = f"{kind:14} {seconds:9.4f} s {_share(seconds, total)}"
    with_plan = [(each, plan) for each, plan in own if plan]
    if with_plan:
        measured = sum(each.seconds for each, _ in with_plan)
        expected = sum(plan * each.calls for each, plan in with_plan)
        line += f", {measured / expected:.2f} times the planner's {expected:.4f} s"
        if measured < 0.999 * seconds:
            line += f" (for {_share(measured, seconds).strip()} of this time)"
    return [line]


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:6.1%}"
