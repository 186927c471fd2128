"""The process that plays environments of verifiers, in the Python that has it.

python -P child.py DESCRIPTOR     DESCRIPTOR: of the connection to the run

It imports verifiers and the standard library alone. Messages are JSON: the settings, then requests ``{"play": number,
"task": index, "token": ...}`` and ``{"cancel": number}``, answered in any order, and ``{"end": true}``.
"""

import asyncio
import itertools
import json
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

MODEL = "policy"
TOKEN_HEADER = "X-RL-Backend-Episode"
KEY_VARIABLE = "RL_BACKEND_VERIFIERS_KEY"


async def serve(connection: Connection, settings: dict[str, Any]) -> None:
    import verifiers.v1 as vf

    environment = vf.load_environment(vf.resolve_env_config(settings["environment"]))
    requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    playing: dict[int, asyncio.Task[None]] = {}

    def read() -> None:
        while True:
            try:
                request = json.loads(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(0)  # the run has ended, and nobody waits for episodes
            loop.call_soon_threadsafe(requests.put_nowait, request)

    async def play(request: dict[str, Any]) -> None:
        client = vf.TrainClientConfig(
            base_url=settings["base_url"],
            renderer=settings["renderer"],
            renderer_model_name=settings["tokenizer"],
            api_key_var=KEY_VARIABLE,
            headers={TOKEN_HEADER: request["token"]},
        )
        try:
            episode = await environment.run_episode(tasks[request["task"]], vf.ModelContext(model=MODEL, client=client))
            answer = described(episode)
        except asyncio.CancelledError:
            answer = {"errors": ["cancelled"]}
        except Exception as error:  # noqa: BLE001, an environment may raise anything, and the run is told
            answer = {"errors": [f"{type(error).__name__}: {error}"]}
        playing.pop(request["play"], None)
        connection.send_bytes(json.dumps({"played": request["play"], **answer}).encode())

    async with environment.serving():
        tasks = list(itertools.islice(environment.taskset, settings["most_tasks"]))
        connection.send_bytes(
            json.dumps({"ready": True, "tasks": [task.data.name or str(task.data.idx) for task in tasks]}).encode()
        )
        threading.Thread(target=read, daemon=True).start()
        while True:
            request = await requests.get()
            if "end" in request:
                break
            if "play" in request:
                playing[request["play"]] = asyncio.create_task(play(request))
            elif request["cancel"] in playing:
                playing[request["cancel"]].cancel()
        for task in playing.values():
            task.cancel()


def described(episode: Any) -> dict[str, Any]:
    traces = [
        {
            "agent": trace.agent.name,
            "reward": trace.reward,
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
            "stop": trace.stop_condition,
            "branches": [{"token_ids": branch.token_ids, "sampled": branch.sampled_mask} for branch in trace.branches],
        }
        for trace in episode.traces
    ]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return {"traces": traces, "errors": [f"{error.type}: {error.message}" for error in errors]}


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    settings = json.loads(connection.recv_bytes())
    sys.path[:0] = settings["path"]
    try:
        asyncio.run(serve(connection, settings))
    except Exception as error:
        # Told where anything can be wrong: the settings, the taskset, the packages.
        connection.send_bytes(json.dumps({"ready": False, "problem": f"{type(error).__name__}: {error}"}).encode())
        raise


if __name__ == "__main__":
    main()
