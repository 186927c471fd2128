"""Ray's processes are out of reach of signals to the driver's process group."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
from ray._private import services

from actors.cluster.local_ray import own_process_groups


@pytest.mark.parametrize("own", [False, True])
def test_processes_of_ray_are_in_the_drivers_group_or_their_own(own: bool) -> None:
    """Where the first case fails, Ray has come to see to it itself, and ``process_group.py`` can go."""
    before = services.ConsolePopen
    with own_process_groups() if own else nullcontext():
        process = services.start_ray_process(["sleep", "600"], "log_monitor", fate_share=True).process
    try:
        assert (os.getpgid(process.pid) == os.getpgrp()) is not own
        assert os.getsid(process.pid) == os.getsid(0)
        assert services.ConsolePopen is before
    finally:
        process.kill()
        process.wait()
