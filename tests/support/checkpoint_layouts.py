"""Training that goes on in another layout or runtime than it was saved in, as jobs for the ranks of a pool."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from rl_backend.checkpoint.state_in_memory import StateInMemory, write_state
from rl_backend.contracts import OptimizerConfig
from rl_backend.runtime import Runtime
from tests.support.bridge_runs import open_bridge
from tests.support.native import deal, micro_batches, open_runtime, token_loss
from tests.support.rank_pool import RankPool

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]
OPTIMIZER = OptimizerConfig(lr=1e-3, lr_warmup_steps=2, lr_decay_style="cosine", total_training_steps=20)
STEPS_BEFORE = 2


@dataclass(frozen=True)
class Layout:
    """A runtime on a number of ranks.

    Attributes:
        parallel: what is not 1, as (name, size).
        schedule: of the native pipeline.
    """

    backend: Literal["native", "bridge"]
    world_size: int
    parallel: tuple[tuple[str, int], ...] = ()
    schedule: str = "auto"

    def __str__(self) -> str:
        sizes = dict(self.parallel)
        dp = self.world_size // math.prod(sizes.get(name, 1) for name in ("tp", "pp", "cp"))
        names = [f"{name}{size}" for name, size in [("dp", dp), *self.parallel] if size > 1]
        return " ".join([self.backend, *(names or ["one rank"]), *([] if self.schedule == "auto" else [self.schedule])])

    def open(self, model: str) -> AbstractContextManager[Runtime[Any]]:
        if self.backend == "bridge":
            return open_bridge(model, dict(self.parallel), optimizer=OPTIMIZER)
        return open_runtime(model, optimizer=OPTIMIZER, parallel=dict(self.parallel), pipeline_schedule=self.schedule)


def native(world_size: int, schedule: str = "auto", **parallel: int) -> Layout:
    return Layout("native", world_size, tuple(parallel.items()), schedule)


def bridge(world_size: int, **parallel: int) -> Layout:
    return Layout("bridge", world_size, tuple(parallel.items()))


DENSE: dict[Layout, list[Layout]] = {
    native(2): [native(1), native(2), native(2, tp=2), native(2, cp=2), bridge(2, tp=2), bridge(2)],
    native(4, "zbv", pp=2, vpp=2): [native(2, pp=2), native(4, tp=2), bridge(2, pp=2)],
    bridge(2, tp=2): [bridge(2, tp=2), bridge(2, pp=2), native(2, tp=2), native(4)],
}
"""Saved by -> loaded by."""

MIXTURE: dict[Layout, list[Layout]] = {
    native(2, ep=2): [native(2, ep=2), native(2), native(4, tp=2, ep=2), bridge(2, ep=2)],
    bridge(2, ep=2): [bridge(2, ep=2), bridge(2), native(2, pp=2), native(4, ep=2)],
}

HYBRID: dict[Layout, list[Layout]] = {
    native(2, ep=2): [native(2, pp=2)],
    bridge(2, tp=2): [native(2, cp=2)],
}
"""Of a mixture with recurrent states."""

MORE_OF_HYBRID: dict[Layout, list[Layout]] = {
    native(2, tp=2): [native(1), native(2), native(2, cp=2), native(4, "zbv", pp=2, vpp=2), bridge(2, ep=2)],
    native(2, ep=2): [native(4, tp=2, ep=2)],
    bridge(2, tp=2): [bridge(2, pp=2)],
}
"""Of the same, for ``make test-all``."""


@dataclass
class Continued:
    """What followed a checkpoint.

    Attributes:
        losses: mean over all tokens of the batch, in nats, of each step.
        learning_rates: after each step.
        weight_version: at the checkpoint.
        extra: what the checkpoint kept.
    """

    losses: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    weight_version: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


def save_job(layout: Layout, model: str, path: str, steps: int) -> Continued:
    """Trains, saves, and trains on for ``steps`` without a break."""
    with layout.open(model) as runtime:
        handle = runtime.build_model()
        _train(runtime, handle, range(STEPS_BEFORE))
        runtime.save_checkpoint(handle, path, extra={"next_batch": STEPS_BEFORE})
        copy_to_memory(runtime, handle, path)
        return _go_on(runtime, handle, {"next_batch": STEPS_BEFORE}, steps)


def load_job(layout: Layout, model: str, path: str, again: str, in_memory: bool, steps: int) -> Continued:
    """Loads into a model that has been trained on something else, saves that anew, and trains on."""
    with layout.open(model) as runtime:
        handle = runtime.build_model()
        _train(runtime, handle, [100])
        extra = runtime.load_checkpoint(handle, state_in_memory(path) if in_memory else path)
        extra = {"next_batch": STEPS_BEFORE} if in_memory else extra
        runtime.save_checkpoint(handle, again, extra=extra)
        return _go_on(runtime, handle, extra, steps)


def copy_to_memory(runtime: Runtime[Any], handle: Any, path: str) -> None:
    """Beside the checkpoint ``path``: what each rank would copy to memory, in a file."""
    rank = dist.get_rank()

    def room(nbytes: int) -> Tensor:
        return torch.from_file(f"{path}.rank{rank}", shared=True, size=nbytes, dtype=torch.uint8)

    table = write_state(*runtime.training_state(handle), room)
    Path(f"{path}.table{rank}").write_text(json.dumps(table))


def state_in_memory(path: str) -> StateInMemory:
    files = sorted(Path(path).parent.glob(f"{Path(path).name}.table*"))
    tables: list[tuple[int, int]] = [tuple(json.loads(file.read_text())) for file in files]

    def read(rank: int, start: int, end: int) -> Tensor:
        return torch.from_file(f"{path}.rank{rank}", shared=True, size=end, dtype=torch.uint8)[start:]

    return StateInMemory("the state", tables, read)


def _go_on(runtime: Runtime[Any], handle: Any, extra: dict[str, Any], steps: int) -> Continued:
    version = handle.weight_version
    start = extra["next_batch"]
    losses, rates = _train(runtime, handle, range(start, start + steps))
    return Continued(losses, rates, version, extra)


def _train(runtime: Runtime[Any], handle: Any, seeds: Sequence[int]) -> tuple[list[float], list[float]]:
    losses, rates = [], []
    rank, size = handle.data_parallel_rank, handle.data_parallel_size
    for seed in seeds:
        runtime.zero_grad(handle)
        result = runtime.forward_backward(
            handle, micro_batches(deal(SPLIT, size)[rank], dp_size=size, seed=seed), token_loss
        )
        assert runtime.optimizer_step(handle).ok
        rates.append(runtime.lr_scheduler_step(handle))
        losses.append(_mean_loss(result.metrics["nll"] if runtime.is_mp_src_rank_with_outputs(handle) else None))
    return losses, rates


def _mean_loss(mine: Any) -> float:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, None if mine is None else (float(mine.sum), float(mine.weight)))
    found = [each for each in everywhere if each is not None]
    return float(sum(total for total, _ in found) / sum(weight for _, weight in found))


class Saved(NamedTuple):
    """A checkpoint on the disk.

    Attributes:
        continued: what its saver trained after it.
        state: its tensors.
    """

    path: Path
    continued: Continued
    state: dict[str, Tensor]


def save_in(ranks: RankPool, model: Path, path: Path, saver: Layout, steps: int = 2) -> Saved:
    whole = ranks.run(save_job, saver, str(model), str(path), steps, world_size=saver.world_size)[0]
    return Saved(path, whole, read_whole(path))


def load_in(ranks: RankPool, model: Path, saved: Saved, again: Path, loader: Layout, *, in_memory: bool = False) -> float:
    """Trains on in another layout, from the disk or from memory, and saves to ``again`` before that.

    Returns the largest relative difference of the losses after the checkpoint to those of its saver. Weights, moments,
    counts, learning rates and ``extra`` must be the same in every digit after loading.
    """
    whole = saved.continued
    job = (loader, str(model), str(saved.path), str(again), in_memory, len(whole.losses))
    part = ranks.run(load_job, *job, world_size=loader.world_size)[0]
    assert part.weight_version == whole.weight_version == STEPS_BEFORE
    assert part.learning_rates == whole.learning_rates
    assert part.extra == whole.extra == {"next_batch": STEPS_BEFORE}
    _require_equal(read_whole(again), saved.state, str(loader))
    return max(abs(a - b) / b for a, b in zip(part.losses, whole.losses, strict=True))


def continue_in(
    ranks: RankPool, model: Path, folder: Path, saver: Layout, loaders: Sequence[Layout], steps: int = 2
) -> dict[Layout, dict[str, float]]:
    """Loader -> ``loss``, the difference of :func:`load_in`."""
    saved = save_in(ranks, model, folder / "saved", saver, steps)
    return {
        loader: {"loss": load_in(ranks, model, saved, folder / f"again-{index}", loader)}
        for index, loader in enumerate(loaders)
    }


def read_whole(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, but for random state."""
    reader = FileSystemReader(path)
    infos = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(info.size, dtype=info.properties.dtype)
        for name, info in infos.items()
        if isinstance(info, TensorStorageMetadata) and not name.startswith("random.")
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def _require_equal(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), where
    different = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not different, f"{where}: {different}"
