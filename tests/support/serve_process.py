"""``rl-backend serve`` in a process, until whoever uses it has done with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class Served(NamedTuple):
    """Attributes:
    model: the name of the base model; of several, all of them with commas between.
    said: the lines that the process has written, while it runs.
    """

    url: str
    model: str
    process: subprocess.Popen[str]
    said: list[str]


def serve_command(model: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "rl_backend.cli", "serve", "--model", str(model), "--port", "0", *options]


@contextmanager
def serving(command: Sequence[str], **environment: str) -> Iterator[Served]:
    """Ends the process by SIGTERM; raises ChildProcessError with what it said where it does not begin to serve."""
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"^serving (.+) at (http://\S+)", line):
                break
        else:
            raise ChildProcessError("".join(said))
        # What it says later would fill the pipe.
        reader = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            yield Served(found[2], found[1], process, said)
        finally:
            process.terminate()
            process.wait(timeout=60)
            reader.join()
