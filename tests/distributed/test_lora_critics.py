"""A critic is a tenant beside an actor and a reference, on one base and in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import CheckpointError, ConfigError, OptimizerConfig
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data.micro_batches import pack
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, assert_near, open_runtime
from tests.support.rank_pool import RankPool
from tests.support.sft_batches import random_token_sequences
from tests.support.tenant_layouts import NATIVE, assert_as_on_one_rank, assert_same_bits_alone, cases, train
from tests.support.tenants import CRITIC, TenantRun, copied, create, nll, rows, squared, train_tenants

NAMES = ("narrow", "critic")
LAYOUTS = ("dp2", "tp2", "cp2", "pp2", "pp2 zbv", "dp2 tp2 recomputed")
BRIDGE = ("one rank", "dp2", "tp2", "pp2")
HEAD = ("base_model.model.score.weight", "base_model.model.score.bias")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_hidden_layers=4))


@pytest.fixture(scope="module")
def on_one_rank(ranks: RankPool, model: str) -> dict[str, TenantRun]:
    return train(ranks, model, NAMES, "native", "one rank")[0]


@pytest.mark.shows("lora: an actor and a critic train on one base in one pass, in every layout as on one rank")
@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(LAYOUTS, BRIDGE),
        *(("native", "pp2 zbv"), ("bridge", "tp2")),
    ),
)
def test_actor_and_critic_train_in_one_pass_in_every_layout_as_on_one_rank(
    ranks: RankPool, model: str, on_one_rank: dict[str, TenantRun], backend: str, layout: str
) -> None:
    assert_as_on_one_rank(train(ranks, model, NAMES, backend, layout), on_one_rank)
    assert on_one_rank["critic"].gradients.keys() >= set(HEAD)
    assert all(bool(on_one_rank["critic"].factors[name].any()) for name in HEAD)


@pytest.mark.parametrize(
    ("backend", "layout"),
    sampled(
        cases(("one rank", *LAYOUTS), ("one rank", "tp2")),
        *(("native", "tp2"), ("bridge", "one rank")),
    ),
)
def test_a_critic_is_the_same_to_the_last_bit_alone_and_beside_an_actor(
    ranks: RankPool, model: str, backend: str, layout: str
) -> None:
    assert_same_bits_alone(ranks, model, NAMES, backend, layout)


def outputs_job(model: str, settings: Mapping[str, Any]) -> list[Mapping[str, list[Tensor]]]:
    """Outputs of a pass of actor, critic and reference, of a part of each, and of the critic alone."""
    with open_runtime(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, NAMES)
        train_tenants(runtime, base, tenants, 1)
        found = random_token_sequences((9, 20, 13), VOCAB_SIZE, 5)
        owners = (tenants["critic"].lora_id, tenants["narrow"].lora_id, -1)
        fields = [{LORA_FIELD: torch.tensor(owner)} for owner in owners]
        sequences = [row.with_fields(sequence_fields=field) for row, field in zip(found, fields, strict=True)]
        mixed = runtime.forward_backward(base, [pack(sequences[:1]), pack(sequences[1:])], None, forward_only=True)
        alone = runtime.forward_backward(tenants["critic"], [pack(found)], None, forward_only=True)
        parts = [mixed, mixed.tenants["critic"], mixed.tenants["narrow"], alone]
        return [{name: list(rows) for name, rows in part.outputs.items()} for part in parts]


@pytest.mark.parametrize("layout", ["one rank", "tp2", "cp2"])
def test_each_sequence_has_the_output_of_its_own_head(ranks: RankPool, model: str, layout: str) -> None:
    world_size, settings = NATIVE[layout]
    mixed, critic, actor, alone = ranks.run(outputs_job, model, settings, world_size=world_size)[0]
    assert mixed.keys() == {"log_probs", "values"} and critic.keys() == alone.keys() == {"values"}
    assert actor.keys() == {"log_probs"}
    # The vocabulary is not computed for rows of a critic, which would have log-probs there, and the other way round.
    assert [bool(rows.any()) for rows in mixed["log_probs"]] == [False, True, True]
    assert [bool(rows.any()) for rows in mixed["values"]] == [True, False, False]
    assert torch.equal(critic["values"][0], mixed["values"][0]) and torch.equal(actor["log_probs"][0], mixed["log_probs"][1])
    assert float((alone["values"][0] - critic["values"][0]).abs().max()) < 1e-6


def state_job(model: str, settings: Mapping[str, Any]) -> list[Mapping[str, Tensor]]:
    """Both moments of a critic after a step of actor and critic."""
    with open_runtime(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, NAMES)
        train_tenants(runtime, base, tenants, 1)
        state = runtime.get_optimizer_state(tenants["critic"])
        assert state.step == 1 and [each.step for each in runtime.list_optimizer_states(base)] == [1, 1]
        return [state.exp_avg, state.exp_avg_sq]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
def test_every_rank_gets_the_whole_state_of_an_optimizer(ranks: RankPool, model: str, layout: str) -> None:
    expected = ranks.run(state_job, model, {}, world_size=1)[0]
    world_size, settings = NATIVE[layout]
    for found in ranks.run(state_job, model, settings, world_size=world_size):
        for mine, other in zip(found, expected, strict=True):
            assert_near(mine, other)


def saved_job(model: str, path: str, settings: Mapping[str, Any], resumed: bool) -> list[Tensor]:
    """Four steps with a save after two; or, when ``resumed``, the last two, after loading it into a new tenant."""
    with open_runtime(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, ("critic",))
        if resumed:
            runtime.load_checkpoint(tenants["critic"], Path(path))
        else:
            train_tenants(runtime, base, tenants, 2)
            runtime.save_checkpoint(tenants["critic"], Path(path))
        train_tenants(runtime, base, tenants, 2, first=2)
        return rows(tenants["critic"])


def test_a_critic_is_saved_with_its_head_and_goes_on_in_another_layout(ranks: RankPool, model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "critic")
    without_stopping = ranks.run(saved_job, model, path, {"parallel": {"tp": 2}}, False, world_size=2)
    again = ranks.run(saved_job, model, path, {"parallel": {"tp": 2}}, True, world_size=2)
    for mine, other in zip(without_stopping, again, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, other, strict=True))
    for parallel in ({}, {"pp": 2}):
        found = ranks.run(saved_job, model, path, {"parallel": parallel}, True, world_size=2)
        assert [float(rank[3]) for rank in found] == [4.0, 4.0]
    with open_runtime(model) as runtime:
        actor = runtime.create_lora_adapter(runtime.build_model(trainable=False), CRITIC)
        with pytest.raises(CheckpointError, match="head"):
            runtime.load_checkpoint(actor, path)


def test_tenants_of_a_critic_have_a_head_of_their_own(model: str, tmp_path: Path) -> None:
    with open_runtime(model) as runtime:
        trained = runtime.build_model(head="values", optimizer=OptimizerConfig(lr=1e-1, weight_decay=0.0))
        batch = pack(random_token_sequences((9, 20), VOCAB_SIZE, 0), {"batch_num_tokens": 29.0, "dp_size": 1})
        runtime.forward_backward(trained, [batch], squared)
        runtime.optimizer_step(trained)
        runtime.save_checkpoint(trained, tmp_path / "critic", hf=True)
    with open_runtime(tmp_path / "critic") as runtime:
        base = runtime.build_model(trainable=False, head="values")
        with pytest.raises(ConfigError, match="head='log_probs'"):
            runtime.create_lora_adapter(base, CRITIC, head="log_probs")
        tenant = runtime.create_lora_adapter(base, CRITIC, OptimizerConfig(lr=1e-2))
        assert tenant.head == "values"
        before = runtime.forward_backward(base, [batch], None, forward_only=True).output("values")
        start = runtime.forward_backward(tenant, [batch], None, forward_only=True).output("values")
        assert all(float((one - other).abs().max()) < 1e-6 for one, other in zip(before, start, strict=True))
        runtime.forward_backward(tenant, [batch], squared)
        gradients = copied(runtime.export_gradients(tenant))
        factors = copied(runtime.export_lora_adapter(tenant))
        assert [decays for _, decays in tenant.rows.spans()] == [True, False]
        runtime.optimizer_step(tenant)
        fields = [{LORA_FIELD: torch.tensor(owner)} for owner in (tenant.lora_id, -1)]
        sequences = random_token_sequences((9, 20), VOCAB_SIZE, 0)
        both = pack([row.with_fields(sequence_fields=field) for row, field in zip(sequences, fields, strict=True)])
        mixed = runtime.forward_backward(base, [both], None, forward_only=True).output("values")
        assert float((mixed[0] - before[0]).abs().max()) > 1e-3
        assert float((mixed[1] - before[1]).abs().max()) < 1e-6
    with open_runtime(model) as runtime:
        critic = runtime.create_lora_adapter(runtime.build_model(trainable=False), CRITIC, head="values")
        runtime.import_lora_adapter(critic, factors)
        runtime.forward_backward(critic, [batch], squared)
        assert_near(copied(runtime.export_gradients(critic)), gradients)


def test_a_loss_of_a_critic_that_wants_log_probs_fails_alone(model: str) -> None:
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, NAMES)
        runs = train_tenants(runtime, base, {"narrow": tenants["narrow"]}, 1)
        fields = {LORA_FIELD: torch.tensor(tenants["critic"].lora_id)}
        row = random_token_sequences((9,), VOCAB_SIZE, 0)[0].with_fields(sequence_fields=fields)
        result = runtime.forward_backward(base, [pack([row])], {"critic": nll})
        assert "AssertionError" in result.tenants["critic"].error
        assert all(torch.equal(*pair) for pair in zip(runs["narrow"].state, rows(tenants["narrow"]), strict=True))
