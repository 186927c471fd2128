"""How the OpenMP threads of a CPU process wait for each other."""

from __future__ import annotations

import os


def thread_environment() -> dict[str, str]:
    """Variables for the environment of a process that does not exist yet.

    Threads that wait sleep instead of spinning. A spinning thread holds the core that the one it waits for needs as soon as
    another process works on the same cores, and a step then takes many times as long. A value that the driver's environment
    has is kept.
    """
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
