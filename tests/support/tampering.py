"""What is done to a run's files, and what must come of it: each reader has the numbers of the whole run, or names the file.

Owns the kinds of files, the ways in which one is changed, and the judgement; tests have the runs, run_readers.py what reads them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from millrace.connectors.storage.conditional import PLACE, check_seal, sealed
from millrace.connectors.storage.iteration_files import IterationFiles
from millrace.connectors.storage.lease import Lease, take_over
from millrace.connectors.storage.manifests.manifest import Manifest
from millrace.connectors.storage.run_folder import RunFolder
from millrace.connectors.storage.store import Store
from millrace.core.errors import MillraceError, StorageError
from millrace.flows.commands.verify import verify_run
from millrace.flows.driver.stored_run import run_record
from millrace.tasks.publish import _commit, _manifest
from tests.support.run_readers import COMMITTED, OPEN, TASKS, UNDER_WAY, Numbers

IN_ITERATION = (
    "prompts.parquet",
    "verdicts.parquet",
    "batch.parquet",
    "step.json",
    "rollouts/part",
    "rewards/part",
    "evaluations/part",
    "results/evaluate.json",
    "takeover.json",
    *(f"results/{task}.json" for task in TASKS),
)
KINDS = (
    *(f"{COMMITTED}/{name}" for name in (*IN_ITERATION, "manifest.json", "results/publish.json")),
    *(f"{UNDER_WAY}/{name}" for name in IN_ITERATION),
    *(f"checkpoints/000003/{name}" for name in (".metadata", "__0_0.distcp", "common.pt", "metadata.json")),
    "checkpoints/000003/complete.json",
    "exports/000003/model.safetensors",
    "exports/000003/config.json",
    "eval/held_out/000002.parquet",
    "quarantine.parquet",
    "run.json",
    "lease/000001.json",
)
UNREAD = ("lease/000001.json",)  # whose own test is tests/connectors/storage/test_lease.py
ANOTHER = "0" * 32  # id of another run
Readers = dict[str, Callable[[str], Numbers]]


def kind_of(path: str) -> str:
    """The row of a file: parts have one, and so have the files of an export beside weights and configuration."""
    path = re.sub(r"/part-[^/]*$", "/part", path)
    path = re.sub(r"/logprobs/rank-[^/]*$", "/logprobs/rank", path)
    path = re.sub(r"^lease/\d+", "lease/000001", path)
    path = re.sub(r"/takeover-\d+", "/takeover", path)
    path = re.sub(r"^iterations/000000/", f"{COMMITTED}/", path)
    path = re.sub(r"^checkpoints/\d+/", "checkpoints/000003/", path)
    path = re.sub(r"^eval/held_out/\d+", "eval/held_out/000002", path)
    path = path.replace("evaluate_before.json", "evaluate.json")
    is_export = path.startswith("exports/") and not path.endswith((".safetensors", "config.json"))
    return "exports/000003/config.json" if is_export or "_config.json" in path else path


def reopened(whole: Path, run: Path) -> None:
    """A copy of a complete run, as its third driver leaves it that dies before it publishes the last iteration.

    The second took over the iteration before, and committed it.
    """
    shutil.copytree(whole, run)
    metrics = json.loads((run / COMMITTED / "manifest.json").read_text())["tasks"]["metrics"]
    for iteration in (COMMITTED, UNDER_WAY):
        (run / iteration / "manifest.json").unlink()
        (run / iteration / "results" / "publish.json").unlink()
    folder, run_id = driven(run)
    began = IterationFiles(folder, OPEN - 1).record("evaluate_before")
    ctx = SimpleNamespace(run_folder=folder, index=OPEN - 1, folder=folder.iteration(OPEN - 1), worked_at={})
    ctx.records = {"evaluate_before": began} if began else {}
    context = cast(Any, ctx)
    published = {"metadata": {}, "result": json.dumps(_commit(context, _manifest(context, metrics)))}
    folder.store.write_sealed(f"{COMMITTED}/results/publish.json", published, run=run_id)
    cast(Lease, folder.store.fence).release()
    folder, _ = driven(run)
    cast(Lease, folder.store.fence).release()


def driven(run: Path) -> tuple[RunFolder, str]:
    """The folder as a driver holds it that has just taken over, and the run's id."""
    folder, run_id = RunFolder(str(run.parent), run.name), run_record(str(run.parent), run.name)["id"]
    folder.store.fence = Lease.take(folder.store)
    folder.owner.drive_as(run_id)
    take_over(folder)
    return folder, run_id


