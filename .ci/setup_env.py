"""Makes .venv hold exactly the versions in constraints.txt, and this package in editable mode.

Run by setup.sh with any Python 3.12; standard library only. ``--check`` only tells by its exit status whether there is
something to do. ``.venv/setup.json`` records what the environment was made for and whether that was finished.

With ``PINS=next`` it then makes an environment beside .venv for each file of .ci/pins/next: what is pinned as in .venv is
linked from there, so that it takes no disk, and the rest is installed. A run for one of them has ``LOCK=next/NAME``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from setup_browser import find_or_install_browser
from setup_pip import GIB, LOCK, LOG, PYTHON, ROOT, UNINSTALL, VENV, SetupError, Step, explain, last_lines, run_pip

STATE = VENV / "setup.json"
PARTIAL_STATE = VENV / "setup.partial"
NEEDED_GIB = {"cpu": {"environment": 8, "downloads": 4}, "gpu": {"environment": 14, "downloads": 8}}
PINS = ROOT / ".ci" / "pins"
_SCRIPTS = ("setup.sh", "setup_env.py", "setup_pip.py", "setup_browser.py")
_LOCKS = (f".ci/pins/{LOCK}.txt",) if LOCK else ()
INPUTS = ("constraints.txt", *_LOCKS, "pyproject.toml", *(f".ci/{name}" for name in _SCRIPTS))


def main() -> int:
    own = main_of_one()
    return own or next(filter(None, map(main_of_lock, locks())), 0)


def locks() -> list[str]:
    """``next/engines`` and so on, where ``PINS=next`` asks for environments beside .venv."""
    named = "" if LOCK else os.environ.get("PINS", "")
    return sorted(f"{named}/{file.stem}" for file in (PINS / named).glob("*.txt")) if named else []


def main_of_lock(lock: str) -> int:
    command = [sys.executable, "-E", "-s", __file__, *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, "LOCK": lock}, check=False).returncode


def main_of_one() -> int:
    if "--check" in sys.argv[1:]:
        return 0 if is_ready() else 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with_lock(set_up)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command starts the set-up again", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"error: {explain(str(error)) or f'set-up stopped: {error}'}", file=sys.stderr)
        return 1
    return 0


def set_up() -> None:
    kind = device_kind()
    if problem := problem_of_pins(kind):
        raise SetupError(problem)
    if is_ready():
        return
    check_platform()
    started = time.monotonic()
    print(
        f"Setting up {VENV.relative_to(ROOT)} for {'an NVIDIA GPU' if kind == 'gpu' else 'CPU only'}; "
        f"details go to {LOG.relative_to(ROOT)}",
        flush=True,
    )
    if reason := why_start_afresh(kind):
        check_space(kind)
        make_environment(kind, reason)
    write_state(kind, finished=False)
    pins = read_pins(kind)
    if others := not_pinned(pins):
        run_pip(f"Removing {len(others)} packages", others, verb=UNINSTALL)
    if missing := differing(pins):
        if "setuptools" in missing:
            run_pip("Preparing to build packages", [pins["setuptools"]])
        run_pip(f"Installing {len(missing)} packages", list(missing.values()), total=len(missing))
    run_pip("Installing rl-backend itself", ["--no-index", "--editable", str(ROOT)])
    if missing := differing(pins):
        raise SetupError(
            f"pip ended well but {', '.join(missing.values())} is not installed; see {LOG}, then run make setup again."
        )
    with Step("Checking that it imports"):
        check_imports()
    if not LOCK:
        find_or_install_browser()
    write_state(kind, finished=True)
    print(f"Set-up done in {time.monotonic() - started:.0f} s", flush=True)


def is_ready() -> bool:
    """Whether .venv was finished for these very inputs, on this path, for this kind of machine."""
    state, kind = read_state(), device_kind()
    finished = state.get("finished") is True and state.get("key") == key(str(state.get("kind"))) and state["kind"] == kind
    return finished and problem_of_pins(kind) is None


def key(kind: str) -> str:
    digest = hashlib.sha256(f"{kind}\n{ROOT}\n".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def read_state() -> dict[str, object]:
    try:
        state = json.loads(STATE.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(kind: str, *, finished: bool) -> None:
    state = {"finished": finished, "kind": kind, "root": str(ROOT), "key": key(kind)}
    PARTIAL_STATE.write_text(json.dumps(state, indent=1) + "\n")
    PARTIAL_STATE.replace(STATE)


def device_kind() -> str:
    """``gpu`` or ``cpu``: what ``DEVICE`` says, else whether the NVIDIA driver shows a device."""
    named = os.environ.get("DEVICE", "")
    if named:
        if named not in NEEDED_GIB:
            raise SetupError(f"DEVICE={named} is not known. Use DEVICE=cpu or DEVICE=gpu, or leave it out.")
        return named
    if Path("/dev/nvidia0").exists():
        return "gpu"
    if shutil.which("nvidia-smi"):
        try:
            listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
        except subprocess.TimeoutExpired:
            raise SetupError(
                "nvidia-smi does not answer within 60 s, so it is not known whether there is an NVIDIA GPU. Use DEVICE=cpu "
                "or DEVICE=gpu."
            ) from None
        if listing.returncode == 0 and "GPU 0" in listing.stdout:
            return "gpu"
    return "cpu"


def check_platform() -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise SetupError(
            f"this machine is {platform.system()} on {platform.machine()}, and the versions in constraints.txt are for "
            "Linux on x86_64. Use such a machine, or install the dependencies in pyproject.toml by hand."
        )


def problem_of_pins(kind: str) -> str | None:
    named = os.environ.get("PINS", "")
    if named and not (PINS / named).is_dir():
        return f"PINS={named} is not known. Use one of {', '.join(sorted(each.name for each in PINS.iterdir()))}."
    if named and kind == "gpu":
        return f"PINS={named} has versions for machines without a GPU only. Set DEVICE=cpu to try them here."
    return None


def why_start_afresh(kind: str) -> str | None:
    """Why .venv must be made from nothing, or None when it can be brought up to date in place."""
    if not VENV.exists() or set(VENV.iterdir()) <= {PARTIAL_STATE}:
        return "Making .venv"
    state = read_state()
    if state and not state.get("finished"):
        return "The last set-up did not finish: making .venv again"
    if state and state.get("root") != str(ROOT):
        if VENV.is_symlink():
            raise SetupError(
                f"{VENV} is a link to {VENV.resolve()}, the environment of {state.get('root')}. "
                "Remove the link and run make setup again."
            )
        return "The folder was moved or copied: making .venv again"
    if state and state.get("kind") != kind:
        return f"This .venv was made for {state.get('kind')}: making it again for {kind}"
    if python_works():
        return None
    if state:
        return "The Python of .venv no longer works: making .venv again"
    raise SetupError(
        f"{VENV} was not made by this project and has no working Python 3.12 with pip. "
        "Move it away and run make setup again."
    )


def python_works() -> bool:
    if not PYTHON.exists():
        return False
    script = "import sys, pip; sys.exit(sys.version_info[:2] != (3, 12))"
    return subprocess.run([PYTHON, "-I", "-c", script], capture_output=True, check=False).returncode == 0


def check_space(kind: str) -> None:
    """Compares free space with what the environment and pip's temporary files and cache need, per file system."""
    reusable = sum(file.lstat().st_size for file in VENV.rglob("*") if file.is_file())
    needs: dict[int, tuple[Path, int]] = {}
    for path, size in (
        (ROOT, NEEDED_GIB[kind]["environment"] * GIB - reusable),
        (Path(tempfile.gettempdir()), NEEDED_GIB[kind]["downloads"] * GIB),
    ):
        first, total = needs.get(path.stat().st_dev, (path, 0))
        needs[path.stat().st_dev] = (first, total + size)
    for path, needed in needs.values():
        free = shutil.disk_usage(path).free
        if free < needed:
            raise SetupError(
                f"too little disk space: set-up needs about {needed / GIB:.0f} GiB on the disk of {path} and "
                f"{free / GIB:.1f} GiB are free. Free some, or put the project, or TMPDIR for "
                "pip's temporary files, on a larger disk."
            )


