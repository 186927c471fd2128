"""Options of runs that sample: what is refused, what follows, and what the first line says."""

from __future__ import annotations

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.cluster.placement import ClusterShare
from actors.options.config import (
    CHECKPOINTING,
    MICRO_BATCH,
    RunModel,
    TrainingConfig,
    resolve_dtype,
    with_local_model,
    with_options,
    writer_names,
)
from actors.options.eval_sets import EvalSet
from actors.options.policy_options import LoRAOptions
from actors.options.sampled_config import EpisodeConfig, RLConfig
from actors.rollout.config import SamplingConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from rl_backend.contracts import ConfigError, NativeConfig, OptimizerConfig
from rl_backend.options.option_set import filled, gives

SFT: Any = SFTConfig
EPISODES: Any = EpisodeConfig
MASKS = {"rollout.engine_args": {"return_sampling_mask": True}}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)


def config_of(**changes: Any) -> RLConfig:
    return RLConfig(**{"model": "m", "dataset": "d", "reward": "r", "run_dir": "x", "prompts_per_step": 6, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates_per_step": 4}, r"RLConfig\.updates_per_step=4: must divide prompts_per_step=6; use 3 or 6$"),
        (
            {"samples_per_prompt": 2, "updates_per_step": 3, "ranks": 5},
            r"RLConfig\.ranks=5: an update has 4 responses; each of 5 data-parallel ranks needs one; use fewer ranks",
        ),
        ({"temperature": 0, "samples_per_prompt": 1}, r"RLConfig\.temperature=0\.0: must be above 0 and finite"),
        ({"temperature": float("inf")}, r"temperature=.*inf"),
        (
            {"max_tokens_per_micro_batch": 1023},
            r"RLConfig\.max_tokens_per_micro_batch=1023: must hold one sequence: max_prompt_tokens \+ max_response_tokens = "
            "1024$",
        ),
        ({"rollout.max_model_len": 1023}, r"RLConfig\.rollout\.max_model_len=1023: must hold one sequence: .* = 1024$"),
        ({"sample_ahead": 1}, r"RLConfig\.sample_ahead=1: max_staleness=0: set both to 0, .*, or neither$"),
        ({"max_staleness": 2, "sample_ahead": 0}, r"RLConfig\.sample_ahead=0: max_staleness=2: set both to 0"),
        ({"stale_samples": "correct"}, r"RLConfig\.stale_samples='correct': max_staleness=0 makes no stale samples"),
        (
            {"max_staleness": 1, "stale_samples": "correct", "importance": "off"},
            r"RLConfig\.importance='off': stale_samples='correct' needs importance weights; use truncate or mask",
        ),
        ({"importance_cap": 3.0}, r"RLConfig\.importance_cap=3\.0: importance='auto' and max_staleness=0 has no weights"),
        (
            {"importance_cap": 3.0, "max_staleness": 1, "importance": "off"},
            r"importance_cap=3\.0: importance='off' and max_staleness=1 has no weights to cap",
        ),
        ({"importance": "mask", "importance_cap": 1.0}, r"importance_cap=1\.0: input should be greater than 1"),
        ({"eval_every": 5}, r"RLConfig\.eval_every=5: needs an eval_dataset"),
        ({"keep_checkpoints": 3}, r"keep_checkpoints=3: save_every=0 saves no checkpoints; set it too"),
        ({"seed": -1}, r"RLConfig\.seed=-1: must be from 0 to 4294967295"),
        ({"seed": 1 << 32}, r"RLConfig\.seed=4294967296: must be from 0 to 4294967295"),
        ({"lr": 0}, r"RLConfig\.lr=0\.0: must be above 0, or nothing is learned"),
        (
            {"steps": 3, "updates_per_step": 2, "lr_warmup_steps": 6},
            r"RLConfig\.lr_warmup_steps=6: the run has 6 optimizer steps and would never reach lr=1e-06",
        ),
        ({"sampling.log_probs": False}, r"sampling\.log_probs=False: training compares them with its own; leave it out"),
        ({"rollout.require_push": False, "rollout.sleep_mode": True}, r"sleep_mode=True"),
        (MASKS | {"top_p": 0.9}, r"top_k=0: with engine_args\['return_sampling_mask'\] vLLM takes no request without it;"),
        (
            MASKS | {"top_k": 5, "eval_dataset": "held.jsonl"},
            r"eval_dataset\['held'\]\.temperature=0: with .*; eval_dataset\['held'\]\.top_k=0: with",
        ),
        ({"colocate": True, "max_staleness": 1}, r"RLConfig\.max_staleness=1: colocate=True: .* nothing is sampled ahead"),
        ({"colocate": True, "lora.rank": 2}, r"lora\.push='adapter': colocate=True: .* use merged"),
        ({"colocate": True, "save_every": 1, "min_ranks": 1, "ranks": 2}, r"min_ranks=1: colocate=True: .* use 0"),
    ],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"updates_per_step": 6},
        {"samples_per_prompt": 2, "updates_per_step": 3, "ranks": 4},
        {"samples_per_prompt": 2, "updates_per_step": 3, "ranks": 8, "tp": 2},
        {"max_tokens_per_micro_batch": 1024, "rollout.max_model_len": 1024},
        {"steps": 3, "updates_per_step": 2, "lr_warmup_steps": 5},
        {"max_staleness": 3, "importance": "off", "top_k": 4},
        {"max_staleness": 1, "sample_ahead": 3, "stale_samples": "correct", "importance": "mask", "importance_cap": 1.5},
        {"top_p": 0.9},
        {"save_every": 1, "keep_checkpoints": 0, "async_save": False},
        MASKS | {"top_k": 5, "eval_dataset": {"held": {"path": "x", "temperature": 1.0, "top_k": 9}}},
        {"colocate": True, "lora.rank": 2, "lora.push": "merged", "engines": 2},
    ],
    ids=str,
)
def test_options_at_the_edge_of_what_goes_together_are_taken(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    assert RLConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({"max_staleness": 2}, {"tis_cap": 2.0}),
        ({"max_staleness": 2, "importance_cap": 4.0}, {"tis_cap": 4.0}),
        ({"max_staleness": 2, "importance": "off"}, {}),
        ({"importance": "truncate", "importance_cap": 5.0}, {"tis_cap": 5.0}),
        ({"importance": "mask", "importance_cap": 4.0}, {"mis_bounds": (0.25, 4.0)}),
        ({"max_staleness": 1, "importance": "mask"}, {"mis_bounds": (0.5, 2.0)}),
    ],
    ids=str,
)
def test_importance_weights_are_truncated_masked_or_left_out(changes: dict[str, Any], options: dict[str, Any]) -> None:
    assert config_of(**changes).importance_options() == options


