"""Forward and backward passes of groups of answers to one prompt, with the prompt computed once and for every answer.

The model is that of ``train_speed``. Prompts are not trained, as in RL. Beside each ratio is the gain that is possible:
floating-point operations without over with sharing, of layers by rows, of scores by pairs of tokens, of the head by answers.
``python -m benchmarks.shared_prefixes`` writes ``results/shared_prefixes.json``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.report import interleave, machine, medians, write_result
from benchmarks.train_speed import MODEL, make_model, next_token_loss
from rl_backend.contracts import TARGET_IDS, PackedBatch, RuntimeConfig
from rl_backend.runtime import create_runtime


class Group(NamedTuple):
    prompt: int  # tokens
    answer: int  # tokens of each
    answers: int

    @classmethod
    def parse(cls, text: str) -> Group:
        return cls(*map(int, text.split("x")))


GROUPS = (Group(256, 64, 8), Group(512, 128, 8), Group(512, 512, 16), Group(1024, 128, 16))


def batch_of(group: Group) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    vocab = MODEL["vocab_size"]
    prompt = torch.randint(1, vocab, (group.prompt,), generator=generator)
    rows, targets = [], []
    for _ in range(group.answers):
        answer = torch.randint(1, vocab, (group.answer,), generator=generator)
        rows.append(torch.cat((prompt, answer)))
        # As rl_backend.algorithm.sequences asks for them.
        targets.append(torch.cat((torch.full((group.prompt - 1,), -100), answer, torch.tensor([-100]))))
    lengths = torch.tensor([len(row) for row in rows])
    meta = {"batch_num_tokens": group.answer * group.answers}
    return PackedBatch(torch.cat(rows), lengths, {TARGET_IDS: torch.cat(targets)}, meta=meta)


def flops(group: Group, *, shared: bool) -> float:
    hidden, width = MODEL["hidden_size"], MODEL["head_dim"]
    heads, kv_heads = MODEL["num_attention_heads"], MODEL["num_key_value_heads"]
    weights = 2 * hidden * width * (heads + kv_heads) + 3 * hidden * MODEL["intermediate_size"]
    prompts = 1 if shared else group.answers
    rows = prompts * group.prompt + group.answers * group.answer
    pairs = prompts * group.prompt**2 / 2 + group.answers * group.answer * (group.prompt + group.answer / 2)
    layers = MODEL["num_hidden_layers"] * (2 * rows * weights + 4 * pairs * heads * width)
    return layers + 2 * group.answers * group.answer * hidden * MODEL["vocab_size"]


def passes(model_dir: Path, share: str) -> Callable[[PackedBatch], float]:
    """Seconds of a forward and a backward pass."""
    options = {"device": "cpu", "share_prefixes": share}
    runtime = create_runtime(RuntimeConfig(hf_path=str(model_dir), backend_cfg=options, max_tokens_per_micro_batch=2**16))
    handle = runtime.build_model()

    def measure(batch: PackedBatch) -> float:
        runtime.zero_grad(handle)
        start = time.perf_counter()
        with runtime.train_mode(handle):
            losses.append(runtime.forward_backward(handle, [batch], next_token_loss).loss)
        return time.perf_counter() - start

    losses: list[float] = []
    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="timed passes of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--groups", type=Group.parse, nargs="+", default=GROUPS, metavar="PxRxN")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts, results = machine(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as directory:
        longest = max(group.prompt + group.answer for group in arguments.groups)
        model_dir = make_model(Path(directory), max_position_embeddings=longest)
        measures = {share: passes(model_dir, share) for share in ("off", "auto")}
        for group in arguments.groups:
            batch = batch_of(group)
            calls = {share: lambda measure=measure, batch=batch: measure(batch) for share, measure in measures.items()}
            interleave(1, calls)
            seconds = interleave(arguments.runs, calls)
            middle = medians(seconds)
            possible = flops(group, shared=False) / flops(group, shared=True)
            gain = middle["off"] / middle["auto"]
            name = "x".join(map(str, group))
            results[name] = {"seconds": seconds, "off_over_auto": gain, "possible": possible, "reached": gain / possible}
            print(f"{name}: {middle['off']:.2f} s, shared {middle['auto']:.2f} s, {gain:.2f}x of {possible:.2f}x possible")
    print(f"wrote {write_result('shared_prefixes', {'groups': results, 'model': MODEL, 'machine': facts})}")


if __name__ == "__main__":
    main()
