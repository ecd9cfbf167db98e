"""Compiled kernels that go through storage from one host to another: what is taken, what is given, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.connectors.host.kernel_folders import (
    COMPILERS,
    KernelKey,
    kernel_environment,
    kernel_folder,
    kernel_key,
    whole_entries,
)
from millrace.connectors.host.local_files import locked
from millrace.connectors.storage.kernel_cache import LOG, KernelCache, kernel_cache
from millrace.connectors.storage.store import Store
from millrace.core.config import RunConfig

KEY = KernelKey("h200-1", {"gpus": ["H200, 9.0"]})
NINJA = shutil.which("ninja")
BUILD = """\
rule compile
  depfile = $out.d
  deps = gcc
  command = printf '%s: %s {header}\\n' $out $in > $out.d && cat $in {header} > $out
build one.o: compile {source}
build one.so: compile one.o
default one.so
"""


class Host:
    """A host's folder of kernels, and what its log says."""

    def __init__(self, root: str, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()
        folder.mkdir(parents=True, exist_ok=True)
        self.cache = KernelCache(root, KEY, folder, self.lines.append)

    def write(self, path: str, text: str = "x") -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def compile(self, name: str, text: str = "cubin") -> None:
        """A kernel as Triton leaves it, with the paths of its files."""
        places = [
            self.write(f"triton/{name}/k.{kind}", f"{text} {kind}") for kind in ("ttir", "cubin", "json")
        ]
        group = {"child_paths": {place.name: str(place) for place in places}}
        self.write(f"triton/{name}/__grp__k.json", json.dumps(group))

    def build(self, header: Path, name: str = "tvm-ffi/one") -> Path:
        """A library that ninja built; returns its folder."""
        source = self.write(f"{name}/one.cu", "source\n")
        self.write(f"{name}/build.ninja", BUILD.format(header=header, source=source))
        self.ninja(name)
        return source.parent

    def ninja(self, name: str = "tvm-ffi/one") -> str:
        assert NINJA, "ninja is a test's tool"
        return subprocess.run(
            [NINJA, "-d", "explain"],
            cwd=self.folder / name,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ).stdout


@pytest.fixture
def host(root: str, tmp_path: Path) -> Callable[[str], Host]:
    return lambda name: Host(root, tmp_path / name / "kernels")


def test_another_host_takes_what_one_gave_and_its_groups_name_its_own_files(
    host: Callable[[str], Host],
) -> None:
    one, two = host("one"), host("two")
    one.compile("AA")
    one.write("triton/BB/launcher.so")
    assert one.cache.give() == 2
    assert two.cache.take() == 2
    group = json.loads((two.folder / "triton/AA/__grp__k.json").read_text())
    for name, path in group["child_paths"].items():
        assert path == str(two.folder / "triton/AA" / name)
        assert Path(path).read_text() == f"cubin {name.removeprefix('k.')}"
    assert "took 2 in" in two.lines[-1]


def test_nothing_is_stored_twice(host: Callable[[str], Host], root: str) -> None:
    one, two = host("one"), host("two")
    one.compile("AA")
    assert [one.cache.give(), one.cache.give()] == [1, 0]
    two.cache.take()
    assert two.cache.give() == 0
    two.compile("CC")
    assert two.cache.give() == 1
    assert [one.cache.take(), one.cache.take()] == [1, 0]
    assert len(Store(root).list(KEY.name)) == 4  # two packs with an index each


PARTS = {
    "triton: no group yet": ({"triton/A/k.ttir": "x"}, []),
    "triton: a launcher": ({"triton/A/l.so": "x"}, ["triton/A"]),
    "triton: a result of tuning": ({"triton/A/k.autotune.json": "{}"}, ["triton/A"]),
    "triton: an empty folder": ({"triton/A/tmp.pid_1_x/k.ttir": "x"}, []),
    "tvm-ffi: no log": ({"tvm-ffi/a/a.so": "x"}, []),
    "tvm-ffi: still linking": (
        {"tvm-ffi/a/a.so": "x", "tvm-ffi/a/.ninja_log": "# ninja log v5\n0\t1\t2\ta.o\tff\n"},
        [],
    ),
    "tvm-ffi: linked": (
        {"tvm-ffi/a/a.so": "x", "tvm-ffi/a/.ninja_log": "# ninja log v5\n0\t1\t2\ta.so\tff\n"},
        ["tvm-ffi/a"],
    ),
    "flashinfer": (
        {
            "flashinfer/.cache/flashinfer/0.6/90a/generated/a/a.cu": "x",
            "flashinfer/.cache/flashinfer/0.6/90a/cached_ops/a/a.so": "x",
            "flashinfer/.cache/flashinfer/0.6/90a/cached_ops/a/.ninja_log": "0\t1\t2\t/any/cached_ops/a/a.so\tff\n",
            "flashinfer/.cache/flashinfer/0.6/90a/cached_ops/tmp/a.lock": "",
            "flashinfer/.cache/flashinfer/0.6/90a/flashinfer_jit.log": "",
        },
        [
            "flashinfer/.cache/flashinfer/0.6/90a/cached_ops/a",
            "flashinfer/.cache/flashinfer/0.6/90a/generated/a/a.cu",
        ],
    ),
    "flashinfer: a source of no library": (
        {"flashinfer/.cache/flashinfer/0.6/90a/generated/a/a.cu": "x"},
        [],
    ),
    "deep-gemm": ({"deep-gemm/cache/k/kernel.cubin": "x"}, ["deep-gemm/cache/k"]),
    "deep-gemm: no cubin yet": ({"deep-gemm/cache/k/kernel.cu": "x"}, []),
    "torch-extensions": (
        {"torch-extensions/a/a.so": "x", "torch-extensions/a/.ninja_log": "0\t1\t2\ta.so\tff\n"},
        ["torch-extensions/a"],
    ),
    "inductor": (
        {"inductor/fxgraph/ab/abc/x": "x", "inductor/cd/cde.py": "x", "inductor/locks/l.lock": ""},
        ["inductor/fxgraph/ab/abc", "inductor/cd/cde.py"],
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_what_is_still_being_written_is_not_given(case: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path / "store"), tmp_path / "one")
    files, given = PARTS[case]
    for path, text in files.items():
        host.write(path, text)
    assert list(whole_entries(host.folder)) == given


def test_every_compiler_has_a_row_and_a_folder() -> None:
    assert {case.partition(":")[0] for case in PARTS} == {compiler.name for compiler in COMPILERS}
    assert len(kernel_environment(Path("/k"))) == len(COMPILERS)


def test_files_arrive_private_and_locks_do_not(host: Callable[[str], Host]) -> None:
    one, two = host("one"), host("two")
    one.write("deep-gemm/cache/k/kernel.cubin")
    one.write("deep-gemm/cache/k/lock")
    one.cache.give()
    two.cache.take()
    entry = two.folder / "deep-gemm/cache/k"
    assert [file.name for file in entry.iterdir()] == ["kernel.cubin"]
    assert (entry / "kernel.cubin").stat().st_mode & 0o777 == 0o600


def test_ninja_has_nothing_to_do_though_headers_are_newer(tmp_path: Path) -> None:
    root, header = str(tmp_path / "store"), tmp_path / "header.h"
    header.write_text("header\n")
    one = Host(root, tmp_path / "kernels")
    built = one.build(header)
    assert one.cache.give() == 1
    shutil.rmtree(one.folder)  # a fresh host, where the same paths are installed again
    header.write_text("header\n")
    os.utime(header, (time.time() - 2, time.time() - 2))
    two = Host(root, tmp_path / "kernels")
    assert two.cache.take() == 1
    assert "no work to do" in two.ninja()
    assert (built / "one.so").stat().st_mtime > header.stat().st_mtime
    header.write_text("changed\n")  # and it still sees a change
    os.utime(header, (time.time() + 2, time.time() + 2))
    assert "no work to do" not in two.ninja()


def test_without_the_times_ninja_would_build_again(tmp_path: Path) -> None:
    header = tmp_path / "header.h"
    header.write_text("header\n")
    host = Host(str(tmp_path / "store"), tmp_path / "kernels")
    built = host.build(header)
    assert "no work to do" in host.ninja()
    for file in built.iterdir():
        os.utime(file)  # as any copy of the files has it
    assert "no work to do" not in host.ninja()


@pytest.mark.parametrize("what", ["changed", "cut", "missing"])
def test_a_damaged_pack_is_named_and_stored_again_once_compiled(
    host: Callable[[str], Host], root: str, what: str
) -> None:
    one, two, three = host("one"), host("two"), host("three")
    one.compile("AA")
    one.cache.give()
    store = Store(root).child(KEY.name)
    pack = next(path for path in store.list() if path.endswith(".tar.gz"))
    data = store.read(pack)
    if what == "missing":
        store.remove(pack)
    else:
        store.write(pack, data[:-9] if what == "cut" else data[:-1] + b"?")
    assert two.cache.take() == 0
    assert any(pack in line and "compiled here" in line for line in two.lines)
    two.compile("AA", "other")
    assert two.cache.give() == 1
    assert three.cache.take() == 1
    assert not any("compiled here" in line for line in three.lines)


@pytest.mark.parametrize("text", ["{", '{"entries": ["triton/AA"]}', ""])
def test_a_damaged_index_is_named_and_replaced(host: Callable[[str], Host], root: str, text: str) -> None:
    one, two, three = host("one"), host("two"), host("three")
    one.compile("AA")
    one.cache.give()
    store = Store(root).child(KEY.name)
    index = next(path for path in store.list() if path.endswith(".json"))
    store.write(index, text.encode())
    assert two.cache.take() == 0
    assert any(index in line and "compiled here" in line for line in two.lines)
    two.compile("AA", "other")
    assert two.cache.give() == 1
    assert three.cache.take() == 1
    assert not any("compiled here" in line for line in three.lines)


def test_an_index_whose_entry_leads_out_of_the_folder_is_refused(
    host: Callable[[str], Host], root: str, tmp_path: Path
) -> None:
    store = Store(root).child(KEY.name)
    store.write_sealed("ab.json", {"entries": ["../../out"], "bytes": 1, "key": {}})
    two = host("two")
    assert two.cache.take() == 0
    assert any("'../../out' is no path" in line for line in two.lines)
    assert not (tmp_path / "out").exists()


def test_givers_at_the_same_time_lose_nothing(host: Callable[[str], Host]) -> None:
    hosts = [host(f"host{number}") for number in range(4)]
    for number, each in enumerate(hosts):
        each.compile("shared")
        each.compile(f"own{number}")
    twice = [*hosts, *(Host(one.cache.store.url.rpartition("/")[0], one.folder) for one in hosts)]
    threads = [threading.Thread(target=each.cache.give) for each in twice]  # two processes a host
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = host("last")
    assert last.cache.take() == 5
    assert not any("not stored" in line for each in twice for line in each.lines)


def test_a_storage_that_fails_is_said_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    one = Host(str(tmp_path / "file"), tmp_path / "one")
    one.compile("AA")
    assert (one.cache.take(), one.cache.give()) == (0, 0)
    assert "not stored" in one.lines[-1]
    assert "correct the path" in one.lines[-1]


def test_a_storage_that_does_not_answer_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    one, two = Host(str(tmp_path / "s"), tmp_path / "one"), Host(str(tmp_path / "s"), tmp_path / "two")
    one.compile("AA")
    one.cache.give()
    with locked(two.folder / "take.lock"):  # another process that waits for the storage
        assert two.cache.take(patience_s=0.3) == 0
        assert two.lines[-1] == "nothing taken in 0.3 s, so kernels are compiled"
    while not any(line.startswith("took 1") for line in two.lines):
        time.sleep(0.01)
    assert (two.folder / "triton/AA/k.cubin").is_file()


def test_a_crash_between_pack_and_index_leaves_what_no_host_reads(
    host: Callable[[str], Host], root: str
) -> None:
    one, two = host("one"), host("two")
    Store(root).child(KEY.name).write(f"{'0' * 64}.tar.gz", b"half")
    one.compile("AA")
    assert one.cache.give() == 1
    assert two.cache.take() == 1


def test_gifts_follow_each_other_in_the_background(tmp_path: Path) -> None:
    one, two = Host(str(tmp_path / "s"), tmp_path / "one"), Host(str(tmp_path / "s"), tmp_path / "two")
    one.compile("AA")
    one.cache.give_later((0.0, 0.2))
    one.cache.give_later((0.0,))
    while not any(line.startswith("stored 1") for line in one.lines):
        time.sleep(0.01)
    one.compile("BB")
    while sum(line.startswith("stored 1") for line in one.lines) < 2:
        time.sleep(0.01)
    assert two.cache.take() == 2


def test_the_key_follows_from_versions_and_the_folder_from_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path))
    here = kernel_key()
    package = tmp_path / "site" / "sglang-0.5.17.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n")
    served = kernel_key([str(tmp_path / "site")])
    assert (here.parts["sglang"], served.parts["sglang"]) == (None, "0.5.17")
    assert here.name != served.name
    assert kernel_key() == here
    folder = kernel_folder(served)
    assert folder == tmp_path / "kernels" / served.name
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_runs_cache_takes_at_once_and_logs_beside_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_HOME", str(tmp_path / "home"))
    (tmp_path / "runs" / "a").mkdir(parents=True)
    key = kernel_key()
    one = Host(str(tmp_path / "store"), tmp_path / "one")
    one.compile("AA")
    giver = KernelCache(str(tmp_path / "store"), key, one.folder, one.lines.append)
    assert giver.give() == 1
    values = {
        "run": {"name": "a"},
        "storage": {"root": str(tmp_path / "runs")},
        "model": {"path": "m"},
        "data": {"sources": [{"path": "d.jsonl"}]},
    }
    assert kernel_cache(RunConfig.model_validate(values), "engine 0") is None
    values["placement"] = {"kernel_cache": str(tmp_path / "store")}
    cache = kernel_cache(RunConfig.model_validate(values), "engine 0")
    assert cache is not None
    assert (Path(cache.environment["TRITON_CACHE_DIR"]) / "AA" / "k.cubin").is_file()
    assert "engine 0: took 1 in" in (tmp_path / "runs" / "a" / "logs" / LOG).read_text()
