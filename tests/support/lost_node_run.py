"""``examples.sft`` with steps of a quarter of a second, which waits after LOST steps until one of three nodes is lost, and
after RETURNED steps until there is another.
"""

from __future__ import annotations

import time

import ray

from actors.run.command_line import run_command
from examples import sft
from rl_backend.options.command_line import parse_config

LOST, RETURNED, STEPS = 16, 24, 32


def main() -> None:
    config = parse_config(sft.SFTConfig, "SFT")

    def wait(step: int, metrics: dict[str, float]) -> None:
        time.sleep(0.25)
        wanted = {LOST: 2, RETURNED: 3}.get(step)
        while wanted and sum(node["Alive"] for node in ray.nodes()) != wanted:
            time.sleep(0.2)

    sft.train(config, on_step=wait)


if __name__ == "__main__":
    run_command(main)
