"""Recorded keys: attended to in place of what indexers choose, and refused where they are not ones of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_backend.contracts import BatchError, PackedBatch, key_fields
from rl_backend.contracts.replay import KEYS
from rl_backend.model.mixers import mla
from tests.support.families import random_sequences
from tests.support.indexed_keys import first_keys, kept_keys, with_keys
from tests.support.models import write_tiny_qwen3
from tests.support.native import open_runtime
from tests.support.sparse_models import TOP_K, write_sparse
from tests.unit.rl_backend.model.test_multi_token import mean_nll
from tests.unit.rl_backend.model.test_sparse_families import batch, pass_over

LAYERS = 2
"""With an indexer, of GLM-5's four here; two follow."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("sparse") / "model", "glm_moe_dsa")


def recorded(model: Path, data: PackedBatch) -> Tensor:
    with open_runtime(model) as runtime:
        policy = runtime.build_model()
        with kept_keys(policy.model) as kept:
            runtime.forward_backward(policy, [data], None, forward_only=True)
    return torch.stack(kept, dim=1)


@pytest.mark.shows("sparse attention: recorded keys give the pass that they were recorded in, and others are attended to")
def test_recorded_keys_are_attended_to(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = batch()
    keys = recorded(model, data)
    assert keys.shape == (data.num_tokens, LAYERS, TOP_K)
    expected = pass_over(model, data)
    # In whatever order an engine returns them.
    found = pass_over(model, with_keys(data, keys.flip(-1)))
    assert all(torch.equal(one, other) for one, other in zip(found[0], expected[0], strict=True))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
    others = first_keys(data, LAYERS, TOP_K)
    replayed = pass_over(model, with_keys(data, others))
    monkeypatch.setattr(mla, "choose_keys", lambda *_: others[:, 0])
    chosen = pass_over(model, data)
    assert all(torch.equal(one, other) for one, other in zip(replayed[0], chosen[0], strict=True))
    assert all(torch.equal(replayed[1][name], gradient) for name, gradient in chosen[1].items())
    assert not torch.equal(replayed[0][0], expected[0][0]), "these keys are others"


def test_tokens_without_recorded_keys_choose_for_themselves(model: Path) -> None:
    """As the last sampled token does, which no rollout has computed; and any other."""
    (sequence,) = random_sequences((TOP_K + 9,))
    data = PackedBatch(sequence, torch.tensor([len(sequence)]))
    keys = recorded(model, data)
    fields = key_fields(keys[:-1], len(sequence))
    assert bool((fields[KEYS][-1] == -1).all())
    fields[KEYS][TOP_K + 2] = -1
    found, expected = pass_over(model, with_keys(data, fields[KEYS])), pass_over(model, data)
    assert torch.equal(found[0][0], expected[0][0])
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


def test_indexers_learn_from_recorded_keys(model: Path) -> None:
    data = batch()
    options: dict[str, Any] = {"indexer": "sparse"}
    as_chosen = pass_over(model, data, **options)[1]
    replayed = pass_over(model, with_keys(data, recorded(model, data)), **options)[1]
    assert all(torch.equal(replayed[name], gradient) for name, gradient in as_chosen.items())
    others = pass_over(model, with_keys(data, first_keys(data, LAYERS, TOP_K)), **options)[1]
    assert any(".indexer." in name and not torch.equal(others[name], as_chosen[name]) for name in others)


def refusal(path: Path, data: PackedBatch, **settings: Any) -> str:
    with open_runtime(path, **settings) as runtime, pytest.raises(BatchError) as refused:
        runtime.forward_backward(runtime.build_model(), [data], mean_nll)
    return str(refused.value)


def changed(keys: Tensor, token: int, values: list[int]) -> Tensor:
    keys = keys.clone()
    keys[token, 1, : len(values)] = torch.tensor(values, dtype=keys.dtype)
    return keys


@pytest.mark.shows("sparse attention: recorded keys of another shape or type, twice, or of later tokens are refused by name")
def test_keys_that_are_not_ones_of_the_model_are_refused(model: Path) -> None:
    data = batch()
    keys = first_keys(data, LAYERS, TOP_K)
    last = 20  # of the first sequence
    refused = {
        "has shape (40, 1, 6) and dtype torch.int32; expected int32 or int64": keys[:, :1],
        "index_topk=6": keys[..., :-1],
        "dtype torch.float32": keys.float(),
        "dtype torch.uint8": keys.to(torch.uint8),
        "has a place below -1": changed(keys, last, [-2]),
        "a place behind its own for token 20 of the micro-batch, at place 20 of its sequence, in layer 1": changed(
            keys, last, [21]
        ),
        "has a place twice": changed(keys, last, [1]),
        "more or fewer places than it can see": changed(keys, last, [-1]),
    }
    with open_runtime(model) as runtime:
        policy = runtime.build_model()
        for message, wrong in refused.items():
            with pytest.raises(BatchError) as said:
                runtime.forward_backward(policy, [with_keys(data, wrong)], mean_nll)
            assert message in str(said.value)


def test_models_that_would_ignore_them_refuse_them(model: Path, tmp_path: Path) -> None:
    data = batch()
    keys = first_keys(data, LAYERS, TOP_K)
    dense = write_tiny_qwen3(tmp_path / "dense")
    assert "this model attends to all keys, so recorded ones would be ignored" in refusal(dense, with_keys(data, keys))
    warm_up = {"model": "glm_moe_dsa", "model_cfg": {"indexer": "warm_up"}}
    assert "unless indexer='warm_up'" in refusal(model, with_keys(data, keys), **warm_up)
