"""Cases that only ``make test-all`` runs, and the record of a run: layouts, features, outcomes and seconds.

A plugin of pytest. Of the cases of ``tests/distributed`` it keeps a set that covers every pair of values (:func:`needs`);
the others get the marker ``long``. Of these ``make test-all`` runs as many as give each test every pair of its own values
(:func:`beyond_pairs`). Whoever names a file or a test gets all of its cases. ``--cases FILE`` writes what became
of each case; from the files of all lanes ``tests/lanes.py --matrix=FILE`` makes the record.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.support.covering import Fact, covering, facts, pairs

REDUCED = "tests/distributed/"
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "matrix.json"
"""How long each case took in the last ``make test-all``."""
UNKNOWN_SECONDS = 5.0
RECORDED = ("tests/distributed/", "tests/e2e/", "tests/golden/")
"""Folders whose cases are recorded one by one; of the others, files."""
LEFT_OUT = {
    "tests/e2e/test_verl_resume.py::test_a_resumed_run_takes_the_steps_of_the_one_that_went_on[ppo-native]": (
        "eight minutes; PPO on the bridge, which saves most, stays"
    ),
    "tests/e2e/test_verl_resume.py::test_a_resumed_run_takes_the_steps_of_the_one_that_went_on[grpo-bridge]": (
        "eight minutes; PPO on the bridge resumes an actor as GRPO does, and a critic"
    ),
    "tests/e2e/test_verl_resume.py::test_grpo_replays_routes_on_the_bridge[R2]": (
        "two minutes; R3, whose routes come from vLLM, stays"
    ),
    "tests/e2e/test_verl_ppo.py::test_ppo_trains_actor_and_critic": (
        "four minutes; a critic on the bridge is in two other cases, an actor on it in the one that resumes"
    ),
    "tests/e2e/test_verl_ppo.py::test_ppo_trains_on_both_runtimes_and_leaves_a_checkpoint": (
        "three minutes; adapters of a native actor and of a critic on the bridge stay, and the reference with GRPO"
    ),
    "tests/e2e/test_verl_ppo.py::test_grpo_trains_an_adapter_that_vllm_serves[False]": (
        "three minutes; vLLM serves the adapter that PPO trains in the same way"
    ),
    "tests/e2e/test_verl_ppo.py::test_grpo_trains_an_adapter_that_vllm_serves[True]": (
        "three minutes; adapters that vLLM serves apart stay, and engines of verl merge them in tests/distributed"
    ),
    "tests/e2e/test_verl_sft.py::test_two_native_ranks_train_as_one": (
        "two minutes; the bridge's two ranks stay, and native ranks train as one in tests/distributed"
    ),
    "tests/e2e/test_resume.py::test_a_killed_run_of_either_runtime_goes_on_as_if_it_had_not_been[grpo-bridge]": (
        "two minutes; GRPO stays on the native runtime, and PPO on the bridge"
    ),
    "tests/e2e/test_resume.py::test_a_killed_run_of_either_runtime_goes_on_as_if_it_had_not_been[ppo-native]": (
        "two minutes; GRPO stays on the native runtime, and PPO, which saves more, on the bridge"
    ),
    "tests/e2e/test_resume.py::test_a_grpo_run_whose_group_was_stopped_goes_on_as_if_it_had_not_been[15-SIGTERM]": (
        "a minute and a half; Ctrl-C takes the same way out, and SIGTERM in tests/unit/actors/run/test_terminated.py"
    ),
    "tests/distributed/test_checkpoint_kills.py::test_ranks_of_either_runtime_killed_in_a_save_of_either_kind_leave_the_"
    "checkpoint_before[bridge]": (
        "two minutes; the bridge's saves in the background stay, and those that ranks wait for of the native runtime"
    ),
    "tests/e2e/test_demo_pipelines.py::test_the_demo_learns_its_task_in_a_pipeline[bridge]": (
        "five minutes; engines serve what the bridge's stages train, and benchmarks/results/demo_runs.json has this run"
    ),
    "tests/e2e/test_demo_pipelines.py::test_the_demo_learns_its_task_in_a_pipeline[zbv]": (
        "five minutes; benchmarks/results/demo_runs.json has this run"
    ),
    "tests/e2e/test_demo_pipelines.py::test_the_demo_learns_its_task_in_a_pipeline[zbv mixture]": (
        "six minutes; engines serve what stages train in test_train_group_layouts, and results/demo_runs.json has this run"
    ),
    "tests/e2e/test_demo_hybrids.py::test_the_demo_learns_its_task_with_a_recurrent_state[qwen3_5]": (
        "five minutes; engines serve this model in test_qwen3_5_engines, and benchmarks/results/demo_runs.json has this run"
    ),
    "tests/e2e/test_demo_hybrids.py::test_the_demo_learns_its_task_with_a_recurrent_state[qwen3_5_moe R3]": (
        "six minutes; engines serve this model in test_qwen3_5_engines, and benchmarks/results/demo_runs.json has this run"
    ),
    "tests/e2e/test_demo_mixtures.py::test_the_demo_learns_its_task_with_sigmoid_routers[minimax_m2]": (
        "four minutes; GLM-4.5, whose router has a bias too, stays"
    ),
    "tests/e2e/test_episode_runs.py::test_episodes_train_with_adapters_critics_routes_and_on_the_bridge[R2]": (
        "a minute and a half; R3, whose routes come from vLLM, stays"
    ),
    "tests/distributed/test_parity_processes.py::test_an_adapter_trains_as_peft_trains_it[--candidate bridge --tp 2]": (
        "a minute and a half; two native ranks stay, and adapters on the bridge's ranks of tp are in test_lora_tenants"
    ),
    "tests/e2e/test_demo_mixtures.py::test_the_demo_learns_its_task_with_sigmoid_routers[deepseek_v3]": (
        "five minutes; GLM-4.5 stays, and results/demo_runs.json has this run"
    ),
    "tests/e2e/test_demo_mixtures.py::test_the_demo_learns_its_task_in_bfloat16_with_attention_sinks": (
        "ten minutes; pushes of gpt-oss are in make test, and results/demo_runs.json has this run"
    ),
}
"""Cases that ``make test-all`` has no time for, and why it can do without; whoever names their file runs them."""
RULE = (
    "make test runs the quickest cases of tests/distributed such that every test runs, every value of a parameter is in a "
    "case that runs, and so is every pair of values of layouts that one case has, but for tests that name the cases they "
    "keep; in make test-all "
    "every test of tests/distributed has all pairs of its own values, and all other tests have all cases but those left out"
)


def needs(item: pytest.Item) -> set[Hashable]:
    """What a case covers: its test, each parameter that is no layout, and the layout's values with their pairs."""
    found = _facts(item)
    return {item.nodeid.partition("[")[0], *_own(item), *found, *pairs(found)}


