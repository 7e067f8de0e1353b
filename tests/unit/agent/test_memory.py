"""What the process's memory is, from the kernel and from torch, without stalling or touching either."""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gc_sidecar_agent import memory
from gc_sidecar_agent.memory import (
    CgroupMemory,
    Memory,
    read_cgroup_memory,
    read_device_memory,
    read_memory,
    trim,
)
from tests.leaving_out import leave_out
from tests.unit.agent.own_process import in_own_process

STATUS = b"""Name:\tRssAnon: 9 kB
Umask:\t0022
VmRSS:\t    9000 kB
RssAnon:\t    1234 kB
RssFile:\t       0 kB
RssShmem:\t      7 kB
"""


def reading(monkeypatch: pytest.MonkeyPatch, status: bytes) -> Memory:
    monkeypatch.setattr(memory.os, "read", lambda fd, size: status[:size])
    return read_memory()


def test_the_kinds_add_up_to_what_is_resident() -> None:
    now = read_memory()
    assert now.anonymous_bytes is not None
    assert now.file_bytes is not None
    assert now.shared_bytes is not None
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    total = now.anonymous_bytes + now.file_bytes + now.shared_bytes
    assert total == pytest.approx(int(resident.split()[1]) * 1024, rel=0.1)


@in_own_process
def test_memory_that_is_written_to_is_anonymous() -> None:
    before = read_memory().anonymous_bytes
    kept = bytearray(os.urandom(1 << 20)) * 50
    after = read_memory().anonymous_bytes
    assert before is not None
    assert after is not None
    assert 45 << 20 < after - before < 60 << 20, len(kept)


def test_a_processs_own_name_is_not_taken_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reading(monkeypatch, STATUS) == Memory(1234 * 1024, 0, 7 * 1024)


@pytest.mark.parametrize(
    "status",
    [
        b"",
        b"Name:\tpython\n",
        b"Name:\tx\nRssAnon:\n",
        b"Name:\tx\nRssAnon:\tmuch kB\n",
        b"\xff" * 99,
    ],
)
def test_what_the_kernel_does_not_tell_is_none(
    monkeypatch: pytest.MonkeyPatch, status: bytes
) -> None:
    assert reading(monkeypatch, status) == Memory(None, None, None)


def test_without_proc_all_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(memory.os, "open", refuse)
    assert read_memory() == Memory(None, None, None)


@in_own_process
def test_reading_leaves_no_descriptor_open() -> None:
    read_memory()
    read_cgroup_memory()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        read_memory()
        read_cgroup_memory()
    assert len(os.listdir("/proc/self/fd")) == before


# --- the cgroup ---

GIB = 1 << 30
V1_NO_LIMIT = (1 << 63) - 4096
V1_LINES = "8:pids:/\n5:cpu,cpuacct:/\n4:memory:{path}\n1:name=systemd:/\n0::/elsewhere\n"


def fake_machine(root: Path, proc_self_cgroup: str, files: dict[str, object]) -> str:
    """A root directory with this /proc/self/cgroup and these files below /sys/fs/cgroup."""
    told = {"proc/self/cgroup": proc_self_cgroup}
    told |= {f"sys/fs/cgroup/{name}": f"{content}\n" for name, content in files.items()}
    for name, content in told.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return str(root)


def v2(directory: str, limit: object, current: int, inactive_file: int) -> dict[str, object]:
    stat = f"anon 5\nfile 9\ninactive_anon 3\ninactive_file {inactive_file}\nactive_file 1"
    return {
        f"{directory}memory.max": limit,
        f"{directory}memory.current": current,
        f"{directory}memory.stat": stat,
    }


def v1(directory: str, limit: int, usage: int, inactive_file: int) -> dict[str, object]:
    stat = f"cache 9\ninactive_file 1\ntotal_cache 9\ntotal_inactive_file {inactive_file}"
    return {
        f"memory{directory}/memory.limit_in_bytes": limit,
        f"memory{directory}/memory.usage_in_bytes": usage,
        f"memory{directory}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("path", "files", "expected"),
    [
        pytest.param(
            "/", v2("", 8 * GIB, 3 * GIB, GIB), CgroupMemory(8 * GIB, 2 * GIB),
            id="a container with a cgroup namespace of its own",
        ),
        pytest.param(
            "/kubepods/pod1/c1", v2("", 8 * GIB, 3 * GIB, GIB), CgroupMemory(8 * GIB, 2 * GIB),
            id="the host's path in a container whose mount is its own",
        ),
        pytest.param(
            "/", v2("", "max", 3 * GIB, GIB), CgroupMemory(None, 2 * GIB), id="no limit"
        ),
        pytest.param(
            "/pod/c1", {**v2("pod/", "max", 6, 0), **v2("pod/c1/", "max", 5, 1)},
            CgroupMemory(None, 4), id="no limit anywhere: the process's own group",
        ),
        pytest.param(
            "/pod/c1", {**v2("pod/", 90, 60, 10), **v2("pod/c1/", 70, 50, 20)},
            CgroupMemory(70, 30), id="the container's limit is the smaller one",
        ),
        pytest.param(
            "/pod/c1", {**v2("pod/", 80, 60, 10), **v2("pod/c1/", "max", 30, 20)},
            CgroupMemory(80, 50), id="only the pod has a limit, which others use too",
        ),
        pytest.param(
            "/pod/c1", {**v2("pod/", 70, 60, 10), **v2("pod/c1/", 70, 50, 20)},
            CgroupMemory(70, 30), id="of two equal limits the nearer one",
        ),
        pytest.param(
            "/../other", v2("other/", 7, 5, 1), CgroupMemory(7, 4),
            id="a process outside of its namespace's root",
        ),
        pytest.param(
            "/", v2("", 9, 5, 8), CgroupMemory(9, 0), id="more cache than is counted as used"
        ),
        pytest.param("/", {"memory.max": 9}, CgroupMemory(9, None), id="a limit alone"),
        pytest.param(
            "/", {"memory.max": "max", "memory.current": 5}, CgroupMemory(None, None),
            id="nothing tells how much of it is cache",
        ),
        pytest.param(
            "/", v2("", "many", 5, 1), CgroupMemory(None, 4), id="a limit that is no number"
        ),
        pytest.param("/c1", {}, CgroupMemory(None, None), id="no memory controller"),
    ],
)  # fmt: skip
def test_memory_of_a_cgroup_of_version_2(
    tmp_path: Path, path: str, files: dict[str, object], expected: CgroupMemory
) -> None:
    assert read_cgroup_memory(fake_machine(tmp_path, f"0::{path}\n", files)) == expected


