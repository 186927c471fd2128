"""``rl-backend report``: writes ``report.html`` into a run folder from the files in it."""

import argparse
from pathlib import Path

from rl_backend.cli.command import CommandError
from rl_backend.lab.report.page import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of a run, finished or not")


def run(arguments: argparse.Namespace) -> int:
    """Writes the report and prints where it is.

    Raises:
        CommandError: not a run folder, or one that cannot be written to.
    """
    folder: Path = arguments.run_dir
    if not (folder / "metrics.jsonl").is_file():
        raise CommandError(f"{folder} is not a run folder: it has no metrics.jsonl; give the directory of --run-dir")
    try:
        print(write_report(folder))
    except OSError as error:
        raise CommandError(f"the report of {folder} cannot be written: {error}") from None
    return 0
