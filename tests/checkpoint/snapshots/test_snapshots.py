"""Snapshots from the training ranks of one layout, found and read by those of another."""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.checkpoint.format import Manifest
from threefold.checkpoint.snapshots import writer as writer_module
from threefold.checkpoint.snapshots.names import FOLDER_VARIABLE
from threefold.checkpoint.snapshots.node_memory import NodeMemory
from threefold.checkpoint.snapshots.reader import complete, find_snapshot
from threefold.checkpoint.snapshots.writer import SnapshotWriter, TurnCounter, partner_nodes
from threefold.checkpoint.state import CheckpointReader
from threefold.checkpoint.writer import CheckpointWriter
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.launch.node_agent import ServerProcess
from threefold.pretrain.setup import memory_of_all_nodes
from threefold.prove.training import start, train_step
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import History, replay
from threefold.run_folder.json_lines import LineFile

FLIPS = 20


@contextmanager
def serve(folder: Path, nodes: int) -> Iterator[list[ServerProcess]]:
    """Start the servers of some nodes, which all know each other."""
    processes = [ServerProcess.start(folder / f"threefold-run-node{n}") for n in range(nodes)]
    tell(processes)
    try:
        yield processes
    finally:
        for process in processes:
            process.end()


def tell(processes: list[ServerProcess], without: tuple[int, ...] = ()) -> None:
    """Write the servers of the nodes that are alive into the memory of each."""
    servers = [
        {"node": f"node{n}", "port": p.port, "secret": p.secret, "address": "127.0.0.1"}
        for n, p in enumerate(processes)
        if n not in without
    ]
    for process in processes:
        process.write_servers(servers)


def train(recipe: Recipe, run: Path, memories: list[Path], steps: int, **settings: Any) -> Any:
    """Train some steps on one rank per node; after each, save and take a snapshot."""
    world = join_world()
    engine, data = start(recipe, world)
    folder = RunFolder(run)
    if world.rank == 0:
        run.mkdir(exist_ok=True)
        folder.event("start", 0)
    facts = {"recipe": recipe, "dims": recipe.parallel_dims(world), "data": data.fingerprint}
    memory, messages = NodeMemory(memories[world.rank]), []
    if settings.get("full") == world.rank:
        memory.lack_of_room = lambda size: "no memory"  # type: ignore[method-assign]
    if "full" in settings:  # no rank may take memory before all ranks have checked theirs
        memory.create = lambda workspace: messages.append("created")  # type: ignore[method-assign]
    with CheckpointWriter(engine.state, folder, **facts) as writer:
        if "full" in settings:
            writer._try_to_write = lambda *_: "no quota"  # type: ignore[method-assign]
        (memory.folder / "step-0000001-1-ab.incomplete").mkdir()
        snapshots = SnapshotWriter(writer, memory, every=1, step=0, ranks_per_node=1)
        assert not list(memory.folder.glob("step-*"))
        for step in range(1, steps + 1):
            train_step(engine, data, step)
            assert snapshots.is_due(step)
            unsaved = writer.save(data.progress_after(step)) or ""
            told = snapshots.take(data.progress_after(step))
            messages += [unsaved, told] if "full" in settings else [told]
            assert not snapshots.is_due(step)
    if not settings:  # the newest snapshot takes the memory that was checked, and its headers
        newest = max(memory.folder.glob("step-*"))
        held = sum(file.stat().st_size for file in newest.glob("*.safetensors"))
        assert 0 < held - snapshots.bytes_of_node < 100_000
    return messages


