"""What a run does around a loop: models, laps, steps, results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import Run, Session
from actors.cluster.session import RunStopped
from actors.folder.resume import find_start
from actors.run.parts import Parts
from actors.run.run import StopRequest
from actors.train.model import GroupModel
from actors.train.recovery import Recovered, Reshaped
from actors.watch.console import Phases
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from rl_backend.contracts import ConfigError, OptimizerConfig
from rl_backend.contracts.lora import LoRAConfig
from tests.support.sampled_runs import Engines, Trainer


@pytest.fixture(autouse=True)
def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr("actors.run.run.check_start", lambda config, session_is_open: [])


def config_of(tmp_path: Path, kind: Any = SFTConfig, **changes: Any) -> Any:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for name in ("model", "other"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
    files = {"model": f"{tmp_path}/model", "dataset": f"{tmp_path}/train.jsonl", "run_dir": f"{tmp_path}/run"}
    return kind(**{**files, "steps": 3, "dtype": "float32", "metrics_to": None, "lr": 3e-4, **changes})


def session_of(config: Any, groups: int = 1) -> tuple[Session, list[Trainer]]:
    trainers = [Trainer(config) for _ in range(groups)]
    engines = None if not config.num_engines else Engines(config)
    return Session(trainers, engines), trainers  # type: ignore[arg-type]


def test_models_are_built_on_their_group_with_the_runs_options_or_their_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, PPOConfig, reward="r", groups="each")
    session, (first, second) = session_of(config, 2)
    own = OptimizerConfig(lr=1.0)
    with Run(config, session) as run:
        actor = run.build_model("actor", router_replay="R2")
        critic = run.build_model("critic", group=1, head="values", hf_path=tmp_path / "other", optimizer=own)
        reference = run.build_model("reference", group=7, forward_only=True)
    assert [each.group for each in (actor, critic, reference)] == [first, second, second]
    assert (actor.router_replay, critic.router_replay, actor.base, actor.hf_path) == ("R2", "off", None, "")
    common = {"forward_only": False, "head": "log_probs", "hf_path": f"{tmp_path}/model"}
    assert first.calls == [("build", {**common, "name": "actor", "optimizer": config.train.backend_cfg.optimizer})]
    assert second.calls == [
        ("build", {**common, "name": "critic", "head": "values", "hf_path": f"{tmp_path}/other", "optimizer": own}),
        ("build", {**common, "name": "reference", "forward_only": True, "optimizer": None}),
    ]


def test_adapters_are_tenants_of_the_frozen_model_which_is_the_forward_only_one(tmp_path: Path) -> None:
    config = config_of(tmp_path, seed=6, **{"lora.rank": 4, "lora.dropout": 0.25})
    session, (trainer,) = session_of(config)
    with Run(config, session) as run:
        policy, reference = run.build_model("policy", router_replay="R2"), run.build_model("reference", forward_only=True)
        assert policy.base is reference.handle and reference.base is None
        assert (policy.hf_path, policy.router_replay) == (f"{tmp_path}/model", "R2")
        assert trainer.calls[-1][0] == "create"
    (_, built), (_, (base, lora, optimizer, options)), removed = trainer.calls
    assert built == {"name": "base of model", "trainable": False, "hf_path": f"{tmp_path}/model"} and base == "base of model"
    assert lora == LoRAConfig(rank=4, dropout=0.25, seed=6) and optimizer == config.train.backend_cfg.optimizer
    assert options["head"] == "log_probs" and options["name"].endswith("/policy") and options["name"].startswith("run-")
    assert removed == ("remove", options["name"])


@pytest.mark.parametrize("merged", [False, True])
def test_a_model_is_saved_whole_or_as_an_adapter_and_an_earlier_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged: bool
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(
        "actors.run.run.write_peft_directory",
        lambda path, tensors, lora, base: written.append((path, dict(tensors), lora, base)) or path.mkdir(),  # type: ignore[func-returns-value]
    )
    config = config_of(tmp_path)
    session, (trainer,) = session_of(config)
    with Run(config, session) as run:
        model = run.build_model("mine")
        assert [run.save_model(model), run.save_model(model), run.save_model(model, "best")] == [
            tmp_path / "run" / name for name in ("model", "model", "best")
        ]
    assert trainer.calls[1:] == [("save", ("model", True)), ("save", ("model", True)), ("save", ("best", True))]
    assert (tmp_path / "run" / "model.1").is_dir() and not written
    config = config_of(tmp_path, run_dir=f"{tmp_path}/adapters", **{"lora.rank": 4, "lora.save_merged": merged})
    session, (trainer,) = session_of(config)
    with Run(config, session) as run:
        model = run.build_model("mine")
        path = run.save_model(model, "final")
    name = model.handle.name
    assert written == [(path, {f"factor of {name}": 1}, LoRAConfig(rank=4), f"{tmp_path}/model")]
    saved = [call for call in trainer.calls if call[0] == "save"]
    assert saved == ([("save", ("final_merged", True))] if merged else [])


def take(run: Run[Any], model: GroupModel, metrics: Any = None) -> None:
    for step in run.steps():
        run.lap("train")
        run.end_step({"weight": model.group.update(step), **(metrics or {})})  # type: ignore[attr-defined]


def test_steps_are_logged_shown_and_continued_with_the_metrics_of_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, save_every=2, resume="auto", async_save=False)
    session, (trainer,) = session_of(config)
    trainer.peak_memory = 5 * 2**29  # type: ignore[misc]
    seen: list[tuple[int, dict[str, float]]] = []
    with Run(config, session, lambda step, metrics: seen.append((step, dict(metrics))), label="mine ") as run:
        assert run.last_metrics == {}
        model = run.build_model("mine")
        run.begin("Mine", {"mine": model}, ["two words"])
        take(run, model, {"odd": math.nan})
        run.write_summary({"best": 0.5})
    assert "mine Mine: two words\n" in capsys.readouterr().out
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged] == [step for step, _ in seen] == [1, 2, 3]
    assert [line["weight"] for line in logged] == [metrics["weight"] for _, metrics in seen]
    assert all(line["peak_memory_gib"] == 2.5 and line["odd"] == "NaN" and line["seconds/train"] > 0 for line in logged)
    assert ["seconds/save" in line for line in logged] == [False, True, True], "every two steps, and after the last"
    assert "seconds/train" not in seen[0][1]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["best"], summary["steps"]) == (0.5, 3) and summary["seconds"] > 0
    state = find_start(config.replace(steps=5)).checkpoint
    assert state is not None and state.state["metrics"] == {"weight": seen[2][1]["weight"], "odd": "NaN"}
    assert set(state.state) == {"run", "logs", "chosen", "vital_signs", "metrics"}
    longer = config.replace(steps=5)
    session, (again,) = session_of(longer)
    with Run(longer, session) as run:
        assert run.start.step == 3 and run.last_metrics["weight"] == seen[2][1]["weight"]
        assert math.isnan(run.last_metrics["odd"])
        model = run.build_model("mine")
        run.begin("Mine", {"mine": model})
        assert again.value == trainer.value, "the checkpoint's weights"
        take(run, model)
    printed = capsys.readouterr().out
    assert (
        "checkpoint loading step-00000003: " in printed
        and f"Mine: continuing after step 3, from {tmp_path}/run" in printed.replace("\n    ", " ")
    )
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]


def test_laps_have_the_tokens_of_the_model_that_had_most(tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=1)
    session, _ = session_of(config)
    with Run(config, session) as run:
        actor, critic = run.build_model("actor"), run.build_model("critic")
        run.begin("Mine", {"actor": actor, "critic": critic})
        for _ in run.steps():
            actor.tokens.add([[0] * 30])  # type: ignore[list-item]
            critic.tokens.add([[0] * 20, [0] * 20])  # type: ignore[list-item]
            run.lap("train")
            actor.tokens.add([[0] * 7])  # type: ignore[list-item]
            run.lap("more")
            run.end_step({})
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["tokens_per_second/train"] == pytest.approx(40 / line["seconds/train"])
    assert line["tokens_per_second/more"] == pytest.approx(7 / line["seconds/more"])


def test_a_trace_has_every_group_and_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []

    class Collector:
        def __init__(self, path: Path, sources: Any) -> None:
            traced.append((path, list(sources)))

        def close(self) -> None:
            traced.append("closed")

    monkeypatch.setattr("actors.folder.folder.TraceCollector", Collector)
    config = config_of(tmp_path, PPOConfig, reward="r", groups="each", trace=True)
    session, trainers = session_of(config, 2)
    with pytest.raises(KeyError, match="mine"), Run(config, session):
        raise KeyError("mine")
    assert traced == [(tmp_path / "run" / "trace.json", [*trainers, session.rollout]), "closed"]


def test_every_group_must_see_the_model_and_the_run_folder(tmp_path: Path) -> None:
    config = config_of(tmp_path, PPOConfig, reward="r", groups="each")
    where = r"on node 10\.0\.0\.2 \(Ray node b\), where training rank 1 runs"
    for sees, message in (
        ((False, True), rf"^model='{tmp_path}/model': is not a Hugging Face directory {where}"),
        ((True, False), rf"^run_dir='{tmp_path}/run\S*': is not seen {where}"),
    ):
        session, (_, second) = session_of(config, 2)
        second.ranks = tuple(  # type: ignore[assignment]
            SimpleNamespace(rank=rank, node_ip=f"10.0.0.{rank + 1}", node_id="ab"[rank]) for rank in (0, 1)
        )
        marks: list[Any] = []

        def looks(function: Any, *arguments: Any, sees: Any = sees, marks: Any = marks) -> list[Any]:
            marks.append(Path(arguments[1]))
            assert function(None, *arguments) == (True, True)
            return [(True, True), sees]

        second.run_on_ranks = looks  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match=message), Run(config, session):
            raise AssertionError("it began")
        assert not marks[0].exists() and marks[0].parent == tmp_path / "run"
        state = json.loads((tmp_path / "run" / "run.json").read_text())
        assert state["state"] == "failed" and "10.0.0.2" in state["error"]


def test_a_run_that_is_to_end_takes_no_ranks_back_before(tmp_path: Path) -> None:
    config, stop = config_of(tmp_path), StopRequest()
    session, (trainer,) = session_of(config)
    grown: list[None] = []
    trainer.has_room, trainer.grow = True, lambda: grown.append(None)  # type: ignore[attr-defined, misc]
    with Run(config, session, lambda step, _: stop.ask("SIGTERM") if step == 2 else None, stop=stop) as run:
        model = run.build_model("mine")
        run.begin("Mine", {"mine": model})
        with pytest.raises(RunStopped):
            take(run, model)
    assert len(grown) == 1


def test_a_group_gets_another_layout_between_two_steps_which_is_said_and_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, save_every=1)
    session, (trainer,) = session_of(config)
    made = [
        Reshaped("mine", "1 rank", "2 ranks (dp=2)", "the cluster has room again", 1.5),
        Reshaped("mine", "a", "b", "", 2.0),
    ]
    asked: list[Any] = []

    def change(*arguments: Any, **sizes: int) -> Reshaped:
        assert not list((tmp_path / "run" / "checkpoints").glob(".*")), "what was saved is committed"
        asked.append((arguments, sizes))
        trainer.reshapes = (*trainer.reshapes, made[len(asked) - 1])
        trainer.has_room = False  # type: ignore[misc]
        return trainer.reshapes[-1]

    trainer.grow = trainer.reshape = change  # type: ignore[attr-defined]
    with Run(config, session) as run:
        model = run.build_model("mine")
        run.begin("Mine", {"mine": model})
        for step in run.steps():
            trainer.has_room = step in (1, 3)  # type: ignore[misc]
            run.end_step({"weight": model.group.update(step)})  # type: ignore[attr-defined]
            if step == 2:
                run.reshape(4, tp=2)
    assert asked == [((), {}), ((4, None), {"tp": 2})], "not after the last step"
    printed = capsys.readouterr().out
    assert "training group 'mine' went from 1 rank to 2 ranks (dp=2) in 1.5 s (the cluster has room again)\n" in printed
    assert "training group 'mine' went from a to b in 2 s\n" in printed
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [{name: value for name, value in line.items() if name.startswith(("reshape", "recovery"))} for line in logged]
    assert [line.get("warnings") for line in logged] == [None, [made[0].describe()], [made[1].describe()]]
    assert found == [
        {},
        {"reshape/count": 1, "reshape/seconds": 1.5, "reshape/ranks": 1},
        {"reshape/count": 1, "reshape/seconds": 2.0, "reshape/ranks": 1},
    ]


def test_a_step_has_the_recoveries_and_layouts_of_all_groups_since_the_step_before(tmp_path: Path) -> None:
    config = config_of(tmp_path, PPOConfig, reward="r", groups="each")
    session, (first, second) = session_of(config, 2)
    first.recoveries = (Recovered("before the run", 9, 9, 99.0),)
    second.num_ranks = 3
    parts = Parts(config, session, Phases(), owner="mine", borrowed=True)
    assert parts.take_recoveries() == {}
    first.recoveries += (Recovered("a rank died", 5, 2, 1.5),)
    second.recoveries += (Recovered("a rank died", 4, 0, 2.0), Recovered("again", 1, 1, 0.25))
    assert parts.take_recoveries() == {
        "recovery/count": 3,
        "recovery/steps_repeated": 3,
        "recovery/operations_repeated": 10,
        "recovery/seconds_lost": 3.75,
    }
    assert parts.take_recoveries() == {}
    second.reshapes += (Reshaped("critic", "a", "b", "", 2.5),)
    assert parts.take_recoveries() == {"reshape/count": 1, "reshape/seconds": 2.5, "reshape/ranks": 4}
    first.recoveries += (Recovered("a rank died", 2, 1, 0.5),)
    first.reshapes += (Reshaped("actor", "a", "b", "", 1.0), Reshaped("actor", "b", "a", "", 1.0))
    found = parts.take_recoveries()
    assert (found["recovery/count"], found["reshape/count"]) == (1, 2)
    assert (found["reshape/seconds"], found["reshape/ranks"]) == (2.0, 4)
    assert parts.take_recoveries() == {}
    first.peak_memory, second.peak_memory = 5, 3
    assert parts.peak_memory == 5
