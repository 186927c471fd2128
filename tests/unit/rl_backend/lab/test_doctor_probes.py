"""How ``rl-backend doctor`` reads what its probes print, and what it says of Ray's tokens."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_backend.lab.doctor.probes import Probe, ray_authentication


@dataclass(frozen=True)
class Small(Probe):
    """A script that is given on the spot."""

    TRIES = "a script"
    SCRIPT = ""

    number: int = 0
    names: tuple[str, ...] = ()


def run(monkeypatch: pytest.MonkeyPatch, *lines: str) -> Small:
    """What becomes of a script of these lines."""
    monkeypatch.setattr(Small, "SCRIPT", "\n".join(("import os, sys", *lines)))
    return Small.run()


def test_the_last_line_is_the_result_whatever_imports_print_before(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = ("print('a library says hello')", """print('{"error": "of before"}')""")
    found = run(monkeypatch, *printed, """print('{"error": null, "number": 3, "names": ["a", "b"]}')""")
    assert found == Small(None, 3, ("a", "b"))


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (("print('on its way')", "raise ValueError('no such thing')"), "ValueError: no such thing"),
        (("print('first')", "print('why'); print()", "sys.exit(2)"), "why"),
        (("os._exit(3)",), "the process ended with status 3"),
        (("os.kill(os.getpid(), 9)",), "the process ended with status -9"),
    ],
)
def test_a_probe_that_fails_says_its_last_words(monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...], error: str) -> None:
    assert run(monkeypatch, *lines) == Small(error)


def test_a_probe_that_hangs_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert Small.run() == Small("no answer within 180 s")


def test_the_folder_of_a_probe_is_its_argument_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = """print('{"error": "%s"}' % sys.argv[1] if os.path.isdir(sys.argv[1]) else 'none')"""
    found = run(monkeypatch, folder).error
    assert found is not None and not os.path.exists(found)


@pytest.mark.parametrize("variable", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_ray_is_named_wherever_ray_looks_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert "is not set, there is no token yet; Ray decides" in ray_authentication()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    assert "is not set, a token is in ~/.ray/auth_token; Ray decides" in ray_authentication()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv(variable, "/etc/ray/token")
    assert ray_authentication() == f"RAY_AUTH_MODE=token, a token is in {variable}"
