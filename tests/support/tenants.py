"""LoRA tenants over one tiny model, trained together or one by one, as the tests compare them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import Head, LossFn, MetricValue, ModelOutput, OptimizerConfig, PackedBatch, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime import Runtime
from rl_backend.runtime.tenants.handle import TenantHandle
from tests.support.bridge_runs import open_bridge
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences

CONFIGS: Mapping[str, LoRAConfig] = {
    "narrow": LoRAConfig(rank=4, alpha=8.0, targets=("attention",)),
    "middle": LoRAConfig(rank=16, alpha=32.0, targets=("q_proj", "v_proj", "feed_forward"), seed=1),
    "wide": LoRAConfig(rank=64, alpha=16.0, targets=("feed_forward", "o_proj"), use_rslora=True, seed=2),
}
CRITIC = LoRAConfig(rank=8, alpha=16.0, targets=("attention", "down_proj"), seed=3)
LENGTHS: Mapping[str, Sequence[int]] = {
    "narrow": (16, 40, 7, 12),
    "middle": (33, 9, 21, 30),
    "wide": (25, 18, 64, 5),
    "critic": (14, 27, 50, 6),
}
LEARNING_RATES = {"narrow": 1e-2, "middle": 1e-3, "wide": 3e-3, "critic": 5e-3}


class TenantRun(NamedTuple):
    """Attributes:
    losses, norms: of each step.
    gradients: peft's name -> of the first step.
    factors: peft's name -> after the last step.
    state: the rows after the last step, on this rank.
    """

    losses: list[float]
    norms: list[float]
    gradients: Mapping[str, Tensor]
    factors: Mapping[str, Tensor]
    state: Sequence[Tensor]


def nll(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """The sum over tokens, over the denominator of the tenant's own batch."""
    assert model_output.log_probs is not None
    total = -model_output.log_probs.sum()
    return total / data.meta["batch_num_tokens"] * data.meta["dp_size"], {"nll": (total, data.num_tokens)}


def squared(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Values as far as they are from the tokens' numbers; denominators as of :func:`nll`."""
    assert model_output.values is not None and model_output.log_probs is None
    total = (model_output.values - data.input_ids / VOCAB_SIZE).square().sum()
    return total / data.meta["batch_num_tokens"] * data.meta["dp_size"], {"squared": (total.detach(), data.num_tokens)}


LOSSES: Mapping[str, LossFn] = {"critic": squared}


def create(
    runtime: Runtime[Any],
    base: Any,
    names: Sequence[str],
    of_each: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> dict[str, TenantHandle]:
    """The named tenants, with changes of each one's configuration and of all."""
    of_each = of_each or {}
    optimizers = {name: OptimizerConfig(lr=LEARNING_RATES[name]) for name in names}
    configs = {**CONFIGS, "critic": CRITIC}
    made = {}
    for name in names:
        head: Head | None = "values" if name == "critic" else None
        config = configs[name].replace(**changes, **of_each.get(name, {}))
        tenant = runtime.create_lora_adapter(base, config, optimizers[name], name=name, head=head)
        assert isinstance(tenant, TenantHandle)
        made[name] = tenant
    return made


def batches(tenants: Mapping[str, TenantHandle], step: int, dp_rank: int, dp_size: int) -> list[PackedBatch]:
    """Two micro-batches of this rank, each with sequences of every tenant."""
    found = []
    for half in range(2):
        sequences: list[TokenSequence] = []
        facts: dict[int, dict[str, float]] = {}
        for name, tenant in tenants.items():
            own = random_token_sequences(LENGTHS[name], VOCAB_SIZE, 100 * step + len(name))
            mine = [own[index] for index in range(half * 2, half * 2 + 2)][dp_rank::dp_size]
            fields = {LORA_FIELD: torch.tensor(tenant.lora_id)}
            sequences += [sequence.with_fields(sequence_fields=fields) for sequence in mine]
            facts[tenant.lora_id] = {"batch_num_tokens": float(sum(LENGTHS[name]))}
        # As a training group gives it, of all sequences; no tenant may divide by it.
        together = float(sum(sum(LENGTHS[name]) for name in tenants))
        found.append(pack(sequences, {"tenants": facts, "batch_num_tokens": together, "dp_size": dp_size}))
    return found


def train_tenants(
    runtime: Runtime[Any],
    base: Any,
    tenants: Mapping[str, TenantHandle],
    steps: int,
    losses: Mapping[str, LossFn] | None = None,
    first: int = 0,
) -> dict[str, TenantRun]:
    """``steps`` steps of all tenants in one pass each, on the data of the steps from ``first`` on."""
    runs = {name: TenantRun([], [], {}, {}, []) for name in tenants}
    for step in range(first, first + steps):
        data = batches(tenants, step, base.data_parallel_rank, base.data_parallel_size)
        result = runtime.forward_backward(base, data, losses or {name: LOSSES.get(name, nll) for name in tenants})
        if step == first:
            gradients = {name: copied(runtime.export_gradients(tenant)) for name, tenant in tenants.items()}
        stepped = runtime.optimizer_step(list(tenants.values()))
        for name, each in zip(tenants, stepped, strict=True):
            total = torch.tensor(result.tenants[name].loss / base.data_parallel_size, dtype=torch.float64)
            group = base.groups.dp_group
            if base.data_parallel_size > 1:
                dist.all_reduce(total, group=group)
            runs[name].losses.append(float(total))
            runs[name].norms.append(each.grad_norm)
        runtime.zero_grad(list(tenants.values()))
        runtime.lr_scheduler_step(list(tenants.values()))
    return {
        name: run._replace(
            gradients=gradients[name],
            factors=copied(runtime.export_lora_adapter(tenants[name])),
            state=rows(tenants[name]),
        )
        for name, run in runs.items()
    }


def copied(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """What a stream gives, to keep."""
    return {name: tensor.clone() for name, tensor in tensors}


def rows(tenant: TenantHandle) -> list[Tensor]:
    """Copies of everything that a tenant's steps change, on this rank."""
    held = tenant.rows
    return [value.clone() for value in (held.weights, held.exp_avg, held.exp_avg_sq, held.num_steps)]


def tenants_job(
    model: str,
    names: Sequence[str],
    settings: Mapping[str, Any],
    steps: int = 3,
    backend: str = "native",
    of_each: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, TenantRun]:
    """Trains the named tenants together; losses on ranks of the last stage."""
    open_backend = open_bridge if backend == "bridge" else open_runtime
    with open_backend(model, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        return train_tenants(runtime, base, create(runtime, base, names, of_each), steps)