def one_bit(store: Store, path: str, _: bytes) -> None:
    data = bytearray(store.read(path))
    data[len(data) // 2] ^= 1
    store.write(path, bytes(data))


def truncated(store: Store, path: str, _: bytes) -> None:
    data = store.read(path)
    store.write(path, data[: len(data) // 2])


def replaced(store: Store, path: str, another: bytes) -> None:
    store.write(path, another)


def removed(store: Store, path: str, _: bytes) -> None:
    store.remove(path)


def doubled(store: Store, path: str, _: bytes) -> None:
    """A copy beside it: of a part one that would count, of a driver after all others."""
    folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
    part = re.fullmatch(r"part-\d{6}-[0-9a-f]{32}(\.[0-9a-f]{16}\.parquet)", name)
    assert part or not name.startswith("part-"), name
    copy = f"part-999999-{'0' * 32}{part[1]}" if part else f"copy of {name}"
    store.write(f"{folder}/{copy}" if folder else copy, store.read(path))


def of_another_run(store: Store, path: str, _: bytes) -> None:
    """As a run of the same name under another root would have it there: whole, sealed, with other numbers."""
    content = store.read_json(path)
    if path.endswith("manifest.json"):
        tasks = {**content["tasks"], "metrics": {}}
        other = Manifest.model_validate({**content, "run": ANOTHER, "tasks": tasks}).sealed()
        store.write_json(path, other.model_dump(mode="json"))
        return
    opened = check_seal(content, store.url_of(path))
    if path == "run.json":
        store.write_sealed(path, {**opened, "id": ANOTHER, "data": []})
        return
    if "result" in opened:
        opened["result"] = json.dumps({**json.loads(opened["result"]), "seconds": 1e9, "metrics": {}})
    store.write_json(path, sealed(opened, content[PLACE], ANOTHER))


WAYS = {way.__name__: way for way in (one_bit, truncated, replaced, removed, doubled)}


def linked(run: Path, into: Path) -> None:
    """A copy of a run that shares its bytes; a file that is written anew is another one."""
    shutil.copytree(run, into, copy_function=os.link)


def victim(run: Path, kind: str) -> str:
    """The first file of a kind."""
    if (run / kind).is_file():
        return kind
    pattern = kind.replace("/takeover.json", "/takeover-*") if "takeover" in kind else f"{kind}-*"
    return sorted(path.relative_to(run).as_posix() for path in run.glob(pattern))[0]


def another(run: Path, path: str) -> bytes:
    """A whole file of the same kind that belongs elsewhere in the run."""
    folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
    if name.startswith("part-"):
        return next(file.read_bytes() for file in sorted((run / folder).glob("part-*")) if file.name != name)
    for number in ("000000", "000001", "000002", "000003"):
        elsewhere = run / re.sub(r"(?<=/)\d{6}(?=/|\.)", number, path)
        if elsewhere.is_file() and elsewhere.read_bytes() != (run / path).read_bytes():
            return elsewhere.read_bytes()
    if name.endswith(".json"):
        content = json.loads((run / path).read_text())
        return json.dumps({**content, "data": [], "eos_token_id": 3}).encode()
    return (run / path).read_bytes()[::-1]


def outcome(reader: Callable[[str], Numbers], root: str) -> tuple[Numbers, MillraceError | None]:
    """What a reader has read, or its error."""
    try:
        return reader(root), None
    except MillraceError as error:
        return {}, error


def check(root: str, path: str, way: str, readers: Readers, expected: Mapping[str, Numbers]) -> None:
    """Each reader has the expected numbers, or fewer where a task runs again or a step is replayed, or names the file."""
    for name, reader in readers.items():
        numbers, refused = outcome(reader, root)
        if refused:
            assert path.rsplit("/", 1)[-1] in str(refused), f"{name} of {way} {path}: {refused}"
            assert refused.remedy, f"{name} of {way} {path}: {refused}"
        for key, value in numbers.items():
            assert value == expected[name].get(key), f"{name} of {way} {path}: {key}"


def runs_again(path: str) -> bool:
    """Whether a file's absence only means that its task runs again, or that another checkpoint is taken."""
    of_open_task = path.startswith(f"{UNDER_WAY}/results/")
    note = path.startswith(
        f"{UNDER_WAY}/takeover"
    )  # without it all parts count; its iteration's records name them
    return of_open_task or note or path.endswith(("complete.json", "results/publish.json"))


def check_verify(root: str, path: str, way: str, unread: bool = False, before: Collection[str] = ()) -> None:
    """verify names the file as broken; a copy of it as a stranger. unread: nothing names it. before: strangers of the whole run."""
    try:
        verdict = verify_run(root, "a")
        problems, strangers = verdict.problems, sorted(set(verdict.strangers) - set(before))
    except StorageError as error:
        problems, strangers = [str(error)], []
    if unread or (way == "removed" and runs_again(path)):
        assert problems == [] or not unread, (way, path, problems)
        return
    if way == "doubled":
        assert problems == []
        assert len(strangers) == 1, strangers
        return
    assert any(path.rsplit("/", 1)[-1] in line for line in problems), (way, path, problems)
