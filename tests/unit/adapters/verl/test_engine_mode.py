"""Modes of an engine: which parts are moved when, and what an error or an inner mode leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.verl.engine import EngineMode

ALL = ("model", "optimizer", "grad")


class Engine:
    """Notes what modes do to it."""

    def __init__(self, *offloaded: str) -> None:
        self.settings: Any = SimpleNamespace(param_offload="model" in offloaded, optimizer_offload="optimizer" in offloaded)
        self.mode: str | None = None
        self.calls: list[Any] = []
        self.failing = ""

    @contextmanager
    def runtime_mode(self, mode: str) -> Iterator[None]:
        self.calls.append(f"+{mode}")
        try:
            yield
        finally:
            self.calls.append(f"-{mode}")

    def move(self, where: str, **parts: bool) -> None:
        self.calls.append((where, *(name for name, moves in parts.items() if moves)))
        if self.failing == where:
            raise MemoryError(where)

    def optimizer_zero_grad(self) -> None:
        self.calls.append("zero")


@pytest.mark.parametrize(
    ("mode", "offloaded", "moved"),
    [
        ("train", ALL, ALL),
        ("train", ("model", "grad"), ("model", "grad")),
        ("train", ("optimizer",), ("optimizer",)),
        ("train", (), ()),
        ("eval", ALL, ("model",)),
        ("eval", ("optimizer",), ()),
    ],
)
def test_a_mode_brings_what_is_offloaded_and_it_uses_and_takes_it_back(
    mode: str, offloaded: tuple[str, ...], moved: tuple[str, ...]
) -> None:
    engine = Engine(*offloaded)
    with EngineMode(engine, mode):
        assert engine.mode == mode
        engine.calls.append("work")
    zero = ["zero"] if mode == "train" else []
    assert engine.calls == [f"+{mode}", ("device", *moved), "work", f"-{mode}", *zero, ("cpu", *moved)]
    assert engine.mode is None


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("fails", [False, True])
def test_gradients_are_kept_where_asked_for_but_not_after_an_error(mode: str, fails: bool) -> None:
    engine = Engine("model")

    def work() -> None:
        with EngineMode(engine, mode, zero_grad_on_exit=False):
            if fails:
                raise ValueError("mine")

    if fails:
        with pytest.raises(ValueError, match="mine"):
            work()
    else:
        work()
    assert ("zero" in engine.calls) is (mode == "train" and fails)
    assert engine.calls[-1][:2] == ("cpu", "model") and engine.mode is None


def test_parts_stay_where_they_are_where_asked_for() -> None:
    engine = Engine(*ALL)
    with EngineMode(engine, "train", disable_auto_offload=True):
        assert engine.mode == "train"
    assert engine.calls == ["+train", "-train", "zero"]


@pytest.mark.parametrize(("outer", "inner"), [("train", "eval"), ("eval", "train"), ("eval", "eval")])
def test_the_outermost_mode_alone_takes_parts_away(outer: str, inner: str) -> None:
    engine = Engine("model", "optimizer")
    with EngineMode(engine, outer):
        for _ in range(2):
            with EngineMode(engine, inner):
                assert engine.mode == inner
            assert engine.mode == outer
    away = [call for call in engine.calls if call[0] == "cpu"]
    assert away == [("cpu", "model", "optimizer", "grad") if outer == "train" else ("cpu", "model")]
    assert engine.calls[-1] == away[0] and engine.mode is None


def test_a_mode_that_cannot_begin_is_left_again() -> None:
    engine = Engine(*ALL)
    engine.failing = "device"
    with pytest.raises(MemoryError), EngineMode(engine, "train"):
        pytest.fail("it has not begun")
    assert engine.calls == ["+train", ("device", *ALL), "-train"] and engine.mode is None
    engine.failing = ""
    with EngineMode(engine, "eval"):
        engine.failing = "device"
        with pytest.raises(MemoryError), EngineMode(engine, "train"):
            pytest.fail("it has not begun")
        assert engine.mode == "eval"
    assert engine.mode is None
