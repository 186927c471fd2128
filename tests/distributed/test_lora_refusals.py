"""A pass that tenants cannot have is refused on every rank, before anything has run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import BatchError, CheckpointError, HandleError, MetricValue, ModelOutput, PackedBatch
from rl_backend.contracts.lora import LORA_FIELD
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.rank_pool import RankPool
from tests.support.tenants import batches, create, nll, rows

NAMES = ("narrow", "middle")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3"))


def without(batch: PackedBatch, lora_id: int) -> PackedBatch:
    """The sequences of all tenants but one."""
    chosen = (batch.sequence_fields[LORA_FIELD] != lora_id).nonzero()[:, 0]
    starts = batch.cu_seqlens.tolist()
    rows = torch.cat([torch.arange(starts[each], starts[each + 1]) for each in chosen.tolist()])
    fields = {LORA_FIELD: batch.sequence_fields[LORA_FIELD][chosen]}
    return PackedBatch(batch.input_ids[rows], batch.seq_lens[chosen], {}, fields, batch.meta)


def refusals_job(model: str) -> tuple[list[str], list[Tensor], list[Tensor]]:
    """What this rank hears about data that only the last rank has wrong, and the tenant with and without these."""
    states, problems = [], []
    for refused in (False, True):
        with open_runtime(model) as runtime:
            base = runtime.build_model(trainable=False)
            tenants = create(runtime, base, NAMES, dropout=0.1)
            losses = dict.fromkeys(tenants, nll)
            narrow, middle = tenants["narrow"], tenants["middle"]
            data = batches(tenants, 0, base.data_parallel_rank, base.data_parallel_size)

            def wrong(data: list[PackedBatch] = data, narrow: Any = narrow, middle: Any = middle) -> Mapping[str, Any]:
                bad_token, nobodys = (
                    PackedBatch(
                        each.input_ids.clone(),
                        each.seq_lens,
                        {},
                        {LORA_FIELD: each.sequence_fields[LORA_FIELD].clone()},
                        each.meta,
                    )
                    for each in data
                )
                bad_token.input_ids[0] = VOCAB_SIZE
                nobodys.sequence_fields[LORA_FIELD][0] = 99
                no_field = PackedBatch(data[0].input_ids, data[0].seq_lens, {}, {}, data[0].meta)
                return {
                    "token": [bad_token, data[1]],
                    "nobody's": [data[0], nobodys],
                    "no field": [data[0], no_field],
                    "no fields at all": [no_field, no_field],
                    "a tenant less": [without(each, middle.lora_id) for each in data],
                }

            runtime.forward_backward(base, data, losses)
            last = dist.get_rank() == dist.get_world_size() - 1
            for bad in wrong().values() if refused else ():
                with pytest.raises(BatchError) as raised:
                    runtime.forward_backward(base, bad if last else data, losses)
                problems.append(str(raised.value))
            for bad in (wrong()["token"], data) if refused else ():
                with pytest.raises(BatchError) as raised:
                    runtime.forward_backward(narrow, bad, nll)
                problems.append(str(raised.value))
            runtime.forward_backward(base, data, losses)
            runtime.optimizer_step([narrow, middle])
            states.append(rows(narrow))
    return problems, *states


def test_refused_data_leaves_gradients_and_dropout_as_they_were_on_every_rank(ranks: RankPool, model: str) -> None:
    (heard, *_), (mine, *_) = found = ranks.run(refusals_job, model)
    assert heard[:4] == ["rank 1 refused its micro-batches; nothing ran on any rank"] * 4
    for problem, part in zip(mine[:4], ("vocabulary has", "99 is no tenant", "missing", "missing"), strict=True):
        assert part in problem
    assert all("LoRA tenants with a loss differ between ranks" in each[4] for each in (heard, mine))
    assert all("sequence field 'lora': 1 in a pass of 0 (narrow)" in each[6] for each in (heard, mine))
    for _, undisturbed, disturbed in found:
        assert all(torch.equal(*pair) for pair in zip(undisturbed, disturbed, strict=True))


def half_failing_job(model: str, forward_only: bool) -> tuple[tuple[float, ...], Mapping[str, Any], str, list[str]]:
    """A loss that fails on one rank, in its second micro-batch."""
    calls = 0

    def fails_later(
        model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor, Mapping[str, MetricValue]]:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 0:
            raise ValueError("only here")
        return nll(model_output, data, dp_group)

    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, NAMES)
        data = batches(tenants, 0, base.data_parallel_rank, base.data_parallel_size)
        losses = {"narrow": nll, "middle": fails_later}
        result = runtime.forward_backward(base, data, losses, forward_only=forward_only)
        failed, fine = result.tenants["middle"], result.tenants["narrow"]
        assert len(fine.losses) == 2 and not fine.error
        if forward_only:
            # There are no gradients that could be incomplete.
            assert runtime.forward_backward(base, data, dict.fromkeys(tenants, nll)).tenants["middle"].error == ""
            assert all(step.ok for step in runtime.optimizer_step(list(tenants.values())))
            return failed.losses, failed.metrics, failed.error, []
        with pytest.raises(HandleError) as raised:
            runtime.optimizer_step([tenants["narrow"]] * 2)
        refused = [str(raised.value)]
        stepped, unable = runtime.optimizer_step([tenants["narrow"], tenants["middle"]])
        assert stepped.ok and not unable.ok
        refused.append(unable.error)
        runtime.to(tenants["narrow"], "cpu")
        with pytest.raises(HandleError) as raised:
            runtime.forward_backward(base, data, None, forward_only=True)
        refused.append(str(raised.value))
        return failed.losses, failed.metrics, failed.error, refused


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_loss_that_fails_on_one_rank_has_no_results_on_any(ranks: RankPool, model: str, forward_only: bool) -> None:
    for rank, (losses, metrics, error, refused) in enumerate(ranks.run(half_failing_job, model, forward_only)):
        assert (losses, metrics) == ((), {})
        assert error == ("its loss failed on another rank" if rank else "ValueError: only here")
        if forward_only:
            continue
        assert "give each tenant once" in refused[0]
        assert "its loss raised" in refused[1]
        assert "narrow" in refused[2] and "model" in refused[2]


def looking_job(model: str) -> Mapping[str, str]:
    """A forward-only pass with the loss of one tenant, beside sequences of another that the last rank does not have."""
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = create(runtime, base, NAMES)
        narrow, middle = tenants.values()
        data = batches({"middle": middle, "narrow": narrow}, 0, base.data_parallel_rank, base.data_parallel_size)
        last = dist.get_rank() == dist.get_world_size() - 1

        def fails_first(*arguments: Any) -> tuple[Tensor, Mapping[str, MetricValue]]:
            if not last:
                raise ValueError("only here")
            return nll(*arguments)

        mine = [without(each, narrow.lora_id) for each in data] if last else data
        result = runtime.forward_backward(base, mine, {"middle": fails_first}, forward_only=True)
        return {name: each.error for name, each in result.tenants.items()}


def test_sequences_without_a_loss_may_be_on_one_rank_alone(ranks: RankPool, model: str) -> None:
    first, last = ranks.run(looking_job, model)
    assert first == {"narrow": "", "middle": "ValueError: only here"}
    assert last == {"middle": "its loss failed on another rank"}


def no_memory_job(model: str) -> tuple[str, list[str], list[int]]:
    """What this rank hears when the last rank has no memory for a tenant, and which tenants it has then and later."""
    with open_runtime(model) as runtime, pytest.MonkeyPatch.context() as patch:
        base = runtime.build_model(trainable=False)
        if dist.get_rank() == dist.get_world_size() - 1:

            def fails(*arguments: object) -> None:
                raise torch.OutOfMemoryError("no room")

            patch.setattr("rl_backend.lora.rows.TenantRows.new", fails)
        with pytest.raises(HandleError) as raised:
            create(runtime, base, ("narrow",))
        names = [each.name for each in runtime.list_lora_adapters(base)]
        patch.undo()
        made = create(runtime, base, ("middle", "narrow"))
        return str(raised.value), names, [tenant.lora_id for tenant in made.values()]


def test_a_tenant_that_one_rank_has_no_memory_for_is_made_on_none(ranks: RankPool, model: str) -> None:
    for heard, names, numbers in ranks.run(no_memory_job, model):
        assert heard == "the adapter 'narrow' could not be made: OutOfMemoryError: no room (on rank 1)"
        assert (names, numbers) == ([], [0, 1])


def lost_base_job(model: str, path: str) -> str:
    """What this rank hears of a save after the base's files have gone from the first rank's disk."""
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenant = create(runtime, base, ("narrow",))["narrow"]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(model)
        with pytest.raises(CheckpointError) as raised:
            runtime.save_checkpoint(tenant, Path(path))
        runtime.zero_grad(tenant)
        return str(raised.value)


def test_a_base_that_one_rank_cannot_read_ends_a_save_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny("qwen3", tmp_path / "model")
    first, second = ranks.run(lost_base_job, str(model), str(tmp_path / "saved"))
    assert first == second and "config.json cannot be read" in first
    assert not (tmp_path / "saved").exists()
