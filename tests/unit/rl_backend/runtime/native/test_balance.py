"""Loss-free balancing: what counts, when biases move, and what takes a move back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError, OptimizerConfig, PackedBatch
from rl_backend.runtime import check_config
from rl_backend.runtime.native import forward_backward
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.bridge_runs import poisoned_loss
from tests.support.deepseek import write_latent
from tests.support.families import load_transformers
from tests.support.models import write_tiny
from tests.support.native import full, make_config, micro_batches, open_runtime, token_loss, weights
from tests.support.routes import with_routes

RATE = 0.01
SPLIT = [[0, 1, 2, 3], [4, 5, 6, 7]]
BALANCED: Mapping[str, Any] = {"model": "deepseek_v3", "model_cfg": {"expert_bias_rate": RATE}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latent("deepseek_v3", tmp_path_factory.mktemp("balance") / "model")


def biases(handle: NativeHandle) -> dict[str, Tensor]:
    return {name: full(value) for name, value in handle.parameters.items() if name.endswith("expert_bias.values")}


def step(runtime: NativeRuntime, handle: NativeHandle, seed: int = 0, loss: Any = token_loss, **options: Any) -> None:
    runtime.zero_grad(handle)
    runtime.forward_backward(handle, micro_batches(SPLIT, seed=seed), loss, **options)
    runtime.optimizer_step(handle)


class PlainRule:
    """Counts what transformers' routers choose, and moves their biases once a step, expert by expert."""

    def __init__(self, reference: nn.Module) -> None:
        self.mixtures = {
            name: module for name, module in reference.named_modules() if hasattr(module, "route_tokens_to_experts")
        }
        self.loads: dict[str, list[int]] = {}
        for name, mixture in self.mixtures.items():
            mixture.gate.register_forward_hook(lambda _, __, logits, name=name: self.count(name, logits))
        self.forget()

    def forget(self) -> None:
        self.loads = {name: [0] * mixture.n_routed_experts for name, mixture in self.mixtures.items()}

    @torch.no_grad()
    def count(self, name: str, logits: Tensor) -> None:
        for token in self.mixtures[name].route_tokens_to_experts(logits)[0].tolist():
            for expert in token:
                self.loads[name][expert] += 1

    def move(self) -> None:
        for name, loads in self.loads.items():
            mean = sum(loads) / len(loads)
            bias = self.mixtures[name].gate.e_score_correction_bias
            for expert, load in enumerate(loads):
                bias[expert] += RATE * ((load < mean) - (load > mean))
        self.forget()


@pytest.mark.shows(
    "model: steps of DeepSeek-V3 with loss-free balancing equal transformers' with a plain rule, 20 in make test-all"
)
@pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.long)])
def test_steps_equal_transformers_with_a_plain_rule(model: Path, steps: int) -> None:
    reference = load_transformers(model)
    rule = PlainRule(reference)
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for parameter in reference.parameters() if parameter.dim() != 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in reference.parameters() if parameter.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    settings = OptimizerConfig(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=0.0)
    with open_runtime(model, optimizer=settings, **BALANCED) as runtime:
        handle = runtime.build_model()
        for seed in range(steps):
            data = micro_batches(SPLIT, seed=seed)
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, data, token_loss)
            norm = runtime.optimizer_step(handle).grad_norm
            optimizer.zero_grad()
            total = 0.0
            for batch in data:
                for sequence in batch.input_ids.split(batch.seq_lens.tolist()):
                    log_probs = reference(sequence[None]).logits[0, :-1].log_softmax(-1)
                    loss = -log_probs.gather(1, sequence[1:, None]).sum() / batch.meta["batch_num_tokens"]
                    loss.backward()
                    total += float(loss.detach())
            gradients = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
            expected = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients]))
            optimizer.step()
            rule.move()
            assert sum(result.losses) == pytest.approx(total, rel=1e-6), seed
            assert norm == pytest.approx(float(expected), rel=1e-5), seed
            for name, bias in biases(handle).items():
                mixture = rule.mixtures[f"model.{name.removesuffix('.gate.expert_bias.values')}"]
                assert torch.equal(bias, mixture.gate.e_score_correction_bias), (seed, name)