def sampled(cases: Iterable[Any], *kept: Any) -> list[ParameterSet]:
    """Values of a parameter, or tuples of several; ``make test`` runs those that are ``kept``, ``make test-all`` all."""
    found = list(cases)
    assert all(case in found for case in kept), "what is kept is no case"
    marks = [[] if case in kept else [pytest.mark.long] for case in found]
    rows = [case if isinstance(case, tuple) else (case,) for case in found]
    return [pytest.param(*row, marks=marked) for row, marked in zip(rows, marks, strict=True)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", metavar="FILE", help="write what became of each case, as JSON")
    parser.addoption("--suite", action="store_true", help="choose cases although a file is named: it is a part of the suite")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Matrix(config))


class Matrix:
    """The choice when tests are collected, and what became of each case."""

    def __init__(self, config: pytest.Config) -> None:
        self.file: str | None = config.getoption("--cases")
        named = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
        self.names_files = named and not config.getoption("--suite")
        self.cases: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self.names_files and (dropped := [item for item in items if item.nodeid in LEFT_OUT]):
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.nodeid not in LEFT_OUT]
        long = {item.nodeid for item in items if item.get_closest_marker("long")}
        if not self.names_files:
            for item in left_out(items):
                item.add_marker(pytest.mark.long)
            # Without long cases there are none of these either, and to choose them takes seconds.
            if config.getoption("markexpr") != "not long" and (dropped := beyond_pairs(items)):
                config.hook.pytest_deselected(items=dropped)
                self.cases |= {item.nodeid: _case(item, "pairs") for item in dropped}
                items[:] = [item for item in items if item.nodeid not in self.cases]
        for item in items if self.file is not None else ():
            marked = item.get_closest_marker("long")
            self.cases[item.nodeid] = _case(item, ("long" if item.nodeid in long else "covered") if marked else None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self.cases.get(report.nodeid)
        if case is not None:
            case["seconds"] += report.duration
            if report.outcome != "passed" or report.when == "call":
                case["outcome"] = report.outcome if case["outcome"] in (None, "passed") else case["outcome"]

    def pytest_sessionfinish(self) -> None:
        if self.file is not None:
            Path(self.file).write_text(json.dumps(self.cases))


def _case(item: pytest.Item, why: str | None) -> dict[str, Any]:
    run_by = {None: "make test", "pairs": None}.get(why, "make test-all")
    return {"has": sorted(_facts(item)), "run_by": run_by, "why": why, "outcome": None, "seconds": 0.0}


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Items that ``make test`` can do without; of several that cover the same it keeps what took less time when recorded."""
    recorded = json.loads(RECORD.read_text())["cases"] if RECORD.exists() else {}
    cases = {
        item.nodeid: item
        for item in items
        if item.nodeid.startswith(REDUCED) and hasattr(item, "callspec") and not item.get_closest_marker("long")
    }
    covered = {name: needs(item) for name, item in cases.items()}
    # A second for each: a test that takes none still has to be collected.
    cost = {name: 1.0 + recorded.get(name, {"seconds": UNKNOWN_SECONDS})["seconds"] for name in cases}
    kept = covering(covered, cost)
    return [item for name, item in cases.items() if name not in kept]


def beyond_pairs(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Items that ``make test-all`` leaves out: other cases of the same test have each pair of their values.

    To have no tp (or dtype, ...) where other cases of the test have one is a value too.
    """
    cases = {item.nodeid: item for item in items if item.nodeid.startswith(REDUCED) and hasattr(item, "callspec")}
    values = {name: {*_facts(item), *_own(item)} for name, item in cases.items()}
    axes: dict[str, set[str]] = defaultdict(set)
    for name, found in values.items():
        axes[name.partition("[")[0]] |= {axis for axis, _ in found}
    covered: dict[str, set[Hashable]] = {}
    for name, found in values.items():
        test = name.partition("[")[0]
        whole = found | {(axis, "") for axis in axes[test] - {axis for axis, _ in found}}
        covered[name] = {(test, value) for value in (*whole, *pairs(whole))}
    in_short = {name for name, item in cases.items() if not item.get_closest_marker("long")}
    done = set().union(*(covered[name] for name in in_short))
    kept = in_short | covering({name: each - done for name, each in covered.items() if name not in in_short})
    return [item for name, item in cases.items() if name not in kept]


def _own(item: pytest.Item) -> set[Fact]:
    """Parameters of a case that are no layout."""
    return {
        (name, _written(value)) for name, value in _parameters(item).items() if not facts("", [f"{name}={_written(value)}"])
    }


def _facts(item: pytest.Item) -> frozenset[Fact]:
    """From the name without its folder, and the parameters."""
    values = [f"{name}={_written(value)}" for name, value in _parameters(item).items() if not callable(value)]
    return facts(item.nodeid.rpartition("/")[2], values)


def _written(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # tests of hostile input have numbers of more digits than Python writes
        return "..."


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def write(file: Path, parts: Iterable[Path]) -> None:
    """The record, from the ``--cases`` of each lane."""
    cases: dict[str, Any] = {}
    for part in parts:
        cases |= json.loads(part.read_text())
    file.write_text(_text(record(cases)))


def record(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What was run, one by one or by file, and how it was chosen."""
    ran = {name: case for name, case in cases.items() if case["outcome"] is not None}
    axes: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    one_by_one, by_file = {}, defaultdict[str, Counter[str]](Counter)
    for name, case in sorted(ran.items()):
        for axis, value in case["has"]:
            axes[axis][value].update([case["outcome"], *(["in make test"] if case["run_by"] == "make test" else [])])
        if name.startswith(RECORDED):
            seconds = round(case["seconds"], 2)
            one_by_one[name] = {**case, "has": _by_axis(case["has"]), "seconds": seconds}
        else:
            by_file[name.partition("::")[0]].update({case["outcome"]: 1, "seconds": round(case["seconds"])})
    tally = {axis: {value: dict(count) for value, count in sorted(each.items())} for axis, each in sorted(axes.items())}
    return {
        "rule": RULE,
        "left_out": LEFT_OUT,
        "reduced_to_pairs": {
            "make test": sum(case["why"] in ("covered", "pairs") for case in cases.values()),
            "make test-all": sum(case["why"] == "pairs" for case in cases.values()),
        },
        "not_selected": sum(case["outcome"] is None and case["why"] != "pairs" for case in cases.values()),
        "outcomes": dict(Counter(case["outcome"] for case in ran.values())),
        "seconds": {
            "all": round(sum(case["seconds"] for case in ran.values())),
            "make test": round(sum(case["seconds"] for case in ran.values() if case["run_by"] == "make test")),
        },
        "axes": tally,
        "files": {name: dict(count) for name, count in by_file.items()},
        "cases": one_by_one,
        "not_in_make_test_all": _by_test(name for name, case in cases.items() if case["why"] == "pairs"),
    }


def _by_test(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        test, _, case = name.partition("[")
        found[test].append(case.removesuffix("]"))
    return found


def _by_axis(found: Iterable[Fact]) -> dict[str, str]:
    """Axis -> value, or values."""
    values: dict[str, list[str]] = defaultdict(list)
    for axis, value in sorted(found):
        values[axis].append(value)
    return {axis: ", ".join(each) for axis, each in values.items()}


def _text(found: Mapping[str, Any]) -> str:
    """JSON with a line for each case, which a diff shows alone."""
    parts = []
    for key, value in found.items():
        if key in ("axes", "files", "cases", "not_in_make_test_all"):
            lines = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
            parts.append(f" {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n }")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
