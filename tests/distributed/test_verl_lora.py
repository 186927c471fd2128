"""verl's engines with LoRA train the tenant that this package's runtimes would, over a base that references share."""

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

from rl_backend.contracts import OptimizerConfig, PackedBatch, RLBackendError, TokenSequence, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.micro_batches import pack
from tests.support.models import write_tiny
from tests.support.native import open_runtime
from tests.support.rank_pool import RankPool
from tests.support.tenants import copied
from tests.support.verl_batches import make_batch, rows
from tests.support.verl_engine import mean_loss, open_engine

IMPORT_SECONDS = 300.0
BY_TOKENS = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 38, "global_batch_size": 8}
RANK, ALPHA = 4, 8
LORA: Mapping[str, Any] = {"rank": RANK, "alpha": ALPHA, "lora_A_init_method": "kaiming"}
"""Starts as a tenant of the runtime does."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp": (2, {}),
    "tp": (2, {"layout": {"tp": 2}}),
    "cp": (2, {"layout": {"cp": 2}}),
    "pp": (2, {"layout": {"pp": 2}}),
    "bridge": (1, {"backend": "bridge"}),
    "bridge tp": (2, {"backend": "bridge", "layout": {"tp": 2}}),
    "offloaded": (1, {"param_offload": True, "optimizer_offload": True}),
}
EVERY_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Run(NamedTuple):
    """Attributes:
    losses, norms: of each step.
    reference: sequence -> log-probs without the adapter after the last step; on source ranks.
    log_probs: with it.
    factors: peft's name -> after the last step.
    merged: Hugging Face name -> weights with the adapter.
    """

    losses: list[float]
    norms: list[float]
    reference: dict[int, Tensor]
    log_probs: dict[int, Tensor]
    factors: dict[str, Tensor]
    merged: dict[str, Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("verl") / "model")


@pytest.fixture(scope="module")
def stored(model: Path) -> dict[str, Tensor]:
    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}


def lora(**changes: Any) -> dict[str, Any]:
    """``open_engine``'s options for an adapter."""
    return {"lora": {"lora": {**LORA, **changes}}}


