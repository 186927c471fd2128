"""Process groups of Ray's own processes, which Ray starts in the group of the driver.

A terminal, ``timeout`` and some schedulers send a signal to the whole group of a command. Ray's servers block Ctrl-C but end
on SIGTERM, and with them the step that a run would still finish.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ray._private import services


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Inside, each process that Ray starts gets a group of its own, and passes it on to those that it starts.

    They stay in the driver's session, and still end when the driver ends: the kernel sees to that, not the group.
    """
    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen
