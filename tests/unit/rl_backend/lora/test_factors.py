"""Whole factors out of the parts that ranks have, and weights with an adapter added to them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts.lora import PEFT_PREFIX, LoRAConfig, LoRAKind, part_name
from rl_backend.lora.modules import AdaptedModule
from rl_backend.lora.rows import TenantRows, each_weight, factors_of, load_tensors, merged_weights, whole_tensors
from tests.support.rank_threads import run_ranks

RANK, INPUTS, OUTPUTS = 3, 8, 6
CONFIG = LoRAConfig(rank=RANK, use_dora=True)
CPU = torch.device("cpu")


def module(name: str, inputs: tuple[int, int] = (0, INPUTS), outputs: tuple[int, int] = (0, OUTPUTS)) -> AdaptedModule:
    return AdaptedModule(name, "attention", INPUTS, OUTPUTS, inputs, outputs)


NAMES = [part_name(name, "attention", part) for name in ("one", "cut", "lone") for part in CONFIG.parts]
SHAPES = dict(zip(NAMES, [(RANK, INPUTS), (OUTPUTS, RANK), (OUTPUTS,)] * 3, strict=True))
WHOLE = {
    name: torch.arange(torch.Size(shape).numel()).view(shape) + 100.0 * n for n, (name, shape) in enumerate(SHAPES.items())
}


def rows_of(modules: list[AdaptedModule]) -> TenantRows:
    tensors = [each for module in modules for each in factors_of(module, CONFIG)]
    return TenantRows.new(CONFIG, tensors, CPU, WHOLE, lambda each: None)


def held_by(rank: int) -> list[AdaptedModule]:
    """Both have the first, each a part of the second (columns of A, whole B), and the second rank alone the third."""
    cut = module("cut", inputs=(0, 5) if rank == 0 else (5, 8))
    return [module("one"), cut] if rank == 0 else [module("lone", outputs=(0, 4)), cut, module("one")]


def test_tensors_are_whole_on_every_rank_in_the_order_asked_and_of_the_first_that_has_them() -> None:
    asked = [name for name in reversed(NAMES) if "lone" not in name]

    def of_rank(group: dist.ProcessGroup) -> tuple[Mapping[str, Tensor], dict[str, Tensor], list[str]]:
        rows = rows_of(held_by(group.rank()))
        moments = rows.exp_avg.copy_(rows.weights).mul_(2)
        if group.rank() == 1:
            # What both have is the first rank's, should they differ.
            for tensor, view in rows.views(moments):
                if tensor.module.name == "one":
                    view.zero_()
        found = whole_tensors(rows, moments, asked, group)
        exported = dict(each_weight(rows, asked, group, copy=False))
        rows.weights.zero_()
        return found, exported, list(found)

    for found, exported, order in run_ranks(of_rank):
        assert order == asked == list(exported)
        for name in asked:
            assert torch.equal(found[name], 2 * WHOLE[name]), name
            assert torch.equal(exported[name], WHOLE[name]), name


def test_one_rank_gives_copies_or_views_of_its_weights() -> None:
    rows = rows_of([module("one"), module("cut")])
    alone: Any = type("Alone", (), {"size": lambda self: 1})()
    asked = NAMES[:5]
    copies, views = dict(each_weight(rows, asked, alone, copy=True)), dict(each_weight(rows, asked, alone, copy=False))
    whole = whole_tensors(rows, rows.weights, asked, alone)
    assert list(copies) == list(views) == list(whole) == asked
    rows.weights.add_(1)
    for name in asked:
        assert torch.equal(copies[name], WHOLE[name]) and torch.equal(whole[name], WHOLE[name]), name
        assert torch.equal(views[name], WHOLE[name] + 1), name


def test_tensors_are_put_where_a_rank_has_its_part_and_padding_stays_zero() -> None:
    rows = rows_of([module("cut", inputs=(2, 5), outputs=(1, 6))])
    rows.weights.zero_()
    load_tensors(rows, rows.exp_avg_sq, WHOLE)
    a, b, magnitude = (part_name("cut", "attention", part) for part in CONFIG.parts)
    found = {tensor.name: view for tensor, view in rows.views(rows.exp_avg_sq)}
    assert torch.equal(found[a], WHOLE[a][:, 2:5])
    assert torch.equal(found[b], WHOLE[b][1:]) and torch.equal(found[magnitude], WHOLE[magnitude][1:])
    assert rows.exp_avg_sq.sum() == sum(view.sum() for view in found.values()) and not rows.weights.any()


class Stream:
    """Weights one after the other, and whether the generator was closed."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights, self.closed, self.taken = weights, False, 0

    def __call__(self) -> Generator[tuple[str, Tensor]]:
        try:
            for name, weight in self.weights.items():
                self.taken += 1
                yield name, weight
        finally:
            self.closed = True