@pytest.mark.parametrize(
    ("path", "files", "expected"),
    [
        pytest.param(
            "/docker/c1", v1("/docker/c1", 8 * GIB, 3 * GIB, GIB), CgroupMemory(8 * GIB, 2 * GIB),
            id="on the host",
        ),
        pytest.param(
            "/docker/c1", v1("", 8 * GIB, 3 * GIB, GIB), CgroupMemory(8 * GIB, 2 * GIB),
            id="the host's path in a container whose mount is its own",
        ),
        pytest.param(
            "/c1", {**v1("", V1_NO_LIMIT, 9, 1), **v1("/c1", V1_NO_LIMIT, 7, 2)},
            CgroupMemory(None, 5), id="no limit",
        ),
        pytest.param(
            "/pod/c1", {**v1("/pod", 80, 60, 10), **v1("/pod/c1", V1_NO_LIMIT, 30, 20)},
            CgroupMemory(80, 50), id="only the pod has a limit",
        ),
        pytest.param("/c1", {}, CgroupMemory(None, None), id="not mounted"),
    ],
)  # fmt: skip
def test_memory_of_a_cgroup_of_version_1(
    tmp_path: Path, path: str, files: dict[str, object], expected: CgroupMemory
) -> None:
    # Version 2 is there too, as on machines in between; its numbers are not this process's.
    more = v2("", 1, 1, 0) | v2("elsewhere/", 1, 1, 0)
    root = fake_machine(tmp_path, V1_LINES.format(path=path), files | more)
    assert read_cgroup_memory(root) == expected


@pytest.mark.parametrize(
    "told", ["", "\n", ":::", "memory", "0:", "\x00::/\x00", "0::/" + "x" * 9000]
)
def test_a_cgroup_that_cannot_be_understood_is_none_or_the_mounted_one(
    tmp_path: Path, told: str
) -> None:
    assert read_cgroup_memory(fake_machine(tmp_path, told, {})) == CgroupMemory(None, None)
    root = fake_machine(tmp_path, told, v2("", 9, 5, 1))
    assert read_cgroup_memory(root) == CgroupMemory(9, 4)


def test_without_proc_and_sys_the_cgroup_is_not_known(tmp_path: Path) -> None:
    assert read_cgroup_memory(str(tmp_path)) == CgroupMemory(None, None)


def test_this_machines_cgroup_holds_at_least_what_this_process_has_written_to() -> None:
    now = read_cgroup_memory()
    if now.current_bytes is None:
        leave_out("this machine's cgroup does not count memory")
    own = read_memory().anonymous_bytes
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert own is not None
    assert own / 2 < now.current_bytes < machine
    assert now.limit_bytes is None or now.limit_bytes >= now.current_bytes


def test_reading_the_cgroup_costs_far_less_than_a_millisecond() -> None:
    def took_s() -> float:
        began = time.perf_counter()
        read_cgroup_memory()
        return time.perf_counter() - began

    assert statistics.median(took_s() for _ in range(200)) < 1e-3


# --- torch ---


def stand_in_torch(monkeypatch: pytest.MonkeyPatch, cuda: Any) -> None:
    torch = ModuleType("torch")
    if cuda is not None:
        torch.cuda = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_torch_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert read_device_memory() == (None, None)
    assert "torch" not in sys.modules


def test_a_device_that_is_not_initialised_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def touched(*_: Any) -> int:
        calls.append(True)  # this would initialise the device
        return 1

    cuda = SimpleNamespace(
        is_initialized=lambda: False,
        device_count=touched,
        memory_allocated=touched,
        memory_reserved=touched,
    )
    stand_in_torch(monkeypatch, cuda)
    assert read_device_memory() == (None, None)
    assert calls == []


def test_an_initialised_device_tells_what_torch_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker of rank 1 uses the second device; the thread that asks has the first one current.
    allocated, reserved = {0: 0, 1: 5}, {0: 0, 1: 8}
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_allocated=lambda device: allocated[device],
        memory_reserved=lambda device: reserved[device],
    )
    stand_in_torch(monkeypatch, cuda)
    assert read_device_memory() == (5, 8)


def test_a_torch_that_is_half_imported_or_fails_is_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    for cuda in (None, SimpleNamespace(), SimpleNamespace(is_initialized=fail)):
        stand_in_torch(monkeypatch, cuda)
        assert read_device_memory() == (None, None)


# --- trim ---


@in_own_process
def test_trim_gives_back_what_the_allocator_keeps() -> None:
    kept = [
        bytearray(100_000) for _ in range(1_000)
    ]  # below glibc's threshold for a map of its own
    pin = bytearray(100_000)
    del kept
    before = read_memory().anonymous_bytes
    trim()
    after = read_memory().anonymous_bytes
    assert before is not None
    assert after is not None
    assert before - after > 50 << 20, len(pin)


def test_trim_is_nothing_where_the_c_library_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    trim()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())
    trim()
