"""RL from nothing, in a few minutes on a laptop CPU: ``make demo`` or ``python -m examples.demo``."""

import json
import shutil
import time
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from pydantic import ConfigDict, Field, model_serializer, model_validator

from actors import Session
from actors.cluster.placement import share_cluster
from actors.cluster.session import ray_session
from actors.folder.lock import usable_run_dir, written_to
from actors.options.config import RANKS, Ranks, RunDtype, Runtime, check_ranks, resolve_dtype
from actors.run import RunResult
from actors.run.command_line import run_command
from actors.train.model import RouterReplayMode
from examples import grpo, ppo, sft
from examples.demo.task import BFLOAT16_ALONE, HELD_OUT, MIXTURES, ModelName, layers_for, write_task
from rl_backend.contracts import BaseConfig, ConfigError
from rl_backend.lab.text import json_text
from rl_backend.options.option_set import Follows, OptionSet, merged, read_options, write_options

type Algorithm = Literal["grpo", "ppo", "cispo", "dapo", "dr_grpo", "gspo", "reinforce_plus_plus", "rloo"]

RECIPES = Path(grpo.__file__).parent / "recipes"
MODELS: dict[ModelName, str] = {
    "qwen3": "a Qwen3 of 0.6M random weights",
    "qwen3_moe": "a Qwen3-MoE of 2M random weights, 0.6M at work on a token,",
    "qwen3_5": "a Qwen3.5 of 0.8M random weights",
    "qwen3_5_moe": "a Qwen3.5-MoE of 1.7M random weights, 0.8M at work on a token,",
    "deepseek_v3": "a DeepSeek-V3 of random weights",
    "glm4_moe": "a GLM-4.5 of random weights",
    "minimax_m2": "a MiniMax-M2 of random weights",
    "gpt_oss": "a gpt-oss of random weights, trained and served in bfloat16,",
}


# dtype -> mean log-prob gap in a step that is rounding at most, nats. Weights that are not the trainer's come to 0.1.
LARGEST_ROUNDING = {"float32": 1e-5, "bfloat16": 3e-2}


class DemoConfig(BaseConfig):
    """Options of the demo; those of ``train`` are passed on to both of its runs."""

    model_config = ConfigDict(allow_inf_nan=False)

    option_set: ClassVar[OptionSet] = RANKS | OptionSet(
        follows={
            "train.hf_path": Follows(lambda config: f"{config.run_dir}/task/model", "the demo makes its model", until="-"),
        },
        fitted=lambda _, given: {"dtype": "bfloat16"} if given.get("model") in BFLOAT16_ALONE else {},
    )
    _read = model_validator(mode="wrap")(read_options)
    _write = model_serializer(mode="wrap")(write_options)

    train: Runtime
    ranks: Ranks = 1
    dtype: RunDtype = "auto"
    run_dir: str = Field(default="runs/demo", description="folder for everything; an earlier demo in it is replaced")
    model: ModelName = Field(
        default="qwen3",
        description="qwen3; qwen3_5, layers with a recurrent state; mixtures of 8 experts: qwen3_moe, qwen3_5_moe, "
        "deepseek_v3, glm4_moe, minimax_m2, gpt_oss",
    )
    algorithm: Algorithm = Field(
        default="grpo", description="grpo, ppo, or a recipe: cispo, dapo, dr_grpo, gspo, reinforce_plus_plus, rloo"
    )
    warm_start_steps: int = Field(default=700, ge=1, description="steps of the supervised warm start")
    steps: int = Field(default=120, ge=1, description="training steps")
    max_staleness: int = Field(default=0, ge=0, description="steps by which samples may be behind; 0: strictly on-policy")
    router_replay: RouterReplayMode = Field(
        default="off", description="for mixtures: R2, routes of the old policy's pass; R3, routes of vLLM"
    )
    engines: int = Field(default=1, ge=1, description="vLLM engines")
    engine_python: str | None = Field(default=None, description="Python of an environment of their own for engines, a path")
    trace: bool = Field(default=True, description="record all actors, for Perfetto")
    shuffle_rewards: bool = Field(default=False, description="control experiment: rewards go to the wrong responses")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_ranks("DemoConfig", self.train, self.ranks, self.dtype)
        wrong = {}
        if self.model in BFLOAT16_ALONE and self.dtype != "bfloat16":
            wrong["dtype"] = f"vLLM serves model={self.model!r} in bfloat16 alone; leave dtype out"
        if self.router_replay != "off" and self.model not in MIXTURES:
            wrong["router_replay"] = f"model={self.model!r} is dense and routes nothing; use {self.model}_moe"
        ConfigError.refuse_all([(f"DemoConfig.{field}", getattr(self, field), wrong[field]) for field in wrong])
        return self

    def shared(self) -> dict[str, Any]:
        return merged({}, {"ranks": self.ranks, "dtype": self.dtype, "train": self.train})


def warm_start(config: DemoConfig, task: Path, run_dir: Path) -> Path:
    settings = {
        **config.shared(),
        "model": str(task / "model"),
        "dataset": str(task / "demonstrations.jsonl"),
        "eval_dataset": str(task / "validation.jsonl"),
        "run_dir": str(run_dir / "warm_start"),
        "steps": config.warm_start_steps,
        "lr": 2e-3,
        "lr_warmup_steps": min(20, config.warm_start_steps - 1),
        "lr_decay_style": "linear",
    }
    return sft.train(sft.SFTConfig.model_validate(settings))