def test_sizes_of_a_step_follow_from_one_another() -> None:
    config = config_of(samples_per_prompt=4, updates_per_step=3, steps=7, max_prompt_tokens=10, max_response_tokens=5)
    assert (config.sequences_per_update, config.optimizer_steps, config.longest_sequence) == (8, 21, 15)
    assert config.train.backend_cfg.optimizer.total_training_steps == 21
    assert (config.batches_ahead, config.num_engines, config.pushes_adapters) == (0, 1, False)
    assert [config_of(colocate=each).rollout.sleep_mode for each in (False, True)] == [False, True]
    assert config.longest_sampled == config.rollout.max_model_len == 15
    assert [config_of(max_staleness=3, sample_ahead=each).batches_ahead for each in (None, 1, 5)] == [3, 1, 5]
    assert (
        config_of(**{"lora.rank": 2}).pushes_adapters
        and not config_of(**{"lora.rank": 2, "lora.push": "merged"}).pushes_adapters
    )
    assert not config_of(eval_dataset="e").stops_at_strings and config_of(stop_strings=["x"]).stops_at_strings
    of_a_set = {"a": {"path": "a"}, "b": {"path": "b", "stop_strings": ["y"], "max_new_tokens": 700}}
    assert config_of(eval_dataset=of_a_set).stops_at_strings
    assert config_of(eval_dataset=of_a_set).longest_sampled == 512 + 700


def test_every_batch_has_the_temperature_and_whether_its_entropy_is_trained_or_told() -> None:
    assert config_of(temperature=0.7, updates_per_step=2).meta() == {"temperature": 0.7, "calculate_entropy": False}
    assert config_of(temperature=0.7).meta() == {"temperature": 0.7, "calculate_entropy": True}
    with_routes = config_of(entropy_coef=0.01, router_replay="R2").meta()
    assert with_routes == {"temperature": 1.0, "calculate_entropy": True, "routed_experts_layers": "moe"}


