"""Reads the command line, runs the sub-command and turns an error into one message."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from rl_backend import __version__
from rl_backend.cli.command import CommandError

# Sub-command -> (module with add_arguments(parser) and run(arguments) -> exit status, what it does).
COMMANDS = {
    "doctor": ("rl_backend.cli.doctor", "say what is installed, what is missing and what this machine can run"),
    "parity": ("rl_backend.cli.parity", "train with two runtimes and name the first place where they part"),
    "schedule": ("rl_backend.cli.schedule", "say what a pipeline schedule costs in idle time and activations, and draw it"),
    "plan": ("rl_backend.cli.plan", "say what a model takes on each rank, whether it fits a device, and which layout does"),
    "check": ("rl_backend.cli.check", "say what refuses a run, from its options, model, data and this machine, in seconds"),
    "export": ("rl_backend.cli.export", "write a Hugging Face directory from a training checkpoint"),
    "example": ("rl_backend.cli.example", "run an example script, or say where it is, to be copied"),
    "report": ("rl_backend.cli.report", "make report.html of a run folder again"),
    "gpu-check": ("rl_backend.cli.gpu_check", "run the tests that need a GPU and write a JSON result"),
}

EXIT_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Args:
        arguments: without the program's name; None takes those of the process.

    Returns:
        The sub-command's exit status, or 2 after an error that was printed as one message.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="rl-backend", description="A training backend for RL on language models.")
    parser.add_argument("--version", action="version", version=f"rl-backend {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command")
    chosen = next((argument for argument in argv if argument in COMMANDS), None)
    for name, (module, purpose) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
    parsed = parser.parse_args(argv)
    if parsed.command is None:
        parser.print_help()
        return EXIT_ERROR
    try:
        return int(importlib.import_module(COMMANDS[parsed.command][0]).run(parsed))
    except Exception as error:
        # Looked up, not imported: the module needs torch, which is what `doctor` may find missing.
        errors = sys.modules.get("rl_backend.contracts.errors")
        expected = isinstance(error, CommandError) or (errors is not None and isinstance(error, errors.RLBackendError))
        if parsed.debug or not expected:
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
