"""Training ranks that die or hang while a run trains: others take their place, and the run is the one it would have been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayError
from safetensors.torch import load_file

from actors import Loss, Run
from actors.cluster.processes import start_time
from actors.run import update_metrics
from actors.run.session import Session, open_session
from actors.sync.staged_transports import SharedMemoryTransport
from actors.train.group import TrainGroup
from examples import grpo, sft
from examples.demo.__main__ import DemoConfig, demo_settings
from examples.demo.task import write_task
from rl_backend.contracts import ConfigError, NativeConfig, RLBackendError, RuntimeConfig
from rl_backend.data.prompts import endless_batches
from tests.support.runs import of_the_run
from tests.support.sft_batches import random_token_sequences

type Disturb = Callable[[Session], None]


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [of_the_run(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    events = ("recovery/", "warnings")
    return [{name: value for name, value in line.items() if not name.startswith(events)} for line in found]


def recoveries(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line[name] for name in line if name.startswith("recovery/")} for line in found if "recovery/count" in line
    ]


def alike(task: Path, folder: Path) -> str:
    """The task's examples, whose prompts all begin with the same 36 tokens: enough to be computed once."""
    rows = [json.loads(line) for line in (task / "train.jsonl").read_text().splitlines()]
    file = folder / "alike.jsonl"
    file.write_text("".join(json.dumps({**row, "prompt": "0+" * 18 + row["prompt"]}) + "\n" for row in rows))
    return str(file)


def shares_prompts(folder: Path) -> bool:
    """Whether every step of a run computed the tokens once with which several of its sequences begin."""
    counts = [(line["tokens_computed"], line["tokens_trained"]) for line in lines(folder) if "tokens_trained" in line]
    return bool(counts) and all(computed < 0.7 * trained for computed, trained in counts)


def config_of(task: Path, folder: Path, **changes: Any) -> sft.SFTConfig:
    options = {"steps": 8, "batch_size": 8, "ranks": 2, "save_every": 3, "dtype": "float32", "metrics_to": "none"}
    files = {"model": str(task / "model"), "dataset": str(task / "train.jsonl"), "run_dir": str(folder)}
    return sft.SFTConfig(**{**options, **files, **changes})


def run(config: sft.SFTConfig, session: Session, disturb: Disturb | None = None, at: int = 5) -> Path:
    def on_step(step: int, metrics: dict[str, float]) -> None:
        if disturb is not None and step == at:
            # In the middle of the step that follows.
            threading.Timer(0.03, disturb, [session]).start()

    sft.train(config, session, on_step)
    return Path(config.run_dir)


def kill(rank: int, sign: signal.Signals = signal.SIGKILL) -> Disturb:
    return lambda session: os.kill(session.groups[0].ranks[rank].pid, sign)


def same_run(found: Path, expected: Path) -> None:
    assert lines(found) == lines(expected)
    (one,), (other,) = (
        [load_file(file) for file in (folder / "model").glob("*.safetensors")] for folder in (found, expected)
    )
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.long
@pytest.mark.shows(
    "recovery: SFT on two ranks, one of them killed by kill -9 in a step, is the undisturbed run in every bit"
)
def test_a_run_goes_on_when_a_rank_is_killed(
    ray_cluster: None, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(task, tmp_path / "undisturbed")
    with open_session(config) as session:
        expected = run(config, session)
        policy_before, ranks = session.groups[0], session.groups[0].ranks
        found = run(config_of(task, tmp_path / "killed"), session, kill(1))
        assert session.groups[0] is policy_before and session.groups[0].epoch == 1
        assert {info.pid for info in session.groups[0].ranks}.isdisjoint(info.pid for info in ranks)
    same_run(found, expected)
    (told,) = recoveries(found)
    assert told["recovery/count"] == 1 and told["recovery/seconds_lost"] > 0
    # Since the checkpoint of step 3: that of step 6 is not committed yet.
    assert 2 <= told["recovery/steps_repeated"] <= 4
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "replaced" in line]
    assert line.startswith("warning: training group") and "died during operation" in line and "the run goes on" in line


