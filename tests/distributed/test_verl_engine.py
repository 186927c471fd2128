"""verl's engines: what its workers and losses see is what transformers computes, however a batch is cut."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_backend.contracts import RLBackendError
from tests.support.critic import transformers_values, write_critic
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.native import assert_near
from tests.support.rank_pool import RankPool
from tests.support.verl_batches import make_batch, ppo, rows, transformers_gradients, transformers_outputs
from tests.support.verl_engine import open_engine

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "native, groups": {"grouped": True},
    "bridge": {"backend": "bridge"},
}
"""Options of ``open_engine``."""
IMPORT_SECONDS = 300.0

CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one micro-batch": ("response", {}),
    "one sequence each": ("response", {"micro_batch_size_per_gpu": 1}),
    "by tokens": ("response", {"use_dynamic_bsz": True, "max_token_len_per_gpu": 34}),
    "by tokens, padded": ("dense", {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40}),
    "two sequences each, padded": ("dense", {"micro_batch_size_per_gpu": 2}),
}


class Inference(NamedTuple):
    """Attributes:
    log_probs, entropy, values: of each sequence, in the order of the batch.
    exported: name -> weight.
    """

    log_probs: list[Tensor]
    entropy: list[Tensor]
    values: list[Tensor]
    exported: dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("verl") / "model")


def inference_job(model: str, critic: str, options: Mapping[str, Any]) -> Inference:
    found = rows()
    temperatures = torch.stack([row["temperature"] for row in found])
    cut = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 34}
    with open_engine(model, forward_only=True, **options) as engine, engine.eval_mode():
        batch = make_batch(found, "response", **cut, calculate_entropy=True)
        batch["temperature"] = temperatures
        output = engine.infer_batch(batch)
        assert (output["loss"], output["metrics"]) == ([], {})
        outputs = {name: list(value.unbind()) for name, value in output["model_output"].items()}
        weights, peft_config = engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)
        assert peft_config is None
        exported = {name: tensor.clone() for name, tensor in weights}
    with open_engine(critic, head="value_model", forward_only=True, **options) as engine, engine.eval_mode():
        output = engine.infer_batch(make_batch(found, "dense", **cut))
    return Inference(**outputs, values=list(output["model_output"]["values"].unbind()), exported=exported)


@pytest.mark.shows(
    "verl: both backends, and use_prefix_grouper, give transformers' log-probs and values to 1e-5 per token, and equal "
    "exported weights"
)
@pytest.mark.parametrize("engine", sampled(ENGINES, "native", "bridge"))
def test_an_engine_gives_transformers_log_probs_and_values_and_exports_its_weights(
    ranks: RankPool, model: Path, tmp_path: Path, engine: str
) -> None:
    critic = write_critic(tmp_path / "critic", model)
    (found,) = ranks.run(inference_job, str(model), str(critic), ENGINES[engine], world_size=1, timeout=IMPORT_SECONDS)
    sequences = rows()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = transformers_outputs(reference, sequences, torch.stack([row["temperature"] for row in sequences]))
    for name in ("log_probs", "entropy"):
        for row, expected_row in zip(getattr(found, name), expected[name].unbind(), strict=True):
            torch.testing.assert_close(row, expected_row, rtol=0, atol=1e-5)
    values = transformers_values(critic, [row["input_ids"] for row in sequences])
    torch.testing.assert_close(torch.cat(found.values), values, rtol=0, atol=1e-5)
    stored = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.exported.keys() == stored.keys()
    for name, tensor in found.exported.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, stored[name]), name


def computed(output: Mapping[str, Any]) -> float:
    """Tokens, for one of the batch."""
    (found,) = output["metrics"].get("shared_prefixes/computed_fraction", (1.0,))
    return float(found)


def gradients_job(
    model: str, options: Mapping[str, Any]
) -> dict[str, tuple[float, dict[str, Any], dict[str, Tensor], float]]:
    """Loss, metrics and gradients of verl's losses, and what is computed, for every way to cut the batch."""
    from verl.utils.metric import Metric
    from verl.workers.utils.losses import sft_loss

    found = rows()
    results = {}
    with open_engine(model, **options) as engine:
        for name, (layout, cut) in {
            **CUTS,
            "sft": ("full", {"use_dynamic_bsz": True, "max_token_len_per_gpu": 34}),
            "sft, one sequence each": ("full", {"micro_batch_size_per_gpu": 1}),
        }.items():
            loss = partial(sft_loss, config=None) if layout == "full" else ppo()
            batch = make_batch(found, layout, **cut, calculate_entropy=layout != "full")
            with engine.train_mode():
                output = engine.forward_backward_batch(batch, loss)
                gradients = {name: value.clone() for name, value in engine._runtime.export_gradients(engine.handle)}
            metrics = {
                key: float(value.aggregate()) for key, value in output["metrics"].items() if isinstance(value, Metric)
            }
            results[name] = sum(output["loss"]), metrics, gradients, computed(output)
    return results