def test_engines_get_what_follows_from_the_run_and_their_share() -> None:
    config = config_of(
        seed=5, dtype="bfloat16", placement="spread", stop_strings=["."], router_replay="R3", engines=2, max_prompt_tokens=9
    )
    engines = config.rollout_config(ClusterShare(1, 3, 0))
    assert engines.model_path == "m" and engines.max_model_len == 521
    assert (engines.dtype, engines.placement, engines.seed) == ("bfloat16", "spread", 5)
    assert (engines.require_push, engines.return_routed_experts, engines.load_tokenizer) == (True, True, True)
    assert (engines.num_engines, engines.max_adapters, engines.max_adapter_rank) == (2, 0, 16)
    assert config_of(router_replay="R2").rollout_config(ClusterShare(1, 1, 0)).return_routed_experts is False


def test_the_first_line_has_the_ranks_and_the_parts_that_are_not_one() -> None:
    config = config_of(
        ranks=8, tp=2, pp=2, backend="native", engines=3, router_replay="R2", max_response_tokens=7, **{"lora.rank": 4}
    )
    assert config.facts() == [
        "6 x 8 responses a step",
        "up to 512 + 7 tokens",
        "8 training rank(s) of native, tp=2, pp=2",
        "3 vLLM engine(s)",
        "LoRA of rank 4",
        "router replay R2",
    ]
    options = {"model": "m", "dataset": "d", "player": "m:play", "max_episode_tokens": 600, "samples_per_prompt": 2}
    episodes = EpisodeConfig(**options, max_staleness=2, run_dir="x")
    assert episodes.facts() == [
        "32 x 2 episodes a step",
        "up to 600 tokens",
        "1 training rank(s) of native",
        "1 vLLM engine(s)",
        "sampling 2 batch(es) ahead",
    ]
    assert episodes.task == "player m:play"
    assert EpisodeConfig(**{**options, "player": None, "environment": "e:make"}, run_dir="x").task == "environment e:make"


def test_a_second_model_has_the_optimizer_of_the_first_at_a_rate_of_its_own() -> None:
    options = {"model": "m", "dataset": "d", "reward": "r", "lr_decay_style": "cosine", "steps": 9}
    config = PPOConfig(**options, critic_lr=3e-4, **{"train.backend_cfg.optimizer.min_lr": 1e-7})
    expected = config.train.backend_cfg.optimizer.replace(lr=3e-4, clip_grad=0.25)
    assert config.other_optimizer("critic_lr", clip_grad=0.25) == expected
    assert isinstance(expected, OptimizerConfig) and expected.total_training_steps == 9 * config.updates_per_step
    with pytest.raises(
        ConfigError, match=r"PPOConfig\.critic_lr=0\.0003: the trained model's schedule does not fit it: .*min_lr"
    ):
        config.other_optimizer("critic_lr", min_lr=1.0)


def test_what_a_training_run_is_where_nothing_is_said() -> None:
    config = SFT(model="m", dataset="d", seed=4, ranks=6, tp=3, dtype="float32")
    assert (config.model, config.seed, config.parallel.tp, config.data_parallel_size) == ("m", 4, 3, 2)
    assert config.models() == (RunModel("model", "m"),) and dict(config.runs()) == {"": config}
    assert (config.training_groups, config.num_engines, config.batches_ahead, config.pushes_adapters) == (1, 0, 0, False)
    assert config.longest_sequence is None and config.rollout_config(ClusterShare(1, 1, 0)) is None
    assert config.eval_sets == {} and config.optimizer_steps == config.steps == 100
    assert config.with_known_steps() is config
    assert config.trained_dtype == config.runtime_config().options(NativeConfig).param_dtype == "float32"
    given = config.replace(dtype="auto", **{"train.backend_cfg.param_dtype": "bfloat16"})
    assert given.trained_dtype == "bfloat16" and given.runtime_config().options(NativeConfig).param_dtype == "bfloat16"
    assert SFT(model="m", dataset="d", epochs=3, lr_warmup_steps=500).lora == LoRAOptions(), "its steps are not known yet"
    with pytest.raises(ConfigError, match=r"SFTConfig\.ranks=4: world size 4 is not a multiple of tp\*pp\*cp = 3"):
        config.replace(ranks=4)
    with pytest.raises(ConfigError, match=r"SFTConfig\.lr_warmup_steps=100: the run has 100 optimizer steps"):
        SFT(model="m", dataset="d", lr_warmup_steps=100)


def test_gpus_decide_a_dtype_that_nobody_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [resolve_dtype(each) for each in ("auto", "float32", "bfloat16")] == ["float32", "float32", "bfloat16"]
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 0.5})
    assert [resolve_dtype(each) for each in ("auto", "float32", "bfloat16")] == ["bfloat16", "float32", "bfloat16"]
    assert config_of().trained_dtype == "bfloat16" and filled(config_of(), "rollout").dtype == "bfloat16"