@pytest.mark.long
@pytest.mark.shows(
    "recovery: a rank that is stopped by SIGSTOP is replaced within seconds, and SIGCONT does not bring it back"
)
def test_a_stopped_rank_is_replaced_and_never_wakes_up(ray_cluster: None, task: Path, tmp_path: Path) -> None:
    config = config_of(task, tmp_path / "undisturbed")
    with open_session(config) as session:
        expected = run(config, session)
        stopped = session.groups[0].ranks[0]
        found = run(config_of(task, tmp_path / "stopped"), session, kill(0, signal.SIGSTOP))
        assert session.groups[0].epoch == 1
        with pytest.raises(ProcessLookupError):
            os.kill(stopped.pid, signal.SIGCONT)
        assert start_time(stopped.pid) != stopped.started
    same_run(found, expected)


@pytest.mark.long
@pytest.mark.shows("recovery: the bridge's ranks are replaced as the native ones, with the same bits")
def test_a_run_of_the_bridge_goes_on_when_a_rank_is_killed(ray_cluster: None, task: Path, tmp_path: Path) -> None:
    run_of_the_bridge(task, tmp_path)


def run_of_the_bridge(task: Path, folder: Path, **changes: Any) -> Path:
    """A run of which a rank is killed, and which is the one that it would have been."""
    changes |= {"train": {"backend": "bridge"}}
    config = config_of(task, folder / "undisturbed", **changes)
    with open_session(config) as session:
        expected = run(config, session)
        found = run(config_of(task, folder / "killed", **changes), session, kill(1))
        assert session.groups[0].epoch == 1
    same_run(found, expected)
    return found


@pytest.mark.shows(
    "recovery: with recover=memory and no checkpoint a run whose rank or whose holder of states is killed is the "
    "undisturbed run in every bit, and at most two steps run again; its prompts are shared and computed once"
)
def test_a_run_goes_on_from_memory(ray_cluster: None, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    changes = {"save_every": 0, "recover": "memory", "dataset": alike(task, tmp_path)}
    config = config_of(task, tmp_path / "undisturbed", **changes)
    killed: list[int] = []
    with open_session(config) as session:
        expected = run(config, session)
        other = run(config_of(task, tmp_path / "holder", **changes), session, kill_holder(killed))
        assert session.groups[0].epoch == 0 and start_time(killed[0]) == ""
        until_replaced(session, killed[0])
        found = run(config_of(task, tmp_path / "killed", **changes), session, kill(1))
        assert session.groups[0].epoch == 1
    same_run(other, expected)
    same_run(found, expected)
    assert shares_prompts(found)
    (told,) = recoveries(found)
    # One; another where its state has not reached the holder when the next, of a tenth of a second, begins.
    assert told["recovery/steps_repeated"] <= 2
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "in memory was lost" in line]
    assert "another one is started" in line
    until_gone(Path("/proc"), "rl_backend_boundary")


def holder_of(session: Session) -> Any:
    recovery: Any = session.groups[0]._recovery
    (holder,) = recovery._memory._holders.values()
    return holder


def kill_holder(killed: list[int]) -> Disturb:
    def kill_it(session: Session) -> None:
        killed.append(ray.get(holder_of(session).ping.remote())[0])
        os.kill(killed[0], signal.SIGKILL)

    return kill_it


def until_replaced(session: Session, pid: int) -> None:
    """Waits until another holder has started, and is asked to keep what that one had."""
    recovery: Any = session.groups[0]._recovery
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        recovery.stepped([])
        with suppress(RayError):
            if ray.get(holder_of(session).ping.remote())[0] != pid:
                return
        time.sleep(0.1)
    raise AssertionError("there is no other holder")