def test_forward_only_passes_recomputation_and_dropped_gradients_do_not_count(model: Path) -> None:
    found = []
    for checkpointing, others in (("none", False), ("full", True)):
        with open_runtime(model, activation_checkpointing=checkpointing, **BALANCED) as runtime:
            handle = runtime.build_model()
            before = biases(handle)
            if others:
                other = micro_batches([[4, 1]], seed=7)
                runtime.forward_backward(handle, other, token_loss)
                runtime.zero_grad(handle)
                runtime.forward_backward(handle, micro_batches(SPLIT[:1]), token_loss)
                runtime.forward_backward(handle, other, None, forward_only=True)
                runtime.forward_backward(handle, micro_batches(SPLIT[1:]), token_loss)
                runtime.optimizer_step(handle)
            else:
                step(runtime, handle)
            found.append(biases(handle))
            assert all(not torch.equal(value, before[name]) for name, value in found[-1].items())
    assert len(found[0]) == 2 and all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_a_step_uses_up_the_choices_that_it_counted(model: Path) -> None:
    """Gradients stay until they are dropped, but the second step moves biases by the second pass alone."""
    found = []
    with open_runtime(model, **BALANCED) as runtime:
        for drops in (True, False):
            handle = runtime.build_model()
            step(runtime, handle, seed=0)
            if drops:
                runtime.zero_grad(handle)
            # Two tokens, whose experts are no likeness of those before.
            runtime.forward_backward(handle, micro_batches([[4]], seed=1), token_loss)
            runtime.optimizer_step(handle)
            found.append(biases(handle))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.shows("model: a refused step leaves biases of routers as they were, and its tokens do not count later")
def test_a_refused_step_moves_no_bias(model: Path) -> None:
    with open_runtime(model, **BALANCED) as runtime:
        handle, other = runtime.build_model(), runtime.build_model()
        before = biases(handle)
        step(runtime, handle, seed=3, loss=poisoned_loss)
        assert all(torch.equal(value, before[name]) for name, value in biases(handle).items())
        step(runtime, handle)
        step(runtime, other)
        assert all(torch.equal(value, biases(other)[name]) for name, value in biases(handle).items())


@pytest.mark.shows("model: biases of routers stay as they are unless balancing is asked for, and routers with freeze_router")
def test_what_is_frozen_stays_as_it_is(model: Path) -> None:
    for freeze in (False, True):
        with open_runtime(model, model="deepseek_v3", model_cfg={"freeze_router": freeze}) as runtime:
            handle = runtime.build_model()
            before = weights(handle)
            step(runtime, handle)
            stayed = {name for name, value in weights(handle).items() if torch.equal(value, before[name])}
            frozen = {name for name in before if name.endswith(".gate.weight")} if freeze else set()
            assert stayed == biases(handle).keys() | frozen


@pytest.mark.shows("replay: where routes are replayed, loss-free balancing counts these")
def test_replayed_routes_are_what_counts(model: Path) -> None:
    with open_runtime(model, **BALANCED) as runtime:
        handle = runtime.build_model()
        before = biases(handle)
        data = micro_batches(SPLIT)
        routes = {
            index: torch.arange(4, dtype=torch.uint8).expand(length, 2, 4)
            for indices, batch in zip(SPLIT, data, strict=True)
            for index, length in zip(indices, batch.seq_lens.tolist(), strict=True)
        }
        runtime.zero_grad(handle)
        runtime.forward_backward(handle, with_routes(data, SPLIT, routes), token_loss, router_replay="replay")
        runtime.optimizer_step(handle)
        moved = torch.tensor([-RATE] * 4 + [RATE] * 4)
        assert all(torch.equal(value, before[name] + moved) for name, value in biases(handle).items())


