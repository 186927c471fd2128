"""Training groups of model-parallel ranks, of either runtime, behind the same calls; and their weights in vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ray import cloudpickle
from torch import Tensor

from actors import HandleRef, Loss, RankContext, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from rl_backend import create_runtime
from rl_backend.contracts import (
    BackendConfig,
    BatchError,
    GroupFailedError,
    ModelOutput,
    NativeConfig,
    OptimizerConfig,
    PackedBatch,
    ParallelConfig,
    RuntimeConfig,
    TokenSequence,
)
from rl_backend.data import prepare_micro_batches
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.sft_batches import random_token_sequences

NLL = Loss("tests.support.losses:nll_loss")
OPTIMIZER = OptimizerConfig(lr=1e-3, clip_grad=1.0)
MAX_TOKENS = 40
STEPS = 2
LENGTHS = [12, 20, 9, 31, 25, 14]
PROMPTS = [[5, 6, 7], [9, 10], [100, 90, 80, 70]]
V_SHAPED = ParallelConfig(pp=2, vpp=2)
BACKENDS: dict[str, BackendConfig] = {
    "bridge tp=2": BridgeConfig(device="cpu", parallel=ParallelConfig(tp=2), optimizer=OPTIMIZER),
    "bridge pp=2 vpp=2": BridgeConfig(device="cpu", parallel=V_SHAPED, optimizer=OPTIMIZER),
    "native tp=2": NativeConfig(device="cpu", parallel=ParallelConfig(tp=2), optimizer=OPTIMIZER),
    "native cp=2": NativeConfig(device="cpu", parallel=ParallelConfig(cp=2), optimizer=OPTIMIZER),
    "native zbv": NativeConfig(device="cpu", parallel=V_SHAPED, pipeline_schedule="zbv", optimizer=OPTIMIZER),
}
"""Of two ranks."""


class Step(NamedTuple):
    """What a training step shows."""

    loss: float
    nll: float
    grad_norm: float
    log_probs: Sequence[Tensor]


def batch(step: int) -> list[TokenSequence]:
    return random_token_sequences(LENGTHS, 128, seed=step)


@pytest.fixture(scope="module")
def native_steps(four_layers: Path) -> list[Step]:
    """The native runtime on one rank, in this process."""
    config = RuntimeConfig(hf_path=str(four_layers), backend_cfg=NativeConfig(device="cpu", optimizer=OPTIMIZER))
    runtime = create_runtime(config)
    handle = runtime.build_model()
    steps = []
    for step in range(STEPS):
        (data,) = prepare_micro_batches(batch(step), 1, config.max_tokens_per_micro_batch)
        runtime.zero_grad(handle)
        result = runtime.forward_backward(handle, data, NLL)
        grad_norm = runtime.optimizer_step(handle).grad_norm
        steps.append(Step(result.loss, result.means["nll"], grad_norm, result.output("log_probs")))
    runtime.close()
    return steps


@pytest.fixture(
    scope="module",
    params=[
        # `make test` has native ranks in test_weight_sync_train_group.py.
        pytest.param(config, id=name, marks=[] if name == "bridge pp=2 vpp=2" else [pytest.mark.long])
        for name, config in BACKENDS.items()
    ],
)
def train(ray_cluster: None, four_layers: Path, request: pytest.FixtureRequest) -> Iterator[TrainGroup]:
    backend = "bridge" if isinstance(request.param, BridgeConfig) else "native"
    config = RuntimeConfig(
        backend=backend, hf_path=str(four_layers), max_tokens_per_micro_batch=MAX_TOKENS, backend_cfg=request.param
    )
    with TrainGroup(config, num_ranks=2, name=backend, failure_grace=2.0) as group:
        yield group


@pytest.fixture(scope="module")
def policy(train: TrainGroup) -> HandleRef:
    return train.build_model(name="policy")


@pytest.mark.shows("actors: with tp, cp or a pipeline, either runtime's steps equal one rank's and vLLM serves the weights")
def test_ranks_of_any_layout_train_as_native_does_and_an_engine_serves_their_weights(
    train: TrainGroup, policy: HandleRef, native_steps: list[Step], random_engine: RolloutGroup
) -> None:
    parallel = train.config.backend_cfg.parallel
    assert policy.data_parallel_size == parallel.data_parallel_size(2)
    interleaved = parallel.vpp > 1 and train.config.backend == "bridge"
    assert policy.micro_batch_multiple == (2 if interleaved else 1)
    for step in range(STEPS):
        train.zero_grad(policy)
        result = train.forward_backward(policy, batch(step), NLL)
        taken = train.optimizer_step(policy)
        assert taken.ok
        expected = native_steps[step]
        assert len(result.losses) > 1
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.means["nll"] == pytest.approx(expected.nll, rel=1e-5)
        assert taken.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        for found, native in zip(result.output("log_probs"), expected.log_probs, strict=True):
            torch.testing.assert_close(found, native, atol=1e-4, rtol=1e-4)
    random_engine.forget_weights()  # of the layout before
    with WeightSync(train, random_engine, policy, byte_budget=1 << 18) as sync:
        assert sync.push().version == train.weight_version(policy) == STEPS
        assert mean_gap(train, policy, random_engine) <= 1e-5


def test_what_a_rank_sends_is_read_without_megatron(train: TrainGroup) -> None:
    # In here, so that ranks need not import this file.
    def pickled_tensor(context: RankContext) -> bytes:
        return cloudpickle.dumps(torch.ones(3))

    found = train.run_on_ranks(pickled_tensor)
    # Native ranks have what Megatron changes from a caller that has imported it, as other tests of this process have.
    assert train.config.backend == "native" or all(b"megatron" not in pickled for pickled in found)


def mean_gap(train: TrainGroup, policy: HandleRef, engine: RolloutGroup) -> float:
    samples = engine.generate(PROMPTS, SamplingConfig(n=2, max_new_tokens=8))
    sequences = [TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids) for sample in samples]
    found = train.forward(policy, sequences).output("log_probs")
    gaps = [
        abs(float(log_probs[len(sample.prompt_ids) - 1 + index]) - log_prob)
        for sample, log_probs in zip(samples, found, strict=True)
        for index, log_prob in enumerate(sample.log_probs)
    ]
    return sum(gaps) / len(gaps)


def test_a_batch_that_every_rank_refuses_leaves_the_group_usable(train: TrainGroup, policy: HandleRef) -> None:
    with pytest.raises(BatchError, match="vocab"):
        train.forward(policy, [TokenSequence(torch.tensor([1, 999])), TokenSequence(torch.tensor([1, 2]))])
    assert len(train.forward(policy, batch(0)).output("log_probs")) == len(LENGTHS)


def test_a_loss_that_fails_on_one_rank_is_named_and_no_rank_waits_for_it(train: TrainGroup, policy: HandleRef) -> None:
    """The last test of a group: its ranks are stopped."""

    def fails_on_long_batches(model_output: ModelOutput, data: PackedBatch, dp_group: Any = None) -> Any:
        if int(data.seq_lens.max()) == max(LENGTHS):
            raise ValueError("a loss that fails")
        return NLL(model_output, data, dp_group)

    parallel = train.config.backend_cfg.parallel
    on_every_rank = parallel.tp * parallel.cp > 1
    with pytest.raises(ValueError if on_every_rank else GroupFailedError, match="a loss that fails"):
        train.forward_backward(policy, batch(0), fails_on_long_batches)
