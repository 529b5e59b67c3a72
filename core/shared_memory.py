"""Memory that another process of this machine can map: one anonymous file, gone with its users."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Final

from core.errors import PreflightError

MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in Python's mmap


class SharedMemory:
    """``length`` zeroed bytes, all of them taken from the system now.

    ``file`` is the descriptor to hand over: whoever maps it sees the same bytes. It has no name in
    any folder. The memory lives as long as a mapping, ``buffer`` here or another process's; the
    descriptor as long as this object. Raises PreflightError where the system has not so much.
    """

    def __init__(self, length: int, name: str = "antiphon-kv") -> None:
        assert length > 0, length
        self.length = length
        self.file = os.memfd_create(name, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        try:
            os.ftruncate(self.file, length)
            self.buffer, self.address = map_file(self.file)
        except OSError as error:
            raise PreflightError(
                f"the system has no {length >> 20} MiB of shared memory ({error.strerror}): "
                "set a smaller kv_memory_mib"
            ) from error


def map_file(file: int) -> tuple[mmap.mmap, int]:
    """Map a file whole and shared, every page now; the mapping, and its address.

    Huge pages are of use where /sys/kernel/mm/transparent_hugepage/shmem_enabled is "advise", and
    only to pages first touched through a mapping. Raises OSError without the memory: a page that
    is found to be missing later is a SIGBUS.
    """
    mapped = mmap.mmap(file, 0)
    _advise(mapped, mmap.MADV_HUGEPAGE)
    if not _advise(mapped, MADV_POPULATE_WRITE):
        os.posix_fallocate(file, 0, len(mapped))
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _advise(mapped: mmap.mmap, advice: int) -> bool:
    """Whether the kernel knows this advice."""
    try:
        mapped.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
