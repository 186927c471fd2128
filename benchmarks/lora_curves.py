"""Several LoRA tenants in one pass against one tenant after the other: their work, and how it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors import HandleRef, Loss, TrainGroup
from benchmarks.report import interleave, medians
from rl_backend.contracts import ModelHandle, NativeConfig, OptimizerConfig, PackedBatch, RuntimeConfig, TokenSequence
from rl_backend.contracts.lora import LORA_FIELD, LoRAConfig
from rl_backend.data import pack_plan, plan_micro_batches, plan_tenants
from rl_backend.runtime import Runtime, create_runtime

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SEQUENCES = {16: (1, 16), 64: (1, 64), 256: (4, 64), 1024: (4, 256)}
"""Tokens of a tenant -> its sequences, and the tokens of each."""
TENANTS = (2, 8, 64)
RANKS: Mapping[str, Sequence[int]] = {"equal": (16,), "mixed": (4, 8, 16, 32, 64)}
"""Ranks that the tenants have in turn."""
SMALL = ("equal", 8, 16)
MAX_TOKENS = 8192
"""Tokens of a micro-batch, on both sides."""
SECONDS_OF_A_CELL = 4.0
LEAST_RUNS, MOST_RUNS = 3, 25
LOSS = Loss("rl_backend.algorithm:sft_loss")

type Curves = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Ranks -> tenants -> tokens of a tenant -> figures."""


class Tenants[Handle](NamedTuple):
    """The base that a runtime or a group has built, and its tenants by name."""

    base: Handle
    handles: Mapping[str, Handle]


def write_model(path: Path, settings: Mapping[str, Any] = MODEL) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**settings)).to(torch.float32).save_pretrained(path)
    return path


def config_of(model: Path) -> RuntimeConfig:
    return RuntimeConfig(hf_path=str(model), max_tokens_per_micro_batch=MAX_TOKENS, backend_cfg=NativeConfig(device="cpu"))


def create_tenants[Handle](owner: Any, base: Handle, ranks: Sequence[int], count: int) -> Tenants[Handle]:
    """Args:
    owner: a runtime or a training group.
    """
    handles = {}
    for index in range(count):
        lora = LoRAConfig(rank=ranks[index % len(ranks)], seed=index)
        name = f"tenant {index} of {ranks}"
        handles[name] = owner.create_lora_adapter(base, lora, OptimizerConfig(lr=1e-4), name=name)
    return Tenants(base, handles)


def draw_sequences(lora_id: int, tokens: int) -> list[TokenSequence]:
    """Sequences of one tenant, each with the field that names it."""
    count, length = SEQUENCES[tokens]
    generator = torch.Generator().manual_seed(lora_id)
    rows = torch.randint(MODEL["vocab_size"], (count, length), generator=generator)
    field = {LORA_FIELD: torch.tensor(lora_id)}
    return [TokenSequence.from_prompt_and_response(row[:1], row[1:], sequence_fields=field) for row in rows]


def curves_of_passes(model: Path, counts: Sequence[int] = TENANTS, seconds: float = SECONDS_OF_A_CELL) -> Curves:
    """Passes alone, forward and backward, in processor time of one thread; ``counts`` of tenants."""
    torch.set_num_threads(1)
    runtime = create_runtime(config_of(model))
    base = runtime.build_model(trainable=False)

    def sides(tenants: Tenants[ModelHandle], sequences: Sequence[list[TokenSequence]]) -> dict[str, Callable[[], float]]:
        return _passes(runtime, tenants, sequences)

    try:
        return _curves(runtime, base, sides, counts, seconds)
    finally:
        runtime.close()


def curves_through_actors(model: Path, counts: Sequence[int] = TENANTS, seconds: float = SECONDS_OF_A_CELL) -> Curves:
    """Whole steps in wall time: ``zero_grad``, ``forward_backward``, ``optimizer_step`` and ``lr_scheduler_step``."""
    with TrainGroup(config_of(model), num_ranks=1) as group:
        base = group.build_model(trainable=False)

        def sides(tenants: Tenants[HandleRef], sequences: Sequence[list[TokenSequence]]) -> dict[str, Callable[[], float]]:
            return _steps(group, tenants, sequences)

        return _curves(group, base, sides, counts, seconds)


