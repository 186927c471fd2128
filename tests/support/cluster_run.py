"""``examples.grpo``, which also writes ``nodes.json``: the node of every actor, by class."""

from __future__ import annotations

import json
from pathlib import Path

import ray

from actors.run.command_line import run_command
from examples import grpo
from rl_backend.options.command_line import parse_config


def main() -> None:
    config = parse_config(grpo.GRPOConfig, "GRPO")

    def note_nodes(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            nodes: dict[str, list[str]] = {"driver": [ray.get_runtime_context().get_node_id()]}
            for actor in ray._private.state.actors().values():
                if actor["State"] == "ALIVE":
                    nodes.setdefault(actor["ActorClassName"], []).append(actor["Address"]["NodeID"])
            (Path(config.run_dir) / "nodes.json").write_text(json.dumps(nodes))

    grpo.train(config, on_step=note_nodes)


if __name__ == "__main__":
    run_command(main)
