"""A run of two ranks on a Ray of its own, one of whose servers is killed while a rank works.

    python -m tests.support.lost_cluster SERVER MODEL RUN_DIR

Writes the ids of all of its processes to ``RUN_DIR/pids`` before that.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import psutil

from actors import RankContext, TrainGroup
from actors.cluster.session import ray_session
from actors.folder.folder import RunFolder
from actors.run.command_line import run_command
from rl_backend.contracts import BaseConfig, NativeConfig, RuntimeConfig


class Options(BaseConfig):
    """Of this run."""

    steps: int = 3


def work(context: RankContext) -> None:
    time.sleep(0.5)


def main() -> None:
    server, model, folder = sys.argv[1:]
    config = RuntimeConfig(hf_path=model, max_tokens_per_micro_batch=64, backend_cfg=NativeConfig(device="cpu"))
    with ray_session(2), TrainGroup(config, num_ranks=2) as train, RunFolder(folder, Options()):
        train.build_model()
        processes = psutil.Process().children(recursive=True)
        (Path(folder) / "pids").write_text(" ".join(str(process.pid) for process in processes))
        (victim,) = (process for process in processes if process.name() == server)
        threading.Timer(1.0, victim.kill).start()
        while True:
            train.run_on_ranks(work)


if __name__ == "__main__":
    run_command(main)
