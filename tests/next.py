"""What of the suite runs in the environments of ``make setup PINS=next``, one environment after the other.

make test-next, or python -m tests.next [engines] [trainer] [ARGUMENTS OF PYTEST]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-next"
SUITE: Mapping[str, Sequence[str]] = {
    "engines": (
        "tests/unit/actors/rollout",
        "tests/unit/actors/sync",
        "tests/e2e/test_rollout.py",
        "tests/e2e/test_weight_sync.py",
        "tests/e2e/test_vllm_families.py",
        "tests/e2e/test_vllm_patches.py",
    ),
    "trainer": ("tests/unit/rl_backend", "tests/golden"),
}
EXCEPTIONS: Mapping[str, Mapping[str, str]] = {
    "engines": {},
    "trainer": {},
}
"""By environment: the beginning of a test's id -> why it is skipped there. docs/reference/versions.md says more."""


class Exceptions:
    """Skips the exceptions of an environment; one that meets no test ends the run, because it hides nothing any more."""

    def __init__(self, environment: str) -> None:
        self._reasons = EXCEPTIONS[environment]
        self._unused = set(self._reasons)

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        """A folder or file is not imported: what it imports may not be there."""
        reason = self._reason(collector.nodeid)
        if reason is None:
            return None
        return pytest.CollectReport(collector.nodeid, "skipped", (str(collector.path), 0, f"Skipped: {reason}"), [])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if reason := self._reason(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))
        if self._unused:
            raise pytest.UsageError(f"no test begins with {', '.join(sorted(self._unused))}; take it from tests/next.py")

    def _reason(self, nodeid: str) -> str | None:
        beginning = next((each for each in self._reasons if is_of(nodeid, beginning=each)), None)
        self._unused.discard(beginning or "")
        return self._reasons[beginning] if beginning else None


def is_of(nodeid: str, *, beginning: str) -> bool:
    return nodeid.startswith(beginning) and nodeid[len(beginning) : len(beginning) + 1] in ("", "/", ":", "[")


def main(arguments: Sequence[str]) -> int:
    inside = Path(sys.prefix).resolve()
    if inside.parent == FOLDER:
        return pytest.main([*SUITE[inside.name], *arguments], plugins=[Exceptions(inside.name)])
    named = [each for each in arguments if each in SUITE]
    rest = [each for each in arguments if each not in SUITE]
    statuses = []
    for environment in named or SUITE:
        command = [str(FOLDER / environment / "bin" / "python"), "-m", "tests.next", *rest]
        print(f"{environment}: {' '.join(SUITE[environment])}", flush=True)
        statuses.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    return max(statuses, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
