"""Native training on the keys and experts that transformers chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.families import is_exact
from benchmarks.replayed_choices import Choices, compare_on_choices, kept_choices
from benchmarks.sparse_reference import record_corrected
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide
from rl_backend.lab.parity.record import SideRecord
from tests.support.sparse_models import write_sparse

STEPS, SEQUENCES = 3, 4
INDEXERS = {"deepseek_v32": 4, "glm_moe_dsa": 2}

type Trained = tuple[ParityConfig, SideRecord, Choices]


@pytest.fixture(scope="module", params=INDEXERS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("sparse")
    model = write_sparse(folder / "model", request.param)
    reference, candidate = ParitySide(runtime=TRANSFORMERS), ParitySide(runtime="native")
    sizes: dict[str, Any] = {"steps": STEPS, "num_sequences": SEQUENCES, "num_micro_batches": 2, "max_length": 20}
    config = ParityConfig(model=str(model), reference=reference, candidate=candidate, device="cpu", min_length=1, **sizes)
    with kept_choices() as chosen:
        theirs = record_corrected(config, folder / "sides")
    assert len(chosen.keys) == (STEPS + 1) * SEQUENCES * INDEXERS[request.param]
    assert len(chosen.experts) == (STEPS + 1) * SEQUENCES * 3
    return config, theirs, chosen


def test_sides_agree_on_the_same_choices(trained: Trained) -> None:
    found = compare_on_choices(*trained)
    assert found["step"] is None
    assert found["max_loss_rel_diff"] <= 1e-6 and found["max_grad_norm_rel_diff"] <= 1e-5


@pytest.mark.parametrize("kind", ["keys", "experts"])
def test_other_choices_are_another_model(trained: Trained, kind: str) -> None:
    config, theirs, chosen = trained
    calls: list[Tensor] = getattr(chosen, kind)
    # In the second step, the first of them, whatever they are.
    second = range(len(calls) * 2 // (STEPS + 1), len(calls) * 3 // (STEPS + 1))
    firsts = [torch.arange(each.shape[1]).expand_as(each) if call in second else each for call, each in enumerate(calls)]
    found = compare_on_choices(config, theirs, replace(chosen, **{kind: firsts}))
    assert found["step"] == 2


def test_a_family_is_exact_where_it_parts_by_a_choice_alone() -> None:
    parted = {"first_divergence": "loss (step 7)", "loss_fall": 0.3}
    assert not is_exact(parted, 0.01)
    assert is_exact({**parted, "on_their_choices": {"step": None}}, 0.01)
    assert not is_exact({**parted, "on_their_choices": {"step": 9}}, 0.01)
    assert not is_exact({**parted, "loss_fall": 0.0, "on_their_choices": {"step": None}}, 0.01)


def test_choices_are_kept_only_meanwhile() -> None:
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer, GlmMoeDsaMoE

    before = GlmMoeDsaIndexer.forward, GlmMoeDsaMoE.route_tokens_to_experts
    with kept_choices():
        assert GlmMoeDsaIndexer.forward is not before[0]
    assert before == (GlmMoeDsaIndexer.forward, GlmMoeDsaMoE.route_tokens_to_experts)
