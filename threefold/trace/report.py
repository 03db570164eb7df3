"""Reports of a trace: text for a terminal and a dict for --json."""

from dataclasses import asdict, fields
from typing import Any

from threefold.trace.trace import Categories, Trace


def text(trace: Trace) -> str:
    """Return the report for a terminal: categories, largest allocations and communication."""
    sizes, own = trace.topology, trace.coordinates
    lines = [
        f"{trace.name}, rank {trace.rank} of {sizes.world_size}: "
        + ", ".join(f"{axis} {getattr(own, axis)} of {n}" for axis, n in sizes.axes.items()),
        f"{trace.micro_batches} micro-batches a step, {trace.traced} traced",
        "",
        f"{'memory, MiB':28}{'between steps':>16}{'at the peak':>16}",
    ]
    for field in fields(Categories):
        between, peak = (getattr(c, field.name) for c in (trace.between_steps, trace.at_peak))
        lines.append(f"{field.name:28}{_mib(between):>16}{_mib(peak):>16}")
    lines += [
        f"{'total':28}{_mib(trace.between_steps.total):>16}{_mib(trace.at_peak.total):>16}",
        "",
        "The most in each phase, MiB",
        *(f"  {phase:26}{_mib(size):>16}" for phase, size in trace.phase_bytes),
        "",
        f"The largest allocations at the peak, in {trace.peak_phase}",
        f"{'MiB':>12}  {'category':12} {'dtype':9} {'shape':24} {'operation':36} made in",
    ]
    for category, made in trace.largest:
        shape = " x ".join(map(str, made.shape))
        lines.append(
            f"{_mib(made.memory_bytes):>12}  {category:12} {made.dtype:9} {shape:24} "
            f"{made.operation:36} {made.phase or 'start'}"
        )
    lines += ["", f"{'communication of a step':28}{'calls':>10}{'MiB':>16}"]
    for each in trace.traffic:
        name = f"{each.axis} {each.kind}"
        lines.append(f"{name:28}{each.count:>10}{_mib(each.memory_bytes):>16}")
    return "\n".join(lines)


def table(trace: Trace) -> dict[str, Any]:
    """Return the report for programs; all sizes are in bytes."""
    return {
        "name": trace.name,
        "rank": trace.rank,
        "world_size": trace.topology.world_size,
        "topology": asdict(trace.topology),
        "coordinates": asdict(trace.coordinates),
        "micro_batches": trace.micro_batches,
        "traced_micro_batches": trace.traced,
        "between_steps_bytes": asdict(trace.between_steps) | {"total": trace.between_steps.total},
        "peak_bytes": trace.peak_bytes,
        "peak_phase": trace.peak_phase,
        "at_peak_bytes": asdict(trace.at_peak),
        "phase_bytes": dict(trace.phase_bytes),
        "largest": [{"category": name} | asdict(made) for name, made in trace.largest],
        "traffic": [asdict(each) for each in trace.traffic],
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