def test_a_name_on_the_hub_becomes_a_folder_and_a_folder_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def local(name: str, *, field: str) -> str:
        asked.append((name, field))
        return f"/cache/{name}" if name == "org/model" else name

    monkeypatch.setattr("actors.options.config.local_model", local)
    here, hub = config_of(), config_of(model="org/model")
    assert with_local_model(here) is here
    assert with_local_model(hub).model == with_local_model(hub).rollout.model_path == "/cache/org/model"
    assert asked[:2] == [("m", "RLConfig.model"), ("org/model", "RLConfig.model")] and hub.model == "org/model"


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (64, 32)),
        ({"max_response_tokens": 60}, (64, 60)),
        ({"max_episode_tokens": 40}, (40, 32)),
        ({"max_episode_tokens": 9, "max_response_tokens": 8}, (9, 8)),
    ],
)
def test_episodes_that_nobody_bounds_are_as_long_as_the_model(tmp_path: Path, given: Any, lengths: Any) -> None:
    def model(positions: int) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": positions}))
        return str(tmp_path)

    options = {"dataset": "d", "player": "m:play", "run_dir": "x", "samples_per_prompt": 2}
    config = EPISODES(model=model(64), **options, **given)
    assert (config.longest_sequence, config.sampling.max_new_tokens) == lengths
    assert EPISODES(model="nowhere", **options).sampling == SamplingConfig(n=2, max_new_tokens=512)
    assert EPISODES(model=model(2), **options).sampling.max_new_tokens == 1


def test_options_of_every_run_are_those_of_a_training_run() -> None:
    assert set(TrainingConfig.model_fields) <= set(SFTConfig.model_fields) & set(RLConfig.model_fields)
    assert config_of(reward_workers=3, on_reward_failure="zero").rewards.workers == 3
    assert config_of().rewards.on_failure == "stop" and config_of(on_reward_failure="zero").rewards.on_failure == "zero"


@pytest.mark.parametrize("importance", ["auto", "truncate", "mask", "off"])
def test_cuts_of_sampling_are_those_of_the_trainers_log_probs(importance: str) -> None:
    config = config_of(top_p=0.9, min_p=0.1, importance=importance, max_staleness=1, temperature=0.7)
    assert config.meta() == {"temperature": 0.7, "calculate_entropy": True, "top_p": 0.9, "min_p": 0.1}
    assert bool(config.importance_options()) == (importance != "off")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"groups": "each", "colocate": True},
            r"PPOConfig\.colocate=True: engines share the GPUs of one training group, and",
        ),
        ({"groups": "one", "colocate": True}, ""),
        ({"groups": "each"}, ""),
    ],
    ids=str,
)
def test_engines_share_the_gpus_of_one_group_alone(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"model": "m", "dataset": "d", "reward": "r", **changes}
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        PPOConfig(**options)


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (1411, r"RLConfig\.rollout\.max_model_len=1411: a held-out set needs 1412: max_prompt_tokens and its"),
        (1023, r"RLConfig\.rollout\.max_model_len=1023: must hold one sequence: .* = 1024$"),
        (1412, ""),
        (None, ""),
    ],
)
def test_engines_hold_the_longest_answer_of_a_held_out_set_too(engines: int | None, message: str) -> None:
    given = {} if engines is None else {"rollout.max_model_len": engines}
    held_out = {"a": {"path": "a", "max_new_tokens": 900}, "b": "b"}
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        assert config_of(eval_dataset=held_out, **given).rollout.max_model_len == 1412


@pytest.mark.parametrize(
    ("changes", "on_policy"),
    [
        ({}, True),
        ({"updates_per_step": 2}, False),
        ({"router_replay": "R2"}, False),
        ({"router_replay": "R3"}, True),
        ({"lora": {"rank": 2}}, True),
        ({"lora": {"rank": 2, "dropout": 0.1}}, False),
    ],
    ids=str,
)
def test_a_step_is_on_policy_where_its_only_update_gives_its_own_log_probs(changes: dict[str, Any], on_policy: bool) -> None:
    config = config_of(**changes)
    assert config.on_policy is on_policy and config.meta()["calculate_entropy"] is on_policy
    assert ("routed_experts_layers" in config.meta()) == ("router_replay" in changes)


def test_seeds_are_those_that_engines_take_from_the_first_to_the_last() -> None:
    for seed in (0, (1 << 32) - 1):
        config = config_of(seed=seed, **{"lora.rank": 2})
        assert (config.seed, filled(config, "lora").seed) == (seed, seed)


