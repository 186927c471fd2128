"""Shared parts of the commands: flags made from configurations, errors, and SIGTERM. Needs no torch."""

from __future__ import annotations

import argparse
import json
import math
import signal
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAliasType, get_args, get_origin

from rl_backend.options.parser import CommandError

if TYPE_CHECKING:
    from rl_backend.contracts import BaseConfig, RLBackendError

EXIT_TERMINATED = 128 + signal.SIGTERM

_RENAMED = {"plugins": "plugin", "calculate_entropy": "entropy"}
"""Fields whose flags have another name."""


type FlagGroup = argparse.ArgumentParser | argparse._ArgumentGroup


def add_fields(parser: FlagGroup, config: type[BaseConfig], fields: Iterable[str], prefix: str = "") -> None:
    """A flag for each of ``fields``, explained as in the configuration's docstring; None where it is not given.

    Args:
        prefix: of the flags, for several configurations of one type.
    """
    documented = config.documented()
    for field in fields:
        info = config.model_fields[field]
        kind = info.annotation
        if isinstance(kind, UnionType):
            kind = next(each for each in get_args(kind) if each is not type(None))
        if isinstance(kind, TypeAliasType):
            kind = kind.__value__
        form: dict[str, Any] = {"type": kind, "metavar": "N" if kind is int else "X"}
        if get_origin(kind) is Literal:
            form = {"choices": get_args(kind)}
        default = "" if info.default is None else f" (default {info.default})"
        parser.add_argument(
            f"--{flag(prefix + field)}",
            dest=prefix + field,
            help=f"{documented[field]}{default}".replace("%", "%%"),
            **form,
        )


def add_plugins(parser: FlagGroup) -> None:
    meaning = "module that registers runtimes or model families; may be given several times"
    parser.add_argument("--plugin", action="append", default=[], metavar="MODULE", help=meaning)


def given(arguments: argparse.Namespace, fields: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Field -> value, of those on the command line; ``prefix`` as in :func:`add_fields`."""
    return {field: value for field in fields if (value := getattr(arguments, prefix + field)) is not None}


def in_flags(error: RLBackendError, *owners: str) -> str:
    """``Workload.num_micro_batches=0: ...`` as ``--micro-batches 0: ...``; ``owners`` are the classes that have flags."""
    from rl_backend.contracts import ConfigError

    def name_of(field: str) -> str:
        owner, _, name = field.rpartition(".")
        return f"--{flag(name)}" if owner in (owners or ("",)) else field

    return error.told(name_of, " ") if isinstance(error, ConfigError) else str(error)


def flag(field: str) -> str:
    return _RENAMED.get(field, field.removeprefix("num_").replace("_", "-"))


def positive(text: str) -> float:
    """A type of argparse, as ``json_object`` is."""
    number = float(text)
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return number


def json_object(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def check_output(name: str, path: Path) -> None:
    """Refuses ``--name`` before the work whose result could not be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"--{name} {path}: must be a file in a directory that exists")


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """SIGTERM raises :class:`SystemExit` with status 143 in the main thread."""

    def leave(_: int, __: FrameType | None) -> None:
        # A second signal must not cut the clean-up short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
