"""Applies every fault of the list to a copy and runs the tests that are named for it: ``make mutate``.

Results are recorded one by one, so that a run can be stopped and continued; what has not changed is not run again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.mutations import results
from tests.mutations.check import problems
from tests.mutations.child import Child, Outcome, preload
from tests.mutations.copies import applied, copy_tree, tree_digest
from tests.mutations.fault import Fault, all_faults
from tests.mutations.places import find_test

_POLL_SECONDS = 0.05
_LEAST_LIMIT, _LIMIT_FACTOR = 90.0, 5.0
_LOG_LINES = 25


def main(arguments: Sequence[str] | None = None) -> int:
    # A shell ignores interrupts in what it runs in the background; either signal ends what runs, and results are kept.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    options = _options(arguments)
    areas = all_faults()
    if options.check:
        return _check(areas)
    results.tidy(areas)
    known = {} if options.again else results.read()
    wanted = [
        fault
        for area, faults in areas.items()
        for fault in faults
        if (not options.names or any(name in (area, fault.name) for name in options.names))
        and (fault.name not in known or (options.survivors and not known[fault.name].get("killed_by")))
    ]
    for problem in problems(wanted):
        _say(f"LEFT OUT {problem}")
    wanted = [fault for fault in wanted if not problems([fault])]
    if wanted:
        _say(f"{len(wanted)} faults to try, {sum(map(len, areas.values()))} in the list")
        preload()
        deadline = time.monotonic() + 60 * options.minutes
        with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
            _try_all(wanted, areas, Path(folder), options.jobs, deadline)
    return _report(areas)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__)
    parser.add_argument("names", nargs="*", help="areas or faults; default: all")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="faults tried at one time")
    parser.add_argument("--minutes", type=float, default=150, help="after which no further fault is begun")
    parser.add_argument("--again", action="store_true", help="also those whose result is known")
    parser.add_argument("--survivors", action="store_true", help="also those that are known to survive")
    parser.add_argument("--check", action="store_true", help="run nothing; say which faults could not be tried")
    return parser.parse_args(arguments)


def _check(areas: Mapping[str, list[Fault]]) -> int:
    found = problems(fault for faults in areas.values() for fault in faults)
    for problem in found:
        _say(problem)
    _say(f"{sum(map(len, areas.values()))} faults in {len(areas)} areas, {len(found)} problems")
    return 1 if found else 0


def _try_all(wanted: Sequence[Fault], areas: Mapping[str, list[Fault]], folder: Path, jobs: int, deadline: float) -> None:
    copies = [folder / f"copy-{number}" for number in range(min(jobs, len(wanted)))]
    copy_tree(copies[0])
    for copy in copies[1:]:
        shutil.copytree(copies[0], copy, symlinks=True)
    limits = _limits(wanted, areas, copies[0], folder)
    left = iter([fault for fault in wanted if fault.name in limits])
    running: list[_Trial] = []
    try:
        while True:
            while copies and time.monotonic() < deadline and (fault := next(left, None)) is not None:
                running.append(_Trial(fault, copies.pop(), folder, limits[fault.name]))
            if not running:
                return
            for trial in [trial for trial in running if trial.ended()]:
                running.remove(trial)
                copies.append(trial.copy)
                results.record(trial.fault.name, trial.result(), areas)
            time.sleep(_POLL_SECONDS)
    finally:
        for trial in running:
            trial.end()


class _Trial:
    """One fault being tried."""

    def __init__(self, fault: Fault, copy: Path, folder: Path, limit: float) -> None:
        self.fault, self.copy = fault, copy
        self._log = folder / f"{fault.name}.log"
        self._outcome: Outcome | None = None
        self._stack = ExitStack()
        self._digest, tests = fault.digest(copy), fault.test_ids(copy)
        self._stack.enter_context(applied(fault, copy))
        self._child = Child(copy, tests, self._log, limit=limit, stop=True)

    def ended(self) -> bool:
        self._outcome = self._outcome or self._child.outcome()
        if self._outcome is not None:
            self._stack.close()
        return self._outcome is not None

    def end(self) -> None:
        self._child.end()

    def result(self) -> results.Result:
        fault, outcome = self.fault, self._outcome
        assert outcome is not None, "it has ended"
        result: results.Result = {"where": fault.where, "why": fault.why, "seconds": outcome.seconds, "digest": self._digest}
        if outcome.kind == "failed":
            result["killed_by"] = outcome.failed[0]
        elif outcome.kind == "time-out":
            result["killed_by"] = f"time-out of {', '.join(fault.tests)}"
        elif outcome.kind == "passed":
            result["survived"] = fault.equivalent or "NOT NOTICED: a test is missing"
        else:
            result["survived"] = "NOT TRIED: no test ran to its end with this fault, which must leave its file importable"
        verdict = "killed" if "killed_by" in result else "SURVIVED"
        _say(f"{verdict:8} {outcome.seconds:6.1f} s  {fault.name}  {result.get('killed_by', result.get('survived'))}")
        if verdict != "killed" and not fault.equivalent:
            _say("\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]))
        return result


def _limits(wanted: Sequence[Fault], areas: Mapping[str, list[Fault]], copy: Path, folder: Path) -> dict[str, float]:
    """Fault -> time limit in seconds, of those whose tests pass without a fault. Runs tests that have not passed yet."""
    ids = {test: find_test(copy, test) for fault in wanted for test in fault.tests}
    files = {test: identifier.partition("::")[0] for test, identifier in ids.items()}
    digests = {file: tree_digest(copy, file) for file in set(files.values())}
    passed = results.passed().items()
    known = {test: each for test, each in passed if test in ids and each["digest"] == digests[files[test]]}
    # Ranks are forked from the process of the tests, before tests have made threads in it. Checks of a run ask Ray where it
    # runs, so tests with Ray come last.
    order = {
        test: (not file.startswith("tests/distributed/"), file.startswith("tests/e2e/"), ids[test])
        for test, file in files.items()
    }
    tests = sorted(ids.keys() - known.keys(), key=order.__getitem__)
    if tests:
        _say(f"running {len(tests)} tests without a fault")
        log = folder / "without-a-fault.log"
        outcome = _wait(Child(copy, [ids[test] for test in tests], log, limit=3600, stop=False))
        if outcome.kind != "passed":
            _say(log.read_text(errors="replace")[-4000:])
        if outcome.kind in ("broken", "time-out"):
            raise SystemExit(f"the tests do not run without a fault: {outcome.kind}")
        for test in tests:
            seconds = [value for each, value in outcome.of_tests.items() if _is_of(each, ids[test])]
            if seconds and not any(_is_of(each, ids[test]) for each in outcome.failed):
                known[test] = {"digest": digests[files[test]], "seconds": round(sum(seconds), 1)}
        results.record_passed(known, areas)
        _say(f"{outcome.seconds:.0f} s without a fault")
    limits = {}
    for fault in wanted:
        if missing := [test for test in fault.tests if test not in known]:
            _say(f"LEFT OUT {fault.name}: without it, {missing[0]} fails or is skipped")
        else:
            limits[fault.name] = _LEAST_LIMIT + _LIMIT_FACTOR * sum(known[test]["seconds"] for test in fault.tests)
    return limits


def _is_of(found: str, test: str) -> bool:
    """Whether the id of a test that has run is ``test``, or ``test`` with parameters."""
    return found == test or found.startswith(f"{test}[")


def _wait(child: Child) -> Outcome:
    try:
        while (outcome := child.outcome()) is None:
            time.sleep(_POLL_SECONDS)
    except BaseException:
        child.end()
        raise
    return outcome


def _report(areas: Mapping[str, list[Fault]]) -> int:
    found = results.summary(results.read(), areas)
    for line in _survivors(found["survived"]):
        _say(line)
    named = found["named"]
    _say(
        f"{found['killed']} of {found['total']} faults killed ({named['killed']} of {named['total']} of the audit's), "
        f"{len(found['survived'])} survived, {len(found['not_run'])} not tried"
    )
    unexplained = [reason for reason in found["survived"].values() if reason.startswith("NOT ")]
    return 1 if unexplained or found["not_run"] else 0


def _survivors(survived: Mapping[str, str]) -> Iterator[str]:
    if survived:
        yield "Survivors:"
    for name, reason in survived.items():
        yield f"  {name}: {reason}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
