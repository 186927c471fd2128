"""The most memory that this process has held, by the kernel's count."""

from __future__ import annotations

import re
from pathlib import Path


def reset_peak_memory() -> int:
    """The count begins anew; bytes that are held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Bytes, since the count began."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "the kernel counts it"
    return int(found[1]) * 1024
