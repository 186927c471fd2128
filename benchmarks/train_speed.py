"""Training speed of the native runtime against transformers with fused AdamW, in tokens per second.

Both train the same model on the same sequences, micro-batch by micro-batch, one optimizer step after several of them.
transformers gets what its Trainer gives it: sequences padded on the right to the longest of the micro-batch, an attention
mask where there is padding, labels of -100 there. Padding does not count as tokens. Runs are interleaved and the figures
are medians. ``python -m benchmarks.train_speed`` writes ``results/train_speed.json``.

With ``--gemm`` it adds ``share_of_gemm`` alone: operations per second of training steps of SmolLM2-135M, six a parameter
and token, over those of products of square matrices of the same dtype with the same threads, and over those of products of
the model's own shapes, which are slower. In bfloat16 where the processor multiplies it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import interleave, machine, medians, over_machines, update_result
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import (
    MetricValue,
    ModelOutput,
    OptimizerConfig,
    PackedBatch,
    RuntimeConfig,
)
from rl_backend.lab.doctor.machine import cpu_features
from rl_backend.runtime import create_runtime

MODEL = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LONGEST, SHORTEST = 512, 32
SEQUENCES_PER_MICRO_BATCH = 8
MIXED_MICRO_BATCHES = 2
LEARNING_RATE = 1e-4
SMOLLM2_PARAMETERS = 134_515_008
# Of the products that a step is compared with: matrices of this many rows and columns, so many times.
GEMM_SIZE, GEMM_TIMES = 2048, 8

type Lengths = list[list[int]]
type Step = Callable[[Sequence[Sequence[Tensor]]], float]


def workloads(seed: int) -> dict[str, Lengths]:
    """Lengths of the sequences of each micro-batch of a step; the mixed ones are evenly spaced and dealt at random."""
    count = MIXED_MICRO_BATCHES * SEQUENCES_PER_MICRO_BATCH
    spread = torch.linspace(SHORTEST, LONGEST, count).long()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return {
        "equal_lengths": [[LONGEST] * SEQUENCES_PER_MICRO_BATCH],
        "mixed_lengths": spread[order].view(MIXED_MICRO_BATCHES, -1).tolist(),
    }


def runtime_step(model_dir: Path, backend: str, device: str = "cpu", dtype: str = "float32", **further: Any) -> Step:
    """A step through a public runtime: every micro-batch forward and backward, gradient clipping, AdamW.

    Args:
        further: options of the runtime.
    """
    optimizer = OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0)
    options = {"optimizer": optimizer, "device": device, "param_dtype": dtype, **further}
    runtime = create_runtime(
        RuntimeConfig(backend=backend, hf_path=str(model_dir), backend_cfg=options, max_tokens_per_micro_batch=2**16)
    )
    handle = runtime.build_model()

    def step(sequences: Sequence[Sequence[Tensor]]) -> float:
        predictions = sum(len(sequence) - 1 for batch in sequences for sequence in batch)
        data = [
            PackedBatch(
                torch.cat(list(batch)), torch.tensor([len(x) for x in batch]), meta={"batch_num_tokens": predictions}
            )
            for batch in sequences
        ]
        runtime.zero_grad(handle)
        with runtime.train_mode(handle):
            result = runtime.forward_backward(handle, data, next_token_loss)
        ok, _, _ = runtime.optimizer_step(handle)
        if not ok:
            raise RuntimeError(f"the optimizer step of {backend} was skipped")
        return result.loss

    return step


def next_token_loss(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Mean negative log-likelihood over the step's predictions."""
    assert model_output.log_probs is not None
    return -model_output.log_probs.sum() / data.meta["batch_num_tokens"], {}


