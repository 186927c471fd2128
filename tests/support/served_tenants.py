"""LoRA tenants that are trained on one group and served by engines, as the tests compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from actors import HandleRef, Loss, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.rollout.group.calls import PendingSamples
from actors.rollout.messages import Sample
from rl_backend.contracts import TokenSequence
from rl_backend.contracts.lora import LoRAConfig
from tests.support.sft_batches import random_token_sequences

NLL = Loss("tests.support.losses:nll_loss")
CONFIGS = {
    "narrow": LoRAConfig(rank=4, alpha=8.0, targets=("attention",)),
    "middle": LoRAConfig(rank=16, seed=1),
    "wide": LoRAConfig(rank=32, targets=("feed_forward",), use_rslora=True, seed=2),
}
LONG = [7 * index % 120 for index in range(150)]
"""More than one block of the prefix cache."""
PROMPTS = [[5, 9, 3, 77, 21], LONG, [100, 2, 45, 6, 7, 31, 90], LONG, LONG, LONG[:140]]
SAMPLING = SamplingConfig(n=2, max_new_tokens=12, temperature=1.0)
SEEDS = list(range(len(PROMPTS) * SAMPLING.n))
TOLERANCE = 1e-5

type Tokens = list[tuple[list[int], list[float]]]


class ServedTenants(NamedTuple):
    """Attributes:
    train, rollout: trainer and engines.
    base: of the tenants.
    tenants, syncs: by the tenant's name.
    """

    train: TrainGroup
    rollout: RolloutGroup
    base: HandleRef
    tenants: dict[str, HandleRef]
    syncs: dict[str, WeightSync]

    def make_ready(self) -> None:
        """Engines alive, the base alone beneath the adapters, every tenant pushed, with weights that are not the base's."""
        restarted = [self.rollout.restart(engine) for engine in list(self.rollout.lost_engines)]
        if restarted and self.rollout.lora.base_pushes:
            self.push_base()
        for index, (name, tenant) in enumerate(self.tenants.items()):
            if not self.train.weight_version(tenant):
                self.step(name, 40 + index)
            self.syncs[name].push()

    def push_base(self) -> None:
        with WeightSync(self.train, self.rollout, self.base) as sync:
            sync.push()

    def versions(self) -> dict[str, int]:
        return {name: self.train.weight_version(tenant) for name, tenant in self.tenants.items()}

    def step(self, name: str, seed: int) -> None:
        """An optimizer step of one tenant."""
        take_step(self.train, self.tenants[name], seed)

    def sample(self, adapter: str | Sequence[str | None] | None, **options: Any) -> list[Sample]:
        return self.rollout.generate(PROMPTS, SAMPLING, seeds=SEEDS, adapter=adapter, **options)

    def submit(self, adapter: str | Sequence[str | None] | None) -> PendingSamples:
        """:meth:`sample` without waiting."""
        return self.rollout.submit(PROMPTS, SAMPLING, seeds=SEEDS, adapter=adapter)

    def tokens(self, adapter: str | Sequence[str | None] | None) -> Tokens:
        """Tokens and log-probs when the prefix cache has the prompts already, so that the last bits are the same again."""
        self.sample(adapter)
        return tokens(self.sample(adapter))

    def gap(self, handle: HandleRef, samples: Sequence[Sample]) -> float:
        """Largest difference between the engine's log-probs and the trainer's."""
        rows = [TokenSequence.from_prompt_and_response(each.prompt_ids, each.response_ids) for each in samples]
        outputs = self.train.forward(handle, rows).output("log_probs")
        return max(
            float((output[len(each.prompt_ids) - 1 : -1] - torch.tensor(each.log_probs)).abs().max())
            for each, output in zip(samples, outputs, strict=True)
        )

    def assert_served(self, names: Sequence[str | None], versions: Mapping[str, int]) -> None:
        """One call with a tenant for each prompt: every sample is of its own one, at its version."""
        samples = self.sample(names)
        for name in dict.fromkeys(names):
            own = [sample for sample in samples if names[sample.prompt_index] == name]
            gap = self.gap(self.base if name is None else self.tenants[name], own)
            assert gap < TOLERANCE, f"{name}: {gap:.1e}"
            if name is not None:
                assert {version for each in own for version in each.weight_versions} == {versions[name]}


def take_step(train: TrainGroup, tenant: HandleRef, seed: int) -> float:
    """The loss of an optimizer step."""
    train.zero_grad(tenant)
    loss = train.forward_backward(tenant, random_token_sequences([20, 31], 128, seed), NLL).loss
    assert train.optimizer_step(tenant).ok
    return loss


def tokens(samples: Sequence[Sample]) -> Tokens:
    return [(list(each.response_ids), list(each.log_probs)) for each in samples]
