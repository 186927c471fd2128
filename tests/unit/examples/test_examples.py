"""What the example scripts share."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import pytest
import ray
from pydantic import Field

from actors import Sample
from actors.cluster.placement import gpus_each
from actors.collect.inputs import load_episode_inputs, load_inputs
from actors.collect.prompts import TrainingBatch
from actors.collect.sample_metrics import score
from actors.collect.stop_tokens import stop_token_ids
from actors.folder.folder import RunFolder
from examples.demo.__main__ import RECIPES, Algorithm, DemoConfig, demo_settings
from examples.demo.task import careless_answer, character_tokenizer, has_carry, right_answer, write_task
from examples.episodes import EpisodesConfig
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig, load_data
from rl_backend.contracts import BaseConfig, BatchError, ConfigError, OptimizerConfig, ParallelConfig, RuntimeConfig
from rl_backend.data.chat_template import encode_text
from rl_backend.data.examples import DataConfig, PromptExample
from rl_backend.data.prompts import Prompt, endless_batches, load_prompts, load_tokenizer
from rl_backend.data.rewards import LoadedReward, RewardScorer
from rl_backend.options.command_line import in_flags, parse_config
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.models import write_tiny


class Options(BaseConfig):
    name: str = Field(description="a name")
    count: int = Field(default=3, description="a number")
    cap: float | None = Field(default=None, description="a cap")
    flag: bool = Field(default=False, description="a switch")


def test_a_command_line_is_read_into_a_configuration_and_over_a_saved_one(tmp_path: Path) -> None:
    assert parse_config(Options, "", ["--name", "a", "--flag"]) == Options(name="a", flag=True)
    saved = tmp_path / "config.json"
    saved.write_text(Options(name="a", count=5, cap=2.0).model_dump_json())
    read = parse_config(Options, "", ["--config", str(saved), "--count", "7", "--cap", "none"])
    assert read == Options(name="a", count=7, cap=None)


def test_a_model_that_is_not_there_is_blamed_by_its_option() -> None:
    options = {"model": "/no/such/model", "dataset": "rows.jsonl"}
    for load, config in (
        (load_data, SFTConfig(**options)),
        (load_inputs, GRPOConfig(**options, reward="rewards.py:score")),
        (load_episode_inputs, EpisodesConfig(**options, environment="environments.py:Game")),
    ):
        field = f"{type(config).__name__}.model"
        with pytest.raises(ConfigError, match=rf"^{field}='/no/such/model': no such folder") as caught:
            load(config)
        assert in_flags(caught.value, config).startswith("--model='/no/such/model': no such folder")


def test_a_wrong_command_line_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--count=\"x\""):
        parse_config(Options, "", ["--name", "a", "--count", "x"])
    with pytest.raises(ConfigError, match=r"^--name: required"):
        parse_config(Options, "", [])
    with pytest.raises(ConfigError, match="--config"):
        parse_config(Options, "", ["--config", str(tmp_path / "missing.json")])


def test_batches_go_through_all_items_in_an_order_that_the_seed_fixes() -> None:
    first = list(islice(endless_batches(range(10), 3, seed=1), 6))
    assert first == list(islice(endless_batches(range(10), 3, seed=1), 6))
    assert first != list(islice(endless_batches(range(10), 3, seed=2), 6))
    assert len({item for batch in first[:3] for item in batch}) == 9
    with pytest.raises(ConfigError, match="a batch of 11"):
        endless_batches(range(10), 11, seed=1)


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "expected"), [(0, 4, 4, 0), (8, 4, 4, 1), (1, 1, 1, 0.5), (1, 1, 0, 1), (2, 1, 1, 1)]
)
def test_ranks_and_engines_take_a_gpu_each_or_share_the_only_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, engines: int, expected: float
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(gpus)})
    assert gpus_each(ranks, engines) == expected


def test_too_few_gpus_are_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 2.0})
    with pytest.raises(ConfigError, match=r"2 training ranks, of all groups, and 1 engines .* the cluster has 2"):
        gpus_each(2, 1)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    options = Options(name="a")
    with RunFolder(tmp_path / "run", options) as folder:
        folder.log(1, {"reward": 0.5})
        folder.write_summary({"done": True})
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.5}
    with pytest.raises(ConfigError, match="holds another run"):
        RunFolder(tmp_path / "run", options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"updates_per_step": 5}, "must divide prompts_per_step=32; use 4 or 8$"),
        ({"ranks": 300}, "each of 300 data-parallel ranks needs one; use fewer ranks, or more prompts_per_step$"),
        ({"max_response_tokens": 20000}, "must hold one sequence"),
        ({"learning_rate": 1.0}, "unknown field"),
        ({"sample_ahead": 1}, "max_staleness=0: set both to 0"),
        ({"max_staleness": 1, "sample_ahead": 0}, "max_staleness=1: set both to 0"),
        ({"max_staleness": 1, "stale_samples": "correct", "importance": "off"}, "needs importance weights"),
        ({"samples_per_prompt": 1}, "compares at least 2"),
        ({"stale_samples": "correct"}, "max_staleness=0 makes no stale samples"),
        (
            {"importance": "off", "importance_cap": 3.0},
            r"importance_cap=3\.0: importance='off' and max_staleness=0 has no weights to cap",
        ),
        ({"importance_cap": 3.0}, r"importance_cap=3\.0: importance='auto' and max_staleness=0 has no weights to cap"),
        ({"keep_checkpoints": 5}, r"GRPOConfig\.keep_checkpoints=5: save_every=0 saves no checkpoints"),
        ({"async_save": False}, r"GRPOConfig\.async_save=False: save_every=0 saves no checkpoints"),
        ({"rollout.load_tokenizer": True}, "follows from stop_strings"),
        ({"eval_every": 5}, "needs an eval_dataset"),
        ({"lr_warmup_steps": 100}, "would never reach lr"),
        ({"plugins": "no_such_module"}, "cannot be imported"),
        ({"pp": 3, "ranks": 4}, r"GRPOConfig\.ranks=4: world size 4 is not a multiple of tp\*pp\*cp = 1\*3\*1 = 3"),
        ({"backend": "bridge", "tp": 2, "ranks": 3}, r"world size 3 is not a multiple of tp\*pp\*cp = 2\*1\*1 = 2"),
        ({"backend": "bridge", "pp": 2, "ranks": 1000, "dtype": "float32"}, "each of 500 data-parallel ranks needs one"),
        ({"train.backend_cfg.no_such": 1}, r"NativeConfig\.no_such=1: unknown field"),
        ({"lr": 0}, r"lr=0\.0: must be above 0"),
        ({"seed": -1}, r"seed=-1: must be from 0 to 4294967295"),
        ({"temperature": 0, "samples_per_prompt": 1}, r"temperature=0\.0: must be above 0"),
        ({"rollout.max_model_len": 600}, r"rollout\.max_model_len=600: must hold one sequence: .* = 1024"),
        ({"rollout.model_path": "other"}, r"rollout\.model_path='other': engines sample from the trained model"),
        ({"rollout.sleep_mode": True}, r"rollout\.sleep_mode=True: follows from colocate; set that"),
        ({"rollout.return_routed_experts": True}, r"return_routed_experts=True: follows from router_replay"),
        ({"train.backend_cfg.optimizer.total_training_steps": 7}, r"total_training_steps=7: follows from steps"),
        ({"train.backend_cfg.optimizer.min_lr": 1e-7}, r"min_lr=1e-07: lr_decay_style='constant' never decays"),
        ({"kl_coef": float("inf")}, "finite"),
        ({"kl_place": "reward"}, "needs advantage='reinforce_plus_plus'"),
        ({"max_batches_per_step": 2}, "only dynamic_sampling"),
        ({"overlong_buffer_tokens": 600}, "more than max_response_tokens=512"),
        ({"loss": {"loss_scale_factor": 2.0}}, "only loss_agg_mode='seq-mean-token-sum-norm' divides"),
        ({"advantage": "nothing"}, "advantage"),
        ({"loss": {"loss_agg_mode": "total"}}, "loss_agg_mode"),
        ({"temperature": float("inf")}, r"temperature=inf: must be above 0 and finite"),
        ({"loss.clip_ratio_low": float("nan")}, "finite number"),
    ],
)
def test_grpo_options_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(model="m", dataset="d", reward="r", **changes)


@pytest.mark.parametrize("name", ["PPOConfig", "EpisodesConfig"])
def test_a_schedule_of_the_policy_that_the_critic_cannot_have_is_refused_by_the_critics_option(name: str) -> None:
    options: dict[str, Any] = {"model": "m", "dataset": "d", "lr": 1e-4, "critic_lr": 1e-5}
    options |= {"train.backend_cfg.optimizer.min_lr": 2e-5, "train.backend_cfg.optimizer.lr_decay_style": "cosine"}
    if name == "PPOConfig":
        make: Any = partial(PPOConfig, **options, reward="r")
    else:
        make = partial(EpisodesConfig, **options, algorithm="ppo", environment="examples.episodes:Calculator")
    with pytest.raises(ConfigError, match=rf"^{name}\.critic_lr=1e-05: .* fit it: \S+min_lr=2e-05: must not exceed"):
        make()
    assert make(critic_lr=1e-4).critic_optimizer().lr == 1e-4


def test_runtime_and_layout_are_options_of_every_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", dict)
    required = ["--model", "m", "--dataset", "d", "--reward", "r", "--dtype", "float32"]
    layout = ["--backend", "bridge", "--ranks", "4", "--tp", "2", "--train.backend_cfg.log_prob_chunk_tokens", "64"]
    config = parse_config(GRPOConfig, "", [*required, *layout])
    assert config.data_parallel_size == 2
    runtime = config.runtime_config()
    assert runtime.backend_cfg == BridgeConfig(
        parallel=ParallelConfig(tp=2),
        log_prob_chunk_tokens=64,
        optimizer=OptimizerConfig(lr=1e-6, total_training_steps=100),
    )
    assert GRPOConfig.model_validate_json(config.model_dump_json()) == config
    demo = parse_config(DemoConfig, "", layout)
    settings = demo_settings(demo, tmp_path, tmp_path, tmp_path)
    assert GRPOConfig(**settings).parallel == config.parallel


def test_router_replay_is_for_mixtures_of_experts_alone(tmp_path: Path) -> None:
    for model in ("qwen3", "qwen3_moe"):
        write_task(tmp_path / model, seed=0, model=parse_config(DemoConfig, "", ["--model", model]).model)
    options = {"dataset": "d", "reward": "r", "run_dir": str(tmp_path / "run")}
    for mode in ("R2", "R3"):
        for name in ("qwen3", "qwen3_5"):
            with pytest.raises(ConfigError, match=rf"^--router-replay='{mode}': model='{name}' is dense .*; use {name}_moe"):
                parse_config(DemoConfig, "", ["--model", name, "--router-replay", mode])
            parse_config(DemoConfig, "", ["--model", f"{name}_moe", "--router-replay", mode])
        dense = GRPOConfig(model=str(tmp_path / "qwen3" / "model"), router_replay=mode, **options)
        with pytest.raises(ConfigError, match=rf"GRPOConfig\.router_replay='{mode}': .*model is a dense model"):
            load_inputs(dense)
        mixture = PPOConfig(model=str(tmp_path / "qwen3_moe" / "model"), router_replay=mode, **options)
        with pytest.raises(ConfigError, match=r"RewardConfig\.functions='r'"):
            load_inputs(mixture)


def test_an_answer_is_required_only_where_the_reward_needs_one(tmp_path: Path) -> None:
    write_task(tmp_path, seed=0)
    (tmp_path / "some.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "10+10="}\n')
    (tmp_path / "rewards.py").write_text(
        "def compares(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"
        "def counts(data_source, solution_str, ground_truth=None, extra_info=None): return len(solution_str)\n"
        "def any_of(**facts): return 1.0\n"
    )
    options: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "dataset": str(tmp_path / "some.jsonl"),
        "prompts_per_step": 1,
        "max_prompt_tokens": 4,
        "too_long": "filter",
    }
    for name in ("counts", "any_of"):
        inputs = load_inputs(GRPOConfig(**options, reward=f"{tmp_path}/rewards.py:{name}"))
        assert [prompt.example.ground_truth for prompt in inputs.prompts] == [None]
        assert inputs.notes == ("1 of 2 prompts has more tokens than max_prompt_tokens=4: filtered",)
    with pytest.raises(BatchError, match=r"some\.jsonl, line 1, field .*answer: missing"):
        load_inputs(GRPOConfig(**options, reward=f"{tmp_path}/rewards.py:compares"))


@pytest.mark.shows("data: of texts and chats in one data set, in any order, responses end as those of each alone")
def test_a_response_to_messages_ends_where_the_chat_template_ends_a_turn(tmp_path: Path) -> None:
    # Turns end otherwise behind a system message.
    system = CHATML.replace("<|im_end|>", "{{ '<|eot_id|>' if messages[0].role == 'system' else '<|im_end|>' }}")
    tokenizer = chat_tokenizer(system)
    tokenizer.save_pretrained(write_tiny("qwen3", tmp_path / "model", vocab_size=512, eos_token_id=tokenizer.eos_token_id))
    user = {"role": "user", "content": "1+1="}
    rows: dict[str, dict[str, Any]] = {
        "text": {"prompt": "1+1="},
        "chat": {"messages": [user]},
        "system": {"messages": [{"role": "system", "content": "x"}, user]},
        "long": {"messages": [{"role": "system", "content": "x " * 64}, user]},
    }
    (tmp_path / "rewards.py").write_text("def any_of(**facts): return 1.0\n")

    def ends(*names: str, of: str) -> str:
        """Of a set of such rows, beside another one of texts alone."""
        for file, found in (("mixed", names), ("texts", ("text", "text"))):
            (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(rows[name]) + "\n" for name in found))
        mixed, texts = (f"{tmp_path}/{file}.jsonl" for file in ("mixed", "texts"))
        sets = {"dataset": mixed, "eval_dataset": texts} if of == "dataset" else {"dataset": texts, "eval_dataset": mixed}
        sizes = {"prompts_per_step": 1, "max_prompt_tokens": 64, "max_response_tokens": 64, "too_long": "filter"}
        options: dict[str, Any] = {"reward": f"{tmp_path}/rewards.py:any_of", **sets, **sizes}
        inputs = load_inputs(GRPOConfig(model=str(tmp_path / "model"), **options))
        found = {"dataset": inputs.sampling, "eval_dataset": inputs.held_out[0].sampling}
        other = next(found[name] for name in found if name != of)
        assert tokenizer.decode(other.stop_token_ids) == "</s>", "the other set ends as it would alone"
        return str(tokenizer.decode(found[of].stop_token_ids))

    for of in ("dataset", "eval_dataset"):
        assert ends("text", of=of) == ends("text", "long", of=of) == "</s>"
        assert ends("chat", of=of) == ends("text", "chat", of=of) == ends("chat", "text", of=of) == "</s><|im_end|>"
        assert ends("text", "text", "system", of=of) == "</s><|eot_id|>"
        assert ends("chat", "text", "system", of=of) == "</s><|im_end|><|eot_id|>"


def test_a_row_whose_answer_the_chat_template_refuses_is_named(tmp_path: Path) -> None:
    template = (
        CHATML + "{% if not add_generation_prompt and messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    )
    tokenizer = chat_tokenizer(template)
    tokenizer.save_pretrained(write_tiny("qwen3", tmp_path / "model", vocab_size=512, eos_token_id=tokenizer.eos_token_id))
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "1+1="}]
    lines = [{"prompt": "1+1="}, {"messages": messages}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rewards.py").write_text("def any_of(**facts): return 1.0\n")
    options = {"dataset": f"{tmp_path}/rows.jsonl", "reward": f"{tmp_path}/rewards.py:any_of", "prompts_per_step": 1}
    with pytest.raises(
        BatchError, match=r"rows\.jsonl, line 2: the chat template of .* refuses messages of the roles system"
    ):
        load_inputs(GRPOConfig(model=str(tmp_path / "model"), **options, max_prompt_tokens=64, max_response_tokens=64))


def test_options_of_data_have_short_names_and_are_read_from_the_command_line() -> None:
    required = ["--model", "m", "--dataset", "d", "--reward", "r"]
    given = ["--chat-template-kwargs", '{"enable_thinking": false}', "--too-long", "cut", "--data.prompt_column", "question"]
    config = parse_config(GRPOConfig, "", [*required, *given])
    assert config.data == DataConfig(
        chat_template_kwargs={"enable_thinking": False}, too_long="cut", prompt_column="question"
    )
    assert GRPOConfig.model_validate_json(config.model_dump_json()) == config


def test_a_loss_of_ppo_clips_as_it_does_elsewhere() -> None:
    options = {"model": "m", "dataset": "d", "reward": "r"}
    for name in ("grpo", "gspo", "cispo"):
        assert "clip_ratio_low" not in PPOConfig(**options, **{"loss.name": name}).actor_loss().keywords
    asked = PPOConfig(**options, **{"loss.name": "gspo", "loss.clip_ratio_low": 0.1}).actor_loss()
    assert asked.keywords["clip_ratio_low"] == 0.1


def test_ppo_needs_steps_in_which_the_actor_is_trained() -> None:
    with pytest.raises(ConfigError, match="leaves none of steps=3 to the actor"):
        PPOConfig(model="m", dataset="d", reward="r", steps=3, critic_warmup_steps=3)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.json")), ids=lambda path: path.stem)
def test_a_recipe_is_a_loss_that_the_ranks_can_call(recipe: Path) -> None:
    required = ["--model", "m", "--dataset", "d", "--reward", "r"]
    config = parse_config(GRPOConfig, "", ["--config", str(recipe), *required])
    assert config.loss_function().target == f"rl_backend.algorithm:{config.loss.name}_loss"
    assert recipe.stem in get_args(Algorithm.__value__)


def test_importance_weights_follow_from_sampling_ahead_unless_they_are_chosen() -> None:
    def options(**changes: Any) -> dict[str, Any]:
        return GRPOConfig(model="m", dataset="d", reward="r", **changes).importance_options()

    assert options() == {}
    assert options(max_staleness=1) == {"tis_cap": 2.0}
    assert options(max_staleness=1, importance="off") == {}
    assert options(importance="mask", importance_cap=4.0) == {"mis_bounds": (0.25, 4.0)}


def test_options_that_are_left_alone_are_never_refused(tmp_path: Path) -> None:
    config = GRPOConfig(model="m", dataset="d", reward="r", train={"backend_cfg": {"head_in_float32": False}})
    saved = tmp_path / "config.json"
    saved.write_text(config.model_dump_json())
    assert parse_config(GRPOConfig, "", ["--config", str(saved)]) == config
    assert parse_config(GRPOConfig, "", ["--config", str(saved), "--save-every", "3", "--no-async-save"]).save_every == 3


def test_what_ends_a_response_is_what_tokenizer_and_generation_config_say(tmp_path: Path) -> None:
    write_task(tmp_path, seed=0)
    model = tmp_path / "model"
    tokenizer = load_tokenizer(str(model))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_token_id, 7]}))
    assert stop_token_ids(str(model), tokenizer) == (tokenizer.eos_token_id, 7)
    (model / "generation_config.json").unlink()
    assert stop_token_ids(str(model), tokenizer) == (tokenizer.eos_token_id,)


def test_a_text_begins_as_the_tokenizer_begins_one_and_does_not_end() -> None:
    class Ended:
        bos_token = "<s>"

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            own = [10 + int(digit) for digit in text]
            return [1, *own, 2] if add_special_tokens else own

    assert encode_text("34", Ended()) == [1, 13, 14]


def test_a_long_response_costs_what_dapo_says() -> None:
    config = GRPOConfig(model="m", dataset="d", reward="r", max_response_tokens=8, overlong_buffer_tokens=4)
    samples = [Sample(0, index, [1], [1] * length, [], "stop", (), 0) for index, length in enumerate((4, 6, 8))]
    batch = TrainingBatch([], samples, [1.0, 1.0, 0.0], {})
    assert config.shaped_rewards(batch) == [1.0, 0.5, -1.0]


def test_a_configuration_file_is_an_object(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="it holds a list, not an object of options"):
        parse_config(Options, "", ["--config", str(tmp_path / "list.json")])


def test_sft_needs_an_example_for_each_rank() -> None:
    with pytest.raises(ConfigError, match="each of 4 data-parallel ranks needs one"):
        SFTConfig(model="m", dataset="d", batch_size=2, ranks=4)


def test_the_demo_makes_disjoint_data_that_its_tokenizer_reads_back(tmp_path: Path) -> None:
    write_task(tmp_path, seed=3)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    prompts = {
        name: {str(prompt.example.prompt) for prompt in load_prompts(tmp_path / f"{name}.jsonl", tokenizer, 8)}
        for name in ("train", "validation", "held_out")
    }
    assert len(prompts["held_out"]) >= 256
    assert not prompts["train"] & prompts["held_out"]
    assert not prompts["train"] & prompts["validation"]
    assert tokenizer.decode(tokenizer.encode("47+38=", add_special_tokens=False)) == "47+38="
    with pytest.raises(BatchError, match="max_prompt_tokens=4"):
        load_prompts(tmp_path / "train.jsonl", tokenizer, 4)


def test_a_careless_answer_forgets_the_carry_and_nothing_else() -> None:
    class Always:
        def random(self) -> float:
            return 0.0

    careless = Always()
    assert has_carry(47, 38)
    assert right_answer(47, 38) == "58"
    assert careless_answer(47, 38, careless) == "57"  # type: ignore[arg-type]
    assert careless_answer(67, 58, careless) == "511"  # type: ignore[arg-type]
    assert careless_answer(41, 38, careless) == right_answer(41, 38)  # type: ignore[arg-type]


def test_a_model_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny("qwen3", tmp_path)  # of which transformers makes an empty tokenizer
    with pytest.raises(ConfigError, match=r"model=.*has no tokenizer with any text; add tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{}"), ("tokenizer.json", "{"), ("tokenizer_config.json", "[]"), ("tokenizer_config.json", "{")],
)
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    write_tiny("qwen3", tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    load_tokenizer(str(tmp_path))
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"model=.*has no tokenizer that can be loaded, \w+: .*check tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"eos_token_id": "end"}', '{"eos_token_id": [1, [2]]}', "[" * 100_000], ids=len
)
def test_a_damaged_generation_config_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model=.*generation_config\.json cannot be used: .*repair or remove it"):
        stop_token_ids(str(tmp_path), character_tokenizer())


def test_a_reward_that_ends_the_process_is_an_error_of_the_run() -> None:
    def reward(**_: Any) -> float:
        raise SystemExit

    prompt = Prompt(PromptExample("p", "a", "source"), [1])
    tokenizer = character_tokenizer()
    sample = Sample(0, 0, [1], tokenizer.encode("12"), [], "stop", (), 0)
    scorer = RewardScorer([LoadedReward(reward, "m:reward")])
    with pytest.raises(BatchError, match=r"the reward function ended the process, SystemExit\(\) .*, response '12'"):
        score([sample], [prompt], tokenizer, scorer)


def test_a_plugin_that_ends_the_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_plugin.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"plugins='leaving_plugin': fails when .* imports it \(SystemExit: 3\)"):
        RuntimeConfig(hf_path="m", plugins=("leaving_plugin",))
