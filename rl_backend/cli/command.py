"""What commands share: their error, their flags, and their end by a signal. Needs no torch."""

from __future__ import annotations

import argparse
import json
import re
import signal
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_TERMINATED = 128 + signal.SIGTERM

SIZES = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline ranks",
    "vpp": "stages per pipeline rank",
    "cp": "context-parallel ranks",
    "ep": "expert-parallel ranks",
    "etp": "tensor-parallel ranks inside an expert",
}
"""Field of :class:`~rl_backend.contracts.ParallelConfig` -> help of the flag with its name."""

_RENAMED = {"plugins": "plugin", "calculate_entropy": "entropy"}
"""Fields whose flags have another name."""


class CommandError(Exception):
    """What was wrong and what to do, in one message."""


def in_flags(message: str, fields: str, micro_batches: str = "micro-batches") -> str:
    """An error in terms of the command line: ``Workload.num_micro_batches=0`` is ``--micro-batches 0``.

    Args:
        fields: pattern of what stands before ``=`` in such errors; its group is the name of the field.
        micro_batches: name of the flag that says how many there are.
    """
    message = re.sub(r"^(-?\d+) micro-batches:", rf"--{micro_batches} \1:", message)
    return re.sub(rf"\b{fields}=", lambda match: f"--{flag(match[1])} ", message)


def flag(field: str) -> str:
    """Name of the flag that sets a field of a configuration."""
    return _RENAMED.get(field, field.removeprefix("num_").replace("_", "-"))


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Those of the arguments that are on the command line."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def json_object(name: str, text: str) -> dict[str, Any]:
    """What ``--name`` was given.

    Raises:
        CommandError: not an object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CommandError(f"--{name} {text}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CommandError(f"--{name} {text}: expected an object of fields")
    return value


def check_output(name: str, path: Path) -> None:
    """Raises :class:`CommandError` where ``--name`` is no file that could be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"--{name} {path}: must be a file in a directory that exists")


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """SIGTERM raises :class:`SystemExit` with status 143 in the main thread, so that ``finally`` ends what was started."""

    def leave(_: int, __: FrameType | None) -> None:
        # A second signal must not cut the clean-up short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
