"""A journal builds models and LoRA tenants again, here on one rank in this process, without Ray."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle

from actors.train.context import HandleRef, RankContext
from actors.train.group import TrainGroup
from actors.train.layout import Layout
from actors.train.order import OperationHeader
from actors.train.recovery import Recovery
from actors.train.worker import run
from rl_backend.contracts import HandleError, OptimizerConfig
from rl_backend.contracts.atoms import Operation
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences


class OneRank:
    """The ranks of a group, without actors: an operation runs when it is dispatched."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.members = SimpleNamespace(id=context.group_id, workers=[None])
        self.journal: list[Operation] = []

    def dispatch(self, name: str, pickled_calls: Sequence[bytes], loss: Any = None) -> tuple[OperationHeader, list[Any]]:
        self.context.operation += 1
        return OperationHeader(self.context.operation, name, 0), [
            (run(self.context, cloudpickle.loads(pickled_calls[0]), loss), None)
        ]

    def collect(self, title: str, number: int, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        return list(refs)

    def keep(self, operation: Operation) -> None:
        self.journal.append(operation)

    def forget(self, key: int) -> None:
        self.journal = [each for each in self.journal if each.number != key]


@contextmanager
def group_of_one(model: Path, group_id: str) -> Iterator[tuple[TrainGroup, OneRank]]:
    with open_runtime(model) as runtime:
        ranks: Any = OneRank(RankContext(runtime, group_id, 0, 1))
        recovery = Recovery(ranks, None, Layout(runtime.config, 1))
        yield TrainGroup.__new__(TrainGroup)._over(runtime.config, recovery), ranks


def test_tenants_of_a_lost_group_are_made_again_on_the_new_base(tmp_path: Path) -> None:
    model = write_tiny("qwen3", tmp_path / "model")
    with group_of_one(model, "lost") as (lost, ranks):
        other = lost.build_model(forward_only=True)
        base = lost.build_model(trainable=False)
        gone = lost.create_lora_adapter(base, LoRAConfig(rank=4))
        actor = lost.create_lora_adapter(base, LoRAConfig(rank=8, seed=3), OptimizerConfig(lr=0.5))
        lost.remove_lora_adapter(gone)
        critic = lost.create_lora_adapter(base, LoRAConfig(rank=2), name=gone.name, head="values")
        expected = lost.export_lora_adapter(actor)
        journal = pickle.loads(pickle.dumps(ranks.journal))
    assert [each.number for each in journal] == [other.key, base.key, actor.key, critic.key]
    with group_of_one(model, "new") as (group, ranks):
        with pytest.raises(HandleError, match="belongs to another training group"):
            group.list_lora_adapters(base)
        built = group.replay(journal)
        assert built.keys() == {other.key, base.key, actor.key, critic.key}
        assert all(isinstance(handle, HandleRef) and handle.group_id == "new" for handle in built.values())
        assert (built[other.key].name, built[base.key].name) == (other.name, base.name)
        listed = group.list_lora_adapters(built[base.key])
        assert [(each.name, each.config.rank, each.head) for each in listed] == [
            (actor.name, 8, "log_probs"),
            (critic.name, 2, "values"),
        ]
        found = group.export_lora_adapter(built[actor.key])
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert group.get_optimizer_state(built[actor.key]).learning_rate == 0.5
        values = group.forward(built[critic.key], random_token_sequences((9, 5), VOCAB_SIZE)).output("values")
        assert [row.shape for row in values] == [(9,), (5,)]
        fields = [{LORA_FIELD: torch.tensor(built[key].lora_id)} for key in (critic.key, actor.key)]
        rows = random_token_sequences((9, 5), VOCAB_SIZE)
        sequences = [row.with_fields(sequence_fields=field) for row, field in zip(rows, fields, strict=True)]
        mixed = group.forward(built[base.key], sequences)
        assert [[row.shape for row in mixed.output(name)] for name in ("log_probs", "values")] == [[(9,), (5,)]] * 2
        assert {name: set(part.outputs) for name, part in mixed.tenants.items()} == {
            critic.name: {"values"},
            actor.name: {"log_probs"},
        }
        assert torch.equal(mixed.tenants[actor.name].output("log_probs")[0], mixed.output("log_probs")[1])
        # What was built again can be lost again.
        again = ranks.journal
    with group_of_one(model, "third") as (group, _):
        assert [handle.name for handle in group.replay(again).values()] == [other.name, base.name, actor.name, critic.name]
