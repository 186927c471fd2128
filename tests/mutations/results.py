"""The results file, to which several runs may write at the same time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.mutations.check import problems
from tests.mutations.copies import ROOT
from tests.mutations.fault import NAMED, Fault

FILE = ROOT / "benchmarks" / "results" / "mutations.json"
WAVES = ROOT / "tests" / "mutations" / "readers"
"""Faults by readers, and what came of their first try (:mod:`tests.mutations.waves`)."""

type Result = dict[str, Any]


def read(file: Path = FILE) -> dict[str, Result]:
    """Fault -> result."""
    try:
        found: dict[str, Result] = json.loads(file.read_text())["faults"]
    except FileNotFoundError:
        return {}
    return found


def passed(file: Path = FILE) -> dict[str, dict[str, Any]]:
    """Test -> ``digest`` and ``seconds`` of its last run without a fault, which it passed."""
    try:
        found: dict[str, dict[str, Any]] = json.loads(file.read_text())["without_a_fault"]
    except FileNotFoundError:
        return {}
    return found


def record_passed(tests: Mapping[str, dict[str, Any]], areas: Mapping[str, list[Fault]], file: Path = FILE) -> None:
    """Adds tests that have passed without a fault."""
    with _locked(file):
        _write(read(file), {**passed(file), **tests}, areas, file)


def record(name: str, result: Result, areas: Mapping[str, list[Fault]], file: Path = FILE) -> None:
    """Adds one result, in place of an earlier one of the same fault."""
    _change(lambda results: results | {name: result}, areas, file)


def tidy(areas: Mapping[str, list[Fault]], file: Path = FILE, root: Path = ROOT) -> None:
    """Leaves out faults that are no longer listed, and stale results; those of faults that cannot be tried are stale."""
    listed = [fault for faults in areas.values() for fault in faults]
    digests = {fault.name: fault.digest(root) for fault in listed if not problems([fault], root)}
    _change(lambda results: {n: r for n, r in results.items() if r["digest"] == digests.get(n)}, areas, file)


def _change(change: Callable[[dict[str, Result]], dict[str, Result]], areas: Mapping[str, list[Fault]], file: Path) -> None:
    with _locked(file):
        _write(change(read(file)), passed(file), areas, file)


def _write(
    results: Mapping[str, Result], tests: Mapping[str, dict[str, Any]], areas: Mapping[str, list[Fault]], file: Path
) -> None:
    named = {test for faults in areas.values() for fault in faults for test in fault.tests}
    kept = {test: tests[test] for test in sorted(tests) if test in named}
    new = file.with_name(f".{file.name}.new")
    new.write_text(json.dumps(summary(results, areas) | {"without_a_fault": kept}, indent=1) + "\n")
    new.replace(file)


def summary(results: Mapping[str, Result], areas: Mapping[str, list[Fault]]) -> dict[str, Any]:
    """What the file holds: counts, survivors with their reasons, and every result in the order of the list."""
    listed = [fault for faults in areas.values() for fault in faults]
    killed = {name for name, result in results.items() if result.get("killed_by")}
    named = [fault.name for fault in areas.get(NAMED, ())]
    return {
        "total": len(listed),
        "killed": sum(fault.name in killed for fault in listed),
        "named": {"total": len(named), "killed": sum(name in killed for name in named)},
        "survived": {name: result["survived"] for name, result in results.items() if "survived" in result},
        "not_run": [fault.name for fault in listed if fault.name not in results],
        "by_readers": by_readers(),
        "faults": {fault.name: results[fault.name] for fault in listed if fault.name in results},
    }


def by_readers(folder: Path = WAVES) -> dict[str, Any]:
    """Wave -> how many of its faults the suite noticed at first try, of those that were tried; and the others' effects."""
    waves = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    return {name: _first_try(wave) for name, wave in waves.items()}


def _first_try(wave: Mapping[str, Any]) -> dict[str, Any]:
    faults = [fault for fault in wave["faults"] if not fault.get("equivalent")]
    tried = [fault for fault in faults if "noticed_by" in fault or "survived" in fault]
    noticed = sum("noticed_by" in fault for fault in tried)
    return {
        "seed": wave["seed"],
        "total": len(faults),
        "tried": len(tried),
        "noticed": noticed,
        "fraction": round(noticed / len(tried), 3) if tried else None,
        "survived": {fault["name"]: fault["effect"] for fault in tried if "survived" in fault},
    }


@contextmanager
def _locked(file: Path) -> Generator[None]:
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
