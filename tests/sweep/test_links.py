"""sweep.py links: the fit of links, the datasheet, and the command with real and fake ranks."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.errors import UserError
from tests.commands import run_here
from tests.ranks import join_world, run_ranks
from tests.sweep.sweeps import copy_of_code, processes_with, rejection_of
from threefold.commands import plan
from threefold.gpus import datasheet
from threefold.gpus.datasheet import FOLDER, Gpu, gpus, load_gpu, read_gpu
from threefold.plan.job import Machine
from threefold.plan.software import THREEFOLD
from threefold.plan.time.block import all_reduce_seconds, matmul_seconds, transfer_seconds
from threefold.runtime import timing as runtime_timing
from threefold.sweep.folder import SweepStopped
from threefold.sweep.links import fit, timing
from threefold.sweep.links.fit import SIZES, FitFailed, LinkTime, Measurements, RankRate, fitted_gpu
from threefold.sweep.links.measure_cluster import ClusterMeasurement
from threefold.sweep.ranks.controller import LocalLauncher

LINK_KEYS = (
    "node_link_gigabytes_per_second", "node_link_efficiency", "node_link_latency_seconds",
    "network_gigabytes_per_second", "network_efficiency", "network_latency_seconds",
)  # fmt: skip
SECONDS = 180


def measured_on(gpu: Gpu, *, nodes: int, gpus_per_node: int) -> Measurements:
    """Return the measurements of a cluster on which the planner's formulas are exact."""
    world = nodes * gpus_per_node
    machine = Machine.of(gpu, gpus=world, gpus_per_node=gpus_per_node)
    links = []
    for across, ranks in ((False, gpus_per_node), (True, world)):
        stride = gpus_per_node if across else 1
        for size in SIZES["cuda"] if ranks > (gpus_per_node if across else 1) else ():
            sent = transfer_seconds(machine, size, stride=stride)
            reduced = all_reduce_seconds(machine, size, ranks=ranks, stride=1)
            common: dict[str, Any] = {"across_nodes": across, "bytes": size}
            links += [
                LinkTime(operation="transfer", ranks=2, seconds=sent, **common),
                LinkTime(operation="all-reduce", ranks=ranks, seconds=reduced, **common),
            ]
    kernels = THREEFOLD.kernels_on(gpu)
    seconds = matmul_seconds(kernels, "bf16", rows=8192, columns=8192, inner=8192)
    return Measurements(
        device="NVIDIA H100 80GB HBM3",
        torch="2.13.0",
        precision="bf16",
        matmul_size=8192,
        rates=[RankRate("host", 2e-12 * 8192**3 / seconds)] * world,
        links=links,
    )


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node", "node_rate", "network_rate"),
    [
        (1, 8, 300.0, 40.0),
        (1, 2, 300.0, 40.0),
        (2, 8, 300.0, 10.0),  # an all-reduce is limited by the network
        (4, 8, 300.0, 45.0),  # an all-reduce is limited by the links within the nodes
        (3, 4, 160.0, 40.0),  # both are equal
        (4, 1, 300.0, 40.0),
    ],
)
def test_the_fit_recovers_rates_and_latencies(
    nodes: int, gpus_per_node: int, node_rate: float, network_rate: float
) -> None:
    source = load_gpu("H100")
    true = replace(
        source,
        matmul_efficiency=0.7,
        node_link_efficiency=node_rate / source.node_link_gigabytes_per_second,
        node_link_latency_seconds=2.5e-5,
        network_efficiency=network_rate / source.network_gigabytes_per_second,
        network_latency_seconds=7e-5,
    )
    if gpus_per_node == 1:  # links that cannot be measured are known
        keys = [key for key in LINK_KEYS if key.startswith("node_link")]
        true = replace(true, **{key: getattr(source, key) for key in keys})
    measured = measured_on(true, nodes=nodes, gpus_per_node=gpus_per_node)
    found = fitted_gpu(source, measured, gpus_per_node)
    expected = true
    if nodes == 1:  # one node cannot measure the network
        network = {key: getattr(source, key) for key in LINK_KEYS if key.startswith("network")}
        expected = replace(true, **network)
    for key in (*LINK_KEYS, "matmul_efficiency"):
        assert getattr(found, key) == pytest.approx(getattr(expected, key), rel=1e-6), key
    assert found.peak_tflops == source.peak_tflops
    others = [key for key in vars(source) if key not in (*LINK_KEYS, "matmul_efficiency")]
    assert all(getattr(found, key) == getattr(source, key) for key in others)


