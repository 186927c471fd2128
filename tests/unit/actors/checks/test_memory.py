"""Memory of a run on a machine that the test makes up: what is counted, what is chosen, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.checks import memory
from actors.checks.memory import choose_micro_batch, chosen_options, find_memory
from actors.options.config import RunModel
from examples.grpo import GRPOConfig
from examples.ppo import PPOConfig
from examples.sft import SFTConfig
from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.lab.plan.make import GIB
from tests.support.models import write_tiny
from tests.unit.actors.checks.test_preflight_machine import config_of, gpus


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs, of which 10 GiB are free."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus(monkeypatch, 0)
    monkeypatch.setattr(memory, "read_memory", lambda: (20 * GIB, 10 * GIB))
    monkeypatch.setattr(memory, "find_layout", lambda config: "")
    monkeypatch.setattr(memory, "positions_of", lambda path: 4096)


def rank(weights: int, step: int, training: int, rollout: int, unreduced: int = 0) -> Any:
    sizes = {"optimizer_step": step, "training": training, "rollout": rollout}
    of_any_tokens = {"unreduced_gradients": unreduced, "gathered_parameters": 0}
    return SimpleNamespace(weights=weights, total=lambda phase, offload: sizes[phase], **of_any_tokens)


def plan(num_ranks: int, *ranks: Any, sync: int = 0) -> Any:
    return SimpleNamespace(num_ranks=num_ranks, ranks=ranks, sync_bytes=sync)


def test_memory_is_that_of_the_fullest_gpu_or_of_all_processes() -> None:
    actor, critic = RunModel("model", "m"), RunModel("critic_model", "c", "values", group=3)
    reference = RunModel("model", "m", forward_only=True, group=1)
    plans = {
        actor: plan(4, rank(1, 10, 40, 8), rank(2, 20, 50, 16), sync=1000),
        critic: plan(2, rank(3, 30, 35, 30)),
        reference: plan(2, rank(5, 99, 17, 10)),
    }
    apart = config_of(PPOConfig, groups="each", kl_coef=0.1, engines=3, **{"rollout.kv_cache_gib": 2.0})
    assert apart.training_groups == 3
    both = {actor: plans[actor], critic: plans[critic], reference: plans[reference]}
    # The weights that were pushed last are in shared memory.
    of_engines = 3 * (1000 + 2 * GIB + memory._ENGINE) + 1000
    each = memory._RANK
    # In groups: the actor's; the reference's weights; the critic's, of whom there is no fourth group.
    assert memory._bytes(apart, both, 0) == 3 * apart.ranks * each + 2 * 30 + 2 * 5 + 2 * 30 + of_engines
    assert memory._bytes(apart, both, 0, memory._of_pass) == (
        3 * apart.ranks * each + 2 * 30 + 2 * 66 + 2 * 5 + 2 * 7 + 2 * 30 + 2 * 5 + of_engines
    )
    assert memory._bytes(apart, both, 1) == 30
    assert memory._bytes(apart, both, 1, memory._of_pass) == 20 + 34
    together = config_of(PPOConfig)
    assert together.training_groups == 1
    assert memory._bytes(together, both, 1) == 20 + 30 + 5
    assert memory._bytes(together, both, 1, memory._of_pass) == 20 + 30 + 5 + 34
    assert memory._bytes(together, both, 0) == each + 60 + 60 + 10 + 2000 + GIB + memory._ENGINE
    assert memory._bytes(config_of(SFTConfig), {actor: plans[actor]}, 0, memory._of_pass) == each + 60 + 132


def test_states_that_are_kept_in_memory_count_where_ranks_are_on_cpus() -> None:
    policy, reference = RunModel("model", "m"), RunModel("model", "m", forward_only=True)
    plans = {each: SimpleNamespace(**vars(plan(2, rank(1, 10, 40, 8))), state_bytes=100) for each in (policy, reference)}
    sizes = {
        (recover, gpus): memory._bytes(config_of(PPOConfig, recover=recover, **changes), plans, gpus)
        for recover, changes in (("memory", {}), ("off", {"save_every": 2}))
        for gpus in (0, 1)
    }
    assert sizes["memory", 0] == sizes["off", 0] + 200 and sizes["memory", 1] == sizes["off", 1]


def per_token(held: float, mib: float, recomputed_mib: float = 0.25, partly_mib: float = 0.0, whole: float = 0.0) -> Any:
    """Plans of a model: GiB that are held, MiB of each token of a micro-batch, and GiB of whole gradients."""

    def make(config: Any, model: RunModel, number: int) -> Any:
        most = config.train.max_tokens_per_micro_batch
        tokens = min(most, memory._tokens_of_an_update(config) or most)
        options = config.train.backend_cfg
        of_token = {"none": mib, "selective": partly_mib or mib, "full": recomputed_mib}[options.activation_checkpointing]
        unreduced = int(whole * GIB) if options.reduce_gradients == "once" else 0
        passes = int(tokens * of_token * 2**20) + unreduced
        made = plan(1, rank(1, int(held * GIB), int(held * GIB) + passes, int(held * GIB), unreduced))
        return SimpleNamespace(**vars(made), workload=SimpleNamespace(micro_batch_tokens=tokens))

    return make


def test_a_micro_batch_takes_what_is_free_and_layers_are_recomputed_before_it_gets_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 8 of the 10 GiB, of which the process takes some: what is left in tokens, and half of it or more as a power of two.
    for held, mib, tokens, checkpointing in (
        # Without a GPU more gains nothing, but the longest sequence that the model has positions for must fit: nobody has
        # read the data yet.
        (1.0, 0.25, 4096, "none"),
        (1.0, 1.0, 4096, "none"),
        (4.0, 1.0, 4096, "full"),
        (7.5, 2.0, 4096, "full"),
    ):
        monkeypatch.setattr(memory, "_plan", per_token(held, mib))
        choice = choose_micro_batch(config_of(SFTConfig), {})
        found = choice.config.train
        assert (found.max_tokens_per_micro_batch, found.backend_cfg.activation_checkpointing) == (tokens, checkpointing)
        recomputed = ", layers recomputed" if checkpointing == "full" else ""
        said = (f"micro-batches of {tokens} tokens{recomputed} (10.0 GiB are free)",)
        assert choice.facts == (() if checkpointing == "none" else said)


@pytest.mark.parametrize(
    ("whole", "mib", "partly", "tokens", "chosen", "said"),
    [
        (0.0, 1.0, 0.5, 4096, ("once", "none"), ""),
        # Of 8 GiB 1 is held: 6 of whole gradients leave 1,024 tokens.
        (6.0, 1.0, 0.5, 4096, ("per_micro_batch", "none"), ", gradients reduced after each"),
        (6.0, 4.0, 1.5, 4096, ("per_micro_batch", "selective"), ", gradients reduced after each, layers recomputed in part"),
        (0.0, 4.0, 1.5, 4096, ("once", "selective"), ", layers recomputed in part"),
        (0.0, 4.0, 3.6, 16384, ("once", "full"), ", layers recomputed"),
        (6.0, 9.0, 8.0, 16384, ("per_micro_batch", "full"), ", gradients reduced after each, layers recomputed"),
    ],
)
def test_what_costs_least_time_is_tried_first_and_the_rest_on_top_of_it(
    monkeypatch: pytest.MonkeyPatch, whole: float, mib: float, partly: float, tokens: int, chosen: Any, said: str
) -> None:
    gpus(monkeypatch, 1, gib=10.0)
    monkeypatch.setattr(memory, "_plan", per_token(1.0, mib, 0.25, partly, whole))
    choice = choose_micro_batch(config_of(SFTConfig), {})
    train = choice.config.train
    assert train.max_tokens_per_micro_batch == tokens
    assert (train.backend_cfg.reduce_gradients, train.backend_cfg.activation_checkpointing) == chosen
    facts = (f"micro-batches of {tokens} tokens{said} (10.0 GiB are free)",)
    assert choice.facts == (facts if tokens < 16384 or said else ())


def test_what_is_given_or_cannot_be_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, gib=10.0)
    place = "train.backend_cfg."
    for whole, mib, given, expected in (
        (6.0, 4.0, {"reduce_gradients": "once"}, ("once", "full")),
        (6.0, 4.0, {"activation_checkpointing": "none"}, ("per_micro_batch", "none")),
        (6.0, 4.0, {"activation_checkpointing": "none", "reduce_gradients": "once"}, ("once", "none")),
        # A compiled layer has no parts, and schedules that split backward passes have whole gradients.
        (0.0, 4.0, {"compile": True}, ("once", "full")),
        (6.0, 4.0, {"pipeline_schedule": "zb-h1"}, ("once", "full")),
    ):
        monkeypatch.setattr(memory, "_plan", per_token(1.0, mib, 0.25, 1.0, whole))
        config = config_of(SFTConfig, ranks=2, pp=2, **{f"{place}{name}": value for name, value in given.items()})
        options = choose_micro_batch(config, {}).config.train.backend_cfg
        assert (options.reduce_gradients, options.activation_checkpointing) == expected, given


def test_a_gpu_takes_more_than_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, gib=10.0)
    for mib, tokens in ((0.25, 16384), (1.0, 4096)):
        monkeypatch.setattr(memory, "_plan", per_token(1.0, mib))
        choice = choose_micro_batch(config_of(SFTConfig), {})
        assert choice.config.train.max_tokens_per_micro_batch == tokens
        assert choice.facts == (() if tokens == 16384 else ("micro-batches of 4096 tokens (10.0 GiB are free)",))


def test_gradients_that_stay_between_micro_batches_are_counted_in_every_layout(tmp_path: Path) -> None:
    model = str(write_tiny("qwen3", tmp_path, num_hidden_layers=4))

    def unreduced(**changes: Any) -> int:
        config = config_of(SFTConfig, model=model, ranks=2, max_tokens_per_micro_batch=256, **changes)
        return memory._plan(config, RunModel("model", model), 0).ranks[0].unreduced_gradients

    assert unreduced() > unreduced(**{"train.backend_cfg.reduce_gradients": "per_micro_batch"})


def test_sequences_fit_and_a_step_that_is_smaller_is_all_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_ENGINE", 0)
    monkeypatch.setattr(memory, "_plan", per_token(1.0, 1.0))
    sizes = {"max_prompt_tokens": 100, "max_response_tokens": 200, "prompts_per_step": 4, "samples_per_prompt": 4}
    whole = choose_micro_batch(config_of(GRPOConfig, **sizes), {}).config
    assert whole.train.max_tokens_per_micro_batch == 2048, "a step of 16 x 300 tokens fits, and 2048 are enough for a CPU"
    sizes |= {"max_prompt_tokens": 1000, "max_response_tokens": 2300}
    monkeypatch.setattr(memory, "_plan", per_token(1.0, 1.6))
    longest = choose_micro_batch(config_of(GRPOConfig, **sizes), {}).config
    assert longest.train.max_tokens_per_micro_batch == 3300, "2048 would be too short for a sequence"


def test_a_given_value_wins_then_the_one_that_a_run_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_plan", per_token(1.0, 1.0))
    given = config_of(SFTConfig, max_tokens_per_micro_batch=16384)
    assert choose_micro_batch(given, {}).config is given and choose_micro_batch(given, {"a": 1}).config is given
    first = choose_micro_batch(config_of(SFTConfig), {}).config
    kept = chosen_options(first)
    assert kept == {
        "train.max_tokens_per_micro_batch": 4096,
        "train.backend_cfg.reduce_gradients": "once",
        "train.backend_cfg.activation_checkpointing": "none",
    }
    monkeypatch.setattr(memory, "read_memory", lambda: (20 * GIB, 20 * GIB))
    gpus(monkeypatch, 1, gib=20.0)
    more = choose_micro_batch(config_of(SFTConfig), {}).config
    assert more.train.max_tokens_per_micro_batch == 8192, "what is free decides without it"
    again = choose_micro_batch(config_of(SFTConfig), kept)
    assert chosen_options(again.config) == kept and not again.facts
    recomputed = config_of(SFTConfig, **{"train.backend_cfg.activation_checkpointing": "full"})
    assert choose_micro_batch(recomputed, kept).config.train.backend_cfg.activation_checkpointing == "full"
    moved = choose_micro_batch(config_of(SFTConfig, backend="bridge"), kept).config
    assert moved.train.max_tokens_per_micro_batch == 4096, "the bridge has no other of these options"
    reduced = {**kept, "train.backend_cfg.reduce_gradients": "per_micro_batch"}
    parallel = {"pp": 2, "ranks": 2, "train.backend_cfg.pipeline_schedule": "zb-h1"}
    assert choose_micro_batch(config_of(SFTConfig, **parallel), reduced).config.train.backend_cfg.reduce_gradients == "once"
    # What was chosen is an option like any other from then on.
    assert SFTConfig(**first.model_dump()).train.max_tokens_per_micro_batch == 4096
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert choose_micro_batch(config_of(SFTConfig), {}).config == config_of(SFTConfig)


def test_a_rank_that_shares_a_gpu_with_an_engine_has_what_the_engine_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, gib=10.0)
    assert memory._free(config_of(GRPOConfig), 1) == pytest.approx(6 * GIB)
    assert memory._free(config_of(GRPOConfig, **{"rollout.gpu_memory_utilization": 0.7}), 1) == pytest.approx(3 * GIB)
    assert memory._free(config_of(GRPOConfig, colocate=True), 1) == 10 * GIB, "engines sleep"
    assert memory._free(config_of(GRPOConfig), 2) == memory._free(config_of(SFTConfig), 1) == 10 * GIB


def test_what_will_not_fit_is_refused_with_what_fits_and_what_almost_does_not_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(tokens: int, **changes: Any) -> str:
        return find_memory(config_of(SFTConfig, max_tokens_per_micro_batch=tokens, **changes))

    monkeypatch.setattr(memory, "_RANK", 0)
    monkeypatch.setattr(memory, "_plan", per_token(2.0, 1.0))
    assert found(6144) == ("training takes up to 8.00 GiB in micro-batches of 6144 tokens, this machine has 10.00 GiB free")
    assert found(7168).startswith(f"{memory.WARNING}training takes up to 9.00 GiB")
    assert "which is 90% of it: this machine has 10.00 GiB free; lower max_tokens_per_micro_batch" in found(7168)
    assert found(8192).startswith(memory.WARNING), "what just fits, fits"
    with pytest.raises(ConfigError) as refused:
        found(8193)
    assert str(refused.value).startswith("SFTConfig.max_tokens_per_micro_batch=8193: training takes up to 10.00 GiB")
    assert "use at most 8192, or activation_checkpointing=full, or free memory" in str(refused.value)
    monkeypatch.setattr(memory, "_plan", per_token(2.0, 1.0, whole=1.0))
    with pytest.raises(ConfigError) as refused:
        found(8193)
    assert ", or reduce_gradients=per_micro_batch, or activation_checkpointing=full, or free" in str(refused.value)
    monkeypatch.setattr(memory, "_plan", per_token(2.0, 1.0))
    with pytest.raises(ConfigError) as refused:
        found(65536, **{"train.backend_cfg.activation_checkpointing": "full"})
    assert "use at most 32768, or free memory" in str(refused.value)
    monkeypatch.setattr(memory, "_plan", per_token(11.0, 1.0))
    for number, engines, more in ((0, " and engines", "memory"), (2, "", "ranks")):
        gpus(monkeypatch, number, gib=10.0)
        with pytest.raises(ConfigError) as refused:
            found(128)
        assert str(refused.value).startswith(
            f"SFTConfig.model='m': parameters, gradients, moments{engines} take 11.00 GiB, and "
        )
        assert f"use a smaller model, more {more}, or lora.rank=16" in str(refused.value)


def test_where_nothing_can_be_planned_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any) -> Any:
        raise UnsupportedError("no plan of it")

    config = config_of(SFTConfig)
    monkeypatch.setattr(memory, "_plan", cannot)
    assert find_memory(config) == "is not estimated: no plan of it"
    assert choose_micro_batch(config, {}).config is config
    monkeypatch.setattr(memory, "find_layout", cannot)
    assert find_memory(config) == "is not estimated of a layout that does not fit the model"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert find_memory(config) == "is not estimated in a process that has a process group"
    assert choose_micro_batch(config, {}).config is config


@pytest.mark.parametrize("number", [0, 1])
def test_a_plan_is_of_the_runs_own_work(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    made: list[Any] = []
    monkeypatch.setattr(memory, "make_plan", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(memory, "positions_of", lambda path: 300)
    config = config_of(ranks=4, pp=2, max_tokens_per_micro_batch=2048)
    memory._plan(config, RunModel("model", "other"), number)
    memory._plan(config.replace(dtype="float32", **{"lora.rank": 4}), RunModel("model", "m", "values"), number)
    (runtime, ranks, work), (of_adapters, _, adapters) = made
    dtype = "bfloat16" if number else "float32"
    assert (runtime.hf_path, ranks, work.sequence_length, work.micro_batch_tokens) == ("other", 4, 300, 2048)
    assert (runtime.backend_cfg.param_dtype, work.sync_dtype, work.head) == (dtype, dtype, "log_probs")
    assert runtime.backend_cfg.device == ("auto" if number else "cpu")
    assert work.num_micro_batches >= 2 and (work.tenants, adapters.tenants) == (0, 1)
    # The prompt of as many samples as the run draws, cut to what the model has positions for.
    assert (work.prompt_length, work.samples_per_prompt, work.trains_prompts) == (299, config.sampling.n, True)
    assert adapters.lora.rank == 4 and adapters.head == "log_probs" and of_adapters.backend_cfg.param_dtype == "float32"


def test_a_pass_takes_gradients_and_gathered_parameters_however_small_it_is() -> None:
    given: Any = SimpleNamespace(unreduced_gradients=3, gathered_parameters=5)
    assert memory._of_any_tokens(given) == 8
    assert memory._of_pass(rank(1, 2, 40, 8)) == 32


def test_a_rank_has_its_share_of_an_update_rounded_up() -> None:
    sizes = {"prompts_per_step": 5, "samples_per_prompt": 3, "max_prompt_tokens": 10, "max_response_tokens": 20}
    for changes, sequences in (
        ({}, 15),
        ({"ranks": 2}, 8),
        ({"ranks": 4, "tp": 2}, 8),
        ({"updates_per_step": 5, "ranks": 2}, 2),
    ):
        assert memory._tokens_of_an_update(config_of(GRPOConfig, **{**sizes, **changes})) == sequences * 30
    assert memory._tokens_of_an_update(config_of(SFTConfig)) is None, "data alone decide"


def test_engines_with_memory_of_their_own_take_no_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 1, gib=10.0)
    assert memory._free(config_of(GRPOConfig, **{"rollout.kv_cache_gib": 2.0}), 1) == 10 * GIB
    assert memory._free(config_of(GRPOConfig), 0) == 10 * GIB, "of this machine without GPUs"


def test_prompts_that_samples_share_are_planned_with_as_many_keys_as_a_pass_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(memory, "make_plan", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(memory, "positions_of", lambda path: 4000)
    monkeypatch.setattr(memory, "_known", {})

    def work(samples: int, **changes: Any) -> Any:
        sizes = {"max_prompt_tokens": 1400, "max_response_tokens": 600, "samples_per_prompt": samples}
        config = config_of(GRPOConfig, max_tokens_per_micro_batch=16384, **sizes, **changes)
        memory._known.clear()
        memory._plan(config, RunModel("model", "m"), 0)
        return made.pop()[2]

    for samples in (16, 32):
        found = work(samples)
        prompt, answer = found.prompt_length, found.sequence_length - found.prompt_length
        assert (prompt, found.samples_per_prompt) == (1400, samples) and 0 < answer <= 600
        keys, tokens = prompt + samples * (prompt + answer), prompt + samples * answer
        assert keys / tokens == pytest.approx(8.0, rel=0.02)
    assert work(16).sequence_length < 2000, "answers are so short that keys bound a pass"
    # Eight keys for each token are what seven answers have anyway, and where nothing is shared all count.
    assert work(7).sequence_length == work(16, **{"train.backend_cfg.share_prefixes": "off"}).sequence_length == 2000


def test_a_choice_that_was_kept_gives_way_to_what_is_given_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_plan", per_token(1.0, 1.0))
    kept = {
        "train.max_tokens_per_micro_batch": 512,
        "train.backend_cfg.reduce_gradients": "per_micro_batch",
        "gone.option": 3,
    }
    found = choose_micro_batch(config_of(SFTConfig, **{"train.backend_cfg.reduce_gradients": "once"}), kept)
    assert (found.config.train.max_tokens_per_micro_batch, found.facts) == (512, ())
    assert found.config.train.backend_cfg.reduce_gradients == "once"
    assert choose_micro_batch(config_of(SFTConfig), kept).config.train.backend_cfg.reduce_gradients == "per_micro_batch"
