"""Runs of verl's trainers on the demo's task, by the scripts of ``examples/verl``, and what they show."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from actors.train.model import RouterReplayMode
from examples.demo.task import ModelName, layers_for
from examples.verl import sft
from examples.verl.rl import RLOptions, train

type Backend = Literal["native", "bridge"]
type Algorithm = Literal["grpo", "ppo"]
type Metrics = Mapping[int, Mapping[str, float]]

QUIET = "trainer.val_before_train=False trainer.test_freq=-1"
LAYOUTS: dict[Backend, dict[str, tuple[ModelName, dict[str, int]]]] = {
    "native": {
        "dp2": ("qwen3", {}),
        "tp2": ("qwen3", {"tp": 2}),
        "pp2": ("qwen3", {"pp": 2}),
        "ep2": ("qwen3_moe", {"ep": 2}),
    },
    "bridge": {
        "dp2": ("qwen3", {}),
        "tp2": ("qwen3", {"tp": 2}),
        "pp2": ("qwen3", {"pp": 2}),
        "ep2": ("qwen3_moe", {"ep": 2}),
    },
}
LAYERS = layers_for(2)
RESUMED_STEPS, STEPS_BEFORE = 5, 3


def sft_options(backend: Backend, folder: Path, steps: int, demo_model: ModelName = "qwen3") -> sft.SFTOptions:
    name = "sft" if demo_model == "qwen3" else f"sft_{demo_model}"
    return sft.SFTOptions(backend=backend, run_dir=str(folder / name), steps=steps, demo_model=demo_model)


def run_sft(options: sft.SFTOptions) -> dict[str, Any]:
    """verl's SFT trainer from random weights; losses in nats a token."""
    started = time.perf_counter()
    found = read_metrics(sft.train(options))
    return {
        "loss_start": found[1]["train/loss"],
        "loss_end": found[max(found)]["train/loss"],
        "held_out_loss_end": found[max(found)]["val/loss"],
        "steps": max(found),
        "seconds": time.perf_counter() - started,
    }


def run_rl(options: RLOptions) -> dict[str, Any]:
    """verl's ``main_ppo``; ``reward`` is the share of right answers on prompts not trained on, greedy."""
    started = time.perf_counter()
    found = read_metrics(train(options))
    return {
        "reward_start": held_out_reward(found[0]),
        "reward_end": held_out_reward(found[max(found)]),
        "max_rollout_probs_diff": max(step.get("training/rollout_probs_diff_max", 0.0) for step in found.values()),
        **replayed(found),
        "steps": max(found),
        "seconds": time.perf_counter() - started,
    }


def replayed(found: Metrics) -> dict[str, float]:
    """The share of tokens that updates sent to recorded experts, in the step where it was least."""
    name = "actor/router_replay/replayed_fraction"
    shares = [step[name] for step in found.values() if name in step]
    return {"least_replayed_fraction": min(shares)} if shares else {}


def rollout_gap(model: str, folder: Path) -> dict[str, Any]:
    """How far probabilities of vLLM in bfloat16 are from those of the trainer in float32, without replay and with R3."""
    found: dict[str, Any] = {}
    modes: tuple[RouterReplayMode, ...] = ("off", "R3")
    for mode in modes:
        options = RLOptions(
            model=model,
            run_dir=str(folder / f"gap_{mode}"),
            router_replay=mode,
            steps=1,
            batch_size=64,
            updates_per_step=1,
            overrides=f"{QUIET} actor_rollout_ref.rollout.dtype=bfloat16",
        )
        metrics = read_metrics(train(options))[1]
        found[mode] = {name: metrics[f"training/rollout_probs_diff_{name}"] for name in ("mean", "max", "std")}
        found[mode] |= {"kl": metrics["rollout_corr/kl"]}
    return found


