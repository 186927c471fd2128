"""Router replay between vLLM and a trainer in bfloat16: what it does for log-probs, and what it costs.

vLLM samples from a random Qwen3-MoE. The native runtime scores the samples twice: routing freely, and sending every token to
vLLM's experts. A token is *flipped* where the trainer, left free, picks other experts than vLLM in some layer. Its log-prob
gap to vLLM is compared with that of the other tokens, with vLLM's weights in the trainer and with weights that were
perturbed by ``PERTURBATION``; the figures at the top are the worse of these two. ``sweep`` has the same comparison for every
size in ``SWEEP``, because the ratio without replay depends on it: with a larger perturbation other weights, and no longer
other experts, make the gap. ``--sweep`` measures this part alone and keeps what the file has of times.

Then the steps of a loop (pass for the old log-probs, update) are timed with replay and without, in turn;
``step_time_fraction`` is the share that R2 or R3 adds, whichever is more, in seconds of the processor that driver and rank
use, on which other work of the machine weighs less than on the clock. ``python -m benchmarks.router_replay`` writes
``results/router_replay.json``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors import HandleRef, Loss, RankContext, RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, sample_seeds
from actors.cluster.session import init_local_ray
from actors.train.model import GroupModel, RouterReplayMode
from benchmarks.report import interleave, machine, medians, read_result, write_result
from rl_backend import NativeConfig, RuntimeConfig, TokenSequence
from rl_backend.algorithm import kl_penalty
from rl_backend.algorithm.sequences import to_sequences, with_outputs

MODEL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
    "mlp_only_layers": [0],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
PERTURBATION = 0.002
"""Standard deviation of the noise on weights, in that of their tensors; ``SWEEP`` shows what others give."""
SWEEP = (0.0005, 0.001, PERTURBATION, 0.005, 0.01, 0.02)
PROMPTS, PROMPT_TOKENS, RESPONSE_TOKENS = 64, 32, 96
TIMED = 16
"""Sequences of a timed step."""
META = {"routed_experts_layers": "moe"}


def write_model(path: Path, perturbation: float = 0.0) -> Path:
    """A random model, the same each time, with noise on its weights."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**MODEL))
    with torch.no_grad():
        for parameter in model.parameters():
            if perturbation and parameter.dim() > 1:
                parameter.add_(perturbation * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def perturbed_model(group: TrainGroup, folder: Path, size: float) -> HandleRef:
    return group.build_model(hf_path=write_model(folder / str(size), size), forward_only=True)


def sample(rollout: RolloutGroup) -> list[TokenSequence]:
    """Sequences with vLLM's log-probs and routes."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(MODEL["vocab_size"], (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    sampling = SamplingConfig(max_new_tokens=RESPONSE_TOKENS)
    return to_sequences(rollout.generate(prompts, sampling, seeds=sample_seeds(0, 0, PROMPTS, 1)), routes=True)


def compare(group: TrainGroup, policy: HandleRef, sequences: Sequence[TokenSequence]) -> dict[str, float]:
    """Mean log-prob gaps to vLLM of flipped and other response tokens, and KL of the rollout to the trainer, in nats."""
    free = group.forward(policy, sequences, router_replay="record")
    replayed = group.forward(policy, sequences, meta=META, router_replay="replay")

    def packed(name: str) -> Tensor:
        return torch.cat([sequence.token_fields[name] for sequence in sequences])

    def experts(routes: Tensor) -> Tensor:
        return routes.long().sort(-1).values

    response = packed("loss_mask").bool()
    own = torch.cat(list(free.output("routed_experts")))
    flipped = (experts(own) != experts(packed("routed_experts"))).flatten(1).any(1)[response]
    rollout = packed("rollout_log_probs")[response]
    result: dict[str, float] = {"response_tokens": int(response.sum()), "flipped_tokens": int(flipped.sum())}
    for name, outputs in {"without": free, "with": replayed}.items():
        log_probs = torch.cat(list(outputs.output("log_probs")))[response]
        gaps = (log_probs - rollout).abs()
        result |= {
            f"gap_of_flipped_{name}": float(gaps[flipped].mean()),
            f"gap_of_unflipped_{name}": float(gaps[~flipped].mean()),
            f"flipped_over_unflipped_{name}": float(gaps[flipped].mean() / gaps[~flipped].mean()),
            f"largest_gap_{name}": float(gaps.max()),
            f"kl_{name}": float(kl_penalty(rollout, log_probs, "k3").mean()),
        }
    return result


def step(group: TrainGroup, policy: HandleRef, samples: Sequence[TokenSequence], mode: RouterReplayMode) -> float:
    """Processor seconds of the trainer's part of a step."""
    free = [TokenSequence(each.input_ids, {"loss_mask": each.token_fields["loss_mask"]}) for each in samples]
    model = GroupModel(group, policy, mode)
    loss = Loss("rl_backend.algorithm:grpo_loss")
    started = processor_seconds(group)
    sequences = samples if mode == "R3" else free
    sequences = with_outputs(sequences, model.outputs({"old_log_probs": "log_probs"}, sequences, META, before_updates=True))
    sequences = [each.with_fields(sequence_fields={"advantages": torch.tensor(1.0)}) for each in sequences]
    model.submit_update(sequences, loss, META)()
    return processor_seconds(group) - started


def processor_seconds(group: TrainGroup) -> float:
    """Used so far by this process and the ranks."""
    return time.process_time() + sum(group.run_on_ranks(_of_rank))


def _of_rank(context: RankContext) -> float:
    return time.process_time()


def time_steps(
    group: TrainGroup, policy: HandleRef, sequences: Sequence[TokenSequence], runs: int
) -> dict[str, Mapping[str, Any]]:
    """Interleaved steps with replay and without."""
    modes: tuple[RouterReplayMode, ...] = ("off", "R2", "R3")
    steps: dict[str, Callable[[], float]] = {
        mode: lambda mode=mode: step(group, policy, sequences, mode)  # type: ignore[misc]
        for mode in modes
    }
    interleave(1, steps)
    seconds = interleave(runs, steps)
    fractions = {
        mode: [replayed / free - 1 for replayed, free in zip(seconds[mode], seconds["off"], strict=True)]
        for mode in ("R2", "R3")
    }
    return {"processor_seconds": medians(seconds), "fraction_of_step": medians(fractions), "runs": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="timed steps with R2, with R3 and without replay")
    parser.add_argument("--sweep", action="store_true", help="only compare perturbations; keep what the file has of times")
    arguments = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        base = write_model(Path(folder) / "model")
        init_local_ray(num_cpus=8, include_dashboard=False, log_to_driver=False)
        with RolloutGroup(
            RolloutConfig(model_path=str(base), max_model_len=256, kv_cache_gib=0.5, return_routed_experts=True)
        ) as rollout:
            sequences = sample(rollout)
        native = NativeConfig(param_dtype="bfloat16")
        config = RuntimeConfig(hf_path=str(base), backend_cfg=native)
        with TrainGroup(config, cores_per_rank=2) as group:
            equal = compare(group, group.build_model(forward_only=True), sequences)
            perturbed = {size: compare(group, perturbed_model(group, Path(folder), size), sequences) for size in SWEEP}
            times = (
                read_result("router_replay")["times"]
                if arguments.sweep
                else time_steps(group, group.build_model(), sequences[:TIMED], arguments.runs)
            )
        ray.shutdown()
    routes = sequences[0].token_fields["routed_experts"]
    both = (equal, perturbed[PERTURBATION])
    path = write_result(
        "router_replay",
        {
            "flipped_over_unflipped_with_replay": max(each["flipped_over_unflipped_with"] for each in both),
            "flipped_over_unflipped_without": min(each["flipped_over_unflipped_without"] for each in both),
            "kl_with": max(each["kl_with"] for each in both),
            "kl_without": min(each["kl_without"] for each in both),
            "bytes_per_token": routes[0].numel() * routes.element_size(),
            "step_time_fraction": max(times["fraction_of_step"].values()),
            "equal_weights": equal,
            "perturbed_weights": {"perturbation": PERTURBATION, **perturbed[PERTURBATION]},
            "sweep": [{"perturbation": size, **perturbed[size]} for size in SWEEP],
            "times": times,
            "model": MODEL,
            "machine": facts,
        },
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
