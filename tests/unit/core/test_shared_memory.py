"""Shared memory: the same bytes in every mapping, all there at once, and nothing left of it."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from core import shared_memory
from core.errors import PreflightError
from core.shared_memory import SharedMemory, map_file

SIZE = 5 * mmap.PAGESIZE + 64


def test_another_mapping_sees_the_same_bytes():
    memory = SharedMemory(SIZE)
    assert bytes(memory.buffer) == bytes(SIZE)
    assert memory.address % mmap.PAGESIZE == 0
    other, address = map_file(memory.file)
    assert address != memory.address
    memory.buffer[SIZE - 3 :] = b"abc"
    assert other[SIZE - 3 :] == b"abc"


@pytest.mark.parametrize("advice", [shared_memory.MADV_POPULATE_WRITE, 9999], ids=["new", "old"])
def test_every_page_is_taken_at_once_by_old_kernels_too(monkeypatch, advice):
    monkeypatch.setattr(shared_memory, "MADV_POPULATE_WRITE", advice)
    memory = SharedMemory(SIZE)
    status = os.fstat(memory.file)
    assert status.st_size == SIZE
    assert status.st_blocks * 512 == 6 * mmap.PAGESIZE


def test_the_bytes_outlive_the_descriptor_which_is_not_inherited():
    memory = SharedMemory(SIZE)
    buffer, file = memory.buffer, memory.file
    assert not os.get_inheritable(file)
    buffer[:2] = b"ok"
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    assert buffer[:2] == b"ok"


def test_a_system_without_memory_says_what_to_do(monkeypatch):
    def refuse(_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shared_memory, "map_file", refuse)
    with pytest.raises(PreflightError, match=r"no 64 MiB of shared memory.*kv_memory_mib"):
        SharedMemory(64 << 20)
