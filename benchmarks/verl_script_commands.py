"""verl's example scripts as the commands that they run: each script runs, with programs on its path that only write their
arguments down, without a network, a trainer or a model.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("examples", "tests/special_e2e")
TRAINERS = ("verl.trainer.main_ppo", "verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray")
# What scripts leave to their user: the engine, where a script has several, and folders.
ENVIRONMENT = {
    "BACKEND": "megatron",
    "DATA_ROOT": "/data",
    "HDFS_ROOT": "/data",
    "RAY_DATA_HOME": "/data",
    "WORK_DIR": "/data",
    "ckpts_home": "checkpoints",
}
_PROGRAMS = [
    "accelerate",
    "apt",
    "apt-get",
    "curl",
    "git",
    "hf",
    "huggingface-cli",
    "npu-smi",
    "nvidia-smi",
    "pip",
    "pip3",
    "python",
    "python3",
    "ray",
    "sleep",
    "srun",
    "ssh",
    "sudo",
    "torchrun",
    "uv",
    "wget",
]
_PROGRAM = """#!/usr/bin/env -S {python} -S
import json, os, sys
arguments = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with open(os.environ["RECORDED_COMMANDS"], "a") as file:
    file.write(json.dumps(arguments) + "\\n")
if arguments[:2] == ["git", "clone"]:
    os.makedirs(os.path.basename([each for each in arguments[2:] if "://" in each][0]), exist_ok=True)
if arguments[1:] in ([], ["-"]) and "get_device_name" in sys.stdin.read():
    print("cuda")
"""


@dataclass(frozen=True)
class Command:
    """How a script starts a trainer.

    Attributes:
        script: path below the folder with verl's sources.
        trainer: one of ``TRAINERS``.
        overrides: hydra's arguments, ``--config-name`` and its like among them.
    """

    script: str
    trainer: str
    overrides: tuple[str, ...]


def recorded_commands(sources: Path) -> tuple[list[Command], dict[str, str]]:
    """The first command of each script that starts one of ``TRAINERS``, and what is wrong with scripts that ended early.

    Args:
        sources: verl's repository.
    """
    commands, ended_early = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        programs = Path(temporary) / "programs"
        _write_programs(programs)
        for index, path in enumerate(sorted(found for name in FOLDERS for found in (sources / name).rglob("*.sh"))):
            script = str(path.relative_to(sources))
            folder = Path(temporary) / str(index)
            started, problem = _run(path, sources, programs, folder)
            trainers = list(_trainer_commands(script, started))
            commands += trainers[:1]
            if not trainers and problem:
                ended_early[script] = problem
    return commands, ended_early


def _write_programs(folder: Path) -> None:
    folder.mkdir()
    for name in _PROGRAMS:
        program = folder / name
        program.write_text(_PROGRAM.format(python="/usr/bin/python3"))
        program.chmod(0o755)


def _run(path: Path, sources: Path, programs: Path, folder: Path) -> tuple[list[list[str]], str]:
    """Runs a script in a folder of its own, from which verl's sources can be seen."""
    folder.mkdir()
    (folder / "logs").mkdir()
    for entry in sources.iterdir():
        (folder / entry.name).symlink_to(entry)
    record = folder / "commands.jsonl"
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(folder),
        "USER": "user",
        "RECORDED_COMMANDS": str(record),
    }
    ran = subprocess.run(
        ["bash", str(path)],
        env={**ENVIRONMENT, **environment},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = record.read_text().splitlines() if record.exists() else []
    last = (ran.stderr.strip().splitlines() or [""])[-1]
    return [json.loads(line) for line in lines], last.replace(str(sources) + os.sep, "") if ran.returncode else ""


def _trainer_commands(script: str, started: list[list[str]]) -> Iterator[Command]:
    for arguments in started:
        for trainer in TRAINERS:
            if trainer in arguments:
                yield Command(
                    script, trainer, tuple(each for each in arguments[arguments.index(trainer) + 1 :] if each.strip())
                )
