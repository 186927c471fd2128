"""A trace of this project's functions, in the driver and in Ray's workers: who was called, and with what in hand.

Each process appends lines of JSON to a file of its own in the folder that ``JOURNEYS_TRACE`` names.
"""

from __future__ import annotations

import inspect
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import CodeType, FrameType, GeneratorType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "JOURNEYS_TRACE"
SOURCES = tuple(f"{ROOT / name}/" for name in ("rl_backend", "actors", "examples"))

TOKENS = ("Sample", "TokenSequence", "PackedBatch", "ModelInput")
WEIGHTS = ("TensorInfo", "WeightManifest")
MANIFESTS = ("TrainingManifest", "RunManifest")
PICKLED_BYTES = 256
"""Shorter pickles are of operations without a batch."""

_DEPTH, _WIDTH = 4, 12
_STAY = ("Context", "Handle", "Config")
"""Ends of the names of dataclasses that hold tensors from one step to the next."""


class Call(NamedTuple):
    """A function that was entered, or that returned.

    Attributes:
        time: nanoseconds of the machine's clock, the same in every process.
        file: below the root.
        carries: kinds of data among its arguments, or in its result: ``tokens``, ``weights``, ``manifest`` (of a
            checkpoint), ``tensor``, ``stream`` (a generator), ``pickle`` or ``path`` (in a folder of checkpoints).
        stack: files and functions that it was called from, the nearest first.
    """

    time: int
    returned: bool
    file: str
    function: str
    carries: list[str]
    stack: list[tuple[str, str]]


def start() -> None:
    """Begins to trace this process; does nothing where no folder is set. Ray calls it in each worker that it starts."""
    if FOLDER not in os.environ:
        return
    events, tool = sys.monitoring.events, sys.monitoring.PROFILER_ID
    sys.monitoring.use_tool_id(tool, "journeys")
    trace = _Trace(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl")
    sys.monitoring.register_callback(tool, events.PY_START, trace.entered)
    sys.monitoring.register_callback(tool, events.PY_RETURN, trace.returned)
    sys.monitoring.register_callback(tool, events.PY_YIELD, trace.returned)
    sys.monitoring.set_events(tool, events.PY_START | events.PY_RETURN | events.PY_YIELD)


def read(folder: Path) -> list[Call]:
    """The calls of all processes, in order of time."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(Call(*json.loads(line)) for line in lines)


class _Trace:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        # Names of modules are gone before the process ends.
        self._sources, self._disable, self._frame = SOURCES, sys.monitoring.DISABLE, sys._getframe
        self._inside = threading.local()

    def entered(self, code: CodeType, _: int) -> Any:
        if not code.co_filename.startswith(self._sources):
            return self._disable
        variable = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + variable]
        frame = self._frame(1)
        self._write(False, code, frame, lambda: _carried([frame.f_locals[name] for name in names if name in frame.f_locals]))
        return None

    def returned(self, code: CodeType, _: int, value: Any) -> Any:
        if not code.co_filename.startswith(self._sources):
            return self._disable
        self._write(True, code, self._frame(1), lambda: _carried([value]))
        return None

    def _write(self, returned: bool, code: CodeType, frame: FrameType, carried: Any) -> None:
        if getattr(self._inside, "busy", False):
            return
        self._inside.busy = True
        try:
            kinds = sorted(carried())
            stack = list(_callers(frame)) if kinds else []
            call = Call(time.monotonic_ns(), returned, _below_root(code), code.co_qualname, kinds, stack)
            self._file.write(json.dumps(call) + "\n")
        finally:
            self._inside.busy = False


def _below_root(code: CodeType) -> str:
    return code.co_filename.removeprefix(f"{ROOT}/")


def _callers(frame: FrameType) -> Iterable[tuple[str, str]]:
    above = frame.f_back
    while above is not None:
        if above.f_code.co_filename.startswith(SOURCES):
            yield _below_root(above.f_code), above.f_code.co_qualname
        above = above.f_back


def _carried(value: Any, depth: int = 0) -> set[str]:
    """Kinds of data in ``value``, by the names of types: nothing is imported, and no method of the value is called."""
    kind = type(value)
    bases = {base.__name__ for base in kind.__mro__}
    if bases & {*TOKENS}:
        return {"tokens"}
    if bases & {*WEIGHTS}:
        return {"weights"}
    if bases & {*MANIFESTS}:
        return {"manifest"}
    if bases & {"Tensor", "ndarray", "memoryview"} or kind is mmap.mmap:
        return {"tensor"}
    if kind is bytes:
        kinds = {"pickle": len(value) > PICKLED_BYTES, "path": b"/checkpoints/" in value}
        return {name for name, holds in kinds.items() if holds}
    if isinstance(value, str | Path):
        return {"path"} if "/checkpoints/" in str(value) else set()
    if kind is GeneratorType:
        return {"stream"} if value.gi_code.co_filename.startswith(SOURCES) else set()
    if depth == _DEPTH:
        return set()
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        return _carried_by(value, depth)
    if isinstance(value, dict):
        return _carried_by(list(value.values()), depth)
    if is_dataclass(kind) and not kind.__name__.endswith(_STAY):
        return _carried_by(list(_fields(value).values()), depth)
    return set()


def _carried_by(values: Sequence[Any], depth: int) -> set[str]:
    return set().union(*(_carried(each, depth + 1) for each in values[:_WIDTH]))


def _fields(value: Any) -> Mapping[str, Any]:
    return getattr(value, "__dict__", None) or {name: getattr(value, name, None) for name in getattr(value, "__slots__", ())}
