"""Records of a comparison: the values of one rank, and of one side."""

import importlib.metadata
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from rl_backend.contracts import RLBackendError
from rl_backend.data import MicroBatchPlan, restore_order

type NamedTensors = Mapping[str, Tensor]

PACKAGES = ("torch", "transformers", "megatron-core", "megatron-bridge", "transformer-engine")


@dataclass(frozen=True, eq=False, repr=False)
class RankRecord:
    """What one rank of a side saw.

    Attributes:
        data_parallel_rank: whose share of the batch it had.
        is_source: whether it has outputs.
        activations: per sequence of the share, Hugging Face module path -> (L, hidden_size).
        log_probs: per sequence of the share, (L,).
        losses: this data-parallel rank's loss in each step.
        grad_norms: in each step.
        loaded_weights, gradients, weights: before training, in the first step and after it, float32 under their Hugging
            Face names; on rank 0 only.
        versions: of the packages that computed.
    """

    data_parallel_rank: int
    is_source: bool
    activations: Sequence[NamedTensors]
    log_probs: Sequence[Tensor]
    losses: Sequence[float]
    grad_norms: Sequence[float]
    loaded_weights: NamedTensors = field(default_factory=dict)
    gradients: NamedTensors = field(default_factory=dict)
    weights: NamedTensors = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The tensors stay in the file until they are used."""
        return cls(**torch.load(path, mmap=True, weights_only=True))


@dataclass(frozen=True, eq=False, repr=False)
class SideRecord:
    """What one side computed, independent of its layout: T tokens are those of all sequences in their order.

    Attributes:
        activations: Hugging Face module path -> (T, hidden_size) in the first step, in order of computation.
        log_probs: (T,) in the first step.
        losses, grad_norms: of each step.
        loaded_weights, gradients, weights, versions: as in :class:`RankRecord`.
    """

    activations: NamedTensors
    log_probs: Tensor
    losses: Sequence[float]
    grad_norms: Sequence[float]
    loaded_weights: NamedTensors
    gradients: NamedTensors
    weights: NamedTensors
    versions: Mapping[str, str] = field(default_factory=dict)


def merge_ranks(ranks: Sequence[RankRecord], plan: MicroBatchPlan) -> SideRecord:
    """One side out of its ranks.

    Raises:
        RLBackendError: no source rank for a share of the batch, or ranks whose gradient norms are not the same.
    """
    sources = {rank.data_parallel_rank: rank for rank in ranks if rank.is_source}
    absent = sorted(set(range(plan.dp_size)) - set(sources))
    if absent:
        raise RLBackendError(
            f"no rank has the outputs of the data-parallel ranks {absent}; is_mp_src_rank_with_outputs is wrong"
        )
    for index, rank in enumerate(ranks):
        for step, (norm, first) in enumerate(zip(rank.grad_norms, ranks[0].grad_norms, strict=True)):
            both_nan = math.isnan(norm) and math.isnan(first)
            if not both_nan and not math.isclose(norm, first, rel_tol=1e-6):
                raise RLBackendError(
                    f"rank {index} has gradient norm {norm} in step {step} and rank 0 has {first}; it must be the same",
                    rank=index,
                    step=step,
                )
    shares = [sources[index] for index in range(plan.dp_size)]
    activations = restore_order(plan, [share.activations for share in shares])
    everywhere = [path for path in activations[0] if all(path in one for one in activations)]
    of_rank_0 = ("grad_norms", "loaded_weights", "gradients", "weights", "versions")
    return SideRecord(
        activations={path: torch.cat([one[path] for one in activations]) for path in everywhere},
        log_probs=torch.cat(restore_order(plan, [share.log_probs for share in shares])),
        losses=[sum(losses) / plan.dp_size for losses in zip(*(share.losses for share in shares), strict=True)],
        **{name: getattr(ranks[0], name) for name in of_rank_0},
    )


def package_versions() -> dict[str, str]:
    """Version of each of the packages that this process has imported."""
    imported = [name for name in PACKAGES if sys.modules.keys() & {name.replace("-", "_"), name.replace("-", ".")}]
    versions = {"python": platform.python_version()}
    for package in imported:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
