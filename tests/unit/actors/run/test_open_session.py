"""What is opened for a run, in which order, and what an engine's log is; Ray and vLLM are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import Session
from actors.cluster.placement import ClusterShare
from actors.run import session as session_module
from actors.run.session import borrowed_session, chosen_of, log_of_engines, open_session, ray_is
from actors.train.pulse import WaitBounds
from actors.watch.console import Phases
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from examples.tenants import TenantsConfig
from rl_backend.contracts import ConfigError, RolloutError

OPTIONS: dict[str, Any] = {"model": "m", "dataset": "d", "dtype": "float32"}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is opened and closed."""
    found: list[Any] = []

    @contextmanager
    def ray_session(ranks: int, engines: int = 0) -> Iterator[None]:
        found.append(("ray", ranks, engines))
        yield
        found.append("ray closed")

    def share_cluster(ranks: int, engines: int = 0, *, take_turns: bool = True, colocate: bool = False) -> ClusterShare:
        found.append(("share", ranks, engines, take_turns, colocate))
        return ClusterShare(3, 5, 1)

    class Opened:
        kind = "group"

        def __init__(self, *arguments: Any, **options: Any) -> None:
            found.append((self.kind, arguments, options))
            self.config = arguments[0]

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            found.append(f"{self.kind} closed")

    class Engines(Opened):
        kind = "engines"

    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr("actors.options.config.local_model", lambda model, field: f"/cache/{model}")
    for name, made in (
        ("ray_session", ray_session),
        ("share_cluster", share_cluster),
        ("TrainGroup", Opened),
        ("RolloutGroup", Engines),
    ):
        monkeypatch.setattr(session_module, name, made)
    return found


@pytest.mark.parametrize("ahead", [0, 2])
def test_ray_groups_and_engines_are_opened_in_order_and_closed_backwards(
    events: list[Any], capsys: pytest.CaptureFixture[str], ahead: int
) -> None:
    options: dict[str, Any] = {"reward": "r", "groups": "each", "ranks": 3, "engines": 2, "placement": "spread"}
    options |= {"rank_silence": 9, "operation_timeout": 99, "save_every": ahead}
    config = PPOConfig(**OPTIONS, **options, max_staleness=ahead, importance="off")
    with open_session(config, Phases("mine ")) as session:
        assert len(session.groups) == 2 and session.rollout is not None
        opened = len(events)
    engines = session.rollout.config
    runtime = config.replace(model="/cache/m").runtime_config()
    assert events[:2] == [("ray", 6, 2), ("share", 6, 2, not ahead, False)]
    recover = "checkpoint" if ahead else "off"
    given = {"placement": "spread", "bounds": WaitBounds(9, 99), "recover": recover, "min_ranks": 0}
    assert events[2:4] == [("group", (runtime, 3, 3, 1), given)] * 2
    assert events[4][0] == "engines" and opened == 5
    assert (engines.model_path, engines.num_engines, engines.placement) == ("/cache/m", 2, "spread")
    assert events[5:] == ["engines closed", "group closed", "group closed", "ray closed"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" s  ")[2].rpartition(":")[0].split(None, 1) for line in lines] == [
        ["ray", "starting on this machine"],
        ["ranks", "starting 6 training ranks of native"],
        ["engines", "starting 2 vLLM engines, each of which loads the model"],
    ]
    assert all(line.startswith("mine ") for line in lines)


def test_a_run_that_samples_nothing_has_no_engines(events: list[Any]) -> None:
    with open_session(SFTConfig(**OPTIONS)) as session:
        assert session.rollout is None and len(session.groups) == 1
    assert events[:2] == [("ray", 1, 0), ("share", 1, 0, True, False)] and "engines closed" not in events


def test_engines_that_share_gpus_with_ranks_can_sleep(events: list[Any]) -> None:
    with open_session(PPOConfig(**OPTIONS, reward="r", ranks=2, engines=2, colocate=True)) as session:
        assert session.rollout is not None and session.rollout.config.sleep_mode
    assert events[1] == ("share", 2, 2, True, True)
    with pytest.raises(
        ConfigError, match=r"PPOConfig\.colocate=True: engines share the GPUs of one training group, .* are 2"
    ):
        PPOConfig(**OPTIONS, reward="r", groups="each", colocate=True)


def test_states_in_memory_need_no_checkpoints(events: list[Any]) -> None:
    with open_session(SFTConfig(**OPTIONS, recover="memory")):
        assert events[2][2]["recover"] == "memory"
    with pytest.raises(
        ConfigError, match=r"recover.*'off'.*save_every=0 saves no checkpoints; set it too, or recover=memory"
    ):
        SFTConfig(**OPTIONS, recover="off")


@pytest.mark.parametrize(
    ("shared", "of_users", "recover"), [(0, (2, 5), "checkpoint"), (2, (0, 0), "off"), (0, (0, 0), "off")], ids=str
)
def test_ranks_of_several_users_recover_where_these_save(
    events: list[Any], shared: int, of_users: tuple[int, ...], recover: str
) -> None:
    users = {f"user{number}": {"save_every": every} for number, every in enumerate(of_users)}
    with open_session(TenantsConfig(**OPTIONS, run_dir="x", reward="r", save_every=shared, users=users)):  # type: ignore[arg-type]
        assert events[2][2]["recover"] == recover


