"""``rl-backend doctor``: the verdict on this machine and installation, then the facts behind it."""

import argparse
import json
import sys

from rl_backend.lab.doctor.diagnosis import as_text, examine

EXIT_BROKEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    parser.add_argument("--quick", action="store_true", help="do not try Ray and Megatron (saves about 15 seconds)")
    parser.add_argument("--verl", action="store_true", help="also say which engine verl would build (about 15 seconds)")


def run(arguments: argparse.Namespace) -> int:
    def say(what: str) -> None:
        print(f"{what} ...", file=sys.stderr, flush=True)

    report = examine(trials=not arguments.quick, verl=arguments.verl, waiting=say)
    print(json.dumps(report.as_json(), indent=1) if arguments.json else as_text(report))
    return EXIT_BROKEN if report.problems else 0