KINDS: Mapping[str, LoRAKind] = {"q": "attention", "embed": "embedding", "d": "feed_forward"}
WEIGHTS = {
    "embed.weight": torch.full((5, 4), 3.0),
    "q.weight": torch.eye(4)[:3].contiguous(),
    "q.bias": torch.ones(3),
    "score.weight": torch.zeros(1, 4),
    "d.weight": torch.eye(4).to(torch.bfloat16),
}


def adapters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (3, 4), "embed": (4, 5), "d": (4, 4)}
    found = {}
    for name, (outputs, inputs) in sizes.items():
        found[part_name(name, KINDS[name], "A")] = torch.randn(2, inputs, generator=generator)
        found[part_name(name, KINDS[name], "B")] = torch.randn(outputs, 2, generator=generator)
    found[part_name("d", "feed_forward", "magnitude")] = torch.tensor([1.0, 2.0, 4.0, 8.0])
    return found | {f"{PEFT_PREFIX}score.weight": torch.full((1, 4), 0.1), f"{PEFT_PREFIX}score.bias": torch.tensor([2.0])}


def test_an_adapter_is_added_with_its_scale_in_float32_and_weights_of_its_own_come_last() -> None:
    tensors, stream = adapters(), Stream(WEIGHTS)
    before = {name: weight.clone() for name, weight in WEIGHTS.items()}
    own = {"score.weight": torch.bfloat16, "score.bias": torch.float32}
    found = dict(merged_weights(stream(), tensors, KINDS, 0.5, own))
    assert list(found) == ["embed.weight", "q.weight", "q.bias", "d.weight", "score.weight", "score.bias"]
    q, embedding, d = (
        tensors[part_name(name, KINDS[name], "B")] @ tensors[part_name(name, KINDS[name], "A")]
        for name in ("q", "embed", "d")
    )
    torch.testing.assert_close(found["q.weight"], before["q.weight"] + 0.5 * q)
    torch.testing.assert_close(found["embed.weight"], before["embed.weight"] + 0.5 * embedding.T)
    direction = before["d.weight"].float() + 0.5 * d
    scaled = direction / direction.norm(dim=1, keepdim=True) * torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    assert found["d.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(found["d.weight"].float(), scaled, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found["d.weight"].float().norm(dim=1), torch.tensor([1.0, 2.0, 4.0, 8.0]), rtol=1e-2, atol=0)
    assert found["q.bias"] is WEIGHTS["q.bias"]
    assert found["score.weight"].dtype == torch.bfloat16 and found["score.bias"].tolist() == [2.0]
    torch.testing.assert_close(found["score.weight"].float(), torch.full((1, 4), 0.1), rtol=1e-2, atol=0)
    assert stream.closed and all(torch.equal(WEIGHTS[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("taken", [1, 2])
def test_the_stream_of_the_base_is_closed_with_that_of_the_tenant(taken: int) -> None:
    stream = Stream(WEIGHTS)
    merged = merged_weights(stream(), adapters(), KINDS, 1.0, {})
    for _ in range(taken):
        next(merged)
    assert not stream.closed
    merged.close()
    assert stream.closed and stream.taken == taken


def test_an_expert_is_merged_with_the_factor_of_all_and_its_own_other() -> None:
    experts, rank, inputs, width = 3, 2, 4, 5
    generator = torch.Generator().manual_seed(1)
    sizes = {
        ("w3", "A"): (1, rank, inputs),
        ("w3", "B"): (experts, width, rank),
        ("w2", "A"): (experts, rank, width),
        ("w2", "B"): (1, inputs, rank),
    }
    given = {key: torch.randn(size, generator=generator) for key, size in sizes.items()}
    tensors = {part_name(f"l.experts.{stack}", "experts", part): each for (stack, part), each in given.items()}  # type: ignore[arg-type]
    kinds: dict[str, LoRAKind] = {
        f"l.experts.{number}.{name}": "experts" for number in range(experts) for name in ("up_proj", "down_proj")
    }
    shapes = {"up_proj": (width, inputs), "down_proj": (inputs, width)}
    weights = {f"{name}.weight": torch.ones(shapes[name.rpartition(".")[2]]) for name in kinds}
    found = dict(merged_weights(Stream(weights)(), tensors, kinds, 3.0, {}))
    for number in range(experts):
        up = given["w3", "B"][number] @ given["w3", "A"][0]
        down = given["w2", "B"][0] @ given["w2", "A"][number]
        torch.testing.assert_close(found[f"l.experts.{number}.up_proj.weight"], 1 + 3.0 * up)
        torch.testing.assert_close(found[f"l.experts.{number}.down_proj.weight"], 1 + 3.0 * down)
