"""A session that is open serves the runs that would open such a one themselves, and refuses others by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors import Run, Session
from actors.cluster.placement import ClusterShare
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from rl_backend.contracts import ConfigError, RolloutError
from tests.support.stopped_run import Weight, config_of

OPTIONS: dict[str, Any] = {"model": "m", "dataset": "d", "dtype": "float32"}


def session_of(config: GRPOConfig | SFTConfig) -> Session:
    group: Any = SimpleNamespace(config=config.runtime_config(), num_ranks=1, wanted_ranks=config.ranks)
    engines: Any = config.rollout_config(ClusterShare(3, 4, 0))
    rollout: Any = None if engines is None else SimpleNamespace(config=engines)
    return Session([group] * config.training_groups, rollout)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)


def test_a_session_serves_runs_of_other_models_rates_and_shorter_responses() -> None:
    config = GRPOConfig(**OPTIONS, reward="r")
    session = session_of(config)
    session.require(config)
    session.require(config.replace(model="another", lr=1e-3, steps=3, max_response_tokens=8, run_dir="x"))
    session_of(config.replace(stop_strings=["x"])).require(config)
    session.require(SFTConfig(**OPTIONS, max_prompt_tokens=512))
    session_of(SFTConfig(**OPTIONS)).require(SFTConfig(**OPTIONS, lr=1.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 2}, r"session='ranks=1': the run asks for ranks=2; open one for it with open_session"),
        ({"ranks": 2, "seed": 3}, r"session='ranks=1, seed=0, .*': the run asks for ranks=2, seed=3, .*; open"),
        ({"ranks": 2, "tp": 2}, "ranks=1"),
        ({"seed": 3}, r"seed=0.*the run asks for seed=3"),
        ({"backend": "bridge"}, r"backend='native'.*the run asks for backend='bridge'"),
        (
            {"train.backend_cfg.log_prob_chunk_tokens": 8},
            r"backend_cfg\.log_prob_chunk_tokens=1024.*asks for .*chunk_tokens=8",
        ),
        ({"engines": 2}, r"rollout\.num_engines=1.*asks for rollout\.num_engines=2"),
        ({"router_replay": "R3"}, r"rollout\.return_routed_experts=False.*asks for .*=True"),
        ({"stop_strings": ["x"]}, r"load_tokenizer=False': the run asks for load_tokenizer=True"),
        ({"max_response_tokens": 600}, r"max_model_len=1024.*asks for max_model_len=1112"),
    ],
)
def test_a_run_that_needs_another_session_is_refused_with_the_difference(changes: dict[str, Any], message: str) -> None:
    config = GRPOConfig(**OPTIONS, reward="r")
    with pytest.raises(ConfigError, match=message):
        session_of(config).require(config.replace(**changes))


class Engines:
    """Stands for a rollout group: counts what makes it forget its weights."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.forgotten = 0

    def forget_weights(self) -> None:
        self.forgotten += 1


def test_runs_of_adapters_share_a_session_and_the_weights_below_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[Any] = []

    class Sync:
        def __init__(self, group: Any, rollout: Any, handle: Any, *, transport: str) -> None:
            self.handle = handle

        def push(self) -> None:
            pushed.append(self.handle.name)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("actors.run.session.WeightSync", Sync)
    many = GRPOConfig(**OPTIONS, reward="r", **{"lora.rank": 64})
    plain = GRPOConfig(**OPTIONS, reward="r")
    engines: Any = Engines(many.rollout_config(ClusterShare(1, 1, 0)))
    built: list[str] = []

    class Group:
        config, wanted_ranks = many.runtime_config(), 1

        def build_model(self, *, name: str, trainable: bool, hf_path: str) -> Any:
            built.append(hf_path)
            return SimpleNamespace(name=name)

    group: Any = Group()
    session = Session([group], engines)
    session.require(GRPOConfig(**OPTIONS, reward="r", **{"lora.rank": 4}))
    session.require(plain)
    with pytest.raises(ConfigError, match=r"max_adapter_rank=64.*asks for max_adapter_rank=128"):
        session.require(GRPOConfig(**OPTIONS, reward="r", **{"lora.rank": 128}))
    base, other = session.base(group, "m"), session.base(group, "n")
    assert session.base(group, "m") is base and built == ["m", "n"]
    with session.serving(group, base, "auto"):
        with session.serving(group, base, "auto"):
            assert (pushed, engines.forgotten) == (["base of m"], 1)
        with pytest.raises(ConfigError, match="serve adapters over another model"), session.serving(group, other, "auto"):
            pass
        with pytest.raises(ConfigError, match="wait for them"):
            session.forget_weights()
    with session.serving(group, other, "auto"):
        assert pushed == ["base of m", "base of n"]
    session.forget_weights()
    assert engines.forgotten == 3


