"""verl's own example scripts for Megatron on our engine: which are accepted as written but for the switch, and train.

Of the scripts under ``examples/`` and ``tests/special_e2e/`` of verl's repository, those count that start ``main_ppo`` or
``sft_trainer``, that verl's own yaml of that release composes, and whose roles are Megatron's. A script passes when

* every role that it has is accepted as it is written but for the switch: the installed verl composes it, and where it names
  its model is a directory with a stand-in's ``config.json``, of as many layers. Overrides of fields that the installed verl
  has lost since are left out, and named;
* verl's own workers train one step of it, on two ranks, with models, data, lengths, nodes and parallel sizes made small.

The stand-in is a Qwen3, or a mixture of it where the script's model is one: what a script sets is tried here, not whether a
runtime has its family of models (``docs/layouts.md`` says which it has), and there are no images.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.verl_script_commands import recorded_commands
from benchmarks.verl_script_models import family, is_mixture, num_layers, write_stand_in
from benchmarks.verl_script_roles import MegatronScript, megatron_scripts, refusal
from benchmarks.verl_script_small import LAYERS, RANKS, make_small
from examples.verl.task import write_verl_task

_SECONDS_WITHOUT_A_RESULT = 400.0


def example_scripts(sources: Path, backend: str) -> dict[str, Any]:
    """Tries every script on one runtime; prints what becomes of each.

    Args:
        sources: verl's repository.
    """
    os.environ["VERL_PLATFORM"] = "cpu"
    commands, ended_early = recorded_commands(sources)
    scripts, broken = megatron_scripts(sources, commands)
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = _try(scripts, backend, Path(temporary))
    for script in scripts:
        print(f"{backend} {script.command.script}: {outcomes[script.command.script].get('refused', 'passed')}", flush=True)
    refused = {name: found["refused"] for name, found in outcomes.items() if "refused" in found}
    return {
        "verl_commit": commit(sources),
        "of": len(scripts),
        "passed": len(scripts) - len(refused),
        "refused": refused,
        "scripts": outcomes,
        "not_composed_by_verl": broken,
        "ended_before_a_trainer": {name: why for name, why in ended_early.items() if "megatron" in name},
    }


def commit(sources: Path) -> str:
    """Of the checkout that ``sources`` is."""
    return subprocess.check_output(["git", "-C", str(sources), "rev-parse", "HEAD"], text=True).strip()


def _try(scripts: list[MegatronScript], backend: str, folder: Path) -> dict[str, dict[str, Any]]:
    write_verl_task(folder / "task")
    outcomes: dict[str, dict[str, Any]] = {}
    plan = []
    for index, script in enumerate(scripts):
        model = script.config.model if script.is_sft else script.config.actor_rollout_ref.model
        name = model.path.rstrip("/").rpartition("/")[2]
        outcome: dict[str, Any] = {"model": name, "family": family(name), "left_out": list(script.left_out)}
        outcomes[script.command.script] = outcome
        as_written = _stand_in(folder, name, num_layers(name), weights=False)
        config = script.switched(backend, *_paths(script, as_written))
        refused = refusal(config)
        if refused is not None:
            outcome |= {"refused": refused.replace(str(folder), ""), "stage": "accepting it as written"}
            continue
        place = folder / str(index)
        place.mkdir()
        outcome["small_layout"] = make_small(config, _stand_in(folder, name, LAYERS, weights=True), folder / "task", place)
        OmegaConf.save(config, place / "config.yaml")
        # Megatron keeps one layout in a process.
        layout = outcome["small_layout"] if backend == "bridge" else ""
        plan.append({"script": script.command.script, "config": str(place / "config.yaml"), "layout": layout})
    for script_name, found in _train(plan, folder).items():
        if found["problem"] is None:
            outcomes[script_name]["metrics"] = found["metrics"]
        else:
            outcomes[script_name] |= {"refused": found["problem"].replace(str(folder), ""), "stage": "training a step"}
    return outcomes


def _stand_in(folder: Path, name: str, layers: int, *, weights: bool) -> Path:
    path = folder / f"{'mixture' if is_mixture(name) else 'dense'}_{layers}"
    if path.exists():
        return path
    return write_stand_in(path, folder / "task" / "model", mixture=is_mixture(name), layers=layers, weights=weights)


def _paths(script: MegatronScript, model: Path) -> list[str]:
    if script.is_sft:
        return [f"model.path={model}"]
    found = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        if OmegaConf.select(script.config, f"{role}.megatron.use_dist_checkpointing"):
            found.append(f"{role}.megatron.dist_checkpointing_path={model}")
    return found


def _train(plan: list[dict[str, str]], folder: Path) -> dict[str, dict[str, Any]]:
    """Runs the plan on ranks, anew for each layout and after a script that ends or stops them."""
    found: dict[str, dict[str, Any]] = {}
    while plan:
        results, jobs = folder / "results.jsonl", folder / "plan.json"
        results.write_text("")
        jobs.write_text(json.dumps([job for job in plan if job["layout"] == plan[0]["layout"]]))
        ended = _run_ranks(jobs, results, folder / "ranks.log")
        found |= {each["script"]: each for each in map(json.loads, results.read_text().splitlines())}
        for job in json.loads(jobs.read_text()):
            if job["script"] not in found:
                problem = f"the ranks {ended}: {_last_error(folder / 'ranks.log')}"
                found[job["script"]] = {"problem": problem, "metrics": {}}
                break
        plan = [job for job in plan if job["script"] not in found]
    return found


def _run_ranks(jobs: Path, results: Path, log: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with log.open("w") as file:
        ranks = subprocess.Popen(
            [*command, "-m", "benchmarks.verl_script_steps", str(jobs), str(results)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        size, since = 0, time.monotonic()
        try:
            while ranks.poll() is None:
                time.sleep(0.5)
                if results.stat().st_size != size:
                    size, since = results.stat().st_size, time.monotonic()
                if time.monotonic() - since > _SECONDS_WITHOUT_A_RESULT:
                    return f"did not end within {_SECONDS_WITHOUT_A_RESULT:.0f} s"
        finally:
            if ranks.poll() is None:
                os.killpg(ranks.pid, signal.SIGKILL)
                ranks.wait()
    return f"ended with status {ranks.returncode}"


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1] if lines else "no error in their output"
