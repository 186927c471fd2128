"""Checks that a run can create or lock its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from actors.folder.lock import RunLock, without_new_folders
from actors.folder.resume import find_start
from actors.options.sampled_config import RunConfig


def find_run_folder(config: RunConfig) -> str:
    """Makes the folder and takes its lock, and leaves nothing behind.

    Raises:
        ConfigError: it cannot be made or written to, is in use, or holds another run.
        CheckpointError: it holds a checkpoint that cannot be continued.
    """
    start = find_start(config.with_known_steps() if config.resume else config)
    folder = Path(config.run_dir)
    has_lock = (folder / ".lock").exists()
    with without_new_folders(folder):
        try:
            with RunLock(folder):
                free = shutil.disk_usage(folder).free
        finally:
            if folder.is_dir() and not has_lock:
                (folder / ".lock").unlink(missing_ok=True)
    what = ", ".join(start.describe()) or "is free"
    return f"{folder} {what}, {free / 2**30:.1f} GiB of disk left"
