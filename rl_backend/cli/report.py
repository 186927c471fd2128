"""``rl-backend report``: writes ``report.html`` into a run folder, or a folder of users' runs, from the files in it."""

import argparse
from pathlib import Path

from rl_backend.lab.report.page import write_report
from rl_backend.options.parser import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the folder of a run, finished or not, or of several users' runs"
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=text)


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.run_dir
    if not any(log.is_file() for pattern in ("metrics.jsonl", "*/metrics.jsonl") for log in folder.glob(pattern)):
        problem = "is not a run folder: it has no metrics.jsonl, and neither has a folder in it"
        raise CommandError(f"{folder} {problem}; give the directory of --run-dir")
    try:
        print(write_report(folder))
    except OSError as error:
        raise CommandError(f"the report of {folder} cannot be written: {error}") from None
    return 0
