"""Tenants made, listed, told apart, changed by an import and removed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import (
    BatchError,
    CheckpointError,
    ConfigError,
    HandleError,
    ModelOutput,
    OptimizerConfig,
    PackedBatch,
    UnsupportedError,
    WeightCheckError,
)
from rl_backend.contracts.lora import LORA_FIELD, PEFT_PREFIX, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime import checkpoints
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.tenants.state import problem_of_import
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import copied

CONFIG = LoRAConfig(rank=4, targets=("q_proj",))
QUERY = "model.layers.{}.self_attn.q_proj"
"""(128, 64): four heads of 32, from a hidden size of 64."""


def log_prob_loss(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    assert model_output.log_probs is not None
    return -model_output.log_probs.sum(), {}


def batch(*owners: int | None) -> PackedBatch:
    rows = random_token_sequences((5,) * len(owners), VOCAB_SIZE, 0)
    owned = [
        row if owner is None else row.with_fields(sequence_fields={LORA_FIELD: torch.tensor(owner)})
        for row, owner in zip(rows, owners, strict=True)
    ]
    return pack(owned)


def test_tenants_are_told_apart_by_names_and_numbers_that_are_not_used_again(model: Path) -> None:
    with open_runtime(model, optimizer=OptimizerConfig(lr=0.3)) as runtime:
        base, other = (runtime.build_model(trainable=False, name=name) for name in ("base", "other"))
        first = runtime.create_lora_adapter(base, CONFIG)
        named = runtime.create_lora_adapter(other, CONFIG, OptimizerConfig(lr=0.7), name="mine")
        second = runtime.create_lora_adapter(base, CONFIG, name="mine")
        assert [(each.name, each.lora_id, each.base) for each in (first, named, second)] == [
            ("tenant-0", 0, base),
            ("mine", 1, other),
            ("mine", 2, base),
        ]
        with pytest.raises(ConfigError, match=r"name='mine': 'base' has a tenant of this name; choose another one"):
            runtime.create_lora_adapter(base, CONFIG, name="mine")
        assert [(each.name, each.learning_rate) for each in runtime.list_lora_adapters(base)] == [
            ("tenant-0", 0.3),
            ("mine", 0.3),
        ]
        (info,) = runtime.list_lora_adapters(other)
        assert info.modules == (QUERY.format(0), QUERY.format(1)) and (info.config, info.head) == (CONFIG, "log_probs")
        assert (info.learning_rate, info.step, info.weight_version) == (0.7, 0, 0)
        # A, (4, 64), and B, (128, 4), of two layers; in memory both are padded to a rank of 16, four times.
        assert info.num_parameters == 2 * (4 * 64 + 128 * 4)
        assert info.bytes == 4 * 4 * 2 * (16 * 64 + 128 * 16)
        assert runtime.get_lora_adapter(named) == info and info.hf_path == str(model)
        assert sorted(info.shapes.values()) == [(4, 64), (4, 64), (128, 4), (128, 4)]
        runtime.remove_lora_adapter(second)
        assert [each.name for each in runtime.list_lora_adapters(base)] == ["tenant-0"]
        assert runtime.list_lora_adapters(other) == [info]
        calls: list[Any] = [runtime.remove_lora_adapter, runtime.zero_grad, runtime.export_lora_adapter]
        for call in calls:
            with pytest.raises(HandleError, match="handle 'mine' is closed or belongs to another runtime"):
                call(second)
        assert runtime.create_lora_adapter(base, CONFIG, name="mine").lora_id == 3
        of_tenants: list[Any] = [runtime.remove_lora_adapter, runtime.get_lora_adapter]
        for call in of_tenants:
            with pytest.raises(HandleError, match="'base' is no LoRA tenant"):
                call(base)


def test_a_tenant_whose_save_failed_stays_until_that_has_been_told(
    runtime: NativeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, written = threading.Event(), list[str]()

    def write(draft: Path, path: Path, *arguments: object) -> None:
        assert may_write.wait(20)
        if path.name == "bad":
            raise CheckpointError("disk full")
        written.append(path.name)

    monkeypatch.setattr(checkpoints, "write_training_state", write)
    base = runtime.build_model(trainable=False)
    good, bad = (runtime.create_lora_adapter(base, CONFIG, name=name) for name in ("good", "bad"))
    for tenant in (good, bad):
        runtime.save_checkpoint(tenant, tmp_path / tenant.name, asynchronous=True)
    threading.Timer(0.2, may_write.set).start()
    runtime.remove_lora_adapter(good)
    assert written == ["good"]
    with pytest.raises(CheckpointError, match="disk full"):
        runtime.remove_lora_adapter(bad)
    assert [each.name for each in runtime.list_lora_adapters(base)] == ["bad"]
    runtime.save_checkpoint(bad, tmp_path / "again", asynchronous=True)
    runtime.remove_lora_adapter(bad)
    assert written == ["good", "again"] and runtime.list_lora_adapters(base) == []
    runtime.close()


def test_heads_and_bases_that_cannot_have_tenants_are_refused(model: Path) -> None:
    with open_runtime(model) as runtime:
        base, critic = (runtime.build_model(trainable=False, head=head, name=head) for head in ("log_probs", "values"))
        for trained in (runtime.build_model(name="trained"), runtime.build_model(name="reference", forward_only=True)):
            with pytest.raises(
                HandleError, match=rf"create_lora_adapter on '{trained.name}', which is trained itself or has"
            ):
                runtime.create_lora_adapter(trained, CONFIG)
        with pytest.raises(ConfigError, match=r"head='rewards': expected one of 'log_probs', 'values'"):
            runtime.create_lora_adapter(base, CONFIG, head="rewards")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"head='log_probs': 'values' is a critic; build another base for policies"):
            runtime.create_lora_adapter(critic, CONFIG, head="log_probs")
        of_embedding = LoRAConfig(targets=("embedding",), use_dora=True)
        with pytest.raises(ConfigError, match=r"LoRAConfig\.targets='head': the model has none, or none that can be"):
            runtime.create_lora_adapter(critic, LoRAConfig(targets=("head",)))
        for each in (base, critic):
            with pytest.raises(UnsupportedError, match=r"LoRAConfig\.use_dora=True with model\.embed_tokens"):
                runtime.create_lora_adapter(each, of_embedding)
        assert runtime.create_lora_adapter(base, CONFIG).head == "log_probs"
        assert runtime.create_lora_adapter(critic, CONFIG).head == "values"
        assert runtime.create_lora_adapter(base, CONFIG, head="values").head == "values"


def test_a_critic_starts_with_the_head_of_its_base_and_has_it_in_place_of_the_language_models(model: Path) -> None:
    score = [f"{PEFT_PREFIX}score.weight", f"{PEFT_PREFIX}score.bias"]
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        critics = runtime.build_model(trainable=False, head="values")
        with torch.no_grad():
            for name, value in (("score.weight", 0.25), ("score.bias", -2.0)):
                key = next(key for key, stored in critics.weight_names.items() if stored == name)
                critics.parameters[key].fill_(value)
        for over, weight, bias in ((base, 0.0, 0.0), (critics, 0.25, -2.0)):
            tenant: Any = runtime.create_lora_adapter(over, CONFIG, head="values")
            factors = copied(runtime.export_lora_adapter(tenant))
            assert list(factors)[-2:] == score
            assert factors[score[0]].shape == (1, 64) and bool((factors[score[0]] == weight).all())
            assert factors[score[1]].tolist() == [bias]
            assert tenant.head_shapes == {"score.weight": (1, 64), "score.bias": (1,)}
            names = [info.name for info in tenant.weights]
            assert (
                names[-2:] == ["score.weight", "score.bias"]
                and "lm_head.weight" not in names
                and len(set(names)) == len(names)
            )
            assert [name for name, _ in runtime.export_weights(tenant)] == names
        # One whose head is that of its base has the weights of its base.
        plain = runtime.create_lora_adapter(base, CONFIG)
        assert plain.weights == base.weights and plain.head_shapes == {} and plain.in_float32 == base.in_float32


def test_an_export_of_a_tenant_has_the_names_asked_for_and_dtypes(model: Path) -> None:
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenant: Any = runtime.create_lora_adapter(base, CONFIG, head="values")
        wanted = ["score.bias", "model.norm.weight", f"{QUERY.format(1)}.weight"]
        found = dict(runtime.export_weights(tenant, names=wanted, dtype=torch.bfloat16))
        assert list(found) == [wanted[2], wanted[1], wanted[0]] or list(found) == [wanted[1], wanted[2], wanted[0]]
        assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
        assert [tensor.dtype for _, tensor in runtime.export_weights(tenant, names=["score.weight"])] == [torch.float32]
        with pytest.raises(ConfigError, match=r"export_weights: the model has no weights called x\.weight"):
            runtime.export_weights(tenant, names=["score.bias", "x.weight"])
        with pytest.raises(HandleError, match="export_gradients on 'tenant-0' without gradients; call"):
            runtime.export_gradients(tenant)
        actor: Any = runtime.create_lora_adapter(base, CONFIG)
        runtime.forward_backward(actor, [batch(None)], log_prob_loss)
        whole = copied(runtime.export_gradients(actor))
        name = f"{PEFT_PREFIX}{QUERY.format(1)}.lora_B.weight"
        some = copied(runtime.export_gradients(actor, names=[name]))
        assert len(whole) == 4 and list(some) == [name] and torch.equal(some[name], whole[name]) and whole[name].any()
        assert list(runtime.export_gradients(actor, names=[])) == []
        with pytest.raises(ConfigError, match=rf"export_gradients: the model has no weights called {QUERY.format(1)}"):
            runtime.export_gradients(actor, names=[f"{QUERY.format(1)}.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda given: None, ""),
        (lambda given: given.pop("a"), "a is missing, and 0 others"),
        (lambda given: [given.pop(name) for name in ("c", "b")], "b is missing, and 1 others"),
        (
            lambda given: given.update(y=torch.ones(1), x=torch.ones(1)),
            "x is no tensor of this adapter (rank and targets must",
        ),
        (lambda given: given.update(c=torch.ones(2, 1)), "c has shape (2, 1); expected (1, 2)"),
        (lambda given: given["b"].__setitem__(1, float("nan")), "b has values that are not finite"),
        (lambda given: given["c"].__setitem__((0, 1), float("-inf")), "c has values that are not finite"),
    ],
    ids=["good", "missing", "two missing", "unknown", "shape", "nan", "infinite"],
)
def test_what_is_wrong_with_an_adapter_is_said(change: Callable[[dict[str, Tensor]], object], message: str) -> None:
    shapes = {"a": (), "b": (3,), "c": (1, 2)}
    given = {name: torch.ones(shape) for name, shape in shapes.items()}
    change(given)
    found = problem_of_import(given, shapes)
    assert found.startswith(message) and bool(found) is bool(message)


def test_an_import_changes_all_or_nothing_and_counts_as_a_version(runtime: NativeRuntime) -> None:
    tenant: Any = runtime.create_lora_adapter(runtime.build_model(trainable=False), CONFIG, name="mine")
    before = copied(runtime.export_lora_adapter(tenant))
    given = {name: value + 1 for name, value in before.items()}
    last = list(given)[-1]
    with pytest.raises(
        WeightCheckError, match=r"import_lora_adapter into 'mine': .* has shape \(2, 2\); .*; nothing was changed"
    ):
        runtime.import_lora_adapter(tenant, {**given, last: torch.ones(2, 2)})
    after = copied(runtime.export_lora_adapter(tenant))
    assert all(torch.equal(after[name], value) for name, value in before.items()) and tenant.weight_version == 0
    runtime.import_lora_adapter(tenant, iter(given.items()))
    taken = copied(runtime.export_lora_adapter(tenant))
    assert all(torch.equal(taken[name], value) for name, value in given.items()) and tenant.weight_version == 1
    views = dict(runtime.export_lora_adapter(tenant, copy=False))
    copies = dict(runtime.export_lora_adapter(tenant))
    runtime.import_lora_adapter(tenant, before)
    assert torch.equal(views[last], before[last]) and torch.equal(copies[last], given[last]) and tenant.weight_version == 2


def test_a_pass_or_step_of_several_is_refused_with_the_name_of_the_one_that_does_not_fit(runtime: NativeRuntime) -> None:
    base = runtime.build_model(trainable=False, name="base")
    first, second = (runtime.create_lora_adapter(base, CONFIG, name=name) for name in ("first", "second"))
    foreign = runtime.create_lora_adapter(runtime.build_model(trainable=False), CONFIG, name="foreign")
    both = [batch(first.lora_id, second.lora_id)]
    refused: list[tuple[Any, Any, str]] = [
        (both, log_prob_loss, "one loss for the sequences of several tenants of 'base'; pass one for each, by name"),
        (
            both,
            {"first": log_prob_loss, "third": log_prob_loss},
            r"loss_fn has 'third', .* of 'base'; there are \['first', 'sec",
        ),
        (both, {"first": log_prob_loss, "foreign": log_prob_loss}, "loss_fn has 'foreign', which is no tenant of 'base'"),
        (both, {"first": log_prob_loss}, "loss_fn has no loss for 'second', whose sequences are in the data"),
        (
            [batch(foreign.lora_id)],
            {},
            rf"{foreign.lora_id} is no tenant of this model; there are 0 \(first\), 1 \(second\)",
        ),
        ([batch(None)], {"first": log_prob_loss}, "missing; it says whose a sequence is"),
    ]
    for data, losses, message in refused:
        with pytest.raises(BatchError, match=message):
            runtime.forward_backward(base, data, losses)
    with pytest.raises(HandleError, match="forward_backward with a backward pass on 'base', which is forward-only"):
        runtime.forward_backward(base, [batch(None)], log_prob_loss)
    for twice, handles in (("second", [first, second, second]), ("first", [first, second, first])):
        with pytest.raises(HandleError, match=rf"step of \[.*'{twice}'.*\] with None for adam; give each tenant once"):
            runtime.optimizer_step(handles)
    # What was refused before anything ran leaves gradients as they were: none, and none broken.
    result = runtime.forward_backward(base, both, {"first": log_prob_loss, "second": log_prob_loss})
    assert sorted(result.tenants) == ["first", "second"] and len(result.losses) == 1
    assert result.loss == pytest.approx(sum(part.loss for part in result.tenants.values()))
    second.rows.gradients[0] = float("inf")
    steps = runtime.optimizer_step([second, first])
    assert [step.ok for step in steps] == [False, True] and (first.weight_version, second.weight_version) == (1, 0)
    with runtime.eval_mode(first):  # type: ignore[arg-type]
        assert first.rows.training is False and second.rows.training is True
    assert first.rows.training is True


def test_a_loss_that_fails_breaks_its_tenant_alone_until_its_gradients_are_dropped(runtime: NativeRuntime) -> None:
    def failing(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        raise ValueError("no advantages")

    base = runtime.build_model(trainable=False)
    tenants: list[Any] = [runtime.create_lora_adapter(base, CONFIG, name=name) for name in ("good", "bad")]
    good, bad = tenants
    data, losses = [batch(bad.lora_id, good.lora_id)], {"good": log_prob_loss, "bad": failing}
    for forward_only in (True, False):
        result = runtime.forward_backward(base, data, losses, forward_only=forward_only)
        assert result.tenants["bad"].error == "ValueError: no advantages" and result.tenants["good"].error == ""
        assert good.broken == ""
        expected = "" if forward_only else "its loss raised ValueError: no advantages, so its gradients are incomplete"
        assert bad.broken == expected
    with pytest.raises(HandleError, match=r"optimizer_step on 'bad': its loss raised ValueError.*; call zero_grad first"):
        runtime.optimizer_step(bad)
    stepped, refused = runtime.optimizer_step([good, bad])
    assert stepped.ok and not refused.ok and "'bad': its loss raised ValueError" in refused.error
    runtime.zero_grad(bad)
    runtime.forward_backward(bad, [batch(None)], log_prob_loss)
    assert runtime.optimizer_step([bad])[0].ok