def test_the_bus_bandwidth_is_that_of_nccl() -> None:
    times: dict[str, Any] = {"across_nodes": False, "ranks": 4, "bytes": 8 * 10**9, "seconds": 2.0}
    assert LinkTime(operation="transfer", **times).bus_gigabytes_per_second == pytest.approx(4.0)
    assert LinkTime(operation="all-reduce", **times).bus_gigabytes_per_second == pytest.approx(6.0)


def test_rates_above_the_datasheet_raise_it() -> None:
    source = load_gpu("H100")
    true = replace(
        source,
        peak_tflops={key: 2 * peak for key, peak in source.peak_tflops.items()},
        matmul_efficiency=1.0,
        node_link_gigabytes_per_second=900.0,
        node_link_efficiency=1.0,
        network_gigabytes_per_second=60.0,
        network_efficiency=1.0,
    )
    found = fitted_gpu(source, measured_on(true, nodes=2, gpus_per_node=8), 8)
    for key in (*LINK_KEYS, "matmul_efficiency"):
        assert getattr(found, key) == pytest.approx(getattr(true, key), rel=1e-6), key
    assert found.peak_tflops == pytest.approx(true.peak_tflops, rel=5e-3)  # three digits


def test_noise_makes_no_latency_negative_and_no_rate_infinite() -> None:
    source = load_gpu("H100")
    measured = measured_on(replace(source, node_link_latency_seconds=0.0), nodes=1, gpus_per_node=8)
    faster = [replace(time, seconds=0.9 * time.seconds) for time in measured.links[:2]]
    found = fitted_gpu(source, replace(measured, links=[*faster, *measured.links[2:]]), 8)
    assert found.node_link_latency_seconds == 0.0 and 0.8 < found.node_link_efficiency <= 1.0
    shrinking = [replace(time, seconds=1 / time.bytes) for time in measured.links]
    with pytest.raises(FitFailed, match="do not grow"):
        fitted_gpu(source, replace(measured, links=shrinking), 8)


def test_busy_nodes_are_measured_again() -> None:
    """Each measurement disturbs one size; the shorter times together are those of idle nodes."""
    source = load_gpu("H100")
    idle = measured_on(source, nodes=1, gpus_per_node=8)
    disturbed = [
        replace(
            idle,
            links=[
                replace(time, seconds=1.0) if time.bytes == size else time for time in idle.links
            ],
        )
        for size in SIZES["cuda"][:2]
    ]
    rounds = iter([disturbed[0], disturbed[0], disturbed[1]])
    measured, fitted = fit.measure_and_fit(lambda: next(rounds), source, 8)
    assert measured == idle and vars(fitted) == vars(fitted_gpu(source, idle, 8))
    with pytest.raises(FitFailed, match="do not grow"):
        fit.measure_and_fit(lambda: disturbed[0], source, 8)


def test_contradicting_measurements_are_predicted_in_between() -> None:
    source = load_gpu("H100")
    measured = measured_on(source, nodes=1, gpus_per_node=8)
    slow = [
        replace(time, seconds=4 * time.seconds) if time.operation == "transfer" else time
        for time in measured.links
    ]
    found = fitted_gpu(source, replace(measured, links=slow), 8)
    reached = found.node_link_gigabytes_per_second * found.node_link_efficiency
    usual = source.node_link_gigabytes_per_second * source.node_link_efficiency
    assert reached == pytest.approx(usual / 2, rel=0.15)  # between 1 and 1/4


