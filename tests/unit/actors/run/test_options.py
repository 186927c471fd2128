"""Options of a run: places and short names, files, old names, values that follow, and what has no effect."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Annotated, Any

import pytest
import ray

from actors.cluster.placement import ClusterShare
from actors.folder.identity import deciding_options, saved_facts
from actors.options.policy_options import tenant_config
from examples.demo.__main__ import RECIPES, DemoConfig, demo_settings
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from examples.tenants import TenantsConfig, UserConfig
from rl_backend.contracts import MAY_CHANGE, BaseConfig, ConfigError, HasEffect, NativeConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.options.command_line import parse_config
from rl_backend.options.option_set import filled
from rl_backend.runtime.bridge.config import BridgeConfig

REQUIRED = ("--model", "m", "--dataset", "d", "--reward", "r")


def read(*arguments: str, kind: Any = GRPOConfig) -> Any:
    return parse_config(kind, "", [*REQUIRED, *arguments])


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)


@pytest.mark.shows(
    "options: every field of the runtime, the engines, sampling and the loss is a flag, often with a short name"
)
def test_a_flag_is_the_place_of_a_value_or_its_short_name(tmp_path: Path) -> None:
    config = read(
        *(
            "--tp",
            "2",
            "--ranks",
            "2",
            "--train.backend_cfg.optimizer.weight_decay",
            "0.5",
            "--lr",
            "2e-5",
            "--engines",
            "3",
        ),
        *("--rollout.dtype", "bfloat16", "--rollout.engine_args", '{"quantization": "fp8"}', "--loss.clip_ratio_low", "0.1"),
        *("--samples-per-prompt", "4", "--sampling.top_p", "0.9", "--no-train.backend_cfg.reshard_after_forward"),
        *("--train.backend_cfg.optimizer.betas", "0.9,0.95", "--metrics-to", "none", "--plugins", "json,math"),
    )
    optimizer = config.train.backend_cfg.optimizer
    assert (config.parallel.tp, config.train.plugins, config.metrics_to) == (2, ("json", "math"), None)
    assert (optimizer.weight_decay, optimizer.lr, optimizer.betas) == (0.5, 2e-5, (0.9, 0.95))
    assert config.train.backend_cfg.reshard_after_forward is False
    assert (config.rollout.num_engines, config.rollout.dtype) == (3, "bfloat16")
    assert config.rollout.engine_args == {"quantization": "fp8"}
    assert (config.sampling.n, config.sampling.top_p, config.loss.clip_ratio_low) == (4, 0.9, 0.1)
    (tmp_path / "saved.json").write_text(config.model_dump_json())
    assert parse_config(GRPOConfig, "", ["--config", str(tmp_path / "saved.json")]) == config
    assert pickle.loads(pickle.dumps(config)) == config


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, dict) and value and name != "engine_args"
            else {prefix + name: value}
        )
    return found


def test_flags_replace_a_file_which_replaces_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("tp: 2\nranks: 4\nlr: 1.0e-5\nloss: {clip_ratio_high: 0.3}\nrollout:\n  seed: 7\n")
    (tmp_path / "mine.json").write_text('{"train": {"backend_cfg": {"parallel": {"tp": 2}}}, "ranks": 4}')
    config = read("--config", str(tmp_path / "mine.yaml"), "--tp", "4", "--rollout.prefix_caching")
    assert (config.parallel.tp, config.ranks, config.train.backend_cfg.optimizer.lr) == (4, 4, 1e-5)
    assert (config.loss.clip_ratio_high, config.rollout.seed, config.sampling.n) == (0.3, 7, 8)
    assert read("--config", str(tmp_path / "mine.json")).parallel.tp == 2


def test_a_flag_of_a_dictionary_replaces_that_of_a_file_and_several_flags_add_up(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "model: m\ndataset: d\nreward: {strict: a.py:f, short: b.py:g}\nreward_workers: 3\nbackend: bridge\n"
        "chat_template_kwargs: {enable_thinking: false}\nrollout: {seed: 7, engine_args: {quantization: fp8}}\n"
        "train: {backend_cfg: {override_transformer_config: {moe_router_fusion: true}, param_dtype: bfloat16}}\n"
    )
    file = parse_config(GRPOConfig, "", ["--config", str(tmp_path / "mine.yaml")])
    assert (list(file.reward), file.rollout.engine_args) == (["strict", "short"], {"quantization": "fp8"})
    given = ["--reward", "lax=c.py:h", "--reward", "long=d.py:i", "--chat-template-kwargs", "x=1"]
    given += ["--rollout.engine_args", '{"y": 1}']
    given += ["--train.backend_cfg.override_transformer_config", '{"moe_permute_fusion": true}']
    config = parse_config(GRPOConfig, "", ["--config", str(tmp_path / "mine.yaml"), *given])
    assert (list(config.reward), config.rewards.workers) == (["lax", "long"], 3)
    assert (config.data.chat_template_kwargs, config.rollout.engine_args, config.rollout.seed) == ({"x": "1"}, {"y": 1}, 7)
    backend = config.train.backend_cfg
    assert (backend.override_transformer_config, backend.param_dtype) == ({"moe_permute_fusion": True}, "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tpp", "2"), "--tpp: there is no such flag; did you mean --tp?"),
        (("--temprature=0.3",), "--temprature: there is no such flag; did you mean --temperature?"),
        (("--engine_args", "{}"), "--engine-args: there is no such flag; did you mean --rollout.engine_args?"),
        (("--dtyp", "x"), "--dtyp: there is no such flag; did you mean --dtype?"),
        (("--placment", "spread"), "--placment: there is no such flag; did you mean --placement?"),
        (("--rollout.placment", "x"), "--rollout.placment: there is no such flag; did you mean --rollout.placement?"),
        (("--rollout.dtyp", "x"), "--rollout.dtyp: there is no such flag; did you mean --rollout.dtype?"),
        (("--train.parallel.tp", "2"), "--train.parallel.tp: there is no such flag; did you mean --tp?"),
        (("--learning-rate=1", "--x"), "--learning-rate: there is no such flag; did you mean --lr?"),
        (("--batch-size", "8"), "--batch-size: there is no such flag; did you mean --prompts-per-step?"),
        (("--zzzzzz",), "--zzzzzz: there is no such flag; see "),
        (("yes",), "unrecognized arguments: yes; see "),
        (("--clip-grad=2",), "--clip-grad: there is no such flag; did you mean --train.backend_cfg.optimizer.clip_grad?"),
        (("--loss", "gspo"), '--loss="gspo": input should be a valid dictionary'),
        (("--lr", "fast"), '--lr="fast": input should be a valid number, unable to parse string as a number'),
        (("--lr", "-1e-4"), '--lr="-1e-4": input should be greater than or equal to 0'),
        (("--run-dir", ""), '--run-dir="": string should have at least 1 character'),
        (("--config", "a.yaml", "--config=b.yaml"), "--config: is given 2 times; put all into one file"),
        (
            ("--metrics-to", "wanb"),
            "--metrics-to='wanb': cannot be imported (No module named 'wanb'); give package.module:Class, or one of ",
        ),
        (("--tp", "2"), "--ranks=1: world size 1 is not a multiple of tp*pp*cp = 2*1*1 = 2; use 2 ranks"),
        (
            ("--lora.rank", "1000", "--lora.push", "adapter"),
            "--lora.push='adapter': vLLM serves adapters of a rank of at most 512, and lora.rank=1000; leave it out",
        ),
        (("--lr",), "argument --lr/--train.backend_cfg.optimizer.lr: expected one argument; see "),
        (("--trace=1",), "argument --trace/--no-trace: ignored explicit argument '1'; see "),
        (("--rollout.cores", "1,2"), '--rollout.cores.0="1": input should be a valid tuple'),
        (("--rollout.engine_args", "x"), '--rollout.engine_args="x": input should be a valid dictionary'),
        (("--backend", "jax"), "--backend: unknown runtime 'jax'; known: bridge,"),
        (("--plugins", "nothing_there"), "--plugins='nothing_there': cannot be imported"),
        (("--no-async-save",), "--async-save=False: save_every=0 saves no checkpoints; set it too"),
        (
            ("--rollout.kv_cache_gib", "1", "--rollout.gpu_memory_utilization", "0.5"),
            "--rollout.gpu_memory_utilization=0.5: vLLM",
        ),
        (("--train.backend_cfg.optimizer.min_lr", "1e-9"), "--train.backend_cfg.optimizer.min_lr=1e-09: lr_decay_style"),
        (
            ("--backend", "bridge", "--train.backend_cfg.pipeline_schedule", "zbv"),
            "--train.backend_cfg.pipeline_schedule: there is no such flag",
        ),
    ],
)
def test_a_wrong_flag_is_one_sentence_that_says_what_to_do(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*arguments)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_flags_are_those_of_the_chosen_runtime() -> None:
    config = read("--backend", "bridge", "--train.backend_cfg.override_transformer_config", '{"moe_z_loss_coeff": 0.1}')
    assert isinstance(config.train.backend_cfg, BridgeConfig)
    assert config.train.backend_cfg.override_transformer_config == {"moe_z_loss_coeff": 0.1}


def test_values_that_follow_are_filled_in_unless_they_are_given_and_are_not_saved() -> None:
    config = read("--seed", "3", "--max-response-tokens", "8", "--router-replay", "R3", "--dtype", "float32", "--steps", "7")
    rollout = config.rollout_config(ClusterShare(2, 3, 0))
    assert (rollout.model_path, rollout.max_model_len, rollout.seed, rollout.dtype) == ("m", 520, 3, "float32")
    assert (rollout.require_push, rollout.return_routed_experts, rollout.cores_per_engine) == (True, True, 3)
    assert config.runtime_config().options(NativeConfig).param_dtype == "float32"
    assert config.train.backend_cfg.optimizer.total_training_steps == 7
    longer = config.replace(max_response_tokens=16, steps=9, model="other")
    rollout = longer.rollout_config(ClusterShare(2, 3, 0))
    assert (rollout.max_model_len, rollout.model_path) == (528, "other")
    assert longer.train.backend_cfg.optimizer.total_training_steps == 9
    given = read("--rollout.seed", "5", "--rollout.max_model_len", "2000", "--train.backend_cfg.param_dtype", "bfloat16")
    given = GRPOConfig.model_validate_json(given.model_dump_json())
    rollout = given.rollout_config(ClusterShare(2, 3, 0))
    assert (rollout.seed, rollout.max_model_len, rollout.dtype) == (5, 2000, "float32")
    assert given.trained_dtype == "bfloat16"
    saved = flat(config.model_dump())
    assert not {"rollout.model_path", "rollout.max_model_len", "rollout.seed", "rollout.dtype"} & set(saved)


@pytest.mark.shows("options: --reward is given once, several times or as NAME=FUNCTION; a resumed run must have the same")
def test_rewards_are_one_function_or_several_by_name(tmp_path: Path) -> None:
    assert read().reward == "r"
    (tmp_path / "mine.yaml").write_text(
        "model: m\ndataset: d\nreward:\n  right: a.py:f\n  short: {function: 'b.py:g', weight: 0.5}\n"
    )
    several = parse_config(GRPOConfig, "", ["--config", str(tmp_path / "mine.yaml"), "--on-reward-failure", "drop"])
    assert {name: (each.function, each.weight) for name, each in several.reward.items()} == {
        "right": ("a.py:f", 1.0),
        "short": ("b.py:g", 0.5),
    }
    assert GRPOConfig.model_validate_json(several.model_dump_json()) == several
    given = ["--model", "m", "--dataset", "d", "--reward", "right=a.py:f", "--reward", "g=b.py:g"]
    assert list(parse_config(GRPOConfig, "", given).reward) == ["right", "g"]
    given[5], given[7] = "a.py:f", "b.py:g"
    config = parse_config(GRPOConfig, "", [*given, "--reward-timeout-seconds", "5", "--reward-workers", "3"])
    assert (list(config.reward), config.rewards.timeout_seconds, config.rewards.workers) == (["f", "g"], 5, 3)
    assert "rewards.workers" not in deciding_options(config) and deciding_options(several)["on_reward_failure"] == "drop"
    (tmp_path / "f.py").write_text("")
    facts = [
        saved_facts(read("--dataset", __file__).replace(reward={"a": {"function": f"{tmp_path}/f.py:f", "weight": weight}}))
        for weight in (1, 2)
    ]
    assert facts[0]["contents"]["reward"]["a"]["content"] == facts[1]["contents"]["reward"]["a"]["content"]
    assert facts[0]["contents"] != facts[1]["contents"]
    with pytest.raises(ConfigError, match=r"^--reward=\['a\.py:f', 'b\.py:f'\]: two are named 'f'"):
        parse_config(GRPOConfig, "", ["--model", "m", "--dataset", "d", "--reward", "a.py:f", "--reward", "b.py:f"])
    with pytest.raises(ConfigError, match=r"^--reward: required field is missing"):
        parse_config(GRPOConfig, "", ["--model", "m", "--dataset", "d"])
    with pytest.raises(ConfigError, match=r'^--reward-timeout-seconds="0": input should be greater than 0'):
        read("--reward-timeout-seconds", "0")


def test_a_field_declares_when_it_has_no_effect() -> None:
    class Mine(BaseConfig):
        on: bool = False
        size: Annotated[int, MAY_CHANGE, HasEffect(lambda mine: mine.on, "on={0.on!r} has no size; set on")] = 3

    assert Mine(on=True, size=4).size == 4
    assert Mine(size=3) == Mine()
    with pytest.raises(ConfigError, match=r"^Mine\.size=4: on=False has no size; set on$"):
        Mine(size=4)


def test_stop_strings_are_taken_from_the_command_line_as_they_stand(tmp_path: Path) -> None:
    for given, expected in (
        (["--stop-strings", "\n\n"], ("\n\n",)),
        (["--stop-strings", "a, b", "--sampling.stop_strings=--", "--top-p", "0.5"], ("a, b", "--")),
        (["--stop-strings=\\n", "--stop-strings", "[1]"], ("\\n", "[1]")),
    ):
        config = read(*given)
        assert config.sampling.stop_strings == expected
        assert config.rollout.load_tokenizer
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert read("--config", str(tmp_path / "config.json")) == config
    assert read("--config", str(tmp_path / "config.json"), "--stop-strings", "x").sampling.stop_strings == ("x",)
    assert not read().rollout.load_tokenizer
    with pytest.raises(ConfigError, match=r"--stop-strings/.*: expected one argument"):
        read("--stop-strings", "--top-p", "0.5")


def test_what_decides_what_is_learned_is_declared_on_the_fields() -> None:
    config = read("--tp", "2", "--ranks", "2", "--lr", "3e-5", "--rollout.enforce_eager", "--sampling.top_p", "0.9")
    of_sampling = {"top_p": 0.9, "samples_per_prompt": 8, "max_response_tokens": 512}
    assert deciding_options(config) == {"lr": 3e-5, **of_sampling}
    contents = {"model", "dataset", "eval_dataset", "tools_file", "reward"}
    assert set(saved_facts(config.replace(dataset=__file__))["contents"]) == contents


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig, SFTConfig, DemoConfig])
def test_help_has_every_flag_in_lines_of_a_hundred(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_config(kind, "What it does.", ["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "What it does.",
        "--tp, --train.backend_cfg.parallel.tp INT",
        "train.backend_cfg (NativeConfig):",
        "default: 1",
    ):
        assert part in text
    assert "param_dtype of" not in text and "--rollout.model_path" not in text


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.json")), ids=lambda path: path.stem)
def test_a_recipe_is_read_beside_flags(recipe: Path) -> None:
    config = read("--config", str(recipe), "--lr", "1e-5")
    assert config.train.backend_cfg.optimizer.lr == 1e-5
    assert GRPOConfig.model_validate_json(config.model_dump_json()) == config


def test_the_demos_options_go_to_both_of_its_runs(tmp_path: Path) -> None:
    demo = parse_config(DemoConfig, "", ["--tp", "2", "--ranks", "2", "--seed", "3", "--train.backend_cfg.device", "cpu"])
    config = GRPOConfig(**demo_settings(demo, tmp_path, tmp_path, tmp_path))
    assert (config.parallel.tp, config.ranks, config.seed) == (2, 2, 3)
    assert config.train.options(NativeConfig).device == "cpu"
    assert (config.train.max_tokens_per_micro_batch, config.train.backend_cfg.optimizer.lr) == (16384, 3e-4)
    with pytest.raises(ConfigError, match=r"train\.hf_path='other': the demo makes its model"):
        parse_config(DemoConfig, "", ["--train.hf_path", "other"])


@pytest.mark.shows("options: --lora.rank trains adapters over a frozen model, which engines serve as adapters or merged")
def test_options_of_adapters_decide_what_engines_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    config = read("--lora.rank", "40", "--lora.targets", "q_proj,v_proj", "--seed", "3", "--lora.push", "adapter")
    adapter = tenant_config(filled(config, "lora"))
    assert (adapter.rank, adapter.targets, adapter.seed) == (40, ("q_proj", "v_proj"), 3)
    engines = config.rollout_config(ClusterShare(1, 1, 0))
    assert (engines.max_adapters, engines.max_adapter_rank) == (1, 40)
    assert GRPOConfig.model_validate_json(config.model_dump_json()) == config
    assert deciding_options(config)["lora.rank"] == 40
    merged = read("--lora.rank", "40", "--lora.push", "merged").rollout_config(ClusterShare(1, 1, 0))
    assert merged.max_adapters == read().rollout.max_adapters == 0
    each = {"kl_coef": 0.1, "model": "m", "dataset": "d", "reward": "r"}
    assert tenant_config(filled(GRPOConfig(**each, lora={"rank": 8}), "lora")) == LoRAConfig(rank=8, alpha=32.0, dropout=0.0)
    given = {"rank": 5, "alpha": 7.0, "dropout": 0.3, "use_rslora": True, "seed": 4, "targets": ("head",)}
    either = {"use_dora": True}, {"experts_share_factor": True}
    assert {*given, *either[0], *either[1]} == set(LoRAConfig.model_fields), "every option of a tenant"
    for kind, one in zip((GRPOConfig, PPOConfig), either, strict=True):
        config = kind(**each, lora={**given, **one, "push": "merged"})
        assert tenant_config(filled(config, "lora")) == LoRAConfig(**given, **one)
    assert PPOConfig(**each, groups="each").training_groups == 3
    assert PPOConfig(**each, groups="each", **{"lora.rank": 4}).training_groups == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lora.alpha", "8"), "--lora.alpha=8.0: has no effect: rank=0 trains whole models; set lora.rank too"),
        (("--lora.push", "merged"), "--lora.push='merged': has no effect: rank=0 trains whole models"),
        (
            ("--lora.rank", "8", "--lora.use_dora", "--lora.push", "adapter"),
            "--lora.push='adapter': vLLM serves no adapters with DoRA",
        ),
        (("--lora.save_merged",), "--lora.save_merged=True: has no effect"),
        (("--lora.rank", "-1"), '--lora.rank="-1": input should be greater than or equal to 0'),
        (("--lora.rank", "8", "--rollout.max_adapters", "3"), "--rollout.max_adapters=3: follows from lora.rank"),
        (("--rollout.max_adapter_rank", "64"), "--rollout.max_adapter_rank=64: follows from lora.rank"),
        (("--lora.rang", "8"), "--lora.rang: there is no such flag; did you mean --lora.rank?"),
    ],
)
def test_options_of_adapters_without_effect_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*arguments)
    assert str(refused.value).startswith(message)


def test_a_user_has_the_options_of_all_and_its_own() -> None:
    users = '{"ann": {}, "bob": {"dataset": "o", "lora": {"rank": 4}, "lr": 1e-3, "max_response_tokens": 9}}'
    config = read("--users", users, "--lora.alpha", "8", "--run-dir", "x", kind=TenantsConfig)
    ann, bob = config.runs().values()
    assert isinstance(bob, UserConfig)
    assert (ann.lora.rank, ann.lora.alpha, ann.dataset, ann.run_dir) == (16, 8, "d", "x/ann")
    assert (bob.lora.rank, bob.lora.alpha, bob.dataset, bob.run_dir) == (4, 8, "o", "x/bob")
    assert bob.train.backend_cfg.optimizer.lr == 1e-3 != ann.train.backend_cfg.optimizer.lr
    engines = config.rollout_config(ClusterShare(1, 1, 0))
    assert (engines.max_adapters, engines.max_adapter_rank, engines.max_model_len) == (2, 16, 1024)
    assert TenantsConfig.model_validate_json(config.model_dump_json()) == config
    assert not filled(config, "rollout").load_tokenizer
    stops = read("--users", '{"ann": {}, "bob": {"stop_strings": ["END"]}}', kind=TenantsConfig)
    assert filled(stops, "rollout").load_tokenizer


def test_users_save_at_steps_of_their_own_or_recover_from_memory() -> None:
    for users, more in (
        ('{"a": {"save_every": 2}, "b": {"save_every": 5}}', ()),
        ('{"a": {"save_every": 2}, "b": {"save_every": 5}}', ("--ranks", "2", "--min-ranks", "1")),
        ('{"a": {"save_every": 2}}', ("--recover", "off")),
        ('{"a": {"save_every": 0}}', ("--save-every", "3")),
        ('{"a": {"save_every": 2}, "b": {}}', ("--recover", "memory")),
        ('{"a": {"seed": 3, "engines": 2, "rollout": {"num_engines": 2}}}', ("--seed", "3", "--engines", "2")),
    ):
        read("--users", users, *more, kind=TenantsConfig)


def test_a_users_reward_functions_replace_those_of_all() -> None:
    users = '{"ann": {}, "bob": {"reward": {"lax": "c.py:h"}, "chat_template_kwargs": {"y": 1}, "reward_workers": 2}}'
    shared = ("--reward", "strict=a.py:f", "--reward-timeout-seconds", "5", "--chat-template-kwargs", '{"x": 1}')
    arguments = ["--model", "m", "--dataset", "d", *shared, "--users", users]
    ann, bob = parse_config(TenantsConfig, "", arguments).runs().values()
    assert [list(user.reward) for user in (ann, bob)] == [["strict"], ["lax"]]
    assert [user.data.chat_template_kwargs for user in (ann, bob)] == [{"x": 1}, {"y": 1}]
    assert [(user.rewards.timeout_seconds, user.rewards.workers) for user in (ann, bob)] == [(5, 1), (5, 2)]


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ("{}", "--users={}: dictionary should have at least 1 item"),
        ('{"a b": {}}', "String should match pattern"),
        ('{"a": {"lr": 0}}', "user 'a': UserConfig.lr=0.0: must be above 0"),
        ('{"a": {"speed": 1}}', "user 'a': UserConfig.speed=1: unknown field"),
        ('{"a": {"run_dir": "y"}}', "user 'a': UserConfig.run_dir='y': is run_dir/a; leave it out"),
        ('{"a": {"lora.push": "merged"}}', "users share engines; push adapters"),
        (
            '{"a": {"max_response_tokens": 600}}',
            "user 'a': UserConfig.rollout.max_model_len=1024: its sequences have up to 1112",
        ),
        (
            '{"a": {"eval_dataset": {"h": {"path": "p", "max_new_tokens": 900}}}}',
            "UserConfig.rollout.max_model_len=1024: its sequences have up to 1412 tokens; set it for all",
        ),
        ('{"a": {}, "b": {"seed": 1}}', "user 'b': UserConfig.seed=1: is 0 for all users; set it for all"),
        ('{"a": {"engines": 2}}', "user 'a': UserConfig.engines=2: is 1 for all users"),
        ('{"a": {"ranks": 2, "tp": 2}}', "UserConfig.tp=2: is 1 for all users; set it for all; UserConfig.ranks=2: is 1"),
        ('{"a": {"rollout.engine_args": {"y": 1}}}', "UserConfig.rollout.engine_args.y=1: is None for all"),
        ('{"a": {"rollout.cores_per_engine": 2}}', "UserConfig.rollout.cores_per_engine=2: is None for all"),
        ('{"a": {"model": "n"}}', "UserConfig.model='n': is 'm' for all"),
        ('{"a": {"max_tokens_per_micro_batch": 2048}}', "UserConfig.max_tokens_per_micro_batch=2048: is None for all"),
        ('{"a": {"recover": "memory"}}', "UserConfig.recover='memory': is 'checkpoint' for all"),
        ('{"a": {"recover": "memory", "min_ranks": 1, "ranks": 2}}', "UserConfig.min_ranks=1: is 0 for all"),
        ('{"a": {"rank_silence": 9}}', "UserConfig.rank_silence=9.0: is 60.0 for all"),
        ('{"a": {"operation_timeout": 9}}', "UserConfig.operation_timeout=9.0: is 7200.0 for all"),
        ('{"a": {"placement": "spread"}}', "UserConfig.placement='spread': is 'pack' for all"),
        ('{"a": {"transport": "gloo"}}', "UserConfig.transport='gloo': is 'auto' for all"),
        ('{"a": {"save_every": 2}, "b": {}}', "user 'b': UserConfig.save_every=0: others save checkpoints"),
    ],
)
def test_a_wrong_option_of_a_user_is_refused_with_its_name(users: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read("--users", users, kind=TenantsConfig)
    assert message.lower() in str(refused.value).lower()