def resume(backend: Backend, model: str, folder: Path, algorithm: Algorithm, **settings: Any) -> dict[str, Any]:
    """A run that went on, and one that was resumed: losses, gradient norms and learning rates of the steps after the
    checkpoint.

    Args:
        settings: further options of the runs, over those here.

    verl's sampling has no seed for a request, so the resumed run is given the samples of the other by verl's own
    ``skip.rollout_tq``. That puts them in another order, hence one update a step.
    """
    steps = range(STEPS_BEFORE + 1, RESUMED_STEPS + 1)
    names = ["actor/grad_norm", "actor/lr"]
    if algorithm == "ppo":
        # Not the actor's loss, which with whitened advantages and one update is 0 but for rounding.
        names += ["critic/vf_loss", "critic/grad_norm", "critic/lr"]
    else:
        names += ["actor/loss", "actor/kl_loss"]

    def run(name: str, *overrides: str) -> Metrics:
        samples = f"skip.rollout_tq.enable=True skip.rollout_tq.dump_dir={folder / 'samples'}"
        options: dict[str, Any] = {
            "model": model,
            "run_dir": str(folder / name),
            "backend": backend,
            "steps": RESUMED_STEPS,
            "updates_per_step": 1,
            "lr_warmup_steps": RESUMED_STEPS - 1,
            "save_every": STEPS_BEFORE,
            "overrides": " ".join([QUIET, samples, f"skip.rollout_tq.steps={list(steps)}".replace(" ", ""), *overrides]),
            **settings,
        }
        options |= {"critic_lr": 1e-3} if algorithm == "ppo" else {"kl_coef": 0.1}
        return read_metrics(train(RLOptions(algorithm=algorithm, **options)))

    started = time.perf_counter()
    straight = run("straight")
    checkpoint = folder / "straight" / "checkpoints" / f"global_step_{STEPS_BEFORE}"
    resumed = run("resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    return {
        "steps": {
            str(step): {name: {"straight": straight[step][name], "resumed": resumed[step][name]} for name in names}
            for step in steps
        },
        "largest_relative_difference": largest_difference(
            [straight[step][name] for step in steps for name in names],
            [resumed[step][name] for step in steps for name in names],
        ),
        "first_step_resumed": min(resumed),
        "seconds": time.perf_counter() - started,
    }


def layouts(backend: Backend, folder: Path) -> dict[str, Any]:
    """Loss and gradient norm of the first step of verl's SFT trainer on two ranks, against one rank of ``native``."""
    started = time.perf_counter()

    def first_step(name: str, backend: Backend, model: ModelName, ranks: int, layout: Mapping[str, int]) -> list[float]:
        options = sft.SFTOptions(
            backend=backend,
            demo_model=model,
            demo_layers=LAYERS,
            run_dir=str(folder / name),
            ranks=ranks,
            steps=1,
            overrides="data.val_files=null",
            **layout,
        )
        found = read_metrics(sft.train(options))[1]
        return [found["train/loss"], found["train/grad_norm"]]

    one = {model: first_step(f"one_{model}", "native", model, 1, {}) for model in ("qwen3", "qwen3_moe")}
    differences = {
        name: largest_difference(one[model], first_step(name, backend, model, 2, layout))
        for name, (model, layout) in LAYOUTS[backend].items()
    }
    return {"relative_difference_to_one_rank": differences, "seconds": time.perf_counter() - started}


def largest_difference(expected: list[float], found: list[float]) -> float:
    """Relative, of numbers in pairs."""
    return max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(expected, found, strict=True))


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics, of verl's file logger."""
    found: dict[int, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        found.setdefault(entry["step"], {}).update(entry["data"])
    return found


def held_out_reward(metrics: Mapping[str, float]) -> float:
    (value,) = (value for name, value in metrics.items() if name.startswith("val-core/") and "mean@1" in name)
    return value


def run_part(part: str, backend: Backend, folder: Path, steps: int, sft_steps: int) -> dict[str, Any]:
    """One part of the result but the overhead; RL starts from the model that SFT leaves in ``folder``."""
    if part == "layouts":
        return layouts(backend, folder / part)
    mixture = part.startswith(("grpo_", "rollout_"))
    warm = sft_options(backend, folder, sft_steps, "qwen3_moe" if mixture else "qwen3")
    if part == "sft":
        return run_sft(warm)
    model = sft.trained_model(warm)
    if not model.exists():
        sft.train(warm)
    if part in ("resume", "resume_ppo"):
        return resume(backend, str(model), folder / part, "ppo" if part == "resume_ppo" else "grpo")
    if part == "rollout_gap":
        return rollout_gap(str(model), folder)
    options: dict[str, Any] = {"backend": backend, "model": str(model), "run_dir": str(folder / part), "steps": steps}
    if mixture:
        options |= {"router_replay": part.removeprefix("grpo_")}
    return run_rl(RLOptions(algorithm="ppo" if part == "ppo" else "grpo", **options))