def time_links() -> tuple[list[dict[str, Any]], list[float]]:
    """Measure two nodes of two ranks, with seconds that are always 1.0 and messages of ones."""
    world, control, messages = join_world(), dist.new_group(backend="gloo"), []

    def message(size: int, device: torch.device) -> torch.Tensor:
        messages.append(torch.ones(size // 4))
        return messages[-1]

    def timed(call: Any, device: torch.device, repetitions: runtime_timing.Repetitions) -> float:
        call()
        return 1.0

    runtime_timing.zeros, runtime_timing.timed = message, timed
    timer = timing.LinkTimer(world, control, torch.device("cpu"), 2)
    found = [vars(each) for each in timer.measure([64, 128])]
    return found, [float(each[0]) for each in messages]


def test_ranks_measure_inside_and_across_nodes() -> None:
    results = run_ranks(4, time_links)
    expected = [
        {"operation": operation, "across_nodes": across, "ranks": ranks, "bytes": size,
         "seconds": 0.5 if operation == "transfer" else 1.0}
        for across in (False, True)
        for operation, ranks in (("transfer", 2), ("all-reduce", 4 if across else 2))
        for size in (64, 128)
    ]  # fmt: skip
    assert [links for links, _ in results] == [expected] * 4
    sums = [1.0, 1.0, 2.0, 2.0]  # of the ranks that an all-reduce inside a node sums
    for rank, (_, messages) in enumerate(results):
        across = [1.0, 1.0] if rank in (0, 2) else []  # the first rank of each node
        assert messages == [*sums, *across, 4.0, 4.0]


def test_the_ranks_of_a_node_share_a_host() -> None:
    timing.check_hosts(["a", "a", "b", "b"], 2)
    with pytest.raises(UserError, match=r"ranks 0 to 2 run on .*--gpus-per-node 3"):
        timing.check_hosts(["a", "a", "b", "b", "b", "b"], 3)


@pytest.mark.parametrize("name", [*(gpu.name for gpu in gpus()), "h100", "a100-80gb", "A100"])
def test_datasheets_of_the_repository_are_not_overwritten(name: str) -> None:
    with pytest.raises(UserError, match=f"use another name, for example links {name}-links"):
        fit.own_file(FOLDER, name)
    assert fit.own_file(FOLDER, f"{name}-links")


def test_a_measured_datasheet_is_not_the_gpu_of_a_published_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h100 = (FOLDER / "h100.toml").read_text()
    (tmp_path / "h100.toml").write_text(h100)
    other = h100.replace('"H100"', '"dgx-one"', 1)
    (tmp_path / "dgx_one.toml").write_text(f"# {fit.mark('dgx-one')}\n{other}")
    with monkeypatch.context() as patched:
        patched.setattr(datasheet, "FOLDER", tmp_path)
        clear_caches()
        assert [gpu.name for gpu in datasheet.gpus()] == ["dgx-one", "H100"]
        assert [gpu.name for gpu in datasheet.gpus_of_name("NVIDIA DGX H100")] == ["H100"]
        assert [gpu.name for gpu in datasheet.gpus_of_name("dgx-one")] == ["dgx-one"]
    clear_caches()


def test_a_datasheet_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone.toml").symlink_to(tmp_path / "nothing")
    with monkeypatch.context() as patched:
        patched.setattr(datasheet, "FOLDER", tmp_path)
        clear_caches()
        with pytest.raises(UserError, match=r"gone\.toml: No such file or directory; remove it"):
            datasheet.gpus()
    clear_caches()


def clear_caches() -> None:
    datasheet.gpus.cache_clear()
    datasheet.published_gpus.cache_clear()


def test_only_own_files_are_rewritten(tmp_path: Path) -> None:
    file = fit.own_file(tmp_path, "my-node")
    h100 = (FOLDER / "h100.toml").read_text()
    text = h100.replace('"H100"', '"my-node"', 1)
    file.write_text(f"# {fit.mark('my-node')}\n{text}")
    assert fit.own_file(tmp_path, "my-node") == file == tmp_path / "my_node.toml"
    with pytest.raises(UserError, match="for example links My-Node-links"):
        fit.own_file(tmp_path, "My-Node")  # its file is that of my-node
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert fit.own_file(tmp_path, "my-node") == file
    subprocess.run(["git", "-C", str(tmp_path), "add", file.name], check=True)
    with pytest.raises(UserError, match="for example links my-node-links"):
        fit.own_file(tmp_path, "my-node")
    (tmp_path / "my_node_links.toml").write_text(h100)
    with pytest.raises(UserError, match="for example links my-node-links-2"):
        fit.own_file(tmp_path, "my-node")
    for name in ("", "-x", "a/b", "a b", "../cpu", "x" * 61):
        with pytest.raises(UserError, match="for example my-cluster"):
            fit.own_file(tmp_path, name)


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space"), SystemExit(143)])
def test_an_earlier_file_survives_a_failed_write(
    problem: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "node.toml"
    file.write_text("earlier")

    def fail(descriptor: int) -> None:
        raise problem

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(type(problem)):
            fit.write(file, "new")
    assert file.read_text() == "earlier" and os.listdir(tmp_path) == [file.name]
    fit.write(file, "new")
    assert file.read_text() == "new" and os.listdir(tmp_path) == [file.name]


def measurement_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterMeasurement:
    """Return a measurement that writes into a folder and measures nothing."""
    measured = measured_on(load_gpu("H100"), nodes=1, gpus_per_node=8)  # reads all datasheets
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # an H100 is not a CPU
    monkeypatch.setattr(datasheet, "FOLDER", folder)
    fitted = measured, fitted_gpu(load_gpu("H100"), measured, 8)
    monkeypatch.setattr(ClusterMeasurement, "_measure", lambda self, launcher: fitted)
    return ClusterMeasurement.of(name, nodes=1, gpus_per_node=8, gpu="H100", seconds=None)


def test_the_file_says_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measurement_of("my-H100", tmp_path, monkeypatch)
    _, gpu = measurement.run(LocalLauncher(Path("absent")))
    text = measurement.file.read_text()
    assert text.startswith("# Written by `python recipes/sweep.py links my-H100`\n")
    assert f"# on {date.today()}, by 8 ranks on 1 node: NVIDIA H100 80GB HBM3, torch" in text
    assert "# The network between nodes was not measured." in text
    assert text.index("node_link_latency") < text.index("# Not measured:")
    assert text.index("# Not measured:") < text.index("network_efficiency")
    expected = vars(load_gpu("H100")) | {"name": "my-H100"}
    for key, value in expected.items():
        if isinstance(value, float):
            assert getattr(gpu, key) == pytest.approx(value, rel=5e-3), key
        else:
            assert getattr(gpu, key) == value, key


def test_a_failed_write_stops_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = measurement_of("my-H100", tmp_path, monkeypatch)

    def fail(source: Any, target: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(SweepStopped, match=r"cannot be written \(Read-only file system\)"):
        measurement.run(LocalLauncher(Path("absent")))
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository's code, whose datasheets the command may write."""
    return copy_of_code(tmp_path_factory.mktemp("copy"))


def run_in(
    copy: Path, program: str, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **variables}
    return subprocess.run(
        [sys.executable, str(copy / program), *options],
        cwd=copy, env=os.environ | environment, capture_output=True, text=True, check=False,
        timeout=SECONDS,
    )  # fmt: skip


def left_over(copy: Path) -> list[str]:
    """Return the processes of a copy, and files of worlds and datasheets that remain."""
    files = [*copy.glob("runs/links*"), *copy.glob("threefold/gpus/datasheets/*incomplete")]
    return processes_with(copy) + [str(file) for file in files]


@pytest.mark.long
def test_the_command_measures_two_real_ranks(copy: Path) -> None:
    done = run_in(copy, "recipes/sweep.py", "links", "two-cores", "--json")
    assert done.returncode == 0, done.stderr
    assert not left_over(copy)
    table = json.loads(done.stdout)
    file = copy / "threefold" / "gpus" / "datasheets" / "two_cores.toml"
    assert table["file"] == str(file) and read_gpu(file).name == table["name"] == "two-cores"
    assert operations_of(table["links"]) == OPERATIONS_OF_TWO_CORES
    assert all(link["seconds"] > 0 for link in table["links"])
    assert len(table["matmul"]["tflops_of_ranks"]) == 2


def operations_of(links: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(link["operation"], link["bytes"]) for link in links]


OPERATIONS_OF_TWO_CORES = [
    (operation, size) for operation in ("transfer", "all-reduce") for size in SIZES["cpu"]
]


def measure_here(request: dict[str, Any]) -> Measurements:
    """Measure this rank and its links to the others."""
    result = timing.measure_links(request, join_world(), dist.new_group(backend="gloo"))
    assert result.links is not None
    return result.links


def test_two_real_ranks_write_a_datasheet_that_plans_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cpu.toml", "h100.toml"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    size = {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"}
    with monkeypatch.context() as patched:
        patched.setattr(datasheet, "FOLDER", tmp_path)
        clear_caches()
        measurement = ClusterMeasurement.of("two-cores", **size, seconds=None)
        request = measurement._request()["links"] | {"matmul_size": 256}
        fitted = fit.measure_and_fit(
            lambda: run_ranks(2, measure_here, request)[0], measurement.source, 2
        )
        patched.setattr(ClusterMeasurement, "_measure", lambda self, launcher: fitted)
        measured, gpu = measurement.run(LocalLauncher(Path("absent")))
        clear_caches()
        planned = run_here(plan.main, "--gpu", "two-cores", "--json", "--top", "0")
        assert datasheet.is_cpu("two-cores") and not datasheet.is_cpu("H100")
    clear_caches()
    assert operations_of([vars(time) for time in measured.links]) == OPERATIONS_OF_TWO_CORES
    assert all(time.seconds > 0 for time in measured.links) and len(measured.rates) == 2
    reached = gpu.node_link_gigabytes_per_second * gpu.node_link_efficiency
    fastest = max(time.bus_gigabytes_per_second for time in measured.links)
    assert 0.05 * fastest < reached < 20 * fastest
    cpu = load_gpu("cpu")
    assert gpu.network_efficiency == cpu.network_efficiency and gpu.device == "cpu"
    assert planned.returncode == 0, planned.stderr
    rate = json.loads(planned.stdout)["links"]["node_link_gigabytes_per_second"]
    assert rate == gpu.node_link_gigabytes_per_second


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("crash", "the measurement crashed: rank 1 was killed by SIGKILL; no datasheet was"),
        ("hang", "the measurement hung: not finished within 2 seconds"),
        *(
            pytest.param(fault, message, marks=pytest.mark.long)
            for fault, message in (
                ("error", "the measurement crashed: rank 1: RuntimeError: a defect, as injected"),
                ("out_of_memory", "the measurement ran out of memory: rank 1: MemoryError"),
            )
        ),
    ],
)
def test_failures_of_ranks_leave_nothing_behind(copy: Path, fault: str, message: str) -> None:
    (copy / "faults.json").write_text(json.dumps({"links": fault}))
    before = sorted(os.listdir(copy / "threefold" / "gpus" / "datasheets"))
    options = ["links", "faulty", "--seconds-per-trial", "1.5"]
    done = run_in(
        copy, "tests/sweep/faulty_sweep.py", *options,
        FAKE_RANKS="1", FAULTS=str(copy / "faults.json"),
    )  # fmt: skip
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not left_over(copy)
    assert sorted(os.listdir(copy / "threefold" / "gpus" / "datasheets")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["recipes/tiny.toml"], "unrecognized arguments: recipes/tiny.toml"),
        (["--layouts", "all"], "unrecognized arguments: --layouts all"),
        (["--nodes", "1,2"], "invalid number 1,2: expected 1 to 1000000, for example 4"),
        (["--nodes", "2"], "use --nodes 1, or --hostfile FILE"),
        (["--gpu", "H1000"], 'gpu = "H1000" is not known; use one of'),
        (["--gpu", "H100"], "unset DS_ACCELERATOR, or use --gpu cpu"),
    ],
)
def test_other_options_are_rejected(
    monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert message in rejection_of("sweep.py", "links", "mine", *options)
    assert not (FOLDER / "mine.toml").exists()