def transformers_step(model_dir: Path, device: str = "cpu", dtype: str = "float32", **options: str) -> Step:
    """A step as transformers' Trainer makes it: padded micro-batches, clipping, fused AdamW.

    Args:
        options: of ``from_pretrained``.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, **options).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def step(sequences: Sequence[Sequence[Tensor]]) -> float:
        predictions = sum(len(sequence) - 1 for batch in sequences for sequence in batch)
        total = 0.0
        for batch in sequences:
            inputs = {name: tensor.to(device) for name, tensor in pad(batch).items()}
            with torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32"):
                loss = model(**inputs, use_cache=False, num_items_in_batch=predictions).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def pad(batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """A micro-batch as transformers' data collator makes it: (B, longest) ids, mask and labels."""
    ids = torch.nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=0)
    lengths = torch.tensor([len(sequence) for sequence in batch])
    mask = torch.arange(ids.shape[1])[None, :] < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def make_model(directory: Path, **changes: Any) -> Path:
    """A random model of the benchmark's size; ``changes`` are fields of its ``config.json``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**MODEL, **changes})).save_pretrained(directory)
    return directory


def timed(step: Step, lengths: Lengths, losses: list[float], vocab_size: int) -> Callable[[], float]:
    """A measurement: one step on fresh sequences of these lengths, in tokens per second."""
    generator = torch.Generator().manual_seed(1)

    def measure() -> float:
        sequences = [[torch.randint(1, vocab_size, (n,), generator=generator) for n in batch] for batch in lengths]
        start = time.perf_counter()
        losses.append(step(sequences))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return sum(map(sum, lengths)) / (time.perf_counter() - start)

    return measure


def measure_workload(
    name: str, lengths: Lengths, steps: Mapping[str, Step], runs: int, vocab_size: int = MODEL["vocab_size"]
) -> dict[str, Any]:
    """Interleaved runs of one workload, checked to have computed the same losses; ``ratios``: native over each other."""
    losses: dict[str, list[float]] = {implementation: [] for implementation in steps}
    measurements = {key: timed(step, lengths, losses[key], vocab_size) for key, step in steps.items()}
    interleave(1, measurements)
    values = interleave(runs, measurements)
    compare_losses(losses)
    middle = medians(values)
    ratios = {key: middle["native"] / value for key, value in middle.items() if key != "native"}
    print(f"{name}: " + ", ".join(f"{key} {value:.0f} tokens/s" for key, value in middle.items()), ratios)
    padded = sum(max(batch) * len(batch) for batch in lengths)
    return {
        "tokens_per_step": sum(map(sum, lengths)),
        "tokens_per_step_with_padding": padded,
        "lengths": lengths,
        "tokens_per_second": values,
        "median_tokens_per_second": middle,
        "first_losses": {key: series[0] for key, series in losses.items()},
        "ratios": ratios,
    }


def compare_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """Raises when they did not train alike: a fast wrong step is no result."""
    for name, series in losses.items():
        for value, reference in zip(series, losses["transformers"], strict=True):
            if abs(value - reference) > 1e-3 * abs(reference):
                raise RuntimeError(f"losses differ: {name} {value}, transformers {reference}")


def share_of_gemm(dtype: str, runs: int) -> dict[str, Any]:
    """Of a step on four sequences of ``LONGEST`` tokens, in one micro-batch; ``share`` is the median of the rounds."""
    # Here: make gpu-check imports this file where there is no SmolLM2.
    from tests.support.libraries import smollm2

    step, lengths, losses = runtime_step(smollm2(), "native", dtype=dtype), [[LONGEST] * 4], list[float]()
    train = timed(step, lengths, losses, vocab_size=49_152)
    train()
    tokens = sum(map(sum, lengths))
    flops = 6 * SMOLLM2_PARAMETERS * tokens
    factor = torch.randn(GEMM_SIZE, GEMM_SIZE).to(getattr(torch, dtype))

    def multiply() -> float:
        start = time.perf_counter()
        for _ in range(GEMM_TIMES):
            torch.mm(factor, factor)
        return 2 * GEMM_SIZE**3 * GEMM_TIMES / (time.perf_counter() - start)

    own = own_products(smollm2(), tokens, dtype)
    for measure in (multiply, own):
        measure()
    values = interleave(runs, {"training": lambda: train() * flops / tokens, "gemm": multiply, "own_products": own})
    shares = {
        name: [one / other for one, other in zip(values["training"], values[name], strict=True)]
        for name in ("gemm", "own_products")
    }
    middle = {name: statistics.median(each) for name, each in shares.items()}
    print(
        f"{dtype}: {middle['gemm']:.2f} of the speed of square products, {middle['own_products']:.2f} of its own, {shares}"
    )
    return {
        "share": middle["gemm"],
        "share_of_own_products": middle["own_products"],
        "shares": shares,
        "operations_per_second": values,
        "operations_per_step": flops,
        "tokens_per_step": tokens,
    }


def own_products(model_dir: Path, tokens: int, dtype: str) -> Callable[[], float]:
    """A measurement: operations per second of a step's products of so many tokens with a model's matrices, forward and
    backward.
    """
    shapes = Counter(info.shape for info in HFReader(model_dir).infos.values() if len(info.shape) == 2)

    def measure() -> float:
        seconds = operations = 0.0
        for (outputs, inputs), count in shapes.items():
            x, weight, grad = (
                torch.randn(size).to(getattr(torch, dtype))
                for size in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
            )
            start = time.perf_counter()
            for left, right in ((x, weight.t()), (grad, weight), (grad.t(), x)):
                torch.mm(left, right)
            seconds += count * (time.perf_counter() - start)
            operations += count * 6 * tokens * outputs * inputs
        return operations / seconds

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed steps of each implementation and workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gemm", action="store_true", help="only the share of the speed of products of matrices")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = machine()
    if arguments.gemm:
        instructions = sorted({"avx512_bf16", "amx_bf16"} & set(cpu_features()))
        dtypes = ("float32", "bfloat16") if instructions else ("float32",)
        shares = {dtype: share_of_gemm(dtype, arguments.runs) for dtype in dtypes}
        found = {**shares, "bfloat16_instructions": instructions, "machine": facts}
        print(f"wrote {update_result('train_speed', {'share_of_gemm': found})}")
        return
    with tempfile.TemporaryDirectory() as directory:
        model_dir = make_model(Path(directory))
        steps = {"native": runtime_step(model_dir, "native"), "transformers": transformers_step(model_dir)}
        results = {
            name: measure_workload(name, lengths, steps, arguments.runs) for name, lengths in workloads(seed=0).items()
        }
    ratios = {name: result.pop("ratios")["transformers"] for name, result in results.items()}
    path = update_result(
        "train_speed",
        {
            "native_over_transformers": ratios,
            "over_machines": over_machines("train_speed", {name: (ratio,) for name, ratio in ratios.items()}),
            "workloads": results,
            "model": MODEL,
            "machine": facts,
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
