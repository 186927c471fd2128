"""Recurrent and latent mixers on a tree of prefixes, against whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError
from rl_backend.model.blocks import KeyChoice, Mixer, MixerSpec, Rotation
from rl_backend.model.mixers.deltanet import DeltaNetSpec
from rl_backend.model.mixers.mla import ChosenKeysSpec, IndexerSpec, MLASpec
from rl_backend.model.options import IndexerTraining
from rl_backend.primitive import sparse_attention as sparse
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.prefix_tree import PrefixTree
from rl_backend.primitive.rope import Rotary, rotary_cos_sin
from tests.support.random_trees import random_tree, require_same, unshared

HIDDEN = 10
TOP_K = 6
LATENT = MLASpec(
    num_heads=3,
    query_rank=7,
    kv_rank=5,
    plain_dim=6,
    value_dim=8,
    rotary=Rotary(4, 7.0),
    interleaved=True,
    scale=0.45,
    latent_eps=0.05,
)
SPECS: dict[str, MixerSpec] = {
    "five values of one key": DeltaNetSpec(num_key_heads=1, num_value_heads=5, key_dim=3, value_dim=7, conv_width=3),
    "three heads": DeltaNetSpec(num_key_heads=3, num_value_heads=3, key_dim=5, value_dim=2, by_key_head=True),
    "no convolution": DeltaNetSpec(num_key_heads=3, num_value_heads=9, key_dim=4, value_dim=6, conv_width=1),
    "a long convolution": DeltaNetSpec(num_key_heads=1, num_value_heads=2, key_dim=4, value_dim=1, conv_width=12),
    "latent": LATENT,
}


def built(spec: MixerSpec) -> Mixer:
    mixer = spec.build(HIDDEN, NormSpec(0.05)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return mixer


def drawn(tree: PrefixTree) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tree.num_rows, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()


def of_tree(tree: PrefixTree) -> Segments:
    return Segments.of_tree(tree, torch.device("cpu"))


def rotation(spec: MixerSpec, position_ids: Tensor) -> Rotation | None:
    return None if spec.rotary is None else rotary_cos_sin(position_ids, spec.rotary, torch.float64)


@pytest.mark.shows("model: DeltaNet and latent attention on a tree of prefixes equal whole sequences to 1e-12")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", range(4))
def test_a_mixer_is_that_of_whole_sequences(name: str, seed: int) -> None:
    spec, tree = SPECS[name], random_tree(seed, (1, 2, 3, 7, 66))
    assert spec.shares_prefixes
    mixer, x, whole = built(spec), drawn(tree), unshared(tree)
    found = mixer(x, rotation(spec, tree.position_ids), of_tree(tree)).index_select(0, whole.rows)
    expected = mixer(x.index_select(0, whole.rows), rotation(spec, whole.position_ids), whole.segments)
    require_same(found, expected, [x, *mixer.parameters()])


def test_a_kernel_that_cannot_start_from_a_state_is_refused() -> None:
    mixer: Any = SPECS["three heads"].build(HIDDEN, NormSpec(0.05))
    mixer.takes_fla = True
    tree = PrefixTree((2, 1), (-1, 0), (0, 1))
    with pytest.raises(ConfigError, match="delta_kernel='fla': it starts every sequence from an empty state"):
        mixer(torch.zeros(3, HIDDEN), None, of_tree(tree))


@pytest.fixture(params=[2**24, 40], ids=["large blocks", "small blocks"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_MOST_SCORES", request.param)


def indexed(training: IndexerTraining, *, follows: bool = False) -> MLASpec:
    indexer = IndexerSpec(num_heads=5, head_dim=6, rotated=4, interleaved=False)
    keys = ChosenKeysSpec(indexer=None if follows else indexer, top_k=TOP_K, training=training, loss_weight=0.3)
    return replace(LATENT, keys=keys)


@pytest.mark.shows("sparse attention: on a tree of prefixes it chooses, attends and learns as on whole sequences")
@pytest.mark.parametrize("training", ["frozen", "warm_up", "sparse"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("block_size")
def test_keys_are_chosen_along_paths_and_rows_teach_as_often_as_sequences_have_them(
    training: IndexerTraining, seed: int
) -> None:
    spec, tree = indexed(training), random_tree(seed, (1, 2, 5, 8))
    mixer: Any = built(spec)
    x, whole = drawn(tree), unshared(tree)
    choice = KeyChoice(max(whole.lengths), loss_weight=0.5)
    shared, keys = mixer(x, rotation(spec, tree.position_ids), of_tree(tree), choice)
    of_whole = x.index_select(0, whole.rows)
    expected, expected_keys = mixer(of_whole, rotation(spec, whole.position_ids), whole.segments, choice)
    if training == "warm_up":
        assert keys is None and expected_keys is None
    else:
        assert torch.equal(keys.index_select(0, whole.rows), expected_keys)
    leaves = [x, *(parameter for parameter in mixer.parameters() if parameter.requires_grad)]
    require_same(shared.index_select(0, whole.rows), expected, leaves, tolerance=1e-11)


def some_keys(tree: PrefixTree) -> Tensor:
    """(rows, TOP_K) int32: of the keys that each row sees as many as can be, drawn at random."""
    generator = torch.Generator().manual_seed(2)
    length, places = max(tree.key_lens), tree.position_ids[:, None]
    drawn_scores = torch.rand(tree.num_rows, length, generator=generator)
    best = drawn_scores.masked_fill(torch.arange(length) > places, -1.0).topk(TOP_K, dim=-1)
    ordered = best.indices.masked_fill(best.values < 0.0, length).sort(-1).values
    return ordered.masked_fill(ordered == length, -1).to(torch.int32)


@pytest.mark.parametrize("follows", [False, True])
def test_recorded_keys_and_those_of_the_layer_before_are_places_in_paths(follows: bool) -> None:
    tree = random_tree(1, (1, 2, 5, 8))
    x, whole, keys = drawn(tree), unshared(tree), some_keys(tree)
    if not follows:
        # Rows that choose for themselves.
        keys[::5] = -1
    spec = indexed("frozen", follows=follows)
    mixer: Any = built(spec)
    field = "chosen" if follows else "recorded"
    told = KeyChoice(max(whole.lengths), **{field: keys})
    shared, _ = mixer(x, rotation(spec, tree.position_ids), of_tree(tree), told)
    told = told._replace(**{field: keys.index_select(0, whole.rows)})
    expected, _ = mixer(x.index_select(0, whole.rows), rotation(spec, whole.position_ids), whole.segments, told)
    leaves = [x, *(parameter for parameter in mixer.parameters() if parameter.requires_grad)]
    require_same(shared.index_select(0, whole.rows), expected, leaves, tolerance=1e-11)
