"""A folder per run that a person and a program can both read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.tensorboard import SummaryWriter

from rl_backend.contracts import BaseConfig, ConfigError


def require_new_run(path: Path | str) -> None:
    """Raises :class:`ConfigError` when ``path`` holds a run that has taken a step."""
    metrics = Path(path) / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise ConfigError.of("run_dir", str(path), "holds another run; choose a new directory or remove it")


class RunFolder:
    """``config.json``, ``metrics.jsonl``, ``samples.jsonl``, ``summary.json`` and TensorBoard events in one directory.

    Args:
        path: see :func:`require_new_run`.
        config: written first.
    """

    def __init__(self, path: Path | str, config: BaseConfig) -> None:
        require_new_run(path)
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.json").write_text(config.model_dump_json(indent=2) + "\n")
        self._metrics = (self.path / "metrics.jsonl").open("w", buffering=1)
        self._samples = (self.path / "samples.jsonl").open("w", buffering=1)
        self._board = SummaryWriter(str(self.path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """One line of ``metrics.jsonl`` and one point per TensorBoard curve."""
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """One line of ``samples.jsonl`` per sample."""
        for sample in samples:
            self._samples.write(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """``summary.json``; a later call replaces an earlier one."""
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._metrics.close()
        self._samples.close()
        self._board.close()