def test_each_group_has_a_base_of_its_own_for_each_directory() -> None:
    class Group:
        def __init__(self, name: str) -> None:
            self.name = name
            self.built: list[dict[str, Any]] = []

        def build_model(self, **options: Any) -> Any:
            self.built.append(options)
            return SimpleNamespace(group=self.name, path=options["hf_path"])

    groups: Any = [Group("first"), Group("second")]
    session = Session(groups)
    found = [session.base(group, path) for _ in range(2) for group in groups for path in ("a/m", "b/m")]
    assert [(base.group, base.path) for base in found] == 2 * [
        ("first", "a/m"),
        ("first", "b/m"),
        ("second", "a/m"),
        ("second", "b/m"),
    ]
    assert all(again is base for again, base in zip(found[4:], found[:4], strict=True))
    for group in groups:
        assert group.built == [{"name": "base of m", "trainable": False, "hf_path": path} for path in ("a/m", "b/m")]


def test_a_run_that_samples_needs_engines_and_one_with_a_group_for_each_model_needs_the_groups() -> None:
    config = GRPOConfig(**OPTIONS, reward="r")
    with pytest.raises(ConfigError, match=r"rollout\.num_engines=None.*asks for .*rollout\.num_engines=1"):
        session_of(SFTConfig(**OPTIONS, max_prompt_tokens=512)).require(config)
    with pytest.raises(ConfigError, match=r"training groups=1.*asks for training groups=2"):
        session_of(config).require(PPOConfig(**OPTIONS, reward="r", groups="each"))


class Tenants(Weight):
    """A training group that refuses a second tenant of a name, as a runtime does."""

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.names: list[str] = []

    def create_lora_adapter(self, base: Any, lora: Any, optimizer: Any, *, name: str, head: str) -> Any:
        if name in self.names:
            raise ConfigError.of("name", name, "'base' has a tenant of this name; choose another one")
        self.names.append(name)
        return SimpleNamespace(name=name)

    def remove_lora_adapter(self, tenant: Any) -> None:
        self.names.remove(tenant.name)


def test_runs_whose_folders_end_alike_have_tenants_of_their_own(tmp_path: Path, tied_model: Path) -> None:
    ann, bob = (
        config_of(tmp_path, tied_model, run_dir=str(tmp_path / user / "grpo"), **{"lora.rank": 4}) for user in ("ann", "bob")
    )
    group = Tenants(ann)
    session = Session([group])  # type: ignore[list-item]
    with Run(ann, session) as first, Run(bob, session) as second:
        made = [run.build_model(name).handle.name for run in (first, second) for name in ("actor", "critic")]
        assert made == group.names
    assert not group.names
    with Run(ann.replace(steps=2), session) as again:
        assert again.build_model("actor").handle.name == made[0], "a run that resumes has the same name"


def test_a_run_that_fails_leaves_the_session_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[Exception] = [RolloutError("the push failed")]

    class Sync:
        def __init__(self, *_: Any, **options: Any) -> None: ...

        def push(self) -> None:
            if problems:
                raise problems.pop()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("actors.run.session.WeightSync", Sync)
    engines: Any = Engines(None)
    session, group = Session([], engines), object()
    one, other = (SimpleNamespace(name=name) for name in ("one", "other"))

    def serve(base: Any, error: Exception | None = None) -> None:
        with session.serving(group, base, "auto"):  # type: ignore[arg-type]
            if error is not None:
                raise error

    with pytest.raises(RolloutError, match="the push failed"):
        serve(one)
    with pytest.raises(KeyError, match="of the loop"):
        serve(one, KeyError("of the loop"))
    serve(other)
    session.forget_weights()
    assert engines.forgotten == 4 and Session([]).forget_weights() is None  # type: ignore[func-returns-value]
