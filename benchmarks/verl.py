"""verl's own trainers on our engine: loss and reward before and after on the demo's task, and the adapter's share of time.

``adapter_fraction`` is the time that the adapter spends outside the runtime's atoms and verl's losses, as a part of the
time in batches, over training and inference steps of a second and more. Each trainer runs as its script in
``examples/verl`` does; GRPO and PPO start from the model that verl's SFT trainer made. ``grpo_R2`` and ``grpo_R3`` are GRPO
on a mixture of experts with router replay, ``rollout_gap`` is what R3 makes of the difference between vLLM in bfloat16 and
the trainer, ``resume`` a stopped and resumed GRPO beside one that went on, ``layouts`` first SFT steps on two ranks beside
one's. With ``--only`` and ``--backend`` one part is measured anew and the others are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from actors.cluster.rendezvous import with_free_port
from benchmarks.report import machine, read_result, write_result
from benchmarks.verl_trainers import Backend, run_part

BACKENDS: tuple[Backend, ...] = ("native", "bridge")
PARTS = ("overhead", "sft", "grpo", "ppo", "grpo_R2", "grpo_R3", "rollout_gap", "resume", "resume_ppo", "layouts")
SEQUENCES, LENGTH, MICRO_BATCH_TOKENS, MEASURED_STEPS = 8, 256, 512, 3


def overhead(backend: Backend) -> dict[str, Any]:
    """``TrainingWorker`` in this process: the adapter's fraction, and seconds of each step."""
    return with_free_port("127.0.0.1", partial(_overhead, backend))


def _overhead(backend: Backend, port: int) -> dict[str, Any]:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import HFModelConfig, McoreOptimizerConfig
    from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
    from verl.workers.utils.losses import sft_loss

    from adapters.verl.engine_config import RLBackendEngineConfig

    with tempfile.TemporaryDirectory() as folder:
        worker: Any = TrainingWorker(
            TrainingWorkerConfig(
                model_type="language_model",
                model_config=HFModelConfig(path=str(write_model(Path(folder))), load_tokenizer=False),
                engine_config=RLBackendEngineConfig(dtype="float32", backend=backend),
                optimizer_config=McoreOptimizerConfig(lr=1e-4, total_training_steps=100),
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
        worker.set_loss_fn(partial(sft_loss, config=None))
        seconds = []
        for step in range(-1, MEASURED_STEPS):
            if step == 0:
                # The first step compiles and allocates.
                spent = Spent(worker.engine)
            started = time.perf_counter()
            worker.train_batch(tu.get_tensordict(*make_batch(step)))
            worker.infer_batch(tu.get_tensordict(*make_batch(step)))
            seconds.append(time.perf_counter() - started)
    return {
        "adapter_fraction": spent.adapter / spent.total,
        "step_seconds": seconds[1:],
        "tokens_per_step": SEQUENCES * LENGTH,
    }


class Spent:
    """Seconds that an engine spends in batches.

    Attributes:
        total: in all.
        adapter: of these, outside the runtime's atoms and verl's losses: cutting, packing, and putting outputs together.
    """

    def __init__(self, engine: Any) -> None:
        self.total = self.adapter = 0.0
        runtime = engine._runtime
        batch, update = self._timed(engine.forward_backward_batch, 1, 1), self._timed(engine.optimizer_step, 1, 1)
        run = self._timed(runtime.forward_backward, 0, -1)

        def forward_backward_batch(data: Any, loss: Any, forward_only: bool = False) -> Any:
            return batch(data, loss and self._timed(loss, 0, -1), forward_only)

        def forward_backward(model: Any, packed: Any, loss: Any, **options: Any) -> Any:
            # The runtime calls the adapter back, and that calls verl's loss.
            return run(model, packed, loss and self._timed(loss, 0, 1), **options)

        engine.forward_backward_batch, engine.optimizer_step = forward_backward_batch, update
        runtime.forward_backward = forward_backward
        runtime.optimizer_step = self._timed(runtime.optimizer_step, 0, -1)

    def _timed(self, function: Callable[..., Any], total: int, adapter: int) -> Callable[..., Any]:
        """``function``, whose seconds are added so many times to each sum."""

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                elapsed = time.perf_counter() - start
                self.total += total * elapsed
                self.adapter += adapter * elapsed

        return call


def write_model(path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def make_batch(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Sequences of uneven length as verl's SFT trainer sends them: tensors, and what is no tensor."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LENGTH // 2, 3 * LENGTH // 2, (SEQUENCES,), generator=generator).tolist()

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tensors = {
        "input_ids": jagged([torch.randint(0, 8192, (length,), generator=generator) for length in lengths]),
        "position_ids": jagged([torch.arange(length) for length in lengths]),
        "loss_mask": jagged([torch.ones(length) for length in lengths]),
    }
    facts = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": MICRO_BATCH_TOKENS,
        "temperature": 1.0,
        "global_batch_size": SEQUENCES,
        "update_lr_scheduler": True,
    }
    return tensors, facts


def measure(part: str, backend: Backend, folder: Path, steps: int, sft_steps: int) -> dict[str, Any]:
    """One part of the result. The adapter's share is measured in a process of its own."""
    if part == "overhead":
        command = [sys.executable, "-m", "benchmarks.verl", "--measure-overhead", backend]
        return dict(json.loads(subprocess.check_output(command, text=True).splitlines()[-1]))
    return run_part(part, backend, folder, steps, sft_steps)


def record(part: str, backend: Backend, found: Mapping[str, Any]) -> None:
    """Puts one part into the result; the others stay as they were."""
    known = read_result("verl")
    runs: dict[str, Any] = known.get("runs", {})
    runs.setdefault(part, {})[backend] = {**found, "machine": machine()}
    fractions = [each["adapter_fraction"] for each in runs.get("overhead", {}).values()]
    share = {"adapter_fraction": max(fractions)} if fractions else {}
    write_result("verl", {**known, **share, "runs": runs, "machine": machine()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (may be given several times)")
    parser.add_argument("--backend", choices=BACKENDS, help="this runtime; without it, both")
    parser.add_argument("--steps", type=int, default=30, help="steps of GRPO and PPO")
    parser.add_argument("--sft-steps", type=int, default=700, help="steps of SFT")
    parser.add_argument("--folder", type=Path, help="where the runs are left, and SFT's model is taken from if it is there")
    parser.add_argument("--measure-overhead", choices=BACKENDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure_overhead:
        print(json.dumps(overhead(arguments.measure_overhead)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        for part in arguments.only or PARTS:
            for backend in [arguments.backend] if arguments.backend else BACKENDS:
                folder = (arguments.folder or Path(temporary)) / backend
                found = measure(part, backend, folder, arguments.steps, arguments.sft_steps)
                record(part, backend, found)
                print(f"{part} {backend}: {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