def train_step(engine: Any, seed: int) -> tuple[float, float]:
    """Loss over all ranks and gradient norm of one of verl's SFT steps on this rank's share of the sequences."""
    from verl.workers.utils.losses import sft_loss

    mine = rows(seed)[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    with engine.train_mode():
        output = engine.train_batch(make_batch(mine, "full", **BY_TOKENS), partial(sft_loss, config=None))
    norm = torch.tensor(output["metrics"]["grad_norm"] if output else 0.0, dtype=torch.float64)
    dist.all_reduce(norm, dist.ReduceOp.MAX)
    engine.lr_scheduler_step()
    return mean_loss(engine, output), norm.item()


def log_probs(engine: Any, *, reference: bool = False) -> dict[int, Tensor]:
    """Of this rank's sequences, as verl's workers ask for them."""
    mine = list(range(8))[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    batch = make_batch([rows()[index] for index in mine], "response", **BY_TOKENS)
    with engine.eval_mode():
        if reference:
            with engine.disable_adapter():
                output = engine.infer_batch(batch)
        else:
            output = engine.infer_batch(batch)
    return dict(zip(mine, output["model_output"]["log_probs"].unbind(), strict=True)) if output else {}


def engine_job(model: str, options: dict[str, Any]) -> Run:
    with open_engine(model, **lora(), **options) as engine:
        steps = [train_step(engine, seed) for seed in range(2)]
        reference, found = log_probs(engine, reference=True), log_probs(engine)
        adapter, _ = engine.get_per_tensor_param(base_sync_done=True)
        factors = copied(adapter)
        merged = copied(engine._runtime.export_weights(engine.handle))
        return Run([loss for loss, _ in steps], [norm for _, norm in steps], reference, found, factors, merged)


def tenant_job(model: str) -> Run:
    """The same steps, on the runtime itself."""

    def nll(model_output: Any, data: PackedBatch, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        return -(model_output.log_probs * data.token_fields["weight"]).sum() / data.meta["num_tokens"], {}

    def batch(seed: int) -> PackedBatch:
        sequences, total = [], 0.0
        for row in rows(seed):
            mask = torch.cat([torch.zeros(int(row["prompt_length"])), row["response_mask"].float()])
            total += float(mask.sum())
            # The loss of a token is that of the log-prob before it.
            sequences.append(TokenSequence(row["input_ids"], token_fields={"weight": mask.roll(-1)}))
        return pack(sequences, {"num_tokens": total})

    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        optimizer = OptimizerConfig(lr=1e-3, lr_decay_style="linear", total_training_steps=10)
        config = LoRAConfig(rank=RANK, alpha=ALPHA, targets=EVERY_LAYER, seed=42)
        tenant = runtime.create_lora_adapter(base, config, optimizer)
        losses, norms = [], []
        for seed in range(2):
            losses.append(runtime.forward_backward(tenant, [batch(seed)], nll).loss)
            norms.append(runtime.optimizer_step(tenant).grad_norm)
            runtime.zero_grad(tenant)
            runtime.lr_scheduler_step(tenant)
        reference, found = (
            dict(enumerate(runtime.forward_backward(handle, [batch(0)], None, forward_only=True).outputs["log_probs"]))
            for handle in (base, tenant)
        )
        factors, merged = copied(runtime.export_lora_adapter(tenant)), copied(runtime.export_weights(tenant))
        return Run(losses, norms, reference, found, factors, merged)


@pytest.fixture(scope="module")
def alone(ranks: RankPool, model: Path) -> Run:
    (found,) = ranks.run(tenant_job, str(model), world_size=1, timeout=IMPORT_SECONDS)
    return found


@pytest.mark.shows("verl: with LoRA, losses, gradient norms and log-probs in every layout are those of the runtime's tenant")
@pytest.mark.parametrize("case", LAYOUTS)
def test_an_engine_trains_the_tenant_that_the_runtime_would(
    ranks: RankPool, model: Path, stored: Mapping[str, Tensor], alone: Run, case: str
) -> None:
    world_size, options = LAYOUTS[case]
    runs = ranks.run(engine_job, str(model), options, world_size=world_size, timeout=IMPORT_SECONDS)
    for run in runs:
        torch.testing.assert_close(run.losses, alone.losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(run.norms, alone.norms, rtol=1e-5, atol=0)
        for found, expected in ((run.factors, alone.factors), (run.merged, alone.merged)):
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5)
    assert run.merged.keys() == stored.keys()
    assert not torch.equal(run.merged["model.layers.0.mlp.up_proj.weight"], stored["model.layers.0.mlp.up_proj.weight"])
    for name in ("reference", "log_probs"):
        found = {index: row for run in runs for index, row in getattr(run, name).items()}
        assert found.keys() == set(range(8))
        for index, row in found.items():
            torch.testing.assert_close(row, getattr(alone, name)[index], rtol=0, atol=1e-5)
    assert max(float((alone.log_probs[index] - alone.reference[index]).abs().max()) for index in range(8)) > 1e-4


class Synced(NamedTuple):
    """What a rollout is given: (weights, peft_config) by ``base_sync_done``, or merged; and what is refused."""

    apart: dict[bool, tuple[dict[str, Tensor], dict[str, Any] | None]]
    merged: tuple[dict[str, Tensor], dict[str, Any] | None]
    refused: list[str]


def sync_job(model: str) -> Synced:
    with open_engine(model, **lora()) as engine:
        train_step(engine, 0)
        apart = {}
        for done in (False, True):
            weights, peft_config = engine.get_per_tensor_param(layered_summon=True, base_sync_done=done)
            apart[done] = copied(weights), peft_config
        refused = []
        for give in (engine.get_per_tensor_param, engine.get_per_tensor_param_shard):
            with pytest.raises(UnsupportedError) as raised:
                give()
            refused.append(str(raised.value))
    with open_engine(model, **lora(merge=True)) as engine:
        train_step(engine, 0)
        weights, peft_config = engine.get_per_tensor_param(base_sync_done=True)
        merged = copied(weights), peft_config
    return Synced(apart, merged, refused)


def test_a_rollout_is_given_the_base_once_and_the_adapter_or_merged_weights(
    ranks: RankPool, model: Path, stored: Mapping[str, Tensor]
) -> None:
    (found,) = ranks.run(sync_job, str(model), world_size=1, timeout=IMPORT_SECONDS)
    base, peft_config = found.apart[False]
    assert base.keys() == stored.keys() and all(torch.equal(base[name], tensor) for name, tensor in stored.items())
    factors, with_factors = found.apart[True]
    assert peft_config == with_factors and peft_config is not None
    assert (peft_config["r"], peft_config["lora_alpha"], peft_config["peft_type"]) == (RANK, ALPHA, "LORA")
    merged, no_config = found.merged
    assert no_config is None
    for name, tensor in merged.items():
        place = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{place}.lora_A.weight" in factors:
            added = factors[f"{place}.lora_B.weight"] @ factors[f"{place}.lora_A.weight"] * (ALPHA / RANK)
            torch.testing.assert_close(tensor, stored[name] + added, rtol=0, atol=1e-6)
        else:
            assert torch.equal(tensor, stored[name])
    assert len(factors) == 2 * sum(name.endswith("_proj.weight") for name in stored)
    whole_weights, shares = found.refused
    assert "lora.merge=False: checkpoint engines other than naive send whole weights only" in whole_weights
    assert "delta_sharded sends shares of weights that are trained themselves" in shares


def start_job(model: str, layout: dict[str, int], options: dict[str, Any]) -> dict[str, Tensor]:
    with open_engine(model, layout=layout, **options) as engine:
        return copied(engine.get_per_tensor_param(base_sync_done=True)[0])


@pytest.mark.parametrize(
    ("method", "spread"), [("xavier", (2 / (64 + RANK)) ** 0.5), ("normal", 0.2), ("kaiming", (1 / 3 / 64) ** 0.5)]
)
def test_first_factors_are_drawn_as_asked_and_the_same_in_every_layout(
    ranks: RankPool, model: Path, method: str, spread: float
) -> None:
    options = lora(lora_A_init_method=method, lora_B_init_method="normal" if method == "normal" else "zero")
    runs = [ranks.run(start_job, str(model), {}, options, world_size=1, timeout=IMPORT_SECONDS)[0]]
    runs += ranks.run(start_job, str(model), {"tp": 2}, options, timeout=IMPORT_SECONDS)
    first = runs[0]
    for name, factor in first.items():
        assert all(torch.equal(run[name], factor) for run in runs)
        if ".lora_A." in name and factor.shape[1] == 64:
            assert float(factor.std()) == pytest.approx(spread, rel=0.3), name
        if ".lora_B." in name:
            assert bool(factor.any()) is (method == "normal")
    assert not torch.equal(*(first[f"base_model.model.model.layers.0.self_attn.{name}_proj.lora_A.weight"] for name in "kv"))


def resume_job(model: str, folder: str, contents: tuple[str, ...], asynchronous: bool) -> dict[str, Any]:
    """Two steps after a save, of a run that went on and of one that loaded it into an engine that had stepped."""

    def go_on(engine: Any) -> list[Any]:
        return [(train_step(engine, seed), engine.lr_scheduler_step()) for seed in (2, 3)]

    options = {**lora(), "contents": contents, "async_save": asynchronous}
    with open_engine(model, **options) as engine:
        for seed in range(2):
            train_step(engine, seed)
        for _ in range(2):
            engine.save_checkpoint(f"{folder}/global_step_2/actor", None, 2, 1)
        merged = copied(engine._runtime.export_weights(engine.handle))
        saved = copied(engine.get_per_tensor_param(base_sync_done=True)[0])
        # A reference's batch, while the save may still be written, does not take it for complete.
        log_probs(engine, reference=True)
        straight = go_on(engine)
    with open_engine(model, **options) as engine:
        train_step(engine, 7)
        engine.load_checkpoint(f"{folder}/global_step_2/actor")
        loaded = copied(engine.get_per_tensor_param(base_sync_done=True)[0])
        return {"straight": straight, "resumed": go_on(engine), "merged": merged, "saved": saved, "loaded": loaded}


@pytest.mark.shows("verl: with LoRA, a saved and resumed engine trains on as if not stopped, to the last bit")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_engine_trains_on_and_peft_and_transformers_load_what_is_beside_its_state(
    ranks: RankPool, model: Path, tmp_path: Path, asynchronous: bool
) -> None:
    from peft import PeftModel

    contents = ("model", "optimizer", "extra", "hf_model")
    for found in ranks.run(resume_job, str(model), str(tmp_path), contents, asynchronous, timeout=IMPORT_SECONDS):
        assert found["resumed"] == found["straight"]
    actor = tmp_path / "global_step_2" / "actor"
    assert sorted(path.name for path in actor.iterdir()) == ["huggingface", "lora_adapter", "training_state"]
    whole = AutoModelForCausalLM.from_pretrained(actor / "huggingface", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(base, actor / "lora_adapter").eval()
    ids = rows()[0]["input_ids"][None]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, whole(ids).logits, rtol=0, atol=1e-5)
    for name, tensor in whole.state_dict().items():
        if name in found["merged"]:
            assert torch.equal(tensor, found["merged"][name]), name


def test_an_adapter_alone_is_saved_and_starts_another_run(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    (found,) = ranks.run(resume_job, str(model), str(tmp_path), ("model",), False, world_size=1, timeout=IMPORT_SECONDS)
    actor = tmp_path / "global_step_2" / "actor"
    assert [path.name for path in actor.iterdir()] == ["lora_adapter"]
    assert found["loaded"].keys() == found["saved"].keys()
    assert all(torch.equal(found["loaded"][name], tensor) for name, tensor in found["saved"].items())
    # Moments and schedule are new.
    assert found["resumed"][0][0][0] == found["straight"][0][0][0]
    assert found["resumed"][0][1] > found["straight"][0][1]
    options = lora(adapter_path=str(actor / "lora_adapter"))
    (start,) = ranks.run(start_job, str(model), {}, options, world_size=1, timeout=IMPORT_SECONDS)
    assert all(torch.equal(start[name], tensor) for name, tensor in found["saved"].items())


def refused_job(model: str, folder: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """What is said of an adapter of a higher rank, the tenant's factors after it, and those that are saved then."""
    with open_engine(model, contents=("model",), **lora(rank=2 * RANK)) as engine:
        engine.save_checkpoint(f"{folder}/large")
    said = []
    with open_engine(model, contents=("model",), **lora()) as engine:
        train_step(engine, 0)
        for _ in range(2):
            with pytest.raises(RLBackendError) as raised:
                engine.load_checkpoint(f"{folder}/large")
            said.append(str(raised.value))
        assert [each.name for each in engine._runtime.list_lora_adapters(engine.model.base)] == [engine.handle.name]
        held = copied(engine.get_per_tensor_param(base_sync_done=True)[0])
        # Another tenant of the base is not the engine's own.
        engine._runtime.create_lora_adapter(engine.model.base, engine.handle.lora)
        engine.save_checkpoint(f"{folder}/own")
    return said, held, load_file(f"{folder}/own/lora_adapter/adapter_model.safetensors")


def test_an_adapter_that_is_refused_leaves_an_engine_that_can_be_saved(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    ((said, held, saved),) = ranks.run(refused_job, str(model), str(tmp_path), world_size=1, timeout=IMPORT_SECONDS)
    assert said[0] == said[1] and f"has rank {2 * RANK} and " in said[0] and f"LoRAConfig.rank={RANK} and " in said[0]
    assert saved.keys() == held.keys() and all(torch.equal(saved[name], tensor) for name, tensor in held.items())


def critic_job(model: str, layout: dict[str, int]) -> tuple[list[float], list[float], dict[str, Tensor], bool]:
    """Losses and norms of verl's value loss, what a tenant has, and whether values are always those with it."""
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    config = CriticConfig(strategy="megatron", ppo_micro_batch_size_per_gpu=1, ppo_max_token_len_per_gpu=64)
    losses, norms = [], []
    with open_engine(model, head="value_model", layout=layout, **lora()) as engine:
        for seed in range(2):
            mine = rows(seed)[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
            with engine.train_mode():
                output = engine.train_batch(make_batch(mine, "response", **BY_TOKENS), partial(value_loss, config=config))
            norm = torch.tensor(output["metrics"]["grad_norm"] if output else 0.0, dtype=torch.float64)
            dist.all_reduce(norm, dist.ReduceOp.MAX)
            norms.append(norm.item())
            losses.append(mean_loss(engine, output))
        factors = copied(engine._runtime.export_lora_adapter(engine.handle))
        batch = make_batch(rows(), "response", **BY_TOKENS)
        with engine.eval_mode():
            output = engine.infer_batch(batch)
            # As verl's worker does where the batch still asks for a reference.
            with engine.disable_adapter():
                again = engine.infer_batch(batch)
        values, others = (each["model_output"]["values"].values() if each else torch.ones(1) for each in (output, again))
        return losses, norms, factors, bool(values.any()) and torch.equal(values, others)


def test_a_critic_trains_its_head_whole_beside_its_adapter(ranks: RankPool, model: Path) -> None:
    (one,) = ranks.run(critic_job, str(model), {}, world_size=1, timeout=IMPORT_SECONDS)
    losses, norms, factors, moved = one
    assert moved and factors["base_model.model.score.weight"].any()
    for run in ranks.run(critic_job, str(model), {"tp": 2}, timeout=IMPORT_SECONDS):
        torch.testing.assert_close(run[0], losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(run[1], norms, rtol=1e-5, atol=0)
        for name, factor in factors.items():
            torch.testing.assert_close(run[2][name], factor, rtol=0, atol=2e-5)
