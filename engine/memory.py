"""How much memory there is to plan with."""

from __future__ import annotations

import os
from pathlib import Path


def available_memory() -> int:
    """Bytes that this process may still use: what the machine has free, within its control group's limit."""
    free = _meminfo("MemAvailable")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read(Path("/sys/fs/cgroup/memory.max")), _read(Path("/sys/fs/cgroup/memory.current"))
    return free if limit is None else max(0, min(free, limit - (used or 0)))


def _meminfo(key: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            if name == key:
                return int(value.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
