"""A run folder as data, even while the run continues or after it was cut off."""

import fcntl
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from rl_backend.lab.text import as_number

type Sample = Mapping[str, Any]
type FirstAndLast = tuple[Sequence[Sample], Sequence[Sample]]

# Begins the names of metrics that are the seconds of a phase.
PHASE = "seconds/"
# Begins the names of a tenant's metrics: tenant/<name>/<metric>.
TENANT = "tenant/"
# In a line of metrics.jsonl: what the run warned of in that step.
WARNINGS = "warnings"
# Read of the first step and of the last in a file of samples, which may have gigabytes.
SAMPLE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Series:
    """One metric: ``values[i]`` at ``steps[i]``, in the order of the steps; values may be NaN or infinite."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]

    @property
    def not_finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)]


@dataclass
class RunData:
    """What the files of a run say.

    Attributes:
        run: of ``run.json``; its ``state`` is "killed" where that says "running" and no process holds the folder any more.
        metrics: name -> its series.
        steps: number of those taken, ``span`` the first and the last that have metrics; 0 is before training.
        samples: the first of the first step that has some and of the last; the second is empty when that is the same step.
        held_out: the same of the held-out prompts; the first are of step 0, before training.
        warnings: sentences that the run has said, in the order of its steps.
        problems: what could not be read.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    steps: int = 0
    span: tuple[int, int] = (0, 0)
    samples: FirstAndLast = ((), ())
    held_out: FirstAndLast = ((), ())
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_run(path: Path | str) -> RunData:
    """Reads what there is; a file that is missing leaves its part empty, a damaged one is named in ``problems``.

    A folder of runs, without metrics of its own, has those of its tenants, a folder each.
    """
    data = RunData(Path(path))
    data.config = _read_object(data, "config.json")
    data.run = _read_object(data, "run.json")
    if data.run.get("state") == "running" and _nobody_holds(data.path / ".lock"):
        data.run |= {"state": "killed", "ended": _last_write(data.path)}
    data.summary = _read_object(data, "summary.json")
    _read_metrics(data)
    if not data.metrics:
        _read_tenants(data)
    data.samples, data.held_out = _read_samples(data, "samples.jsonl"), _read_samples(data, "held_out.jsonl")
    return data


def _read_object(data: RunData, name: str) -> dict[str, Any]:
    try:
        value = json.loads((data.path / name).read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        data.problems.append(f"{name}: {error}")
        return {}
    if not isinstance(value, dict):
        data.problems.append(f"{name}: is not an object")
        return {}
    return value


def _nobody_holds(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _last_write(folder: Path) -> str:
    logs = [folder / name for name in ("run.json", "metrics.jsonl", "samples.jsonl")]
    last = max(log.stat().st_mtime for log in logs if log.exists())
    return datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds")


def _read_metrics(data: RunData) -> None:
    path = data.path / "metrics.jsonl"
    if not path.is_file():
        return
    found: dict[str, dict[int, float]] = {}
    steps: set[int] = set()
    not_numbers: set[str] = set()
    warnings: dict[int, list[str]] = {}
    for step, line in _objects(data, path.name, path.read_text(encoding="utf-8", errors="replace").split("\n")):
        steps.add(step)
        if isinstance(line.get(WARNINGS), list):
            warnings[step] = [str(sentence) for sentence in line.pop(WARNINGS)]
        for name, written in line.items():
            value = as_number(written)
            if value is None:
                not_numbers.add(name)
            elif name != "step":
                found.setdefault(name, {})[step] = value
    data.problems += [f"metrics.jsonl: {name} is not a number in every step" for name in sorted(not_numbers)]
    data.warnings = [sentence for step in sorted(warnings) for sentence in warnings[step]]
    data.steps = len(steps - {0})
    data.span = (min(steps), max(steps)) if steps else (0, 0)
    data.metrics = {
        name: Series(name, tuple(sorted(values)), tuple(values[step] for step in sorted(values)))
        for name, values in found.items()
    }


def _read_tenants(data: RunData) -> None:
    for file in sorted(data.path.glob("*/metrics.jsonl")):
        tenant = RunData(file.parent, problems=data.problems)
        _read_metrics(tenant)
        data.warnings += [f"{file.parent.name}, {sentence}" for sentence in tenant.warnings]
        for name, series in tenant.metrics.items():
            if not name.startswith(PHASE):
                named = f"{TENANT}{file.parent.name}/{name}"
                data.metrics[named] = replace(series, name=named)
        data.steps = max(data.steps, tenant.steps)
    steps = [step for series in data.metrics.values() for step in series.steps]
    data.span = (min(steps), max(steps)) if steps else (0, 0)


def _read_samples(data: RunData, name: str) -> FirstAndLast:
    path = data.path / name
    if not path.is_file():
        return (), ()
    size = path.stat().st_size
    with path.open("rb") as file:
        first = last = list(_objects(data, name, _lines(file, 0, size)))
        if size > SAMPLE_BYTES:
            last = list(_objects(data, f"end of {name}", _lines(file, size - SAMPLE_BYTES, size)))
    first_step, last_step = (first[0][0] if first else None), (last[-1][0] if last else None)
    if last_step is not None and last[0][0] == last_step != first_step:
        # From its beginning: of a set that is answered again the same prompts come first.
        with path.open("rb") as file:
            last = list(_objects(data, f"end of {name}", _lines(file, _begin_of(file, last_step, size), size)))
    return (
        [sample for step, sample in first if step == first_step],
        [sample for step, sample in last if step == last_step != first_step],
    )


def _lines(file: BinaryIO, begin: int, size: int) -> list[str]:
    """Whole lines from a byte on, ``SAMPLE_BYTES`` at most."""
    file.seek(max(begin - 1, 0))
    found = file.read(SAMPLE_BYTES).decode("utf-8", "replace").split("\n")
    return found[1 if begin else 0 : None if file.tell() >= size else -1]


def _begin_of(file: BinaryIO, last_step: int, size: int) -> int:
    """The first byte of the lines of the last step, by halves: steps only rise."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        file.seek(max(middle - 1, 0))
        if middle:
            file.readline()
        # A line that cannot be read says nothing; the next one does.
        steps = (_step(line) for line in iter(file.readline, b""))
        if next((step for step in steps if step is not None), last_step) == last_step:
            high = middle
        else:
            low = middle + 1
    return low


def _step(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _objects(data: RunData, name: str, lines: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    damaged = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            step = int(value["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged.append(number)
            continue
        yield step, value
    # The last line of a run that continues may be half written.
    if damaged and damaged != [len(lines)]:
        data.problems.append(f"{name}: {len(damaged)} line(s) are not an object with a step, the first is line {damaged[0]}")
