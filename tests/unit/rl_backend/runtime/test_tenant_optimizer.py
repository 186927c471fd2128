"""Steps of a tenant under every option of its optimizer are torch's AdamW with rates and decays worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import HandleError, OptimizerConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.lora.rows import Section
from rl_backend.runtime.adaptable import RowGroups, SumGroups
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.tenants.handle import TenantHandle, TenantOptimizer
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import copied, nll

STEPS = 7
LORA = LoRAConfig(rank=4, alpha=40.0, targets=("q_proj", "down_proj"), use_dora=True)


class Case(NamedTuple):
    """Attributes:
    options: of the optimizer.
    rate, decay: of a step, counted from 0.
    """

    options: Mapping[str, Any]
    rate: Callable[[int], float]
    decay: Callable[[int], float]


def cosine(step: int, last: int) -> float:
    """Falls from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * min(step / last, 1.0)))


CASES = {
    "warm-up, linear, more and more decay": Case(
        {
            "lr": 0.02,
            "min_lr": 0.002,
            "lr_warmup_steps": 2,
            "lr_warmup_init": 0.004,
            "lr_decay_style": "linear",
            "total_training_steps": 6,
            "weight_decay": 5.0,
            "weight_decay_start": 1.0,
            "weight_decay_incr_style": "linear",
            "betas": (0.6, 0.7),
            "clip_grad": 0.3,
        },
        lambda step: 0.004 + 0.016 * step / 2 if step <= 2 else 0.002 + 0.018 * max(1 - (step - 2) / 4, 0.0),
        lambda step: 1.0 + 4.0 * min(step / 6, 1.0),
    ),
    "cosine, decay by a cosine, a large epsilon, no clipping": Case(
        {
            "lr": 0.03,
            "lr_decay_style": "cosine",
            "lr_decay_steps": 5,
            "total_training_steps": 8,
            "weight_decay": 3.0,
            "weight_decay_start": 0.0,
            "weight_decay_incr_style": "cosine",
            "eps": 1e-2,
            "clip_grad": 0.0,
        },
        lambda step: 0.03 * cosine(step, 5),
        lambda step: 3.0 * (1.0 - cosine(step, 8)),
    ),
    "a final decay, no weight decay": Case(
        {
            "lr": 0.01,
            "lr_decay_style": "WSD",
            "lr_wsd_decay_style": "linear",
            "lr_wsd_decay_steps": 4,
            "total_training_steps": 6,
            "lr_warmup_steps_ratio": 0.34,
            "weight_decay": 0.0,
            "clip_grad": 2.0,
        },
        lambda step: 0.01 * (step / 2 if step <= 2 else max(min((6 - step) / 4, 1.0), 0.0)),
        lambda step: 0.0,
    ),
}


def updated(runtime: NativeRuntime, tenant: TenantHandle, step: int) -> tuple[dict[str, Tensor], Any]:
    """Gradients of a step, and what it says; the tenant has taken it."""
    batch = pack(random_token_sequences((9, 14), VOCAB_SIZE, step), {"batch_num_tokens": 2.0, "dp_size": 1})
    runtime.zero_grad(tenant)
    runtime.forward_backward(tenant, [batch], nll)
    gradients = copied(runtime.export_gradients(tenant))
    result = runtime.optimizer_step(tenant)
    runtime.lr_scheduler_step(tenant)
    return gradients, result


def prepared(runtime: NativeRuntime, base: NativeHandle, optimizer: OptimizerConfig | None) -> TenantHandle:
    """A tenant whose factors are far from 0, so that decay shows."""
    tenant = runtime.create_lora_adapter(base, LORA, optimizer)
    generator = torch.Generator().manual_seed(3)
    factors = copied(runtime.export_lora_adapter(tenant))
    runtime.import_lora_adapter(
        tenant, {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in factors.items()}
    )
    return tenant


@pytest.mark.shows(
    "lora: schedules, decay, betas, epsilon and clipping of a tenant are torch's, and go on after a checkpoint"
)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_torch_and_go_on_after_a_checkpoint(model: Path, tmp_path: Path, case: str) -> None:
    options, rate, decay = CASES[case]
    config = OptimizerConfig(log_num_zeros_in_grad=True, **options)
    reference: dict[str, torch.nn.Parameter] = {}
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenant = prepared(runtime, base, config)
        reference = {name: torch.nn.Parameter(value) for name, value in copied(runtime.export_lora_adapter(tenant)).items()}
        matrices = [value for value in reference.values() if value.dim() > 1]
        vectors = [value for value in reference.values() if value.dim() == 1]
        assert vectors, "magnitudes of DoRA, which do not decay"
        adamw = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors}],
            betas=options.get("betas", (0.9, 0.999)),
            eps=options.get("eps", 1e-8),
        )
        for step in range(STEPS):
            if step == 4:
                runtime.save_checkpoint(tenant, tmp_path / "saved")
                tenant = runtime.create_lora_adapter(base, LORA, config, name="again")
                runtime.load_checkpoint(tenant, tmp_path / "saved")
            assert next(each for each in runtime.list_lora_adapters(base) if each.name == tenant.name).learning_rate == (
                pytest.approx(rate(step), abs=1e-9)
            )
            gradients, result = updated(runtime, tenant, step)
            for name, parameter in reference.items():
                parameter.grad = gradients[name]
            clip = options["clip_grad"] or math.inf
            norm = torch.nn.utils.clip_grad_norm_(reference.values(), clip)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
            assert result.num_zeros == sum(int((value == 0).sum()) for value in gradients.values())
            assert clip > 1 or norm > clip, "gradients are clipped"
            for group, share in zip(adamw.param_groups, (decay(step), 0.0), strict=True):
                group["lr"], group["weight_decay"] = rate(step), share
            adamw.step()
            found = dict(runtime.export_lora_adapter(tenant))
            for name, parameter in reference.items():
                torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=f"{name}, step {step}")


