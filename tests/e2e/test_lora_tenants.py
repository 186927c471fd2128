"""LoRA tenants of a training group: one pass for several, passes from threads, checkpoints, adapters out and in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch

from actors import HandleRef, Loss, TrainGroup
from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import (
    BatchError,
    HandleError,
    OperationOrderError,
    OptimizerConfig,
    TokenSequence,
)
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from tests.support.sft_batches import random_token_sequences

NLL = Loss("tests.support.losses:nll_loss")
CONFIGS = {
    "attention": LoRAConfig(rank=4, alpha=8.0, targets=("attention",)),
    "everything": LoRAConfig(rank=16, seed=1),
    "wide": LoRAConfig(rank=32, targets=("feed_forward",), seed=2),
}
RATES = {"attention": 1e-2, "everything": 1e-3, "wide": 3e-3}
LENGTHS = {"attention": [12, 20, 9, 31], "everything": [25, 14, 40, 8, 16, 30], "wide": [33, 21]}
STEPS = 3


@pytest.fixture(scope="module")
def group(two_ranks: TrainGroup) -> TrainGroup:
    return two_ranks


@pytest.fixture(scope="module")
def base(group: TrainGroup) -> HandleRef:
    return group.build_model(trainable=False)


def create(group: TrainGroup, base: HandleRef, kind: str) -> dict[str, HandleRef]:
    return {
        name: group.create_lora_adapter(base, config, OptimizerConfig(lr=RATES[name]), name=f"{name} {kind}")
        for name, config in CONFIGS.items()
    }


def rows(name: str, step: int, lora_id: int | None = None) -> list[TokenSequence]:
    found: Sequence[TokenSequence] = random_token_sequences(LENGTHS[name], 128, 10 * step + len(name))
    if lora_id is None:
        return list(found)
    return [row.with_fields(sequence_fields={LORA_FIELD: torch.tensor(lora_id)}) for row in found]


def train_alone(group: TrainGroup, tenant: HandleRef, name: str) -> list[float]:
    losses = []
    for step in range(STEPS):
        group.zero_grad(tenant)
        losses.append(group.forward_backward(tenant, rows(name, step), NLL).loss)
        assert group.optimizer_step(tenant).ok
        group.lr_scheduler_step(tenant)
    return losses


@pytest.mark.shows("lora: tenants in one pass of a group train as each does alone, bit for bit")
def test_one_pass_for_several_is_a_pass_for_each(group: TrainGroup, base: HandleRef) -> None:
    together, alone = create(group, base, "together"), create(group, base, "alone")
    losses: dict[str, list[float]] = {name: [] for name in together}
    for step in range(STEPS):
        mixed = [row for name, tenant in together.items() for row in rows(name, step, tenant.lora_id)]
        mixed += rows("wide", step, -1)
        group.zero_grad(list(together.values()))
        result = group.forward_backward(base, mixed, {tenant.name: NLL for tenant in together.values()})
        assert len(result.output("log_probs")) == len(mixed)
        for name, tenant in together.items():
            losses[name].append(result.tenants[tenant.name].loss)
            assert [len(each) for each in result.tenants[tenant.name].output("log_probs")] == LENGTHS[name]
        assert all(each.ok for each in group.optimizer_step(list(together.values())))
        rates = group.lr_scheduler_step(list(together.values()))
        assert rates == [RATES[name] for name in together]
    for name, tenant in alone.items():
        assert train_alone(group, tenant, name) == losses[name]
        expected, found = group.export_lora_adapter(tenant), group.export_lora_adapter(together[name])
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.shows("lora: users on threads of one driver train tenants of one base without touching each other")
def test_threads_of_one_driver_train_tenants_of_one_base(group: TrainGroup, base: HandleRef, tmp_path: Path) -> None:
    first, second = create(group, base, "of threads"), create(group, base, "in turn")
    found: dict[str, list[float]] = {}

    def use(name: str) -> None:
        found[name] = train_alone(group, first[name], name)

    users = [threading.Thread(target=use, args=(name,)) for name in first]
    for user in users:
        user.start()
    for user in users:
        user.join()
    for name, tenant in second.items():
        assert train_alone(group, tenant, name) == found[name]
    kept = group.export_lora_adapter(first["wide"])
    group.save_checkpoint(first["wide"], tmp_path / "tenant")
    train_alone(group, first["wide"], "wide")
    assert group.load_checkpoint(first["wide"], tmp_path / "tenant") == {}
    assert all(torch.equal(value, kept[key]) for key, value in group.export_lora_adapter(first["wide"]).items())
    assert group.weight_version(first["wide"]) == STEPS
    group.import_lora_adapter(second["wide"], {name: value * 2 for name, value in kept.items()})
    doubled = group.export_lora_adapter(second["wide"])
    write_peft_directory(tmp_path / "adapter", kept.items(), CONFIGS["wide"], "base")
    group.import_lora_adapter(second["wide"], tmp_path / "adapter")
    assert all(torch.equal(value, kept[key]) for key, value in group.export_lora_adapter(second["wide"]).items())
    assert not any(torch.equal(value, kept[key]) for key, value in doubled.items())
    infos = {info.name: info for info in group.list_lora_adapters(base)}
    assert infos["wide of threads"].step == STEPS and infos["wide of threads"].config == CONFIGS["wide"]


def fails(*arguments: object, **options: object) -> None:
    raise ArithmeticError("no loss of this user works")


@pytest.mark.shows("lora: operations of one user that fail end no run of another on a thread of its own")
def test_a_user_whose_operations_fail_stops_no_other(group: TrainGroup, base: HandleRef) -> None:
    users, alone = create(group, base, "beside failures"), create(group, base, "without failures")
    failing = group.create_lora_adapter(base, CONFIGS["attention"], name="fails")
    done = threading.Event()

    def fail() -> int:
        failed = 0
        while not done.is_set() or failed < 3:
            # Behind the pass others submit theirs, before this thread has read its failure.
            behind = [group.forward_backward.submit(failing, rows("wide", 0), fails), group.optimizer_step.submit(failing)]
            for future, kind in zip(behind, (ArithmeticError, OperationOrderError), strict=True):
                with pytest.raises(kind, match="no loss of this user works"):
                    future.result()
            group.zero_grad(failing)
            failed += 1
        return failed

    with ThreadPoolExecutor(len(users) + 1) as threads:
        failures = threads.submit(fail)
        runs = {name: threads.submit(train_alone, group, tenant, name) for name, tenant in users.items()}
        wait(runs.values())
        done.set()
        assert failures.result() >= 3
    for name, tenant in alone.items():
        assert train_alone(group, tenant, name) == runs[name].result()


def test_what_cannot_be_run_is_refused_before_any_rank_has_seen_it(group: TrainGroup, base: HandleRef) -> None:
    tenant = group.create_lora_adapter(base, LoRAConfig(rank=8), name="removed")
    with pytest.raises(HandleError, match="forward-only"):
        group.forward_backward(base, rows("wide", 0), NLL)
    with pytest.raises(BatchError, match="'other', which is no tenant"):
        group.forward_backward(base, rows("wide", 0, tenant.lora_id), {"other": NLL})
    group.remove_lora_adapter(tenant)
    with pytest.raises(HandleError, match="was not built by this training group"):
        group.zero_grad(tenant)
