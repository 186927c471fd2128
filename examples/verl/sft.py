"""Supervised fine-tuning by verl's own trainer, ``verl.trainer.sft_trainer``, on our engine.

    python -m examples.verl.sft                                   # the demo's model and demonstrations
    python -m examples.verl.sft --model Qwen/Qwen3-4B --train-files train.parquet --val-files test.parquet --ranks 8

The command that it runs is printed, to be copied; for several nodes start torchrun on each with its overrides.
"""

from pathlib import Path

from pydantic import Field

from actors.run.command_line import run_command
from examples.verl.options import VerlOptions


class SFTOptions(VerlOptions):
    """Options of a run. A row of the files has ``messages``."""

    run_dir: str = Field(default="runs/verl_sft", description="folder for metrics.jsonl and checkpoints")
    steps: int = Field(default=700, ge=1, description="optimizer steps")
    batch_size: int = Field(default=64, ge=1, description="conversations in each step")
    max_length: int = Field(default=2048, ge=1, description="longest conversation, in tokens")
    max_tokens_per_rank: int = Field(default=8192, ge=1, description="most tokens of a micro-batch")
    lr: float = Field(default=2e-3, gt=0, description="peak learning rate")
    lr_warmup_steps: int = Field(default=20, ge=0, description="steps up to it")


def train(options: SFTOptions) -> Path:
    task = options.files_of_task
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    return options.run([*command, "-m", "verl.trainer.sft_trainer"], overrides(options, task))


def overrides(options: SFTOptions, task: Path | None) -> list[str]:
    return [
        "engine=megatron",
        "optim=megatron",
        *options.engine("engine"),
        f"model.path={options.model or (task and task / 'model')}",
        f"data.train_files={options.train_files or (task and task / 'demonstrations.parquet')}",
        f"data.val_files={options.val_files or (task and task / 'validation.parquet')}",
        f"data.train_batch_size={options.batch_size}",
        f"data.max_length={options.max_length}",
        f"data.max_token_len_per_gpu={options.max_tokens_per_rank}",
        f"optim.lr={options.lr}",
        f"optim.lr_warmup_steps={min(options.lr_warmup_steps, options.steps - 1)}",
        "optim.lr_decay_style=linear",
        "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        *options.trainer(),
        *(["trainer.device=cpu", "data.num_workers=0"] if options.on_cpu else []),
    ]


def trained_model(options: SFTOptions) -> Path:
    return Path(options.run_dir).resolve() / "checkpoints" / f"global_step_{options.steps}" / "huggingface"


def main(options: SFTOptions) -> None:
    print(f"metrics: {train(options)}\ntrained model: {trained_model(options)}")


if __name__ == "__main__":
    run_command(main, SFTOptions, "Supervised fine-tuning by verl's trainer.")
