"""A run that is still going on when this process gets SIGTERM: in a reward function, or in a call to Ray.

python -m tests.support.terminated_run WHERE FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any

import ray

from actors import Sample
from actors.cluster.session import raised_on_sigterm, ray_session
from actors.collect.inputs import load_scorer
from actors.collect.sample_metrics import score
from actors.folder.folder import RunFolder
from actors.run.command_line import run_command
from rl_backend.contracts import BaseConfig
from rl_backend.data.examples import PromptExample
from rl_backend.data.prompts import Prompt
from rl_backend.data.rewards import RewardConfig


class Options(BaseConfig):
    steps: int = 3


class NoTokenizer:
    def decode(self, token_ids: list[int], **_: object) -> str:
        return "12"


def work(where: str) -> None:
    """Goes on for minutes."""
    sys.stdout.write("works\n")
    sys.stdout.flush()
    if where == "ray":
        ray.wait([sleep.remote()], timeout=300)
    elif where == "driver":
        time.sleep(300)
    else:
        sample = Sample(0, 0, [1], [2], [], "stop", (), 0)
        scorer = load_scorer(RewardConfig(functions=f"{__spec__.name}:{where}"))
        score([sample], [Prompt(PromptExample("p", "a", "source"), [1])], NoTokenizer(), scorer)


@ray.remote
def sleep() -> None:
    time.sleep(300)


def reward(**_: Any) -> float:
    time.sleep(300)
    return 1.0


def reward_that_catches_all(**_: Any) -> float:
    with suppress(BaseException):  # as a bare except of a user's
        time.sleep(300)
    return 1.0


def reward_that_exits(**_: Any) -> float:
    try:
        time.sleep(300)
    except BaseException:  # noqa: BLE001, as users write it
        sys.exit(3)
    return 1.0


def main() -> None:
    where, folder = sys.argv[1:]
    with ray_session(1) if where == "ray" else raised_on_sigterm(), RunFolder(folder, Options()):
        if where == "twice":
            try:
                work("driver")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
        work(where)


if __name__ == "__main__":
    run_command(main)
