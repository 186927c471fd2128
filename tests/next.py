"""Tests that run in the environments of ``make setup PINS=next`` too, one environment after the other.

make test-next, or python -m tests.next [engines] [trainer] [together] [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUITE: Mapping[str, Sequence[str]] = {
    "engines": (
        "tests/unit/actors/rollout/vllm/test_patches.py",
        "tests/unit/actors/rollout/vllm/test_worker.py",
        "tests/unit/actors/sync/test_weight_streams.py",
    ),
    "trainer": (
        "tests/golden",
        "tests/unit/rl_backend/checkpoint/test_written_configs.py",
        "tests/unit/rl_backend/model/test_families.py",
        "tests/unit/rl_backend/model/test_left_out_fields.py",
        "tests/unit/rl_backend/model/test_sparse_families.py",
    ),
    "together": ("-m", "long", "tests/e2e/test_engine_environments.py"),
}
"""By environment; ``together`` is a cluster of both. Of other tests nothing is known: see docs/reference/versions.md."""


def main(arguments: Sequence[str]) -> int:
    named = [each for each in arguments if each in SUITE]
    rest = [each for each in arguments if each not in SUITE]
    statuses = []
    for environment in named or SUITE:
        python = f".venv-next/{'trainer' if environment == 'together' else environment}/bin/python"
        command = [python, "-m", "pytest", *SUITE[environment], *rest]
        print(" ".join(command), flush=True)
        statuses.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    return max(statuses, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
