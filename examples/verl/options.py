"""Options that the scripts share, and verl's overrides for an engine and for a machine."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow
import pyarrow.parquet
import torch
from pydantic import Field, field_validator

from actors.cluster.placement import usable_cores
from actors.folder.lock import usable_run_dir
from examples.demo.task import NUM_LAYERS, ModelName, character_tokenizer, layers_for, write_task
from rl_backend.contracts import BaseConfig, ConfigError, HasEffect

# verl's rollouts look this token up in the tokenizer of a Qwen model.
END = "<|im_end|>"
# Messages follow each other as they are; what the assistant says ends in the end-of-text token.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
DATA_SOURCE = "addition"


def write_verl_task(folder: Path, seed: int = 0, model: ModelName = "qwen3", *, num_layers: int = NUM_LAYERS) -> None:
    """Writes ``model/`` and the parquet files ``demonstrations`` (SFT), ``train`` and ``held_out`` (RL)."""
    write_task(folder, seed, model, num_layers=num_layers)
    tokenizer = character_tokenizer(END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    _write(folder / "demonstrations.parquet", _conversations(_rows(folder / "demonstrations.jsonl")))
    _write(folder / "validation.parquet", _conversations(_rows(folder / "validation.jsonl")))
    for name in ("train", "held_out"):
        _write(folder / f"{name}.parquet", _prompts(_rows(folder / f"{name}.jsonl"), name))


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())


def _conversations(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        yield {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }


def _prompts(rows: Iterable[dict[str, Any]], split: str) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"split": split, "index": index},
        }


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


_OF_DEMO = HasEffect(lambda options: options.model is None, "model is trained instead; give one of them")


class VerlOptions(BaseConfig):
    model: str | None = Field(default=None, description="Hugging Face directory or name; none: the demo's model and files")
    demo_model: Annotated[ModelName, _OF_DEMO] = Field(
        default="qwen3", description="the demo's: qwen3 or qwen3_5; qwen3_moe or qwen3_5_moe, mixtures of experts"
    )
    demo_layers: Annotated[int | None, _OF_DEMO] = Field(
        default=None, ge=1, description="layers of the demo's model; none: 3, rounded up to what pp divides"
    )
    train_files: str | None = Field(default=None, description="parquet in verl's format")
    val_files: str | None = Field(default=None, description="parquet in verl's format, not trained on")
    run_dir: str = Field(description="folder for metrics.jsonl and checkpoints")
    backend: Literal["native", "bridge"] = Field(default="native", description="runtime: native, or bridge (Megatron)")
    device: Literal["auto", "cpu", "gpu"] = Field(default="auto", description="auto: gpu where there is one")
    ranks: int = Field(default=1, ge=1, description="training ranks on each node")
    tp: int = Field(default=1, ge=1, description="tensor-parallel ranks")
    pp: int = Field(default=1, ge=1, description="pipeline ranks")
    cp: int = Field(default=1, ge=1, description="context-parallel ranks")
    ep: int = Field(default=1, ge=1, description="expert-parallel ranks")
    steps: int = Field(default=100, ge=1, description="training steps")
    save_every: int = Field(default=-1, description="steps between checkpoints; -1: the last step only (SFT) or none (RL)")
    overrides: str = Field(default="", description="more of verl's overrides, as on its command line")

    @field_validator("model", "train_files", "val_files")
    @classmethod
    def _make_absolute(cls, path: str | None) -> str | None:
        # verl's processes have other working directories; names of models and addresses stay as they are.
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu" or (self.device == "auto" and not torch.cuda.is_available())

    @property
    def layers(self) -> int:
        return self.demo_layers or layers_for(self.pp)

    @property
    def files_of_task(self) -> Path | None:
        """The folder of the demo's task, which is written the first time; None with a model of one's own."""
        given = {"model": self.model, "train_files": self.train_files, "val_files": self.val_files}
        if all(given.values()):
            return None
        if self.train_files or self.val_files:
            missing = [name for name, value in given.items() if not value]
            raise ConfigError.of("model, train_files, val_files", given, f"give all three, or no files; missing: {missing}")
        folder = Path(self.run_dir).resolve() / f"task_{self.demo_model}_{self.layers}_layers"
        # The last of its files: a run may have been ended while it wrote them.
        if not (folder / "held_out.parquet").exists():
            with usable_run_dir(self.run_dir):
                write_verl_task(folder, model=self.demo_model, num_layers=self.layers)
        return folder

    def engine(self, role: str) -> list[str]:
        """verl's overrides that put a role on our engine: ``_target_`` is the one that it takes; the others choose."""
        return [
            f"{role}._target_=adapters.verl.engine_config.RLBackendEngineConfig",
            f"+{role}.backend={self.backend}",
            f"{role}.tensor_model_parallel_size={self.tp}",
            f"{role}.pipeline_model_parallel_size={self.pp}",
            f"{role}.context_parallel_size={self.cp}",
            f"{role}.expert_model_parallel_size={self.ep}",
            # verl's own class knows 16-bit types only.
            f"{role}.dtype={'float32' if self.on_cpu else 'bfloat16'}",
        ]

    def trainer(self) -> list[str]:
        """verl's overrides of how long its trainers run, and where they write."""
        return [
            f"trainer.total_training_steps={self.steps}",
            # An epoch has at least one step, so that the steps end the run.
            f"trainer.total_epochs={self.steps}",
            f"trainer.save_freq={self.save_every}",
            f"trainer.default_local_dir={Path(self.run_dir).resolve() / 'checkpoints'}",
            "trainer.logger=[console,file]",
            f"trainer.n_gpus_per_node={self.ranks}",
        ]

    def run(self, command: Sequence[str], overrides: Sequence[str]) -> Path:
        """Runs verl with its own entry point; returns its log of metrics, one JSON object a step."""
        folder = Path(self.run_dir).resolve()
        with usable_run_dir(folder):
            folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.jsonl"
        whole = [*command, *overrides, f"hydra.run.dir={folder / 'hydra'}", *shlex.split(self.overrides)]
        print(shlex.join(["python", *whole]), flush=True)
        environment = {**(self._for_cpu() if self.on_cpu else {}), **os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)}
        code = subprocess.run([sys.executable, *whole], env=environment, check=False).returncode
        if code:
            raise ConfigError(f"verl ended with status {code}; its own message is above")
        return metrics

    def _for_cpu(self) -> dict[str, str]:
        return {
            # On a machine that has GPUs verl would take those.
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": str(max(1, usable_cores() // self.ranks)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Rollout and training take turns on the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
