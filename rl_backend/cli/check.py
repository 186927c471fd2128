"""``rl-backend check``: what a run would be refused for, without starting it."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import typing
from typing import Any

from rl_backend.cli.example import EXAMPLES, example_file, import_from_here

if typing.TYPE_CHECKING:
    from actors.options.config import TrainingConfig

EXIT_REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "A line for each check, with the seconds that it took. Exit status: 0 nothing refuses the run, 2 something does. "
        "Ray, ranks and engines are not started."
    )
    parser.add_argument("name", choices=[name for name in EXAMPLES if name != "eval"], help="the example that would run")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="those of the run, as the example takes them")


def run(arguments: argparse.Namespace) -> int:
    from actors.checks.preflight import findings
    from actors.folder.resume import RunFinishedError
    from rl_backend.options.command_line import in_flags, parse_config

    import_from_here()
    kind: type[TrainingConfig] = config_type(arguments.name)
    config = parse_config(kind, f"Checks a run of {arguments.name}; these are its options.", arguments.options)
    refused, started = 0, time.perf_counter()
    for name, each in config.runs().items():
        if name:
            print(f"{name}:")
        for found in findings(each):
            finished = isinstance(found.error, RunFinishedError)
            # A run that has finished ends with success.
            refused += found.error is not None and not finished
            verdict = "ok" if found.error is None else "done" if finished else "REFUSED"
            text = found.text if found.error is None else in_flags(found.error, each)
            print(f"{verdict:8}{found.name:11}{found.seconds:6.2f} s  {text}")
    seconds = time.perf_counter() - started
    print(f"{'nothing refuses this run' if not refused else f'{refused} of these refuse the run'} ({seconds:.1f} s)")
    return EXIT_REFUSED if refused else 0


def config_type(name: str) -> type[Any]:
    spec = importlib.util.spec_from_file_location(f"rl_backend_example_{name}", example_file(name))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Configurations look up the names in their annotations in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    kind: type[Any] = typing.get_type_hints(getattr(module, "train", None) or module.evaluate)["config"]
    return kind
