"""Faults by readers who know no tests, at places drawn by a seed: how many does the suite notice at first try?

    python -m tests.mutations.waves draw --seed 7 --places 60 > places.json
    python -m tests.mutations.waves try WAVE.json --reach FOLDER

A wave is ``{"seed": ..., "faults": [{"name", "where", "old", "new", "effect", "kind"}, ...]}``; a fault that no test can
notice has ``equivalent``, a sentence of a second reader. It is committed before anything is tried. ``try`` puts each fault
into a copy and runs tests that enter its function (:mod:`tests.mutations.reach` has recorded them), quick ones first;
results go into the same file.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
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
from tests.mutations.source import definitions

_LEAST_LINES = 5
_SLOW = ("tests/e2e/", "tests/gpu/")
"""Tests that start Ray and vLLM: ``--slow`` runs these, with the faults that survived the others."""
_LIMIT = 300.0
"""Seconds that a trial may take beside those of its tests."""


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.waves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="print places of faults")
    draw.add_argument("--seed", required=True)
    draw.add_argument("--places", type=int, default=60)
    attempt = commands.add_parser("try", help="try the faults of a wave that have no result")
    attempt.add_argument("wave", type=Path)
    attempt.add_argument("--reach", type=Path, required=True, help="what tests.mutations.reach has recorded")
    attempt.add_argument("--seconds", type=float, default=90.0, help="of tests for a fault")
    attempt.add_argument("--slow", action="store_true", help="survivors anew, with tests that start Ray and vLLM")
    attempt.add_argument("--also", nargs="*", default=[], help="tests to run with every fault, that were not recorded")
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    if options.command == "draw":
        _say(json.dumps(places(ROOT, options.seed)[: options.places], indent=1))
        return 0
    _try(options)
    return 0


def places(root: Path, seed: str) -> list[str]:
    """``module:qualname`` of functions with five lines and more besides their docstring, in the order of the seed."""
    found = []
    for file in sorted(file for package in ("rl_backend", "actors", "adapters") for file in (root / package).rglob("*.py")):
        module = ".".join(file.relative_to(root).with_suffix("").parts)
        for name, scope in definitions(ast.parse(file.read_text())):
            body = scope.body[1:] if ast.get_docstring(scope) else scope.body
            if not isinstance(scope, ast.ClassDef) and body and _lines(body) >= _LEAST_LINES:
                found.append(f"{module}:{name}")
    random.Random(seed).shuffle(found)
    return found


def _lines(body: Sequence[ast.stmt]) -> int:
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def _try(options: argparse.Namespace) -> None:
    wave = json.loads(options.wave.read_text())
    reached = entered_by(options.reach)
    preload()
    with tempfile.TemporaryDirectory(prefix="waves-") as folder:
        copy = Path(folder, "copy")
        copy_tree(copy)
        for fault in wave["faults"]:
            if fault.get("equivalent") or fault.get("noticed_by") or ("survived" in fault and not options.slow):
                continue
            fault |= _trial(fault, copy, Path(folder, "log"), reached, options)
            fault.pop("survived" if "noticed_by" in fault else "noticed_by", None)
            options.wave.write_text(json.dumps(wave, indent=1) + "\n")
    tried = [fault for fault in wave["faults"] if not fault.get("equivalent")]
    noticed = sum("noticed_by" in fault for fault in tried)
    _say(f"{noticed} of {len(tried)} noticed, {100 * noticed / len(tried):.0f} %")


def _trial(
    fault: Mapping[str, str], copy: Path, log: Path, reached: Mapping[tuple[str, str], Mapping[str, float]], options: Any
) -> dict[str, Any]:
    place = find_place(copy, fault["where"], fault["old"], fault["new"])
    name = place.file.relative_to(copy).as_posix(), place.where.partition(":")[2]
    known = reached.get(name, {})
    tests = [*options.also, *_chosen(known, place.file.stem, options.seconds, slow=options.slow)]
    if not tests:
        return _said(
            fault, {"survived": "no test that was recorded enters this function" if not known else "slow tests alone"}
        )
    text = place.file.read_text()
    place.file.write_text(place.text)
    try:
        outcome = _wait(Child(copy, tests, log, limit=_LIMIT + 5 * options.seconds, stop=True))
    finally:
        place.file.write_text(text)
    if outcome.kind == "passed":
        return _said(fault, {"survived": f"{len(tests)} tests of {len(known)} that enter it", "seconds": outcome.seconds})
    if outcome.kind == "broken":
        _say(log.read_text(errors="replace")[-1500:])
        return _said(fault, {"survived": "BROKEN: no test ran to its end", "seconds": outcome.seconds})
    return _said(fault, {"noticed_by": (outcome.failed or ["time-out"])[0], "seconds": outcome.seconds})


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


def _wait(child: Child) -> Outcome:
    while (outcome := child.outcome()) is None:
        time.sleep(0.05)
    return outcome


def _said(fault: Mapping[str, str], result: dict[str, Any]) -> dict[str, Any]:
    _say(f"{fault['name']}: {result}")
    return result


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