def test_what_a_start_says_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_is() == "starting on this machine"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_is() == "joining the cluster at 10.0.0.1:6379"
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    assert ray_is() == "running already"


def fails(error: Exception, folder: str | None) -> None:
    with log_of_engines(folder):
        raise error


def test_what_an_engine_said_is_in_a_file_that_the_error_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RolloutError("engine 1 did not start", traceback="a\nb\n", engine=1)
    with pytest.raises(RolloutError) as raised:
        fails(error, f"{tmp_path}/new/run")
    log = tmp_path / "new" / "run" / "engines.log"
    assert log.read_text() == "a\nb\n"
    assert str(raised.value) == f"engine 1 did not start; all that vLLM said is in {log}"
    assert raised.value.details == error.details and raised.value.__suppress_context__
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RolloutError, match=rf"said is in {tmp_path}/rl-backend-\S+/engines\.log$"):
        fails(error, None)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run_dir='\S+/file': cannot be written"):
        fails(error, f"{tmp_path}/file")
    for other in (RolloutError("no answer"), ValueError("mine")):
        with pytest.raises(type(other)) as same:
            fails(other, str(tmp_path))
        assert same.value is other
    assert not (tmp_path / "engines.log").exists()


def session_of(config: Any, **engines: Any) -> Session:
    group: Any = SimpleNamespace(config=config.runtime_config(), num_ranks=config.ranks, wanted_ranks=config.ranks)
    rollout: Any = SimpleNamespace(config=config.rollout_config(ClusterShare(3, 4, 0)).replace(**engines), forgotten=0)
    rollout.forget_weights = lambda: setattr(rollout, "forgotten", rollout.forgotten + 1)
    return Session([group], rollout)


@pytest.mark.parametrize(
    ("engines", "changes", "message"),
    [
        (
            {"dtype": "bfloat16"},
            {},
            r"^session=\"rollout\.dtype='bfloat16'\": the run asks for rollout\.dtype='float32'; open",
        ),
        ({"enforce_eager": False}, {}, r"rollout\.enforce_eager=False"),
        ({"engine_args": {"x": 1}}, {}, r"rollout\.engine_args=\{'x': 1\}.*asks for rollout\.engine_args=\{\}"),
        ({"seed": 4}, {}, r"rollout\.seed=4"),
        ({}, {"max_response_tokens": 513}, r"max_model_len=1024.*asks for max_model_len=1025"),
        ({"max_adapters": 0}, {"lora.rank": 8}, r"^session='max_adapters=0': the run asks for max_adapters=1; open one"),
        (
            {"max_adapters": 2, "max_adapter_rank": 7},
            {"lora.rank": 8},
            r"max_adapter_rank=7': the run asks for max_adapter_rank=8",
        ),
        (
            {},
            {"ranks": 2, "tp": 2},
            r"ranks=1, backend_cfg\.parallel\.tp=1': the run asks for ranks=2, backend_cfg\.parallel\.tp=2; ",
        ),
    ],
    ids=str,
)
def test_a_session_of_other_engines_or_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, engines: Any, changes: Any, message: str
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    config = GRPOConfig(**OPTIONS, reward="r")
    session = session_of(config, **engines)
    with pytest.raises(ConfigError, match=message), borrowed_session(session, config.replace(**changes)):
        raise AssertionError("it was lent")
    assert session.rollout.forgotten == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("engines", "changes"),
    [
        ({"max_model_len": 1024, "load_tokenizer": True}, {}),
        ({"max_adapters": 3, "max_adapter_rank": 8}, {"lora.rank": 8}),
        ({"placement": "spread", "cores_per_engine": 2, "max_model_len": 5000}, {"max_response_tokens": 500}),
        ({"max_adapters": 0, "max_adapter_rank": 7}, {"lora.rank": 8, "lora.push": "merged"}),
    ],
    ids=str,
)
def test_a_session_with_more_than_a_run_needs_is_lent(monkeypatch: pytest.MonkeyPatch, engines: Any, changes: Any) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    config = GRPOConfig(**OPTIONS, reward="r")
    session = session_of(config, **engines)
    with borrowed_session(session, config.replace(**changes)) as lent:
        assert lent is session
    pushes_adapters = changes.get("lora.rank") and "lora.push" not in changes
    assert session.rollout.forgotten == (0 if pushes_adapters else 1)  # type: ignore[union-attr]


def test_a_run_on_a_session_chooses_what_that_was_opened_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    config = GRPOConfig(**OPTIONS, reward="r")
    other = GRPOConfig(**OPTIONS, reward="r", max_tokens_per_micro_batch=9000)
    reduced = {"backend_cfg": config.train.backend_cfg.replace(reduce_gradients="per_micro_batch")}
    session = session_of(config.replace(train=config.train.replace(**reduced)))
    opened = session.groups[0].config.model_dump()
    found = chosen_of(session, other)
    assert {place.rpartition(".")[2] for place in found} >= {"max_tokens_per_micro_batch", "reduce_gradients"}
    for place, value in found.items():
        at: Any = {"train": opened}
        for name in place.split("."):
            at = at[name]
        assert at == value
    assert "per_micro_batch" in found.values() and 9000 not in found.values()