def until_gone(processes: Path, name: str) -> None:
    """Waits until no process has memory of this name open."""
    deadline = time.monotonic() + 30
    while any(name in target for target in map(target_of, processes.glob("[0-9]*/fd/*"))):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def target_of(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


@pytest.mark.long
@pytest.mark.shows("recovery: the bridge's ranks go on from memory as the native ones, with the same bits")
def test_a_run_of_the_bridge_goes_on_from_memory(ray_cluster: None, task: Path, tmp_path: Path) -> None:
    found = run_of_the_bridge(task, tmp_path, save_every=0, recover="memory")
    assert recoveries(found)[0]["recovery/steps_repeated"] <= 2


@pytest.mark.long
@pytest.mark.shows("recovery: ranks that compute for over a minute beside four busy neighbours are not taken for hung")
def test_a_pass_of_a_minute_beside_busy_neighbours_is_no_hang(ray_cluster: None, task: Path) -> None:
    runtime = RuntimeConfig(hf_path=str(task / "model"), backend_cfg=NativeConfig(device="cpu"))
    data = random_token_sequences((9, 5, 12, 7), 12)
    with ExitStack() as neighbours:
        for _ in range(4):
            busy = neighbours.enter_context(subprocess.Popen((sys.executable, "-c", "while True: pass")))
            neighbours.callback(busy.kill)
        with TrainGroup(runtime, 2, 1, recover="memory") as group:
            model, before = group.build_model(), group.ranks
            for seconds in (0.0, 65.0):
                group.zero_grad(model)
                group.forward_backward(model, data, Loss("tests.support.losses:slow_loss", seconds=seconds))
                group.optimizer_step(model)
            assert group.recoveries == () and group.ranks == before and group.weight_version(model) == 2


def train_and_move(config: sft.SFTConfig, session: Session, moves: dict[int, Callable[[Run], None]]) -> Path:
    """A loop of a user's own, whose training group gets another layout after some steps."""
    examples, _ = sft.load_data(config)
    with Run(config, session) as run:
        model = run.build_model("sft")
        batches = endless_batches(examples, config.batch_size, config.seed, start=run.start.step)
        run.begin("SFT", {"sft": model})
        for step in run.steps():
            run.end_step(update_metrics([model.update(list(chain(*next(batches))), Loss("rl_backend.algorithm:sft_loss"))]))
            if step in moves:
                moves[step](run)
        run.save_model(model)
    return Path(config.run_dir)


@pytest.mark.long
@pytest.mark.shows("recovery: a run moves from dp=2 to tp=2, pp=2 and one rank between its steps; losses within 1e-5")
def test_a_run_changes_its_layout_between_steps(
    ray_cluster: None, task: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moves: dict[int, Callable[[Run], None]] = {
        2: lambda run: run.reshape(2, tp=2),
        4: lambda run: run.reshape(2, pp=2),
        6: lambda run: run.reshape(1),
    }
    configs = [config_of(task, tmp_path / name) for name in ("undisturbed", "moved")]
    with open_session(configs[0]) as session:
        folders = [run(configs[0], session), train_and_move(configs[1], session, moves)]
        group = session.groups[0]
        assert group.num_ranks == 1 and group.epoch == 3 and not group.recoveries
        assert_close(*folders)
        with pytest.raises(RLBackendError, match=r"stays on 1 rank, because 99 ranks .* could not take over: .*asks for 99"):
            group.reshape(99)
        with pytest.raises(ConfigError, match=r"world size 3 is not a multiple of tp\*pp\*cp"):
            group.reshape(3, tp=2)
        assert group.num_ranks == 1 and not group.ended
    said = [line for line in capfd.readouterr().out.splitlines() if " went from " in line]
    expected = ["from 2 ranks (dp=2) to 2 ranks (tp=2) in ", "to 2 ranks (pp=2) in ", "from 2 ranks (pp=2) to 1 rank in "]
    assert [part in line for part, line in zip(expected, said, strict=True)] == [True] * 3
    told = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"]: line["reshape/ranks"] for line in told if "reshape/count" in line} == {3: 2, 5: 2, 7: 1}
    # Whatever wrote it, a checkpoint continues in the layout of the configuration.
    with open_session(configs[0]) as session:
        for folder in folders:
            run(config_of(task, folder, steps=10, resume="auto"), session)
    assert len(lines(folders[1])) == 10
    assert_close(*folders)


@pytest.mark.long
@pytest.mark.shows(
    "recovery: a run of a mixture moves from dp=2 to ep=2, to the bridge and back to the native runtime between its steps; "
    "losses within 1e-5"
)
def test_a_run_moves_to_expert_parallelism_and_to_the_other_runtime(
    ray_cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "task", seed=0, model="qwen3_moe")
    # Moments of the optimizer that were lost would show.
    changes = {"lr": 1e-3, "steps": 9}
    configs = [config_of(tmp_path / "task", tmp_path / name, **changes) for name in ("undisturbed", "moved")]
    native = configs[1].runtime_config()
    bridge = config_of(tmp_path / "task", tmp_path / "moved", train={"backend": "bridge"}, **changes).runtime_config()
    moves: dict[int, Callable[[Run], None]] = {
        2: lambda run: run.reshape(2, ep=2),
        4: lambda run: run.reshape(2, bridge, ep=2),
        6: lambda run: run.reshape(2, tp=2),
        8: lambda run: run.reshape(2, native),
    }
    with open_session(configs[0]) as session:
        folders = [run(configs[0], session), train_and_move(configs[1], session, moves)]
        assert session.groups[0].epoch == 4 and not session.groups[0].recoveries
    assert_close(*folders)
    said = [line for line in capfd.readouterr().out.splitlines() if " went from " in line]
    expected = [
        "from 2 ranks (dp=2) to 2 ranks (dp=2, ep=2) in ",
        "from 2 ranks (dp=2, ep=2) to 2 ranks of the bridge runtime (dp=2, ep=2) in ",
        "to 2 ranks of the bridge runtime (tp=2) in ",
        "from 2 ranks of the bridge runtime (tp=2) to 2 ranks (dp=2) in ",
    ]
    assert [part in line for part, line in zip(expected, said, strict=True)] == [True] * 4


def assert_close(*folders: Path) -> None:
    one, other = ([line["nll"] for line in lines(folder)] for folder in folders)
    assert one == pytest.approx(other, rel=1e-5)


def kill_in_a_save(folder: Path) -> Disturb:
    def wait_and_kill(session: Session) -> None:
        deadline = time.monotonic() + 60
        while not list((folder / "checkpoints").glob(".step-*.incomplete/.policy.incomplete-*")):
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        kill(0)(session)

    return wait_and_kill


def kill_in_a_push(monkeypatch: pytest.MonkeyPatch) -> Disturb:
    stage = SharedMemoryTransport.stage

    def wait_and_kill(session: Session) -> None:
        def killing(*arguments: Any) -> Any:
            monkeypatch.setattr(SharedMemoryTransport, "stage", stage)
            kill(0)(session)
            return stage(*arguments)

        monkeypatch.setattr(SharedMemoryTransport, "stage", killing)

    return wait_and_kill


# Also of a model that knows nothing some answers are better than others.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""


def samples(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.shows("recovery: GRPO whose trainer moves to another layout pushes on, and vLLM's log-probs stay within 1e-5")
def test_a_run_that_samples_pushes_from_its_new_layout(ray_cluster: None, task: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    settings = demo_settings(DemoConfig(steps=4), task, task / "model", tmp_path / "run")
    changes = {"ranks": 2, "recover": "memory", "eval_dataset": None, "reward": f"{tmp_path}/reward.py:compute_score"}
    config = grpo.GRPOConfig(**{**settings, **changes})

    def on_step(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            session.groups[0].reshape(2, tp=2)

    with open_session(config) as session:
        grpo.train(config, session, on_step)
    found = [line for line in lines(Path(config.run_dir)) if line["step"]]
    assert [line.get("reshape/ranks") for line in found] == [None, None, 2, None]
    assert max(line["log_prob_gap"] for line in found) <= 1e-5
    versions = [line["weight_version"] for line in found]
    assert versions == sorted(set(versions)) and len(versions) == 4


@pytest.mark.long
@pytest.mark.shows(
    "recovery: GRPO with vLLM, its groups' prompts computed once, is the undisturbed run after kills of ranks in a pass, a "
    "save and a push, token by token"
)
def test_grpo_goes_on_with_the_same_samples(
    ray_cluster: None, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    dataset = alike(task, tmp_path)

    def config_in(folder: Path) -> grpo.GRPOConfig:
        settings = demo_settings(DemoConfig(steps=6), task, task / "model", folder)
        changes = {"ranks": 2, "save_every": 2, "eval_dataset": None, "reward": f"{tmp_path}/reward.py:compute_score"}
        return grpo.GRPOConfig(**{**settings, **changes, "dataset": dataset, "max_prompt_tokens": 42})

    def trained(name: str, disturb: Disturb | None = None) -> Path:
        config = config_in(tmp_path / name)

        def on_step(step: int, metrics: dict[str, float]) -> None:
            if disturb is not None and step == 3:
                threading.Timer(0.2, disturb, [session]).start()

        grpo.train(config, session, on_step)
        return Path(config.run_dir)

    disturbances = {
        "pass": kill(1),
        "save": kill_in_a_save(tmp_path / "save" / "grpo"),
        "push": kill_in_a_push(monkeypatch),
    }
    with open_session(config_in(tmp_path)) as session:
        expected = trained("undisturbed")
        for number, (name, disturb) in enumerate(disturbances.items(), start=1):
            found = trained(name, disturb)
            assert session.groups[0].epoch == number and recoveries(found)
            assert samples(found) == samples(expected)
            same_run(found, expected)
            assert shares_prompts(found)
