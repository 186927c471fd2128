"""Hugging Face directories: rank 0 writes what all ranks gather, and what fails on one is the error of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import ConfigError, ExportInterruptedError, RLBackendError, TensorInfo
from rl_backend.runtime import checkpoints
from rl_backend.runtime.checkpoints import CheckpointWriter
from tests.support.rank_threads import run_ranks


def message_of(call: Callable[[], object]) -> str:
    """Of the error that it raises; empty where it raises none."""
    try:
        call()
    except RLBackendError as error:
        return str(error)
    return ""


class Export:
    """A stream of weights that says how far it was read and that it was closed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.read: list[str] = []
        self.closed, self.error = False, error

    def __call__(self) -> Generator[tuple[str, Tensor]]:
        try:
            for name in ("a", "b"):
                self.read.append(name)
                yield name, torch.ones(1)
                if self.error is not None:
                    raise self.error
        finally:
            self.closed = True


def hf_handle(head: str = "log_probs") -> Any:
    return SimpleNamespace(
        head=head,
        weights=(TensorInfo.of("a", (1,), torch.float32), TensorInfo.of("b", (1,), torch.float32)),
        config=SimpleNamespace(hf_path="source"),
        hf_config={"model_type": "m", "architectures": ["MForCausalLM"]},
        kept={"tower": (2,)},
    )


@pytest.mark.parametrize("head", ["log_probs", "values"])
def test_rank_zero_writes_a_hugging_face_directory_of_what_all_gather(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    written: list[tuple[Any, ...]] = []

    def write(path: Path, infos: Any, tensors: Any, source: str, *, config: Mapping[str, Any] | None, kept: Any) -> None:
        written.append((path, infos, [name for name, _ in tensors], source, config, kept))

    monkeypatch.setattr(checkpoints, "write_hf_directory", write)

    def of_rank(group: dist.ProcessGroup) -> Export:
        export = Export()
        CheckpointWriter(group).save_hf(hf_handle(head), tmp_path / "new" / "out", export, asynchronous=False, extra={})
        return export

    for export in run_ranks(of_rank):
        assert export.read == ["a", "b"] and export.closed
    ((path, infos, names, source, config, kept),) = written
    assert (path, names, source, kept) == (tmp_path / "new" / "out", ["a", "b"], "source", {"tower": (2,)})
    assert infos == hf_handle().weights and path.parent.is_dir() and not path.exists()
    assert (config is None) is (head == "log_probs")
    assert config is None or "num_labels" in json.dumps(config) or "id2label" in json.dumps(config)


def test_a_hugging_face_directory_that_cannot_be_written_is_the_error_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, infos: Any, tensors: Any, *arguments: Any, **options: Any) -> None:
        next(tensors)
        raise OSError("no space left")

    monkeypatch.setattr(checkpoints, "write_hf_directory", write)
    (tmp_path / "there").mkdir()

    def of_rank(group: dist.ProcessGroup) -> list[Any]:
        writer = CheckpointWriter(group)

        def call(path: Path, export: Export, **options: Any) -> str:
            given = {"asynchronous": False, "extra": None, **options}
            return message_of(lambda: writer.save_hf(hf_handle(), path, export, **given))

        interrupted = Export(ExportInterruptedError("another rank closed it") if group.rank() else None)
        untouched = Export()
        return [
            call(tmp_path / "out", interrupted),
            interrupted.closed,
            call(tmp_path / "there", untouched),
            call(tmp_path / "out", untouched, asynchronous=True),
            call(tmp_path / "out", untouched, extra={"a": 1}),
            untouched.read,
        ]

    for failed, closed, exists, asynchronous, extra, read in run_ranks(of_rank):
        assert failed == f"writing {tmp_path}/out failed: no space left (on rank 0)" and closed
        assert "there exists; a checkpoint is written to a new directory" in exists
        assert (
            asynchronous.startswith("save_checkpoint(hf=True, extra=None, asynchronous=True): ")
            and "use asynchronous=False" in asynchronous
        )
        assert extra.startswith("save_checkpoint(hf=True, extra={'a': 1}, asynchronous=False): a Hugging Face directory is")
        assert read == []
    alone: Any = SimpleNamespace(size=lambda: 1)
    refused: list[dict[str, Any]] = [{"asynchronous": True, "extra": None}, {"asynchronous": False, "extra": {"a": 1}}]
    for options in refused:
        with pytest.raises(ConfigError):
            CheckpointWriter(alone).save_hf(hf_handle(), tmp_path / "out", Export(), **options)