def demo_settings(config: DemoConfig, task: Path, model: Path, run_dir: Path) -> dict[str, Any]:
    """Fields of the RL examples' configurations; the run is in ``run_dir/<algorithm>``."""
    return {
        **config.shared(),
        "model": str(model),
        "dataset": str(task / "train.jsonl"),
        "eval_dataset": str(task / "held_out.jsonl"),
        "reward": "examples.demo.task:compute_score",
        "run_dir": str(run_dir / config.algorithm),
        "steps": config.steps,
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "lr": 3e-4,
        "lr_warmup_steps": min(5, config.steps - 1),
        "lr_decay_style": "linear",
        "max_staleness": config.max_staleness,
        "router_replay": config.router_replay,
        "engines": config.engines,
        "rollout": {"py_executable": config.engine_python},
        "transport": "shared_memory",
        "trace": config.trace,
        "shuffle_rewards": config.shuffle_rewards,
    }


def reinforce(config: DemoConfig, task: Path, model: Path, run_dir: Path, session: Session | None = None) -> RunResult:
    settings = demo_settings(config, task, model, run_dir)
    if config.algorithm == "ppo":
        return ppo.train(ppo.PPOConfig(**settings, critic_lr=1e-3, kl_coef=1e-3), session)
    if config.algorithm == "grpo":
        return grpo.train(grpo.GRPOConfig(**settings), session)
    recipe = json.loads((RECIPES / f"{config.algorithm}.json").read_text())
    # Accuracies of recipes are compared with two updates each.
    return grpo.train(grpo.GRPOConfig(**{**settings, **recipe, "updates_per_step": 2}), session)


def fresh_folder(path: Path) -> None:
    with usable_run_dir(path):
        if path.exists():
            # A folder of something else is not deleted.
            if not (path / "demo.json").exists() and any(path.iterdir()):
                raise ConfigError.of("run_dir", str(path), "is not empty and not an earlier demo; choose another folder")
            shutil.rmtree(path)
        path.mkdir(parents=True)


def main(config: DemoConfig) -> None:
    started = time.perf_counter()
    run_dir = Path(config.run_dir)
    fresh_folder(run_dir)
    task, parallel = run_dir / "task", config.train.backend_cfg.parallel
    with usable_run_dir(run_dir):
        (run_dir / "demo.json").write_text(config.model_dump_json(indent=2) + "\n")
        write_task(task, config.train.seed, config.model, num_layers=layers_for(parallel.pp * parallel.vpp))
    print("The task: add two two-digit numbers; the answer is written last digit first, as in 47+38=58.")
    with ray_session(config.ranks, config.engines):
        share_cluster(config.ranks, config.engines)  # refuses what would not fit, before the warm start
        print(f"\n[1/2] warm start: {MODELS[config.model]} imitates demonstrations that often forget the carry")
        model = warm_start(config, task, run_dir)
        print(f"\n[2/2] {config.algorithm}: vLLM samples, right answers are rewarded, weights go to vLLM after each step")
        result = reinforce(config, task, model, run_dir)
        dtype = resolve_dtype(config.dtype)
    # The task's rewards are 0 or 1, and their mean is the share of right answers.
    before, after = result.held_out_reward_before, result.held_out_reward_after
    summary = {
        "accuracy_before": before,
        "accuracy_after": after,
        "max_log_prob_gap": result.max_log_prob_gap,
        "computed_in": dtype,
        "gap_is_rounding": result.max_log_prob_gap <= LARGEST_ROUNDING[dtype],
        "step_seconds": result.step_seconds,
        "seconds": time.perf_counter() - started,
        **config.model_dump(mode="json", exclude={"run_dir"}),
    }
    with written_to(run_dir):
        (run_dir / "summary.json").write_text(json_text(summary, indent=2) + "\n")
    gap = "largest mean log-prob gap between trainer and vLLM in a step"
    if config.max_staleness:
        gap += ", between new and old weights too"
    kind = "rounding" if summary["gap_is_rounding"] else "more than rounding"
    print(
        f"""
held-out accuracy  {before:.3f} -> {after:.3f}  (greedy, {HELD_OUT} prompts not trained on)
{gap}  {result.max_log_prob_gap:.1e} nats, {kind} in {dtype} (at most {LARGEST_ROUNDING[dtype]:.0e})
time  {summary["seconds"]:.0f} s

look at it    {run_dir}/{config.algorithm}/report.html
files         beside it: metrics.jsonl, samples.jsonl, tensorboard/, {"trace.json, " if config.trace else ""}model/
your own run  .venv/bin/rl-backend grpo --model DIR --dataset FILE.jsonl --reward FILE.py:compute_score
              DIR: a local Hugging Face model; FILE.jsonl: lines of {{"prompt": ..., "answer": ...}}; --help: all options"""
    )


if __name__ == "__main__":
    run_command(main, DemoConfig, "The demo: warm start and RL on a task made on the spot.")
