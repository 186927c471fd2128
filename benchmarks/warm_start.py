"""A supervised warm start in this process, without Ray: careless demonstrations, imitated by a small model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rl_backend.algorithm import sft_loss
from rl_backend.contracts import OptimizerConfig, RuntimeConfig
from rl_backend.data import prepare_micro_batches
from rl_backend.data.prompts import endless_batches, load_tokenizer
from rl_backend.data.sft import load_sft_examples
from rl_backend.runtime import create_runtime


def imitate(model: Path, demonstrations: Path, out: Path, steps: int, *, batch_size: int = 64, lr: float = 2e-3) -> Path:
    """Trains on rows of messages, and writes the model with its tokenizer to ``out``; returns that."""
    tokenizer = load_tokenizer(str(model))
    # Rendered once, because that takes longer than a step.
    sequences = [each for example in load_sft_examples(demonstrations, tokenizer, 128, 128) for each in example]
    optimizer = OptimizerConfig(lr=lr, lr_warmup_steps=20, lr_decay_style="linear", total_training_steps=steps)
    config = RuntimeConfig(hf_path=str(model), backend_cfg={"param_dtype": "float32", "optimizer": optimizer})
    batches = endless_batches(sequences, batch_size, 0)
    with closing(create_runtime(config)) as runtime:
        handle = runtime.build_model()
        for _ in range(steps):
            (data,) = prepare_micro_batches(next(batches), 1, 4096)
            runtime.zero_grad(handle)
            with runtime.train_mode(handle):
                runtime.forward_backward(handle, data, sft_loss)
            runtime.optimizer_step(handle)
            runtime.lr_scheduler_step(handle)
        runtime.save_checkpoint(handle, out, hf=True)
    return out