@pytest.mark.parametrize(
    ("given", "sets"),
    [
        (["a.jsonl"], {"a": "a.jsonl"}),
        (["a.jsonl", "b.csv"], {"a": "a.jsonl", "b": "b.csv"}),
        ("none", {}),
        (["none"], {}),
        ([' {"hard": "h.jsonl", "easy": {"path": "e", "n": 4}}'], {"hard": "h.jsonl", "easy": "e"}),
        ({"x": "y"}, {"x": "y"}),
        (None, {}),
    ],
    ids=str,
)
def test_held_out_sets_are_given_by_paths_or_by_names(given: Any, sets: dict[str, str]) -> None:
    config = config_of(eval_dataset=given)
    assert {name: each.path for name, each in config.eval_sets.items()} == sets
    assert {name: each.n for name, each in config.eval_sets.items() if each.n} == ({"easy": 4} if "easy" in sets else {})
    assert RLConfig.model_validate_json(config.model_dump_json()) == config


def test_held_out_sets_that_cannot_be_read_or_answered_are_refused() -> None:
    with pytest.raises(ConfigError, match="is neither a path nor JSON"):
        config_of(eval_dataset='{"a": ')
    for options in ({"n": 3, "temperature": 0}, {"top_p": 1.5}):
        with pytest.raises(ConfigError, match=r"EvalSet\.(n|top_p)="):
            EvalSet(path="a", **options).sampling(SamplingConfig())


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, []),
        ("", []),
        ("none", []),
        (" , ", []),
        ("tensorboard", ["tensorboard"]),
        (" json:loads ,tensorboard, json:loads", ["json:loads", "tensorboard"]),
    ],
)
def test_writers_of_metrics_are_named_once_each_in_their_order(given: str | None, names: list[str]) -> None:
    assert writer_names(given) == names and config_of(metrics_to=given).metrics_to == given


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("none,json:loads", "none"),
        ("json:nothing", "json:nothing"),
        ("no_such_module_here:x", "no_such_module_here:x"),
        ("json", "json"),
    ],
)
def test_writers_that_cannot_be_imported_are_refused_by_name(given: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^metrics_to='{named}': cannot be imported"):
        writer_names(given)


def test_a_service_whose_package_is_missing_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    with pytest.raises(ConfigError, match=r"^metrics_to='wandb': wandb is not installed: pip install wandb, or give none$"):
        writer_names("wandb")
    with pytest.raises(ConfigError, match=r"or leave it out$"):
        writer_names("tensorboard,wandb")


def test_options_that_were_not_given_stay_so_when_others_change() -> None:
    config: Any = SFT(model="m", dataset="d", lr=0.5)
    changed = with_options(config, {MICRO_BATCH: 128, "model": "other"})
    assert (changed.train.max_tokens_per_micro_batch, changed.model) == (128, "other")
    assert changed.train.backend_cfg.optimizer.lr == 0.5 and config.train.max_tokens_per_micro_batch == 16384
    assert gives(changed, MICRO_BATCH) and not gives(changed, CHECKPOINTING) and not gives(config, MICRO_BATCH)
    assert not changed.chooses_dtype and type(changed) is type(config)
    assert with_options(changed, {"dtype": "float32"}).chooses_dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling": {"max_new_tokens": 600}, "max_episode_tokens": 600},
            "max_response_tokens=600: max_episode_tokens=600 must",
        ),
        ({"sampling": {"max_new_tokens": 599}, "max_episode_tokens": 600}, ""),
        ({"least_episodes": 3}, "least_episodes=3: a group has samples_per_prompt=2 episodes"),
        ({"least_episodes": 2}, ""),
        ({"environment": "e:make"}, "environment='e:make': give either an environment"),
        ({"player": None}, "environment=None: give either an environment"),
        ({"max_prompt_tokens": 512}, ""),
        ({"max_prompt_tokens": 9}, "max_prompt_tokens=9: environments make their prompts"),
        ({"limits": {"tool_calls": 3}}, r"limits\.tool_calls=3: a player has neither"),
        ({"limits": {"tool_calls": 3}, "player": None, "environment": "e:make"}, ""),
        ({"chat_template_kwargs": {"a": 1}}, ""),
    ],
    ids=str,
)
def test_options_of_episodes_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    options = {"model": "m", "dataset": "d", "player": "m:play", "run_dir": "x", "samples_per_prompt": 2, **changes}
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        EPISODES(**options)
