"""Episodes of many turns, by part.

python -m benchmarks.environments --part continuous_over_waves
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks import environment_examples, environment_failures, environment_waves
from benchmarks.report import require_sleeping_threads, update_result

RESULT = "environments"
PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "continuous_over_waves": environment_waves.measure,
    "failures": environment_failures.measure,
    "examples": environment_examples.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=tuple(PARTS), action="append", help="this one (default: all)")
    arguments = parser.parse_args()
    require_sleeping_threads("benchmarks.environments")
    for part in arguments.part or PARTS:
        update_result(RESULT, PARTS[part]())


if __name__ == "__main__":
    main()
