"""Faults by readers who know no tests, or by rule, at places drawn by a seed: how many does the suite notice at first try?

    python -m tests.mutations.waves draw --seed 7 --places 60 > places.json
    python -m tests.mutations.waves draw --seed 7 --places 600 --by-rule > WAVE.json
    python -m tests.mutations.waves try WAVE.json --reach FOLDER --jobs 2

A wave is ``{"seed": ..., "commit": ..., "faults": [{"name", "where", "old", "new", "effect", "kind"}, ...]}``, of the
commit that it was tried on. A fault that no test can notice has ``equivalent``, a sentence of a second reader. A wave
is committed before anything is tried. Faults by rule (:mod:`tests.mutations.rules`) cost nobody an hour: they show
which functions of the tree are tested least. ``try`` puts each fault into a copy and runs tests that enter its function
(:mod:`tests.mutations.reach` has recorded them), quick ones first; results go into the same file.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.mutations.child import Child, Outcome, preload
from tests.mutations.copies import ROOT, copy_tree
from tests.mutations.places import find_place
from tests.mutations.reach import entered_by
from tests.mutations.rules import changes
from tests.mutations.source import Scope, definitions

_LEAST_LINES = 5
_SLOW = ("tests/e2e/", "tests/gpu/")
"""Tests that start Ray and vLLM: ``--slow`` runs these, with the faults that survived the others."""
_LIMIT = 300.0
"""Seconds that a trial may take beside those of its tests."""
_POLL_SECONDS = 0.05


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.waves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="print places of faults")
    draw.add_argument("--seed", required=True)
    draw.add_argument("--places", type=int, default=60)
    draw.add_argument("--by-rule", action="store_true", help="a fault at each place in the place's stead")
    attempt = commands.add_parser("try", help="try the faults of a wave that have no result")
    attempt.add_argument("wave", type=Path)
    attempt.add_argument("--reach", type=Path, required=True, help="what tests.mutations.reach has recorded")
    attempt.add_argument("--seconds", type=float, default=90.0, help="of tests for a fault")
    attempt.add_argument("--jobs", type=int, default=1, help="faults tried at one time")
    attempt.add_argument("--slow", action="store_true", help="survivors anew, with tests that start Ray and vLLM")
    attempt.add_argument("--also", nargs="*", default=[], help="tests to run with every fault, that were not recorded")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    if options.command == "draw":
        drawn = places(ROOT, options.seed)[: options.places]
        wave = {"seed": options.seed, "faults": faults_by_rule(ROOT, options.seed, drawn)}
        _say(json.dumps(wave if options.by_rule else drawn, indent=1))
        return 0
    _try(options)
    return 0


def places(root: Path, seed: str) -> list[str]:
    """``module:qualname`` of functions with five lines and more besides their docstring, in the order of the seed."""
    found = [where for where, scope in _functions(root) if _is_long(scope)]
    random.Random(seed).shuffle(found)
    return found


def faults_by_rule(root: Path, seed: str, drawn: Sequence[str]) -> list[dict[str, str]]:
    """One fault, drawn by the seed, at each place that a rule fits."""
    functions, draw, faults = dict(_functions(root)), random.Random(seed), []
    for number, where in enumerate(drawn):
        found = list(changes(functions[where]))
        draw.shuffle(found)
        if fault := next((each for each in found if _has_one_place(root, where, each)), None):
            old, new, kind = fault
            faults.append(
                {"name": f"rule-{number}", "where": where, "old": old, "new": new, "effect": "by rule", "kind": kind}
            )
    return faults


def _has_one_place(root: Path, where: str, change: tuple[str, str, str]) -> bool:
    try:
        find_place(root, where, *change[:2])
    except (ValueError, SyntaxError):
        return False
    return True


def _functions(root: Path) -> Iterator[tuple[str, Scope]]:
    for file in sorted(file for package in ("rl_backend", "actors", "adapters") for file in (root / package).rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for name, scope in definitions(ast.parse(file.read_text())):
            if not isinstance(scope, ast.ClassDef):
                yield f"{module}:{name}", scope


def _is_long(scope: Scope) -> bool:
    body = scope.body[1:] if ast.get_docstring(scope) else scope.body
    return bool(body) and _lines(body) >= _LEAST_LINES


def _lines(body: Sequence[ast.stmt]) -> int:
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def _try(options: argparse.Namespace) -> None:
    wave = json.loads(options.wave.read_text())
    reached = entered_by(options.reach)
    preload()
    left = iter([fault for fault in wave["faults"] if _is_wanted(fault, slow=options.slow)])
    with tempfile.TemporaryDirectory(prefix="waves-") as folder:
        copies = [Path(folder, f"copy-{number}") for number in range(options.jobs)]
        copy_tree(copies[0])
        for copy in copies[1:]:
            shutil.copytree(copies[0], copy, symlinks=True)
        trials: list[_Trial] = []
        while True:
            while copies and (fault := next(left, None)) is not None:
                trials.append(_Trial(fault, copies.pop(), reached, options))
            if not trials:
                break
            for trial in [trial for trial in trials if trial.ended()]:
                trials.remove(trial)
                copies.append(trial.copy)
                trial.fault.pop("survived" if "noticed_by" in trial.result else "noticed_by", None)
                trial.fault |= trial.result
                _say(f"{trial.fault['name']}: {trial.result}")
                options.wave.write_text(json.dumps(wave, indent=1) + "\n")
            time.sleep(_POLL_SECONDS)
    tried = [fault for fault in wave["faults"] if not fault.get("equivalent")]
    noticed = sum("noticed_by" in fault for fault in tried)
    _say(f"{noticed} of {len(tried)} noticed, {100 * noticed / len(tried):.0f} %")


def _is_wanted(fault: Mapping[str, str], *, slow: bool) -> bool:
    return not (fault.get("equivalent") or fault.get("noticed_by") or ("survived" in fault and not slow))


class _Trial:
    """One fault being tried."""

    def __init__(
        self, fault: dict[str, Any], copy: Path, reached: Mapping[tuple[str, str], Mapping[str, float]], options: Any
    ) -> None:
        self.fault, self.copy = fault, copy
        self.result: dict[str, Any] = {}
        self._log = copy.with_suffix(".log")
        self._child: Child | None = None
        place = find_place(copy, fault["where"], fault["old"], fault["new"])
        self._file, self._text = place.file, place.file.read_text()
        known = reached.get((place.file.relative_to(copy).as_posix(), place.where.partition(":")[2]), {})
        tests = [*options.also, *_chosen(known, place.file.stem, options.seconds, slow=options.slow)]
        self._ran = f"{len(tests)} tests of {len(known)} that enter it"
        if tests:
            self._file.write_text(place.text)
            self._child = Child(copy, tests, self._log, limit=_LIMIT + 5 * options.seconds, stop=True)
        else:
            self.result = {"survived": "slow tests alone" if known else "no test that was recorded enters this function"}

    def ended(self) -> bool:
        if self._child is not None and (outcome := self._child.outcome()) is not None:
            self._child = None
            self._file.write_text(self._text)
            self.result = self._result(outcome)
        return self._child is None

    def _result(self, outcome: Outcome) -> dict[str, Any]:
        if outcome.kind == "passed":
            return {"survived": self._ran, "seconds": outcome.seconds}
        if outcome.kind == "broken":
            _say(self._log.read_text(errors="replace")[-1500:])
            return {"survived": "BROKEN: no test ran to its end", "seconds": outcome.seconds}
        return {"noticed_by": (outcome.failed or ["time-out"])[0], "seconds": outcome.seconds}


def _chosen(known: Mapping[str, float], stem: str, seconds: float, *, slow: bool) -> list[str]:
    """The quickest tests, those of a file that is named after the source first, up to a sum of seconds."""
    candidates = [test for test in known if test.startswith(_SLOW) == slow]
    candidates.sort(key=lambda test: (stem not in test.partition("::")[0], "distributed" in test, known[test]))
    return list(_within(candidates, known, seconds))


def _within(tests: Sequence[str], known: Mapping[str, float], seconds: float) -> Iterator[str]:
    for test in tests:
        seconds -= known[test] + 0.01
        if seconds < 0:
            return
        yield test


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
