"""The gated delta rule and its convolution on a tree of prefixes, against whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rl_backend.primitive.causal_conv import causal_conv, path_history
from rl_backend.primitive.gated_delta import chunks_of, gated_delta_rule, l2_normalised
from rl_backend.primitive.prefix_tree import PrefixTree
from tests.support.random_trees import random_tree, require_same, unshared

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, CHANNELS = 3, 9, 5, 7, 6
FAMILY = PrefixTree((70, 3, 64, 1), (-1, 0, 0, 2), (1, 3, 0))
"""A run, two that continue it, and one that continues the second of these."""


def inputs(rows: int, decay: float = 1.0) -> list[Tensor]:
    """Query, key, value, decay, beta."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    query, key = (l2_normalised(random(KEY_HEADS, KEY_DIM)) for _ in range(2))
    leaves = [query / KEY_DIM**0.5, key, random(HEADS, VALUE_DIM), -decay * random(HEADS).sigmoid(), random(HEADS).sigmoid()]
    return [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.shows("model: the gated delta rule on a tree equals that on whole sequences to 1e-12, gradients too")
@pytest.mark.parametrize("decay", [0.01, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_the_rule_is_that_of_whole_sequences(seed: int, decay: float) -> None:
    tree = random_tree(seed, (1, 2, 63, 64, 65, 130))
    leaves, whole = inputs(tree.num_rows, decay), unshared(tree)
    found = gated_delta_rule(*leaves, tree.lengths, tree.parents).index_select(0, whole.rows)
    expected = gated_delta_rule(*(leaf.index_select(0, whole.rows) for leaf in leaves), whole.lengths)
    require_same(found, expected, leaves)


def test_sequences_that_continue_none_have_the_bits_of_a_plain_pack() -> None:
    lengths = (65, 1, 130, 64)
    leaves = inputs(sum(lengths))
    outputs = [gated_delta_rule(*leaves, lengths, parents) for parents in ((), (-1,) * len(lengths))]
    assert torch.equal(*outputs)
    gradients = [torch.autograd.grad(output.square().sum(), leaves) for output in outputs]
    assert all(map(torch.equal, *gradients))


@pytest.mark.shows("model: a state is forked where sequences part, and siblings do not see each other, bit for bit")
def test_a_run_changes_itself_and_what_continues_it() -> None:
    starts = FAMILY.starts
    changed = {0: {0, 1, 2, 3}, 1: {1}, 2: {2, 3}, 3: {3}}
    for run, expected in changed.items():
        outputs = []
        for factor in (1.0, 1e3):
            leaves = inputs(FAMILY.num_rows)
            with torch.no_grad():
                leaves[2][starts[run] : starts[run] + FAMILY.lengths[run]] *= factor
            outputs.append(gated_delta_rule(*leaves, FAMILY.lengths, FAMILY.parents).split(FAMILY.lengths))
        assert {each for each in range(4) if not torch.equal(outputs[0][each], outputs[1][each])} == expected
        assert all(bool((outputs[0][each] != outputs[1][each]).flatten(1).any(1).all()) for each in expected)


def test_runs_of_a_time_are_computed_together() -> None:
    chunks = chunks_of(FAMILY.lengths, torch.device("cpu"), FAMILY.parents)
    assert chunks.steps == (1, 1, 2, 1) and [fork is None for fork in chunks.forks] == [True, True, False, False]
    assert [fork.tolist() for fork in chunks.forks if fork is not None] == [[0, 0], [1]]
    assert chunks_of((65, 1), torch.device("cpu"), (-1, -1)).forks == (None, None)


def history(x: Tensor, tree: PrefixTree, width: int) -> Tensor | None:
    return path_history(x, tree.lengths, tree.parents, width - 1)


@pytest.mark.shows("model: on a tree of prefixes a convolution reaches over runs that are shorter than it, gradients too")
@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("seed", range(6))
def test_the_convolution_is_that_of_whole_sequences(seed: int, width: int) -> None:
    tree = random_tree(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tree.num_rows, CHANNELS, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(CHANNELS, 1, width, generator=generator, dtype=torch.float64).requires_grad_()
    whole = unshared(tree)
    found = causal_conv(x, weight, tree.lengths, history(x, tree, width)).index_select(0, whole.rows)
    expected = causal_conv(x.index_select(0, whole.rows), weight, whole.lengths)
    require_same(found, expected, [x, weight])


def test_what_is_before_a_run_ends_with_its_parent() -> None:
    def before(lengths: Sequence[int], parents: Sequence[int], room: int) -> list[list[float]] | None:
        rows = torch.arange(1.0, sum(lengths) + 1.0)[:, None]
        found = path_history(rows, lengths, parents, room)
        return None if found is None else found[..., 0].tolist()

    # 1 2 | 3 | 4 | 5 6 7 8 | 9: the second and the third run continue the first, the fourth the third, the fifth the fourth.
    assert before((2, 1, 1, 4, 1), (-1, 0, 0, 2, 3), 3) == [[0, 0, 0], [0, 1, 2], [0, 1, 2], [1, 2, 4], [6, 7, 8]]
    assert before((2, 1), (-1, -1), 3) is None and before((2, 1), (-1, 0), 0) is None
