"""What ``rl-backend doctor --verl`` says about the engine that verl would build."""

from __future__ import annotations

import dataclasses

import pytest

from adapters.verl import registration
from rl_backend.lab.doctor import diagnosis
from rl_backend.lab.doctor.diagnosis import verl_lines
from rl_backend.lab.doctor.probes import VENDOR_VARIABLE, VENDORS, TorchProbe, VerlProbe

OURS = {"language_model": "native", "value_model": "native"}
VERLS = dict.fromkeys(OURS, "of verl")
CHOSEN = VerlProbe(None, "0.9.1", True, True, engines=OURS, device="cuda", verl_engine_vendor="rl_backend")
PLAIN = dataclasses.replace(CHOSEN, engines=VERLS, verl_engine_vendor=None)
BROKEN = dataclasses.replace(CHOSEN, loaded=False, load_error="ImportError: no", engines=VERLS)


def test_doctor_knows_the_vendors_of_the_adapter() -> None:
    assert VENDORS == registration.VENDORS
    assert VENDOR_VARIABLE == registration.VENDOR_VARIABLE


def test_the_engine_that_the_vendor_chooses_is_named() -> None:
    lines = verl_lines(CHOSEN)
    assert "entry point    installed, and verl loads it" in lines
    assert "language_model rl_backend's, backend native, with VERL_ENGINE_VENDOR=rl_backend" in lines
    assert CHOSEN.problems == []


def test_without_the_vendor_verls_own_engine_is_no_problem() -> None:
    assert PLAIN.problems == []
    assert any(line.startswith("value_model    verl's own without VERL_ENGINE_VENDOR; rl_b") for line in verl_lines(PLAIN))


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (BROKEN, "does not load, which verl does not say: ImportError: no"),
        (dataclasses.replace(BROKEN, load_error=None, installed=False), "not installed: pip install rl-backend"),
        (
            dataclasses.replace(BROKEN, load_error=None, verl_use_external_plugins="none"),
            "left out by VERL_USE_EXTERNAL_PLUGINS=none",
        ),
    ],
)
def test_a_vendor_that_verl_would_silently_ignore_is_a_problem(probe: VerlProbe, message: str) -> None:
    (problem,) = probe.problems
    assert problem.startswith("VERL_ENGINE_VENDOR=rl_backend is set and verl would build its own engine: ")
    assert message in problem


@pytest.mark.parametrize("model", OURS)
@pytest.mark.parametrize("engine", ["of verl", "bridge", "none of verl's own on this device"])
def test_a_single_engine_that_is_not_the_vendors_is_a_problem(model: str, engine: str) -> None:
    probe = dataclasses.replace(CHOSEN, engines={**OURS, model: engine})
    (problem,) = probe.problems
    assert problem.startswith("VERL_ENGINE_VENDOR=rl_backend is set and verl would build its own engine: ")
    assert dataclasses.replace(probe, verl_engine_vendor="another").problems == []


def test_verl_that_does_not_import_is_a_problem() -> None:
    assert VerlProbe("No module named 'verl'").problems == ["verl does not import: No module named 'verl'"]
    assert verl_lines(VerlProbe("No module named 'verl'")) == ["does not import: No module named 'verl'"]


@pytest.mark.long
@pytest.mark.shows("verl: rl-backend doctor --verl tells which engine verl would build")
def test_doctor_asks_verl_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "rl_backend_bridge")
    probe = VerlProbe.run()
    assert (probe.error, probe.load_error, probe.override_error) == (None, None, None)
    assert probe.engines == dict.fromkeys(OURS, "bridge")
    assert probe.problems == []


def test_verl_is_asked_only_when_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerlProbe, "run", lambda: CHOSEN)
    monkeypatch.setattr(TorchProbe, "run", lambda: TorchProbe("not tried"))
    assert diagnosis.examine(trials=False).facts.verl is None
    waited: list[str] = []
    assert diagnosis.examine(trials=False, verl=True, waiting=waited.append).facts.verl == CHOSEN
    assert waited == ["importing torch (about 5 s)", "asking verl for its engine (about 15 s)"]
