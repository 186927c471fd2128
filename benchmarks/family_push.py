"""The gap between a trainer and a vLLM engine that its weights are pushed to, before and after steps of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from actors import HandleRef, Loss, RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.cluster.session import ray_session
from actors.rollout.sample import Sample
from actors.rollout.vllm.capabilities import REFUSALS
from benchmarks.family_models import Family, write_small
from benchmarks.parity_random import is_refusal
from benchmarks.report import machine
from benchmarks.sparse_reference import as_transformers_reads
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import NativeConfig, OptimizerConfig, RLBackendError, RuntimeConfig, TokenSequence
from rl_backend.lab.parity.config import DType

DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
LENGTHS = (1, 5, 60, 130)
"""Tokens of the prompts: one alone, and more than two chunks of the gated DeltaNet."""

STEPS = 2
SAMPLES_PER_PROMPT = 2
NEW_TOKENS = 24
LEARNING_RATE = 1e-3
LARGEST_GAP = 1e-5
"""Mean over the tokens of a push, float32, nats."""

MOST_OVER_TRANSFORMERS = 3.0
"""In bfloat16, over the gap between transformers in bfloat16 and in float32."""


def measure_push(family: Family, folder: Path) -> dict[str, Any]:
    """dtype -> gaps, or a refusal of the runtime or the engine."""
    directory = write_small(family, folder / "model", **family.pushed)
    found: dict[str, Any] = {}
    with ray_session(1, 1):
        for dtype in DTYPES:
            try:
                found[dtype] = push_gaps(directory, dtype, corrected=bool(family.corrected))
            except RLBackendError as error:
                message = str(error).replace(str(directory), "MODEL")
                found[dtype] = {"refused" if is_refusal(error) else "failed": message}
            print(f"push {dtype}: {found[dtype]}", flush=True)
    return {
        "dtypes": found,
        "steps": STEPS,
        "prompt_lengths": LENGTHS,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "new_tokens": NEW_TOKENS,
        "lr": LEARNING_RATE,
        "model": {"model_type": family.model_type, **family.settings("small"), **family.pushed},
        "machine": machine(),
    }


def push_gaps(directory: Path, dtype: DType, *, corrected: bool = False) -> dict[str, Any]:
    """Gaps after a push of the weights of ``directory`` and after one of each step's; the engine starts with others.

    In bfloat16 also those of transformers to itself in float32, on the samples of the first push.

    Args:
        corrected: transformers has to be corrected (:mod:`benchmarks.sparse_reference`).

    Raises:
        RLBackendError: the native runtime or vLLM does not serve the model in ``dtype``.
    """
    native = NativeConfig(device="cpu", param_dtype=dtype, optimizer=OptimizerConfig(lr=LEARNING_RATE))
    engine = RolloutConfig(
        model_path=str(directory), device="cpu", dtype=dtype, load_format="dummy", max_model_len=256, kv_cache_gib=0.25
    )
    vocab_size = int(read_hf_config(directory)["vocab_size"])
    prompts, data = draw_tokens(LENGTHS, vocab_size, seed=1), draw_tokens((12, 20, 9, 131), vocab_size, seed=2)
    sampling = SamplingConfig(n=SAMPLES_PER_PROMPT, max_new_tokens=NEW_TOKENS)
    gaps: list[list[float]] = []
    first: Sequence[Sample] = ()
    with (
        TrainGroup(RuntimeConfig(hf_path=str(directory), backend_cfg=native)) as trainer,
        RolloutGroup(engine) as rollout,
        WeightSync(trainer, rollout, policy := trainer.build_model()) as sync,
    ):
        for step in range(STEPS + 1):
            if step:
                train(trainer, policy, data)
            sync.push()
            samples = rollout.generate(prompts, sampling)
            if not step:
                first = samples
            sequences = [as_sequence(sample) for sample in samples]
            gaps.append(gaps_to(samples, trainer.forward(policy, sequences).output("log_probs")))
    largest = max(map(mean, gaps))
    found = {"mean_gap": largest, "max_gap": max(map(max, gaps)), "mean_gaps": list(map(mean, gaps))}
    if dtype == "float32":
        return found
    theirs = directory.with_name("corrected") if corrected else directory
    with as_transformers_reads(directory, theirs) if corrected else nullcontext():
        exact, rounded = (
            transformers_log_probs(theirs, first, kind, "eager" if corrected else None)
            for kind in (torch.float32, getattr(torch, dtype))
        )
    own = [float(gap) for one, other in zip(exact, rounded, strict=True) for gap in (one - other).abs()]
    rounding = {"mean_gap": mean(own), "max_gap": max(own)}
    return {**found, "transformers_to_float32": rounding, "mean_gap_over_transformers": largest / rounding["mean_gap"]}


def is_good(push: Mapping[str, Any]) -> bool:
    """Whether every gap is as small as it has to be; what is refused has none."""
    exact, rounded = (push["dtypes"][dtype] for dtype in DTYPES)
    return (
        "failed" not in exact
        and "failed" not in rounded
        and exact.get("mean_gap", 0.0) <= LARGEST_GAP
        and rounded.get("mean_gap_over_transformers", 0.0) <= MOST_OVER_TRANSFORMERS
    )


def engine_refusals() -> list[dict[str, Any]]:
    """What no engine is started for, and why; ``model_types`` is empty for every model."""
    fields = ("device", "what", "measured", "instead")
    return [
        {"model_types": sorted(refusal.model_types), **{name: getattr(refusal, name) for name in fields}}
        for refusal in REFUSALS
    ]


def train(trainer: TrainGroup, policy: HandleRef, data: Sequence[Sequence[int]]) -> None:
    trainer.zero_grad(policy)
    sequences = [TokenSequence.from_prompt_and_response(row[:1], row[1:]) for row in data]
    trainer.forward_backward(policy, sequences, Loss("rl_backend.algorithm:sft_loss"))
    if not trainer.optimizer_step(policy).ok:
        raise RuntimeError("the optimizer step was skipped")


def as_sequence(sample: Sample) -> TokenSequence:
    return TokenSequence.from_prompt_and_response(sample.prompt_ids, sample.response_ids)


def gaps_to(samples: Sequence[Sample], log_probs: Sequence[Tensor]) -> list[float]:
    """|engine's log-prob - other| of every sampled token, nats.

    Args:
        log_probs: of each sample (L,), that of a token at the position before it.
    """
    return [
        abs(float(row[len(sample.prompt_ids) - 1 + index]) - log_prob)
        for sample, row in zip(samples, log_probs, strict=True)
        for index, log_prob in enumerate(sample.log_probs)
    ]


def transformers_log_probs(
    directory: Path, samples: Sequence[Sample], dtype: torch.dtype, attention: str | None = None
) -> list[Tensor]:
    """Of the response of each sample, (R,), one at a time; ``attention`` is what transformers calls an implementation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=attention).eval()
    found = []
    for sample in samples:
        row = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        with torch.no_grad():
            log_probs = model(row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(log_probs.gather(1, row[1:, None]).squeeze(1)[len(sample.prompt_ids) - 1 :])
    return found


def draw_tokens(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (sum(lengths),), generator=generator).tolist()
    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    return [tokens[start:end] for start, end in pairwise(ends)]
