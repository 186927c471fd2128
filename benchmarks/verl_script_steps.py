"""One step of each of verl's example scripts by verl's own workers, on the ranks that run this module.

``python -m torch.distributed.run --nproc-per-node=2 -m benchmarks.verl_script_steps PLAN RESULTS`` reads ``PLAN``, a JSON
file that :mod:`benchmarks.verl_scripts` writes, and appends one JSON object for each script to ``RESULTS``.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor

from benchmarks.verl_script_small import PROMPTS, SAMPLES

_PROMPT, _RESPONSE, _VOCAB = 6, 10, 40


def train_step(config: DictConfig, folder: Path) -> dict[str, float]:
    """Loss and gradient norm of every role that trains.

    Args:
        config: made small, with our engine switched in.
    """
    return _sft_step(config, folder) if "actor_rollout_ref" not in config else _rl_step(config)


def _sft_step(config: DictConfig, folder: Path) -> dict[str, float]:
    from verl.trainer.sft_trainer import SFTTrainer

    log = folder / "metrics.jsonl"
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    trainer = SFTTrainer(config)
    try:
        trainer.fit()
    finally:
        trainer.engine.close()
    found = json.loads(log.read_text().splitlines()[0])["data"] if log.exists() else {}
    return {f"sft/{name}": found[f"train/{name}"] for name in ("loss", "grad_norm") if found}


def _rl_step(config: DictConfig) -> dict[str, float]:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.workers.engine_workers import ActorRolloutRefWorker

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    OmegaConf.resolve(config)
    engines: list[Any] = []
    found: dict[str, float] = {}
    try:
        actor = ActorRolloutRefWorker(config.actor_rollout_ref, "actor")
        actor.init_model()
        engines.append(actor.actor.engine)
        temperature = config.actor_rollout_ref.rollout.temperature
        scoring = {"compute_loss": False, "temperature": temperature}
        batch = _batch(actor.actor.engine, config)
        _output(actor.compute_log_prob(_with(batch, calculate_entropy=True, **scoring)))
        if need_reference_policy(config):
            ref = ActorRolloutRefWorker(config.actor_rollout_ref, "ref")
            ref.init_model()
            engines.append(ref.ref.engine)
            _output(ref.compute_ref_log_prob(_with(batch, calculate_entropy=False, **scoring)))
        policy = config.actor_rollout_ref.actor
        entropy = policy.calculate_entropy or policy.entropy_coeff != 0.0
        found |= _trained(
            "actor", actor.update_actor(_with(batch, calculate_entropy=entropy, **_update(policy, temperature)))
        )
        if need_critic(config):
            critic = _critic(config)
            engines.append(critic.engine)
            _output(critic.infer_batch(_with(batch, **scoring)))
            found |= _trained("critic", critic.train_mini_batch(_with(batch, **_update(config.critic, temperature))))
    finally:
        for engine in engines:
            engine.close()
    return found


def _critic(config: DictConfig) -> Any:
    """As verl's trainer makes it."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import value_loss

    critic = omega_conf_to_dataclass(config.critic)
    critic.engine.infer_max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_infer_max_token_len_per_gpu
    worker: Any = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=critic))
    return worker


def _update(role: DictConfig, temperature: float) -> dict[str, Any]:
    size = PROMPTS * SAMPLES
    shuffle = {"dataloader_kwargs": {"shuffle": role.shuffle}, "seed": role.data_loader_seed}
    return {"global_batch_size": size, "mini_batch_size": size, "epochs": 1, "temperature": temperature, **shuffle}


def _batch(engine: Any, config: DictConfig) -> dict[str, Tensor]:
    """This data-parallel rank's share of random samples, as verl's rollouts leave them."""
    generator = torch.Generator().manual_seed(0)
    rows = [_row(generator, config) for _ in range(PROMPTS * SAMPLES)]
    share = rows[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    return {name: torch.nested.as_nested_tensor([row[name] for row in share], layout=torch.jagged) for name in share[0]}


def _row(generator: torch.Generator, config: DictConfig) -> dict[str, Tensor]:
    prompt, response = (int(torch.randint(2, most, (), generator=generator)) for most in (_PROMPT, _RESPONSE))
    tokens = torch.randint(0, _VOCAB, (prompt + response,), generator=generator)
    mask = torch.ones(response, dtype=torch.int64)

    def noise() -> Tensor:
        return torch.randn(response, generator=generator)

    row = {
        "input_ids": tokens,
        "position_ids": torch.arange(prompt + response),
        "prompts": tokens[:prompt],
        "responses": tokens[prompt:],
        "response_mask": mask,
        "loss_mask": mask,
        "advantages": noise()[:1].expand(response).clone(),
        **{name: -4.0 + 0.1 * noise() for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs")},
        **{name: noise() for name in ("values", "returns")},
    }
    if config.actor_rollout_ref.actor.megatron.router_replay.mode == "R3":
        # vLLM has no routes for the last token; 4 layers of 4 experts, of which each token goes to 2.
        shape = (prompt + response - 1, 4, 4)
        row["routed_experts"] = torch.rand(shape, generator=generator).argsort(-1)[..., :2].to(torch.int16)
    return row


def _with(batch: Mapping[str, Tensor], **facts: Any) -> TensorDict:
    from verl.utils import tensordict_utils as tu

    found: TensorDict = tu.get_tensordict(dict(batch), facts)
    return found


def _output(output: Any) -> Any:
    """What a worker's method returns, ready or not."""
    return output.get() if hasattr(output, "futures") else output


def _trained(role: str, output: Any) -> dict[str, float]:
    from verl.utils import tensordict_utils as tu

    output = _output(output)
    if output is None:
        return {}
    metrics = tu.get(output, "metrics")

    def number(value: Any) -> float:
        while isinstance(value, list):
            value = value[0]
        return float(value)

    return {f"{role}/{name}": number(metrics[name]) for name in ("loss", "grad_norm")}


def problem_of(metrics: Mapping[str, float]) -> str | None:
    """Why these are not those of a step that trained; None where they are."""
    norms = [name for name in metrics if name.endswith("grad_norm")]
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    wrong |= {name: metrics[name] for name in norms if not metrics[name] > 0}
    return f"no step was trained: {wrong or metrics}" if wrong or not norms else None


def main() -> None:
    plan, results = (Path(argument) for argument in sys.argv[1:])
    dist.init_process_group("gloo")
    for job in json.loads(plan.read_text()):
        config = OmegaConf.load(job["config"])
        assert isinstance(config, DictConfig)
        with open_dict(config):
            try:
                metrics = train_step(config, Path(job["config"]).parent)
                problem = None
            except Exception as error:  # noqa: BLE001 - it is what the result says of this script
                traceback.print_exc()
                metrics, problem = {}, f"{type(error).__name__}: {error}"
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        everywhere: list[Any] = [None] * dist.get_world_size()
        # In a pipeline the last stage has the metrics.
        dist.all_gather_object(everywhere, (problem, metrics))
        if dist.get_rank() == 0:
            metrics = {name: value for _, found in everywhere for name, value in found.items()}
            problem = next((each for each, _ in everywhere if each), None) or problem_of(metrics)
            with results.open("a") as file:
                file.write(json.dumps({"script": job["script"], "problem": problem, "metrics": metrics}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