def find(recipe: Recipe, run: Path, memories: list[Path], at_least: int = 0) -> Any:
    """Find the newest snapshot; compare it with the checkpoint of its step, and load it.

    Returns:
        The step of the snapshot, 0 for none; the messages of damaged ones; and the loss of the next
        step.
    """
    world = join_world()
    engine, data = start(recipe, world)
    memory = NodeMemory(memories[world.rank])
    history = RunFolder(run).history()
    found = find_snapshot(
        memory, recipe=recipe, data=data.fingerprint, history=history, at_least=at_least
    )
    skipped = list(found.skipped.values())
    if found.checkpoint is None:
        return 0, skipped, 0.0
    progress = found.progress
    path = run / "checkpoints" / f"step-{progress.step:07d}"
    on_disk = CheckpointReader(path, Manifest.read(path))
    assert found.reader().manifest.progress == on_disk.manifest.progress
    for key in on_disk.manifest.tensors if world.rank == 0 else ():
        kind, _, name = key.rpartition("/")
        a, b = (reader.tensor(kind or "weights", name) for reader in (found.reader(), on_disk))
        assert torch.equal(a, b), key
        rows = slice(len(a) // 3, len(a) // 2 + 1)
        part = found.reader().rows(kind or "weights", name, rows.start, rows.stop)
        assert torch.equal(part, a[rows])
    engine.load(found.reader())
    data.resume(progress)
    return progress.step, skipped, float(train_step(engine, data, progress.step + 1).loss)


@pytest.fixture(scope="module")
def recipe(corpus: Path) -> Recipe:
    changes = {"training__steps": 9, "optimizer__average": {"decay": 0.8}}
    return parse_recipe(changed(small_recipe(corpus), **changes), "small")


@pytest.fixture(scope="module")
def four_nodes(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the folder of a run on four nodes, and the servers of its snapshots."""
    folder = tmp_path_factory.mktemp("four-nodes")
    layout = recipe.model_copy(
        update={"layout": recipe.layout.model_copy(update={"pipeline": 2, "tensor": 2})}
    )
    with serve(folder, 4) as processes:
        run_ranks(4, train, layout, folder / "run", [p.folder for p in processes], 2)
        yield folder / "run", processes


def test_only_the_newest_snapshot_is_kept_on_each_node_and_its_partner(four_nodes: Any) -> None:
    _, processes = four_nodes
    files = []
    for process in processes:
        (snapshot,) = (entry for entry in process.folder.iterdir() if entry.is_dir())
        assert snapshot.name.startswith("step-0000002-1-")
        files.append({file.name for file in snapshot.glob("*.safetensors")})
    for node, partner in partner_nodes(4):
        assert files[node] == files[partner]
        assert {f"weights-{n:05d}.safetensors" for n in (node, partner)} <= files[node]


@pytest.mark.parametrize(
    ("ranks", "lost", "step"), [(2, (), 2), (1, (3,), 2), (2, (0, 1), 2), (1, (1, 3), 0)]
)
def test_a_snapshot_is_read_in_another_layout(
    ranks: int, lost: tuple[int, ...], step: int, four_nodes: Any, recipe: Recipe
) -> None:
    """It is complete unless a node and its partner (1 and 3) are both lost."""
    run, processes = four_nodes
    tell(processes, without=lost)
    memories = [p.folder for n, p in enumerate(processes) if n not in lost]
    results = run_ranks(ranks, find, recipe, run, memories)
    assert {(found, *skipped) for found, skipped, _ in results} == {(step,)}
    tell(processes)


def test_turns_are_counted_without_reading_an_event_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = RunFolder(tmp_path), []
    folder.event("start", 0)
    with folder.events.open("a") as file:
        file.write('{"event": "resume", "st')  # of an attempt that lost power
    counter, parse = TurnCounter(folder.events), LineFile.parse

    def noted(file: LineFile, content: bytes) -> list[dict[str, Any]]:
        lines = parse(file, content)
        read.append([line["event"] for line in lines])
        return lines

    rollback: dict[str, Any] = {"event": "rollback", "step": 9, "to": 5, "samples": 72}
    rounds: list[list[dict[str, Any]]] = [
        [{"event": "resume", "step": 3}, {"event": "save", "step": 5}],
        [],
        [{"event": "skip", "step": 8, "reason": "NaN"}, rollback, {"event": "repeat", "step": 5}],
        [{"event": "save", "step": 7}],
    ]
    turns = []
    for events in rounds:
        for event in events:
            folder.event(**event)
        with monkeypatch.context() as patch:
            patch.setattr(LineFile, "parse", noted)
            turns.append(counter.count())
        assert turns[-1] == len(folder.history().turns)
    assert turns == [2, 2, 3, 3]
    rounds[0].insert(0, {"event": "start"})
    assert read == [[event["event"] for event in events] for events in rounds]


def test_snapshots_of_abandoned_steps_are_not_used(four_nodes: Any, recipe: Recipe) -> None:
    _, processes = four_nodes
    rollback = {"event": "rollback", "step": 4, "samples": 32}
    branch = {"event": "branch", "step": 2, "checkpoint": "step-0000002", "stamp": "s"}
    cases: list[tuple[list[dict[str, Any]], int, int]] = [
        ([], 2, 2),
        ([], 3, 0),  # the disk has a newer checkpoint
        ([{"event": "resume", "step": 2}], 0, 2),
        ([{"event": "resume", "step": 1}], 0, 0),
        ([rollback | {"to": 2}], 0, 2),
        ([rollback | {"to": 1}], 0, 0),
        ([branch], 0, 0),
    ]
    wanted = [
        (replay([{"event": "start", "step": 0}, *events]), at_least)
        for events, at_least, _ in cases
    ]
    memories = [process.folder for process in processes]
    (found,) = run_ranks(1, find_each, recipe, memories, wanted)
    assert found == [step for *_, step in cases]


def find_each(recipe: Recipe, memories: list[Path], wanted: list[tuple[History, int]]) -> list[int]:
    """Return the step of the snapshot that is found with each history; 0 for none."""
    data = start(recipe, join_world())[1]
    memory = NodeMemory(memories[0])
    return [
        find_snapshot(
            memory, recipe=recipe, data=data.fingerprint, history=history, at_least=at_least
        ).progress.step
        for history, at_least in wanted
    ]


def flip(file: Path, chance: random.Random) -> None:
    """Flip one bit of a file."""
    content = bytearray(file.read_bytes())
    place = chance.randrange(len(content))
    content[place] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def find_flipped(recipe: Recipe, memories: list[Path], history: History) -> list[str]:
    """Flip a bit of a file in one copy, or in both copies; return what is not noticed."""
    world = join_world()
    data = start(recipe, world)[1]
    memory, chance, missed = NodeMemory(memories[0]), random.Random(5), []
    files = sorted(file for folder in memories for file in folder.glob("step-*/*.safetensors"))
    for number in range(FLIPS):
        victim = chance.choice(files)
        victims = [victim]
        if number % 4 == 0:
            victims = [file for file in files if file.name == victim.name]
        sound = {file: file.read_bytes() for file in victims}
        for file in victims:
            flip(file, chance)
        found = find_snapshot(
            memory, recipe=recipe, data=data.fingerprint, history=history, at_least=0
        )
        if found.checkpoint:
            if found.skipped:
                missed.append(f"{number}: the snapshot is used and skipped")
            holders = found.checkpoint.holders  # type: ignore[attr-defined]
            used = {victim.parents[1].name.split("node")[1][0] for victim in victims}
            if holders[victim.name].server.node.removeprefix("node") in used:
                missed.append(f"{number}: {victim} is used")
        if bool(found.checkpoint) != (len(victims) == 1):
            missed.append(f"{number}: {victims}")
        # The other copy is verified first in about half of the cases.
        if not found.checkpoint and "another SHA-256" not in str(found.skipped):
            missed.append(f"{number}: {found.skipped}")
        for file, content in sound.items():
            file.write_bytes(content)
    if find_snapshot(
        memory, recipe=recipe, data=data.fingerprint, history=history, at_least=0
    ).skipped:
        missed.append("the repaired files")
    return missed


def test_flipped_bits_are_noticed(four_nodes: Any, recipe: Recipe) -> None:
    run, processes = four_nodes
    memories = [process.folder for process in processes]
    (missed,) = run_ranks(1, find_flipped, recipe, memories, RunFolder(run).history())
    assert not missed


def test_a_damaged_manifest_is_read_from_another_node(four_nodes: Any, recipe: Recipe) -> None:
    run, processes = four_nodes
    memories = [process.folder for process in processes]
    manifests = [next(memory.glob("step-*/manifest.json")) for memory in memories]
    sound = manifests[0].read_bytes()
    for count, step in ((3, 2), (4, 0)):
        for manifest in manifests[:count]:
            flip(manifest, random.Random(count))
        wanted = [(RunFolder(run).history(), 0)]
        assert run_ranks(1, find_each, recipe, memories, wanted) == [[step]]
        for manifest in manifests:
            manifest.write_bytes(sound)


def test_a_node_without_memory_ends_the_snapshots_but_not_the_run_or_its_reports(
    recipe: Recipe, tmp_path: Path
) -> None:
    with serve(tmp_path, 2) as processes:
        memories = [process.folder for process in processes]
        results = run_ranks(2, full, recipe, tmp_path / "run", memories)
        failed = "the snapshot of step 1 failed, so no more are taken: rank 1: no memory"
        lost = "is not saved: no quota"
        assert results == [["", "", f"step 1 {lost}", failed, f"step 2 {lost}", ""]] * 2
        assert not list(tmp_path.glob("threefold-run-node*/step-*"))


def full(recipe: Recipe, run: Path, memories: list[Path]) -> Any:
    """Train three steps on two nodes; one has no memory for snapshots, and no save succeeds."""
    return train(recipe, run, memories, 3, full=1)


def test_a_failed_rename_leaves_the_earlier_snapshot(recipe: Recipe, tmp_path: Path) -> None:
    with serve(tmp_path, 2) as processes:
        memories = [process.folder for process in processes]
        results = run_ranks(2, fail_second, recipe, tmp_path / "run", memories)
        failed = "the snapshot of step 2 failed, so no more are taken: rank 1: step-2: no rename"
        assert results == [["", "", failed]] * 2
        names = [sorted(entry.name[:12] for entry in m.glob("step-*")) for m in memories]
        assert names == [["step-0000001", "step-0000002"], ["step-0000001"]]
        # Node 0 has the files of both nodes, so step 2 is complete there; node 1 has step 1.
        history = RunFolder(tmp_path / "run").history()
        for without, step in (((), 2), ((0,), 1)):
            tell(processes, without=without)
            assert run_ranks(1, find_each, recipe, memories, [(history, 0)]) == [[step]]


def fail_second(recipe: Recipe, run: Path, memories: list[Path]) -> Any:
    """Train three steps on two nodes; node 1 cannot publish the snapshot of the second one."""
    publish = NodeMemory.publish

    def fail(self: NodeMemory, workspace: Path, name: str, manifest: str) -> None:
        if json.loads(manifest)["step"] == 2 and self.folder == memories[1]:
            raise OSError(5, "no rename", "step-2")
        publish(self, workspace, name, manifest)

    writer_module.NodeMemory.publish = fail  # type: ignore[method-assign]
    return train(recipe, run, memories, 3)


def test_all_nodes_must_have_a_folder(recipe: Recipe) -> None:
    wanted = recipe.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"snapshot_every": 5})}
    )
    cases = [(wanted, 0), (wanted, 1), (wanted, 2), (recipe, 2)]  # the last wants no snapshots
    assert run_ranks(2, have_memory, cases) == [[False, False, True, False]] * 2


def have_memory(cases: list[tuple[Recipe, int]]) -> list[bool]:
    """Return whether the ranks agree to take snapshots, when only the first have a folder."""
    world, agreed = join_world(), []
    for recipe, with_memory in cases:
        if world.rank < with_memory:
            os.environ[FOLDER_VARIABLE] = "/absent"
        agreed.append(memory_of_all_nodes(recipe) is not None)
        dist.barrier()  # a rank that ends closes the store of the others
    return agreed


def test_files_must_be_complete() -> None:
    files = {"a": {"bytes": 3}, "b": {"bytes": 5}}
    assert complete(files, {}) is None
    assert complete(files, {"n0": {"a": 3, "manifest.json": 9}}) is None
    assert complete(files, {"n0": {"a": 3}, "n1": {"b": 4}}) is None
    found = complete(files, {"n0": {"a": 3, "b": 5}, "n1": {"b": 5}, "n2": {"a": 2}})
    assert found == {"a": ["n0"], "b": ["n0", "n1"]}
