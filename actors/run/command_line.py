"""A command line made from a configuration: one ``--option`` per field, and ``--config FILE.json`` for a saved one."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from actors.cluster.session import EXIT_TERMINATED, RunTerminated
from actors.run.state import read_object
from rl_backend.contracts import BaseConfig, ClusterLostError, ConfigError, RLBackendError


def parse_config[C: BaseConfig](config_type: type[C], description: str, arguments: Sequence[str] | None = None) -> C:
    """Reads ``config_type`` from the command line; options given there replace those of ``--config``.

    Raises:
        ConfigError: a value that the configuration refuses, or a ``--config`` file that cannot be read.
    """
    parser = argparse.ArgumentParser(description=description, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="JSON of all options, as config.json in a run folder has it")
    for name, field in config_type.model_fields.items():
        option = f"--{name.replace('_', '-')}"
        text = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, dest=name, help=text)
        else:
            default = "required" if field.is_required() else f"default: {field.default}"
            parser.add_argument(option, dest=name, metavar="X", help=f"{text} ({default})")
    given = vars(parser.parse_args(arguments))
    values: dict[str, Any] = {}
    if "config" in given:
        path = Path(given.pop("config"))
        try:
            values = read_object(path)
        except (OSError, ValueError) as error:
            raise ConfigError.of("--config", str(path), f"cannot be read as options: {error}") from None
    return config_type(**{**values, **{name: None if value == "none" else value for name, value in given.items()}})


def run_command(main: Callable[[], None]) -> None:
    """Runs ``main``; an error of ours becomes one message and exit status 2, Ctrl-C status 130, SIGTERM status 143."""
    try:
        main()
    except RLBackendError as error:
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, ClusterLostError):
            # Ray's own exit handlers wait for what has ended, and end with another status.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)
        raise SystemExit(2) from None
    except RunTerminated:
        print("stopped by SIGTERM", file=sys.stderr)
        raise SystemExit(EXIT_TERMINATED) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
