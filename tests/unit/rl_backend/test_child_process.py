"""A process that ends, by whatever signal, leaves none of those that it started, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.claims import ROOT
from tests.support.matrix import sampled

SECONDS = 5.0
"""How long the processes may take to end."""
_ENDLESS = "__import__('re').match('(a+)+$', 'a' * 60 + 'b')"
"""In C, and with the interpreter's lock."""
_HERE = """
import asyncio, multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace

from rl_backend.child_process import open_lifeline, tie

folder = Path(sys.argv[0]).parent
"""
PROGRAMS = {
    "of_a_thread_that_has_ended": f"""
def start():
    with open_lifeline() as line:
        tie(subprocess.Popen([sys.executable, "-c", "{_ENDLESS}"], pass_fds=[line.fileno()]).pid, line)

for _ in range(2):
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
""",
    "forks": f"""
def run(line):
    {_ENDLESS}

for _ in range(2):
    with open_lifeline() as line:
        process = multiprocessing.get_context("fork").Process(target=run, args=(line,))
        process.start()
        tie(process.pid, line)
""",
    "reward_functions": """
from rl_backend.data.rewards.worker_pool import WorkerPool

async def call():
    score = SimpleNamespace(spec=f"{folder}/endless.py:score")
    pool = WorkerPool([score], size=2, processes=True, limit=None)
    calls = [asyncio.ensure_future(pool.call(0, {})) for _ in range(2)]
    while len(list(folder.glob("called-*"))) < 2:
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.gather(*calls)

asyncio.run(call())
""",
    "reward_functions_that_are_being_loaded": """
from rl_backend.data.rewards.worker_pool import WorkerPool

async def call():
    pool = WorkerPool([SimpleNamespace(spec=f"{folder}/slow_to_import.py:score")], size=1, processes=True, limit=None)
    called = asyncio.ensure_future(pool.call(0, {}))
    await asyncio.sleep(1.0)
    print("ready", flush=True)
    await called

asyncio.run(call())
""",
    "sides_of_a_comparison": """
from rl_backend.lab.parity.run import start_rank

for index in range(2):
    start_rank([f"{folder}/unwritten", "reference", "nowhere"], os.environ, folder / f"log-{index}")
""",
    "forked_ranks": """
from benchmarks import forked_ranks

forked_ranks._IMPORTED = ()
for index in range(2):
    forked_ranks.start_forked_rank([f"{folder}/unwritten", "reference", "nowhere"], os.environ, folder / f"log-{index}")
""",
    "pool_of_ranks": """
from tests.support.rank_pool import RankPool

pool = RankPool(2)
threading.Thread(target=pool.run, args=(time.sleep, 600), kwargs={"timeout": 600.0}, daemon=True).start()
while len(pool._ranks) < 2:
    time.sleep(0.05)
time.sleep(2.0)
""",
    "server_of_forks_that_is_importing": """
from tests.support.rank_pool import RankPool

pool = RankPool(2, preload=["slow_to_import"])
threading.Thread(target=pool.run, args=(time.sleep, 600), daemon=True).start()
time.sleep(1.0)
""",
    "benchmark_of_pipelines": """
from benchmarks import pipeline_bubble

threading.Thread(target=pipeline_bubble.main, daemon=True).start()
while len(multiprocessing.active_children()) < pipeline_bubble.PP:
    time.sleep(0.05)
time.sleep(0.5)
""",
}
"""What starts processes. Where it does not itself, ``ready`` is printed after it."""


@pytest.mark.shows(
    "failures: processes of rewards, comparisons, benchmarks and tests end within 5 s of the kill -9 of their parent"
)
@pytest.mark.parametrize(
    ("name", "number"),
    sampled(
        [("benchmark_of_pipelines", signal.SIGTERM), *((name, signal.SIGKILL) for name in PROGRAMS)],
        *((name, signal.SIGKILL) for name in ("forks", "reward_functions", "sides_of_a_comparison", "pool_of_ranks")),
    ),
)
def test_no_child_is_left_five_seconds_after_the_end_of_its_parent(name: str, number: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "unwritten")
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "endless.py").write_text(
        "import os\nfrom pathlib import Path\n\n\ndef score():\n"
        f"    Path(__file__).with_name(f'called-{{os.getpid()}}').touch()\n    {_ENDLESS}\n"
    )
    (tmp_path / "parent.py").write_text(f"{_HERE}{PROGRAMS[name]}\nprint('ready', flush=True)\ntime.sleep(600)\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        ready = parent.stdout.readline()
        children = psutil.Process(parent.pid).children(recursive=True)
        parent.send_signal(number)
        parent.wait()
    try:
        assert ready == "ready\n" and children
        deadline = time.monotonic() + SECONDS
        while any(map(is_there, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [each.cmdline() for each in children if is_there(each)] == []
    finally:
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