def make_environment(kind: str, step: str) -> None:
    with Step(step):
        empty_environment(kind)
        if LOCK:
            link_environment()
            return
        made = subprocess.run([sys.executable, "-I", "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        output = made.stdout + made.stderr
        raise SetupError(explain(output) or f"{sys.executable} cannot make a virtual environment: {last_lines(output, 3)}")


def link_environment() -> None:
    """Makes a second environment of .venv: files are links to the same data, those that name their folder are rewritten."""
    base = (ROOT / ".venv").resolve()

    def link(source: str, target: str) -> None:
        if Path(source).parent in (base, base / "bin") and bytes(base) in (data := Path(source).read_bytes()):
            Path(target).write_bytes(data.replace(bytes(base), bytes(VENV)))
            shutil.copymode(source, target)
            return
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            shutil.copy2(source, target)

    shutil.copytree(
        base, VENV, symlinks=True, ignore=shutil.ignore_patterns("setup.*"), copy_function=link, dirs_exist_ok=True
    )


def empty_environment(kind: str) -> None:
    """Leaves in .venv only its state, which is there all the time: wherever this stops, .venv is known as our own."""
    VENV.mkdir(exist_ok=True, parents=True)
    write_state(kind, finished=False)
    for entry in VENV.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry != STATE:
            entry.unlink()


def read_pins(kind: str) -> dict[str, str]:
    """Package name -> ``name==version``; a line that ends in ``# cpu`` or ``# gpu`` counts for that kind only.

    In a file of .ci/pins a line replaces that of constraints.txt, and ``-name`` takes it away.
    """
    pins: dict[str, str] = {}
    for line in [line for name in ("constraints.txt", *_LOCKS) for line in (ROOT / name).read_text().splitlines()]:
        requirement, _, only = line.partition("#")
        requirement = requirement.strip()
        if requirement.startswith("-"):
            del pins[canonical(requirement[1:])]
        elif requirement and only.strip() in ("", kind):
            pins[canonical(requirement.partition("==")[0])] = requirement
    return pins


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def differing(pins: dict[str, str]) -> dict[str, str]:
    """The pins that are not installed in this very version."""
    here = installed()
    return {name: pin for name, pin in pins.items() if here.get(name) != pin.partition("==")[2]}


def not_pinned(pins: dict[str, str]) -> list[str]:
    """What came from .venv and must not stay; in .venv itself, what someone has added is left alone."""
    return sorted(installed().keys() - pins.keys() - {"pip", "rl-backend"}) if LOCK else []


def installed() -> dict[str, str]:
    script = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"
    listing = subprocess.run([PYTHON, "-I", "-c", script], capture_output=True, text=True, check=True)
    return {canonical(name): version for name, version in json.loads(listing.stdout)}


def check_imports() -> None:
    result = subprocess.run(
        [PYTHON, "-c", "import torch, transformers, ray, rl_backend"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        with LOG.open("a") as log:
            log.write(result.stderr)
        raise SetupError(
            f"everything is installed but does not import: {last_lines(result.stderr, 1)}. See {LOG}; run make setup again."
        )


def with_lock(action: Callable[[], None]) -> None:
    """Runs ``action`` while no other set-up of this folder runs."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up of this folder is running; waiting for it", flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        action()
    finally:
        os.close(folder)


if __name__ == "__main__":
    sys.exit(main())