def _curves(
    owner: Any, base: Any, sides: Callable[..., dict[str, Callable[[], float]]], counts: Sequence[int], seconds: float
) -> Curves:
    curves: Curves = {}
    for kind, ranks in RANKS.items():
        whole = create_tenants(owner, base, ranks, max(counts))
        for count in counts:
            tenants = Tenants(base, dict(list(whole.handles.items())[:count]))
            for tokens in SEQUENCES:
                sequences = [draw_sequences(handle.lora_id, tokens) for handle in tenants.handles.values()]
                cell = _cell(sides(tenants, sequences), seconds)
                curves.setdefault(kind, {}).setdefault(str(count), {})[str(tokens)] = cell
                print(f"{kind} ranks, {count} tenants of {tokens} tokens: {cell['ratio']:.2f}x", flush=True)
        for handle in whole.handles.values():
            owner.remove_lora_adapter(handle)
    return curves


def _cell(sides: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, Any]:
    """Medians of as many interleaved runs as fit into ``seconds``; the first counts where there are only a few."""
    started = time.perf_counter()
    values = interleave(1, sides)
    more = int(seconds / (time.perf_counter() - started))
    if more > LEAST_RUNS:
        values = interleave(min(more, MOST_RUNS), sides)
    else:
        for name, series in interleave(LEAST_RUNS - 1, sides).items():
            values[name] += series
    runs, middle = len(values["batched"]), medians(values)
    ratios = {f"{name}_over_batched": value / middle["batched"] for name, value in middle.items() if name != "batched"}
    return {
        "ratio": ratios.pop("swapped_over_batched"),
        **ratios,
        **{f"{name}_ms": round(1e3 * value, 3) for name, value in middle.items()},
        "runs": runs,
    }


def _passes(
    runtime: Runtime[Any], tenants: Tenants[ModelHandle], sequences: Sequence[list[TokenSequence]]
) -> dict[str, Callable[[], float]]:
    def packed(rows: Sequence[TokenSequence]) -> list[PackedBatch]:
        lengths, owners = [len(row) for row in rows], [int(row.sequence_fields[LORA_FIELD]) for row in rows]
        single = len(set(owners)) == 1
        plan = plan_micro_batches(lengths, 1, MAX_TOKENS) if single else plan_tenants(lengths, owners, 1, MAX_TOKENS)
        return list(pack_plan(rows, plan)[0])

    handles = list(tenants.handles.values())
    alone, together = [packed(rows) for rows in sequences], packed(list(chain(*sequences)))
    losses = dict.fromkeys(tenants.handles, LOSS)

    def timed(run: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            runtime.zero_grad(handles)
            started = time.process_time()
            run()
            return time.process_time() - started

        return measure

    def swapped() -> None:
        for handle, data in zip(handles, alone, strict=True):
            runtime.forward_backward(handle, data, LOSS)

    return {
        "swapped": timed(swapped),
        "batched": timed(lambda: runtime.forward_backward(tenants.base, together, losses)),
    }


def _steps(
    group: TrainGroup, tenants: Tenants[HandleRef], sequences: Sequence[list[TokenSequence]]
) -> dict[str, Callable[[], float]]:
    handles = list(tenants.handles.values())
    together, losses = list(chain(*sequences)), dict.fromkeys(tenants.handles, LOSS)

    def timed(run: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            started = time.perf_counter()
            run()
            return time.perf_counter() - started

        return measure

    def step(handle: HandleRef, rows: list[TokenSequence]) -> None:
        group.zero_grad(handle)
        group.forward_backward(handle, rows, LOSS)
        _require_ok([group.optimizer_step(handle)])
        group.lr_scheduler_step(handle)

    def swapped() -> None:
        for handle, rows in zip(handles, sequences, strict=True):
            step(handle, rows)

    def swapped_ahead() -> None:
        """Nothing is waited for before everything is submitted."""
        futures = []
        for handle, rows in zip(handles, sequences, strict=True):
            futures += [group.zero_grad.submit(handle), group.forward_backward.submit(handle, rows, LOSS)]
            futures += [group.optimizer_step.submit(handle), group.lr_scheduler_step.submit(handle)]
        for future in futures:
            future.result()

    def batched() -> None:
        group.zero_grad(handles)
        group.forward_backward(tenants.base, together, losses)
        _require_ok(group.optimizer_step(handles))
        group.lr_scheduler_step(handles)

    sides = {"swapped": timed(swapped), "batched": timed(batched)}
    # Where calls cost as much as passes.
    return {**sides, "swapped_ahead": timed(swapped_ahead)} if sum(map(len, sequences[0])) <= SMALL[2] else sides


def _require_ok(results: Sequence[Any]) -> None:
    if not all(result.ok for result in results):
        raise RuntimeError(f"an optimizer step was skipped: {results}")
