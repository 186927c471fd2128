"""The atoms on a group of Ray actors with the native runtime, against a runtime in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from actors import HandleRef, Loss, RankContext, TrainGroup
from actors.train.outcome import RemoteTraceback
from rl_backend.contracts import (
    BatchError,
    HandleError,
    OperationOrderError,
    RuntimeConfig,
    StepResult,
    TokenSequence,
)
from rl_backend.data import pack_plan, plan_micro_batches, restore_order
from rl_backend.runtime import create_runtime
from tests.support.losses import ScaledLoss, nll_loss
from tests.support.sft_batches import random_token_sequences
from tests.support.tensordicts import tensordict_of

MAX_TOKENS = 48
LENGTHS = [7, 31, 2, 18, 24, 9, 40, 3, 12, 28]
NLL = Loss("tests.support.losses:nll_loss")

type Record = tuple[float, dict[str, float], list[torch.Tensor], StepResult, float, int]


@pytest.fixture(scope="module")
def config(train_config: RuntimeConfig) -> RuntimeConfig:
    return train_config


@pytest.fixture(scope="module")
def sequences() -> list[TokenSequence]:
    return random_token_sequences(LENGTHS, 128)


@pytest.fixture(scope="module", params=[pytest.param(1, id="1 rank", marks=pytest.mark.long), pytest.param(2, id="2 ranks")])
def group(request: pytest.FixtureRequest, ray_cluster: None, config: RuntimeConfig) -> Iterator[TrainGroup]:
    if request.param == 2:
        yield request.getfixturevalue("two_ranks")
    else:
        with TrainGroup(config) as train:
            yield train


@pytest.fixture(scope="module")
def policy(group: TrainGroup) -> HandleRef:
    """One model that all tests share; a test that needs known weights builds its own."""
    return group.build_model(name="policy")


@pytest.fixture(scope="module")
def in_process(config: RuntimeConfig, sequences: list[TokenSequence]) -> list[Record]:
    """Three training steps of a runtime in this process."""
    runtime = create_runtime(config)
    handle = runtime.build_model()
    plan = plan_micro_batches(LENGTHS, 1, MAX_TOKENS)
    (data,) = pack_plan(sequences, plan)
    records: list[Record] = []
    for _ in range(3):
        runtime.zero_grad(handle)
        with runtime.train_mode(handle):
            result = runtime.forward_backward(handle, data, nll_loss)
        log_probs = restore_order(plan, [result.output("log_probs")])
        step, lr = runtime.optimizer_step(handle), runtime.lr_scheduler_step(handle)
        records.append((result.loss, result.means, log_probs, step, lr, handle.weight_version))
    runtime.close()
    return records


def fail_in_loss(*arguments: object, **keywords: object) -> None:
    raise ValueError("this loss never works")


def exported(context: RankContext, ref: HandleRef) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in context.runtime.export_weights(context.handle(ref))}


def operation_number(context: RankContext) -> int:
    return context.operation


@pytest.mark.shows("actors: a training group's steps equal those of a runtime in one process")
def test_training_steps_equal_those_of_a_runtime_in_this_process(
    group: TrainGroup, sequences: list[TokenSequence], in_process: list[Record]
) -> None:
    model = group.build_model()
    assert model.data_parallel_size == group.num_ranks
    for loss, means, log_probs, step, lr, version in in_process:
        group.zero_grad(model)
        result = group.forward_backward(model, sequences, NLL, max_tokens_per_micro_batch=MAX_TOKENS)
        assert len(result.losses) > 1
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.means == pytest.approx(means, rel=1e-5)
        for ours, expected in zip(result.output("log_probs"), log_probs, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
        ok, grad_norm, _ = group.optimizer_step(model)
        assert ok
        assert grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
        assert group.lr_scheduler_step(model) == lr
        assert group.weight_version(model) == version


@pytest.mark.shows("actors: a number of sequences that the ranks do not divide trains as on one rank, however long they are")
@pytest.mark.parametrize("count", [1, 3])
def test_sequences_that_ranks_do_not_divide_train_as_on_one_rank(
    group: TrainGroup, config: RuntimeConfig, count: int
) -> None:
    long = random_token_sequences([40, 33, 36][:count], 128)
    runtime = create_runtime(config)
    alone = runtime.build_model()
    plan = plan_micro_batches([len(sequence) for sequence in long], 1, MAX_TOKENS)
    (data,) = pack_plan(long, plan)
    model = group.build_model()
    with runtime.train_mode(alone):
        expected = runtime.forward_backward(alone, data, nll_loss)
    result = group.forward_backward(model, long, NLL, max_tokens_per_micro_batch=MAX_TOKENS)
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.means == pytest.approx(expected.means, rel=1e-5)
    log_probs = restore_order(plan, [expected.output("log_probs")])
    for ours, theirs in zip(result.output("log_probs"), log_probs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert group.optimizer_step(model).grad_norm == pytest.approx(runtime.optimizer_step(alone).grad_norm, rel=1e-5)
    runtime.close()


def test_long_sequences_without_a_mask_that_ranks_do_not_divide_only_run_forward(
    group: TrainGroup, policy: HandleRef
) -> None:
    bare = [TokenSequence(sequence.input_ids) for sequence in random_token_sequences([40, 33, 36], 128)]
    outputs = group.forward(policy, bare, max_tokens_per_micro_batch=MAX_TOKENS).output("log_probs")
    assert [len(row) for row in outputs] == [40, 33, 36]
    if group.num_ranks > 1:
        for forward_only in (False, True):
            with pytest.raises(BatchError, match="make the number of sequences a multiple of the data-parallel size"):
                group.forward_backward(policy, bare, NLL, forward_only=forward_only, max_tokens_per_micro_batch=MAX_TOKENS)


def test_a_tensordict_gives_what_a_list_gives(group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]) -> None:
    meta = {"calculate_entropy": True, "temperature": 0.7}
    from_list = group.forward(policy, sequences, meta=meta)
    from_tensordict = group.forward(policy, tensordict_of(sequences), meta=meta)
    assert sorted(from_list.outputs) == ["entropy", "log_probs"]
    for name, rows in from_list.outputs.items():
        assert [len(row) for row in rows] == LENGTHS
        for ours, theirs in zip(rows, from_tensordict.output(name), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.shows("actors: outputs come back in the caller's order, from a list or a TensorDict")
def test_outputs_follow_the_callers_order(group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]) -> None:
    forwards = group.forward(policy, sequences).output("log_probs")
    backwards = group.forward(policy, sequences[::-1]).output("log_probs")
    for one, other in zip(forwards, reversed(backwards), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_submitted_operations_run_in_order_and_results_are_read_later(
    group: TrainGroup, sequences: list[TokenSequence], in_process: list[Record]
) -> None:
    model = group.build_model()
    futures = []
    for _ in range(2):
        group.zero_grad.submit(model)
        forward = group.forward_backward.submit(model, sequences, NLL, max_tokens_per_micro_batch=MAX_TOKENS)
        futures.append((forward, group.optimizer_step.submit(model), group.lr_scheduler_step.submit(model)))
    for (forward, step, lr), record in zip(reversed(futures), reversed(in_process[:2]), strict=True):
        assert lr.result() == record[4]
        assert step.result().grad_norm == pytest.approx(record[3].grad_norm, rel=1e-5)
        assert forward.result().loss == pytest.approx(record[0], rel=1e-5)
        assert forward.done()


def test_a_result_that_takes_too_long_can_be_asked_for_again(group: TrainGroup) -> None:
    def slow(context: RankContext) -> int:
        import time

        time.sleep(0.5)
        return context.rank

    future = group.submit_on_ranks(slow)
    with pytest.raises(TimeoutError, match=r"run_on_ranks.*not done after 0.05 s"):
        future.result(timeout=0.05)
    assert future.result(timeout=30) == list(range(group.num_ranks))


def test_a_loss_may_be_a_name_a_function_or_a_closure(
    group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]
) -> None:
    factor = 3.0
    by_name = group.forward_backward(policy, sequences, Loss("tests.support.losses:nll_loss", scale=3.0)).loss
    by_function = group.forward_backward(policy, sequences, nll_loss).loss
    by_closure = group.forward_backward(
        policy, sequences, lambda model_output, data, dp_group=None: nll_loss(model_output, data, scale=factor)
    ).loss
    group.zero_grad(policy)
    assert by_name == by_closure == pytest.approx(3.0 * by_function, rel=1e-6)


def test_a_loss_whose_state_changed_is_sent_again(
    group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]
) -> None:
    loss = ScaledLoss(1.0)
    before = group.forward_backward(policy, sequences, loss, forward_only=True).loss
    loss.scale = 2.0
    after = group.forward_backward(policy, sequences, loss, forward_only=True).loss
    assert after == pytest.approx(2 * before, rel=1e-6)


def test_losses_beyond_those_kept_still_work(group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]) -> None:
    losses = [ScaledLoss(float(scale)) for scale in range(1, 20)]
    found = [group.forward_backward(policy, sequences, loss, forward_only=True).loss for loss in [*losses, losses[0]]]
    assert found == pytest.approx([found[0] * scale for scale in [*range(1, 20), 1]], rel=1e-5)


def test_a_checkpoint_restores_weights_version_and_what_follows(
    group: TrainGroup, sequences: list[TokenSequence], tmp_path: Path
) -> None:
    def step(model: HandleRef) -> float:
        group.zero_grad(model)
        loss = group.forward_backward(model, sequences, NLL).loss
        assert group.optimizer_step(model).ok
        return loss

    first, second = group.build_model(), group.build_model()
    step(first)
    group.save_checkpoint(first, tmp_path / "step-1")
    group.wait_for_checkpoint(first)
    after = [step(first), step(first)]
    group.load_checkpoint(second, tmp_path / "step-1")
    assert group.weight_version(second) == 1
    assert [step(second), step(second)] == after


def test_parameters_offloaded_to_the_host_come_back(
    group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]
) -> None:
    before = group.forward(policy, sequences).output("log_probs")
    group.to(policy, "cpu")
    group.to(policy, "device")
    for one, other in zip(group.forward(policy, sequences).output("log_probs"), before, strict=True):
        assert torch.equal(one, other)


def test_every_rank_runs_a_function_and_answers_in_order(group: TrainGroup, policy: HandleRef) -> None:
    def facts(context: RankContext, ref: HandleRef, *, word: str) -> tuple[int, int, str, str, int]:
        return context.rank, context.world_size, word, context.handle(ref).name, torch.get_num_threads()

    expected = [(rank, group.num_ranks, "hello", "policy", 1) for rank in range(group.num_ranks)]
    assert group.run_on_ranks(facts, policy, word="hello") == expected


def test_what_a_function_keeps_in_its_rank_is_there_for_the_next(group: TrainGroup) -> None:
    def put(context: RankContext, value: int) -> None:
        context.state["kept"] = value + context.rank

    def take(context: RankContext) -> int:
        return int(context.state.pop("kept"))

    group.run_on_ranks(put, 10)
    assert group.run_on_ranks(take) == [10 + rank for rank in range(group.num_ranks)]


def test_every_rank_exports_the_same_weights(group: TrainGroup, policy: HandleRef) -> None:
    first, *others = group.run_on_ranks(exported, policy)
    assert "model.embed_tokens.weight" in first
    for other in others:
        assert list(other) == list(first)
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())


def test_data_that_cannot_run_is_refused_before_any_rank_sees_it(
    group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]
) -> None:
    masked = sequences[0].with_fields({"loss_mask": torch.ones(len(sequences[0]))})
    (before, *_) = group.run_on_ranks(operation_number)
    for data, message in (
        ([], "no sequences"),
        ([*sequences, TokenSequence(torch.arange(4))], "sequence 10 lacks"),
        ([masked, *sequences], "loss_mask of sequence 0"),
        ([TokenSequence(torch.arange(65))] * 2, "sequence 0 has 65 tokens, more than the budget of 64"),
    ):
        with pytest.raises(BatchError, match=message):
            group.forward_backward(policy, data, NLL)
    with pytest.raises(BatchError, match="loss=None"):
        group.forward_backward(policy, sequences, None)
    with pytest.raises(BatchError, match="max_tokens_per_micro_batch=65 is more than the configuration's 64"):
        group.forward_backward(policy, sequences, NLL, max_tokens_per_micro_batch=65)
    assert group.run_on_ranks(operation_number)[0] == before + 1


def test_a_forward_only_model_gives_log_probs_and_refuses_to_train(
    group: TrainGroup, sequences: list[TokenSequence], in_process: list[Record]
) -> None:
    reference = group.build_model(forward_only=True, name="reference")
    for ours, expected in zip(group.forward(reference, sequences).output("log_probs"), in_process[0][2], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(HandleError, match="'reference', which is forward-only"):
        group.forward_backward(reference, sequences, NLL)
    with pytest.raises(HandleError, match="reference") as raised:
        group.optimizer_step(reference)
    assert raised.value.details["failed_ranks"] == list(range(group.num_ranks))


def test_after_a_refusal_on_the_ranks_training_goes_on_as_if_nothing_had_happened(
    group: TrainGroup, sequences: list[TokenSequence], in_process: list[Record]
) -> None:
    model = group.build_model()
    ids = sequences[-1].input_ids.clone()
    ids[3] = 128
    outside = [*sequences[:-1], TokenSequence(ids, sequences[-1].token_fields)]
    with pytest.raises(BatchError, match="token 128; the vocabulary has 128 tokens") as raised:
        group.forward_backward(model, outside, NLL)
    assert type(raised.value) is BatchError
    assert isinstance(raised.value.__cause__, RemoteTraceback)
    assert "check_micro_batches" in raised.value.details["remote_traceback"]
    with pytest.raises(ValueError, match="this loss never works") as wrong_loss:
        group.forward_backward(model, sequences, fail_in_loss)
    assert type(wrong_loss.value) is ValueError
    assert "fail_in_loss" in str(wrong_loss.value.__cause__)
    with pytest.raises(HandleError, match="call zero_grad first"):
        group.optimizer_step(model)
    for loss, _, _, step, _, _ in in_process[:2]:
        group.zero_grad(model)
        assert group.forward_backward(model, sequences, NLL).loss == pytest.approx(loss, rel=1e-5)
        assert group.optimizer_step(model).grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
        group.lr_scheduler_step(model)


def test_what_was_submitted_behind_a_failure_does_not_run(
    group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]
) -> None:
    version = group.weight_version(policy)
    group.zero_grad(policy)
    failing = group.forward_backward.submit(policy, sequences, fail_in_loss)
    behind = group.optimizer_step.submit(policy)
    with pytest.raises(OperationOrderError, match=r"optimizer_step.*was not run.*this loss never works"):
        behind.result()
    with pytest.raises(ValueError, match="this loss never works"):
        failing.result()
    assert group.weight_version(policy) == version
    group.zero_grad(policy)


def test_what_another_thread_submits_runs_behind_a_failure(
    group: TrainGroup, policy: HandleRef, sequences: list[TokenSequence]
) -> None:
    failing = group.forward_backward.submit(policy, sequences, fail_in_loss)
    with ThreadPoolExecutor(1) as other:
        result = other.submit(group.forward, policy, sequences).result()
    assert [len(row) for row in result.output("log_probs")] == LENGTHS
    with pytest.raises(OperationOrderError, match=r"zero_grad.*was not run.*this loss never works"):
        group.zero_grad(policy)
    with pytest.raises(ValueError, match="this loss never works"):
        failing.result()
    group.zero_grad(policy)


def test_a_model_of_another_group_is_refused(group: TrainGroup, policy: HandleRef) -> None:
    from dataclasses import replace

    with pytest.raises(HandleError, match="'policy' belongs to another training group"):
        group.zero_grad(replace(policy, group_id="another"))
