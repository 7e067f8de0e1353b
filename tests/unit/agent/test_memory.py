"""What the process's memory is, from the kernel and from torch, without stalling or touching either."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gc_sidecar_agent import memory
from gc_sidecar_agent.memory import Memory, read_device_memory, read_memory, trim
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
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        read_memory()
    assert len(os.listdir("/proc/self/fd")) == before


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
