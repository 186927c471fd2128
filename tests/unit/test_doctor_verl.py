"""What ``rl-backend doctor --verl`` says about the engine that verl would build."""

from __future__ import annotations

import dataclasses

import pytest

from rl_backend.cli import doctor
from rl_backend.cli.probes import TorchProbe
from rl_backend.cli.verl_probe import VerlProbe, probe_verl, verl_lines, verl_problems

OURS = {"language_model": "native", "value_model": "native"}
VERLS = dict.fromkeys(OURS, "of verl")
CHOSEN = VerlProbe(None, "0.9.1", True, True, engines=OURS, device="cuda", verl_engine_vendor="rl_backend")
PLAIN = dataclasses.replace(CHOSEN, engines=VERLS, verl_engine_vendor=None)
BROKEN = dataclasses.replace(CHOSEN, loaded=False, load_error="ImportError: no", engines=VERLS)


def test_the_engine_that_the_vendor_chooses_is_named() -> None:
    lines = verl_lines(CHOSEN)
    assert "entry point    installed, and verl loads it" in lines
    assert "language_model rl_backend's, backend native, with VERL_ENGINE_VENDOR=rl_backend" in lines
    assert verl_problems(CHOSEN) == []


def test_without_the_vendor_verls_own_engine_is_no_problem() -> None:
    assert verl_problems(PLAIN) == []
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
    (problem,) = verl_problems(probe)
    assert problem.startswith("VERL_ENGINE_VENDOR=rl_backend is set and verl would build its own engine: ")
    assert message in problem


def test_verl_that_does_not_import_is_a_problem() -> None:
    assert verl_problems(VerlProbe("No module named 'verl'")) == ["verl does not import: No module named 'verl'"]
    assert verl_lines(VerlProbe("No module named 'verl'")) == ["does not import: No module named 'verl'"]


@pytest.mark.shows("verl: rl-backend doctor --verl tells which engine verl would build")
def test_doctor_asks_verl_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verl")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "rl_backend_bridge")
    probe = probe_verl()
    assert (probe.error, probe.load_error, probe.override_error) == (None, None, None)
    assert probe.engines == dict.fromkeys(OURS, "bridge")
    assert verl_problems(probe) == []


def test_verl_is_asked_only_when_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_verl", lambda: CHOSEN)
    monkeypatch.setattr(doctor, "probe_torch", lambda: TorchProbe("not tried"))
    assert doctor.examine(trials=False).verl is None
    assert doctor.examine(trials=False, verl=True).verl == CHOSEN