def value_gradients_job(critic: str, options: Mapping[str, Any]) -> list[tuple[float, dict[str, Tensor], float]]:
    """Loss and gradients of verl's value loss, and what is computed, for every way to cut the batch."""
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    results = []
    config = CriticConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=1, ppo_max_token_len_per_gpu=64)
    with open_engine(critic, head="value_model", **options) as engine:
        for layout, cut in CUTS.values():
            with engine.train_mode():
                output = engine.forward_backward_batch(make_batch(rows(), layout, **cut), partial(value_loss, config=config))
                gradients = {name: value.clone() for name, value in engine._runtime.export_gradients(engine.handle)}
            results.append((sum(output["loss"]), gradients, computed(output)))
    return results


@pytest.mark.parametrize("engine", sampled(ENGINES, "native", "bridge"))
def test_gradients_of_verls_value_loss_do_not_depend_on_how_a_batch_is_cut(
    ranks: RankPool, model: Path, tmp_path: Path, engine: str
) -> None:
    critic = write_critic(tmp_path / "critic", model)
    ((first, *others),) = ranks.run(value_gradients_job, str(critic), ENGINES[engine], world_size=1, timeout=IMPORT_SECONDS)
    assert first[1]["score.weight"].norm() > 0.1
    assert (first[2] < 0.9) == ("grouped" in ENGINES[engine])
    for loss, gradients, _ in others:
        assert loss == pytest.approx(first[0], rel=1e-5)
        assert_near(gradients, first[1])


@pytest.mark.shows(
    "verl: verl's PPO and SFT losses give transformers' gradients however a batch is cut, by use_prefix_grouper too"
)
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_verls_losses_do_not_depend_on_how_a_batch_is_cut(ranks: RankPool, model: Path, engine: str) -> None:
    from verl.workers.utils.losses import sft_loss

    (results,) = ranks.run(gradients_job, str(model), ENGINES[engine], world_size=1, timeout=IMPORT_SECONDS)
    expected: Mapping[str, tuple[float, dict[str, Tensor]]] = {
        "ppo": transformers_gradients(model, rows(), ppo(), "response"),
        "sft": transformers_gradients(model, rows(), partial(sft_loss, config=None), "full"),
    }
    _, metrics, _, of_all = results["one micro-batch"]
    assert (of_all < 0.9) == ("grouped" in ENGINES[engine]) and results["one sequence each"][-1] == 1
    assert {"actor/pg_loss", "actor/entropy_loss", "kl_loss"} < metrics.keys()
    for name, (loss, found_metrics, gradients, _) in results.items():
        expected_loss, expected_gradients = expected["sft" if name.startswith("sft") else "ppo"]
        assert loss == pytest.approx(expected_loss, rel=1e-5), name
        assert_near(gradients, expected_gradients)
        if name in CUTS:
            sums = {key: found_metrics[key] for key in ("actor/pg_loss", "actor/entropy_loss", "kl_loss")}
            assert sums == pytest.approx({key: metrics[key] for key in sums}, rel=1e-4), name


def refusal_job(model: str) -> tuple[list[str], bool]:
    """What this rank says to batches that only rank 1 cannot run, and whether it trains after them."""
    from verl.workers.utils.losses import sft_loss

    loss = partial(sft_loss, config=None)
    found = rows()[dist.get_rank() * 4 :][:4]
    broken: list[dict[str, Any]] = [
        {"use_dynamic_bsz": True, "max_token_len_per_gpu": 20},
        {"micro_batch_size_per_gpu": 3},
        {"calculate_sum_pi_squared": True},
    ]
    problems = []
    with open_engine(model) as engine, engine.train_mode():
        for facts in broken:
            cut = facts if dist.get_rank() == 1 else {"use_dynamic_bsz": True, "max_token_len_per_gpu": 40}
            with pytest.raises(RLBackendError) as raised:
                engine.train_batch(make_batch(found, "full", **cut), loss)
            problems.append(str(raised.value))
        output = engine.train_batch(make_batch(found, "full"), loss)
    return problems, output["metrics"]["grad_norm"] > 0


def test_a_batch_that_one_rank_refuses_is_refused_on_all_and_the_next_one_runs(ranks: RankPool, model: Path) -> None:
    (others, _), (mine, trains) = ranks.run(refusal_job, str(model), timeout=IMPORT_SECONDS)
    assert others == ["1 of 2 data-parallel ranks refused their batches; nothing ran on any"] * 3
    for problem, part in zip(mine, ("does not hold the longest", "does not divide", "sum of squared"), strict=True):
        assert part in problem
    assert trains


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


def failing_mode_job(model: str) -> list[tuple[str | None, bool]]:
    """After modes that failed to begin: the engine's mode, and whether its model is as it was."""
    found = []
    with open_engine(model, param_offload=True) as engine:
        before = engine.module[0].training
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "move", no_memory)
            for enter in (engine.train_mode, engine.eval_mode):
                with pytest.raises(MemoryError), enter():
                    pass
                found.append((engine.mode, engine.module[0].training is before))
        with engine.eval_mode():
            found.append((None, engine.mode == "eval"))
    return found


def test_a_mode_that_cannot_begin_leaves_none(ranks: RankPool, model: Path) -> None:
    assert ranks.run(failing_mode_job, str(model), world_size=1, timeout=IMPORT_SECONDS) == [[(None, True)] * 3]