@pytest.mark.shows("checkpoints: a run with loss-free balancing resumes bit for bit, biases included")
def test_a_resumed_run_has_the_same_biases(model: Path, tmp_path: Path) -> None:
    with open_runtime(model, **BALANCED) as runtime:
        handle = runtime.build_model()
        for seed in range(4):
            step(runtime, handle, seed)
            if seed == 1:
                runtime.save_checkpoint(handle, tmp_path / "saved")
        again = runtime.build_model()
        runtime.load_checkpoint(again, tmp_path / "saved")
        for seed in (2, 3):
            step(runtime, again, seed)
        expected = weights(handle)
        assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())
        exported = dict(runtime.export_weights(again, dtype=torch.bfloat16))
        stored = {name: value for name, value in exported.items() if name.endswith("e_score_correction_bias")}
        assert len(stored) == 2 and all(value.dtype == torch.float32 for value in stored.values())


def test_balancing_evens_out_the_load(model: Path) -> None:
    """One router's scores prefer three experts; nothing but the bias can change that."""
    still = OptimizerConfig(lr=1e-12)
    with open_runtime(model, model="deepseek_v3", model_cfg={"expert_bias_rate": 0.05}, optimizer=still) as runtime:
        handle = runtime.build_model()
        skewed = [value for name, value in handle.parameters.items() if name.endswith("expert_bias.values")]
        with torch.no_grad():
            for bias in skewed:
                bias.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
        loads = []
        for seed in range(25):
            runtime.zero_grad(handle)
            recorded = runtime.forward_backward(handle, micro_batches(SPLIT, seed=seed), token_loss, router_replay="record")
            loads.append(torch.cat(recorded.outputs["routed_experts"]).flatten().long().bincount(minlength=8).float())
            runtime.optimizer_step(handle)
        # Over ten steps, because each has few tokens and other ones.
        uneven = [float(load.max() / load.mean()) for load in (loads[0], sum(loads[-10:]))]
        assert uneven[0] > 1.9 and uneven[1] < 1.3, uneven


def test_a_family_without_a_bias_has_no_rate(tmp_path: Path) -> None:
    path = write_tiny("qwen3_moe", tmp_path / "model", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    config = make_config(path, model="qwen3_moe", model_cfg={"expert_bias_rate": 0.1})
    with pytest.raises(ConfigError, match=r"model_cfg\.expert_bias_rate=0\.1: config\.json describes no part that takes it"):
        check_config(config, 1)


@pytest.mark.parametrize("stages", [{}, {"parallel": {"vpp": 2}, "pipeline_schedule": "zbv"}], ids=["plain", "stages"])
def test_tokens_that_fill_up_a_ranks_share_count_as_no_use_of_experts(
    model: Path, monkeypatch: pytest.MonkeyPatch, stages: dict[str, Any]
) -> None:
    """As where tensor-parallel ranks share an odd number of tokens out."""
    module = forward_backward
    lay_out, filler = forward_backward.lay_out, 3

    def with_filler(batch: PackedBatch, *args: Any) -> Any:
        found = lay_out(batch, *args)
        padding = torch.arange(batch.num_tokens) >= batch.num_tokens - filler
        return replace(found, inputs=found.inputs._replace(padding=padding))

    with open_runtime(model, **BALANCED, **stages) as runtime:
        handle = runtime.build_model()
        data = micro_batches(SPLIT)
        counts: dict[bool, list[Tensor]] = {}
        for has_filler in (False, True):
            if has_filler:
                monkeypatch.setattr(module, "lay_out", with_filler)
            runtime.zero_grad(handle)
            runtime.forward_backward(handle, data, token_loss)
            assert handle.optimizer is not None and handle.optimizer.balance is not None
            counts[has_filler] = list(handle.optimizer.balance._counts.values())
        tokens = sum(batch.num_tokens for batch in data)
        for every, without in zip(counts[False], counts[True], strict=True):
            top_k = int(every.sum()) // tokens
            assert top_k > 0 and int(every.sum()) == tokens * top_k
            assert int(without.sum()) == (tokens - filler * len(data)) * top_k
            assert bool((without <= every).all())
