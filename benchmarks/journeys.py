"""The files between a batch and its gradient, between weights and vLLM, and between a checkpoint and the disk.

One step of ``examples.grpo`` runs with a tiny model while every function of this project that the driver, the training
rank and the engine enter is recorded. A file is on a journey if one of its functions is given what travels, or returns it,
or is on the call stack above such a function. Checks that are given the data count, accessors too; what runs meanwhile
without the data (order of operations, metrics, locks) is listed apart, as ``beside``.

    python -m benchmarks.journeys       # also brings the walks in docs/architecture.md up to date
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import ray

from actors.cluster.session import init_local_ray
from benchmarks import call_trace
from benchmarks.call_trace import FOLDER, ROOT, Call
from benchmarks.report import write_result

PAGE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.*) \|\n?", re.MULTILINE)
ONE_FOLDER = ("rl_backend/primitive", "rl_backend/model")
"""Count as one folder each, whatever is in them."""


class Journey(NamedTuple):
    """Attributes:
    begins, ends: function, and whether its end counts; the first begin and the last end are taken.
    carries: kinds of data that travel, and of what is made of them on the way.
    itself: those of what travels alone; files that are given it are counted apart, too. Empty where nothing else is made.
    """

    begins: tuple[str, bool]
    ends: tuple[str, bool]
    carries: frozenset[str]
    itself: frozenset[str] = frozenset()


JOURNEYS: Mapping[str, Journey] = {
    "batch to gradient": Journey(
        ("SampledRun.collect", True),
        ("GuardedRuntime.forward_backward", True),
        carries=frozenset({"tokens", "tensor", "pickle"}),
        itself=frozenset({"tokens", "pickle"}),
    ),
    "weights to vLLM": Journey(
        ("SampledRun.push", False), ("SampledRun.push", True), frozenset({"weights", "tensor", "stream"})
    ),
    "checkpoint to disk": Journey(
        ("RunSaver.save", False), ("RunSaver.commit", True), frozenset({"path", "manifest", "tensor", "stream"})
    ),
}


def trace_step(folder: Path) -> list[Call]:
    """Runs the step in a new Ray of its own, with traces in ``folder``."""
    trace = folder / "trace"
    trace.mkdir()
    os.environ[FOLDER] = str(trace)
    hook = {"worker_process_setup_hook": f"{call_trace.__name__}.start", "env_vars": {FOLDER: str(trace)}}
    # Imported before the trace begins: what a module does when it is imported is not part of a step.
    from examples import grpo
    from examples.demo.task import write_task

    write_task(folder / "task", seed=0)
    init_local_ray(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=hook)
    try:
        config = grpo.GRPOConfig(**settings(folder))
        call_trace.start()
        grpo.train(config)
    finally:
        ray.shutdown()
    return call_trace.read(trace)


def settings(folder: Path) -> dict[str, Any]:
    """Options of the step."""
    return {
        "model": str(folder / "task" / "model"),
        "dataset": str(folder / "task" / "train.jsonl"),
        "reward": "examples.demo.task:compute_score",
        "run_dir": str(folder / "run"),
        "steps": 1,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "save_every": 1,
        "async_save": False,
        "metrics_to": None,
        "transport": "shared_memory",
    }


def follow(journey: Journey, calls: Sequence[Call]) -> dict[str, Any]:
    """The files of one journey, in the order in which they are reached, with the functions that count."""
    # What the journey begins with is not part of it where its end is meant.
    first = min(call.time + call.returned for call in calls if (call.function, call.returned) == journey.begins)
    last = max(call.time for call in calls if (call.function, call.returned) == journey.ends)
    during = [call for call in calls if first <= call.time <= last and "<module>" not in call.function]
    functions = _passed(during, journey.carries)
    itself = _passed(during, journey.itself or journey.carries)
    entered = {call.file for call in during}
    return {
        "files": len(functions),
        "folders": len(folders(functions)),
        "itself": {"files": len(itself), "folders": len(folders(itself)), "passed": list(itself)},
        "beside_files": len(entered - set(functions)),
        "path": {file: list(names) for file, names in functions.items()},
        "beside": sorted(entered - set(functions)),
    }


def _passed(during: Sequence[Call], carries: frozenset[str]) -> dict[str, dict[str, None]]:
    """Files, in their order, and those of their functions that are given such data, return it or call those that are."""
    functions: dict[str, dict[str, None]] = {}
    for call in during:
        if carries & set(call.carries):
            for file, function in [*reversed(call.stack), (call.file, call.function)]:
                functions.setdefault(file, {})[_plain(function)] = None
    return {file: functions[file] for file in _in_order(functions, during)}


def folders(files: Iterable[str]) -> list[str]:
    """Folders of ``files``, each once."""
    found = (
        next((one for one in ONE_FOLDER if file.startswith(f"{one}/")), str(PurePosixPath(file).parent)) for file in files
    )
    return list(dict.fromkeys(found))


def with_walks(page: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """``page`` with each journey's files in their order. What a row says of its file stays; that of a new file is empty."""
    for name, journey in found.items():
        head, title, rest = page.partition(f"### {name[0].upper()}{name[1:]}\n")
        walk, following, tail = rest.partition("\n#")
        said = dict(ROW.findall(walk))
        rows = "".join(f"| `{file}` | {said.get(file, '')} |\n" for file in journey["path"])
        counts = f"{journey['files']} files in {journey['folders']} folders; {journey['beside_files']} run beside."
        text = re.sub(r"\d+ files in \d+ folders; \d+ run beside\.", counts, ROW.sub("", walk))
        itself = f"itself passes {journey['itself']['files']} files in {journey['itself']['folders']} folders"
        text = re.sub(r"itself passes \d+ files in \d+ folders", itself, text)
        page = head + title + text.replace("|---|---|\n", f"|---|---|\n{rows}", 1) + following + tail
    return page


def _in_order(functions: Mapping[str, Iterable[str]], during: Sequence[Call]) -> list[str]:
    """Files by when they were entered; those of functions that were entered earlier come first."""
    entered: dict[str, int] = {}
    for call in during:
        entered.setdefault(call.file, call.time)
    started = {(call.file, _plain(call.function)) for call in during}
    earlier = {file for file, names in functions.items() if any((file, name) not in started for name in names)}
    return sorted(functions, key=lambda file: 0 if file in earlier else entered[file])


def _plain(function: str) -> str:
    return function.partition(".<locals>")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        calls = trace_step(Path(folder).resolve())
    found = {name: follow(journey, calls) for name, journey in JOURNEYS.items()}
    write_result("journeys", {name.lower().replace(" ", "_"): journey for name, journey in found.items()})
    PAGE.write_text(with_walks(PAGE.read_text(), found))
    for name, journey in found.items():
        itself = f"{journey['itself']['files']} in {journey['itself']['folders']} of them are given what travels itself"
        print(f"{name}: {journey['files']} files, {journey['folders']} folders ({journey['beside_files']} beside); {itself}")
        for file, functions in journey["path"].items():
            print(f"    {file}: {', '.join(functions)}")
        print(f"    beside: {json.dumps(journey['beside'])}")


if __name__ == "__main__":
    main()
