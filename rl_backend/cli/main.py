"""Reads the command line, runs the sub-command and turns an error into one message."""

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from rl_backend import __version__
from rl_backend.cli.example import EXAMPLES, run_example
from rl_backend.options.parser import CommandError, CommandParser, missing_package

# Sub-command -> (module with add_arguments(parser) and run(arguments) -> exit status, what it does).
COMMANDS = {
    "doctor": ("rl_backend.cli.doctor", "say what is installed, what is missing and what this machine can run"),
    "parity": ("rl_backend.cli.parity", "train with two runtimes and name the first place where they part"),
    "schedule": ("rl_backend.cli.schedule", "say what a pipeline schedule costs in idle time and activations, and draw it"),
    "plan": ("rl_backend.cli.plan", "say what a model takes on each rank, whether it fits a device, and which layout does"),
    "check": ("rl_backend.cli.check", "say what refuses a run, from its options, model, data and this machine, in seconds"),
    "episode": ("rl_backend.cli.episode", "show an episode of an environment, played by the model before training"),
    "export": ("rl_backend.cli.export", "write a Hugging Face directory from a training checkpoint"),
    "import": ("rl_backend.cli.import_model", "write a Hugging Face directory from a GGUF file"),
    "example": ("rl_backend.cli.example", "run an example script, or say where it is, to be copied"),
    "report": ("rl_backend.cli.report", "make report.html of a run folder again"),
    "serve": ("rl_backend.cli.serve", "let others train and sample a model over HTTP, with the SDK of Tinker or of OpenAI"),
    "completion": ("rl_backend.cli.completion", "print a script with which bash or zsh completes commands and options"),
    "gpu-check": ("rl_backend.cli.gpu_check", "run the tests that need a GPU and write a JSON result"),
}

EPILOG = """\
rl-backend COMMAND --help lists the options of a command. For example:
  rl-backend grpo --model DIR --dataset train.jsonl --reward my_reward.py:compute_score
  rl-backend export --checkpoint runs/grpo/checkpoints/latest --out models/mine"""

EXIT_ERROR = 2
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one sub-command; None takes the arguments of the process.

    Returns:
        The sub-command's exit status, 2 after an error that was printed as one message, or 141 where the reader of the
        output, such as ``head``, has left.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # What is still in the buffer would be refused again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0] in EXAMPLES:
        # Its options are its own, and so are its messages.
        return _reported(lambda: run_example(argv[0], argv[1:]), debug=False)
    try:
        if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
            near = get_close_matches(argv[0], [*EXAMPLES, *COMMANDS], n=1)
            advice = f"did you mean {near[0]}?" if near else "see rl-backend --help"
            raise CommandError(f"{argv[0]}: there is no such command; {advice}")
        parser = _parser(argv)
        parser.refuse_unknown(argv[:1])
        parsed = parser.parse_args(argv)
    except (CommandError, ModuleNotFoundError) as error:
        return _say(error)
    if parsed.command is None:
        parser.print_help()
        return EXIT_ERROR
    return _reported(lambda: int(importlib.import_module(COMMANDS[parsed.command][0]).run(parsed)), debug=parsed.debug)


def _parser(argv: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        prog="rl-backend",
        description="A training backend for RL on language models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rl-backend {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, purpose in EXAMPLES.items():
        subparsers.add_parser(name, help=purpose)
    chosen = next((argument for argument in argv if argument in COMMANDS), None)
    for name, (module, purpose) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        # Modules of commands are slow to import.
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
            subparser.refuse_unknown(argv[argv.index(name) + 1 :])
    return parser


def _reported(command: Callable[[], int], *, debug: bool) -> int:
    try:
        return command()
    except Exception as error:
        # Looked up, not imported: the module needs torch, which is what `doctor` may find missing.
        errors = sys.modules.get("rl_backend.contracts.errors")
        expected = isinstance(error, CommandError) or (errors is not None and isinstance(error, errors.RLBackendError))
        if debug or not (expected or missing_package(error)):
            raise
        return _say(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _say(error: Exception) -> int:
    print(f"error: {missing_package(error) or error}", file=sys.stderr)
    return EXIT_ERROR


def _reader_has_left() -> bool:
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
