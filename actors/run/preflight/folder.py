"""Whether a run can have its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from actors.run.config import TrainingConfig
from actors.run.lock import RunLock
from actors.run.start import find_start


def find_run_folder(config: TrainingConfig) -> str:
    """Makes the folder and takes its lock, and leaves nothing behind.

    Raises:
        ConfigError: it cannot be made or written to, is in use, or holds another run.
        CheckpointError: it holds a checkpoint that cannot be continued.
    """
    start = find_start(config)
    folder = Path(config.run_dir)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    has_lock = (folder / ".lock").exists()
    try:
        with RunLock(folder):
            free = shutil.disk_usage(folder).free
    finally:
        if folder.is_dir() and not has_lock:
            (folder / ".lock").unlink(missing_ok=True)
        for path in made:
            if path.is_dir():
                path.rmdir()
    what = ", ".join(start.describe()) or "is free"
    return f"{folder} {what}, {free / 2**30:.1f} GiB of disk left"