def test_a_tenant_without_an_optimizer_of_its_own_has_that_of_the_configuration(model: Path) -> None:
    given = OptimizerConfig(lr=0.02, betas=(0.5, 0.6), eps=1e-3, weight_decay=2.0, clip_grad=0.1)
    after = []
    with open_runtime(model, optimizer=given) as runtime:
        base = runtime.build_model(trainable=False)
        for optimizer in (None, given, OptimizerConfig()):
            tenant = prepared(runtime, base, optimizer)
            for step in range(2):
                updated(runtime, tenant, step)
            after.append(torch.cat([value.flatten() for _, value in runtime.export_lora_adapter(tenant)]))
    assert torch.equal(after[0], after[1]) and not torch.allclose(after[0], after[2], atol=1e-3)


def test_a_tenant_steps_only_with_gradients_that_it_has_been_given(model: Path) -> None:
    batch = pack(random_token_sequences((9, 14), VOCAB_SIZE, 0), {"batch_num_tokens": 2.0, "dp_size": 1})
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        tenant, other = (runtime.create_lora_adapter(base, LORA, OptimizerConfig(weight_decay=1.0)) for _ in range(2))

        def refused() -> None:
            before = copied(runtime.export_lora_adapter(tenant)), tenant.weight_version, tenant.optimizer.num_steps
            without = f"optimizer_step on '{tenant.name}' without gradients; call forw"
            with pytest.raises(HandleError, match=without):
                runtime.optimizer_step(tenant)
            assert runtime.optimizer_step([other, tenant])[1].error.startswith(without)
            after = copied(runtime.export_lora_adapter(tenant)), tenant.weight_version, tenant.optimizer.num_steps
            assert after[1:] == before[1:] and all(torch.equal(after[0][name], before[0][name]) for name in before[0])

        runtime.forward_backward(other, [batch], nll)
        refused()
        runtime.forward_backward(tenant, [batch], nll, forward_only=True)
        refused()
        runtime.forward_backward(tenant, [batch], nll)
        runtime.zero_grad(tenant)
        refused()
        runtime.forward_backward(tenant, [batch], nll)
        assert runtime.optimizer_step(tenant).ok and tenant.weight_version == 1


class Ranks(NamedTuple):
    """Attributes:
    factor: what a sum over them makes of a gradient here.
    """

    factor: float
    number: int = 0

    def size(self) -> int:
        return 1 if self.factor == 1.0 else 2

    def rank(self) -> int:
        return self.number


SECTIONS = [
    Section(0, 2, of_experts=False, summed=False),
    Section(2, 5, of_experts=False, summed=True),
    Section(5, 6, of_experts=True, summed=True),
    Section(6, 9, of_experts=True, summed=False),
]


@pytest.mark.parametrize(
    ("dense", "experts", "sums", "counted"),
    [
        ((Ranks(2.0), Ranks(3.0)), (Ranks(5.0), Ranks(7.0)), [3, 3, 6, 6, 6, 35, 7, 7, 7], [1] * 9),
        ((Ranks(2.0, 1), Ranks(3.0)), (Ranks(5.0), Ranks(7.0, 1)), [3, 3, 6, 6, 6, 35, 7, 7, 7], [1, 1, *[0] * 7]),
        ((Ranks(2.0), Ranks(3.0, 1)), (Ranks(5.0, 1), Ranks(7.0)), [3, 3, 6, 6, 6, 35, 7, 7, 7], [*[0] * 6, 1, 1, 1]),
        ((None, Ranks(3.0)), (None, Ranks(1.0)), [3, 3, 3, 3, 3, 1, 1, 1, 1], [1] * 9),
    ],
    ids=str,
)
def test_gradients_are_added_up_over_the_ranks_that_have_parts_of_them_and_once(
    monkeypatch: pytest.MonkeyPatch, dense: Any, experts: Any, sums: list[int], counted: list[int]
) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(group.factor))
    gradients = torch.arange(1.0, 10.0)
    rows: Any = SimpleNamespace(sections=SECTIONS, gradients=gradients)
    optimizer = TenantOptimizer(OptimizerConfig(), rows, RowGroups(SumGroups(*dense), SumGroups(*experts), dp_size=4))
    expected = torch.arange(1.0, 10.0) * torch.tensor(sums) / 4
    for _ in range(2):
        optimizer.reduce()
        torch.testing.assert_close(gradients, expected)
    assert float(optimizer.statistics()[0, 0]) == pytest.approx(float((expected * torch.tensor(counted)).square().sum()))
    # What another pass adds is added up beside what has been: that is this rank's share now, or nothing.
    optimizer.expect_gradients()
    torch.testing.assert_close(gradients, expected * 4 * torch.tensor(counted))
