"""Comparison of what a trainer announces, what its export yields and what an engine loads."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_backend.contracts import TensorInfo, UnsupportedError, WeightCheckError, WeightManifest
from rl_backend.contracts.errors import listed


def name_of_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; raises :class:`~rl_backend.contracts.UnsupportedError` for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"dtype {name!r} is not a torch dtype; expected a name such as 'float32' or 'bfloat16'")
    return dtype


def tensor_info(name: str, tensor: Tensor) -> TensorInfo:
    """Name, shape, dtype and bytes of a full tensor; no offset, no digest."""
    return TensorInfo(name=name, shape=tuple(tensor.shape), dtype=name_of_dtype(tensor.dtype), nbytes=tensor.nbytes)


def as_announced(infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]]) -> Generator[tuple[TensorInfo, Tensor]]:
    """Each of ``infos`` with its tensor, before anything is done with the tensor.

    Whoever receives weights places them by what was announced. Two tensors of one size that change places would arrive
    with right digests under each other's names.

    Args:
        infos: the tensors in the order announced.
        weights: (name, full tensor), a collective's generator in general. It is closed when it differs, or when this
            generator is closed, which tells the other ranks.

    Raises:
        WeightCheckError: ``weights`` differ from ``infos`` in a name, shape, dtype or number.
    """
    iterator = iter(weights)
    try:
        for place, info in enumerate(infos):
            name, tensor = next(iterator, (None, None))
            if name is None or tensor is None:
                raise WeightCheckError(f"the export ended before {info.name}; {place} of {len(infos)} tensors came")
            found = (name, tuple(tensor.shape), name_of_dtype(tensor.dtype))
            if found != (info.name, info.shape, info.dtype):
                raise WeightCheckError(
                    f"the export yielded {found}, but announced {(info.name, info.shape, info.dtype)}; nothing of it was "
                    "sent: the runtime's weight_infos and export_weights must agree in names and order",
                    name=name,
                    announced=info.name,
                )
            yield info, tensor
        extra = next(iterator, None)
        if extra is not None:
            raise WeightCheckError(f"the export yielded {extra[0]} after the {len(infos)} tensors that it announced")
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


_SHOWN = 8


@dataclass(frozen=True)
class ExpectedWeights:
    """What an engine loads.

    Attributes:
        required: name -> tensor that every push must hold.
        optional: name -> tensor that a push may hold (for example ``lm_head.weight`` of a model that ties it).
        fused_groups: the names that are loaded into one parameter together; a part of a group leaves the rest of that
            parameter undefined.
    """

    required: Mapping[str, TensorInfo]
    optional: Mapping[str, TensorInfo] = field(default_factory=dict)
    fused_groups: Sequence[tuple[str, ...]] = ()


def find_mismatches(offered: Sequence[TensorInfo], expected: ExpectedWeights) -> list[str]:
    """One sentence for every kind of mismatch, each with the names concerned; empty when the weights can be loaded."""
    names = {tensor.name for tensor in offered}
    problems: list[str] = []
    halves = [group for group in expected.fused_groups if 0 < len(names.intersection(group)) < len(group)]
    problems.extend(
        f"half of a fused group: {', '.join(name for name in group if name in names)} came without "
        f"{', '.join(name for name in group if name not in names)}"
        for group in halves[:_SHOWN]
    )
    in_halves = {name for group in halves for name in group}
    missing = [name for name in expected.required if name not in names and name not in in_halves]
    if missing:
        problems.append(f"missing: {listed(missing, _SHOWN)}")
    known = {**expected.required, **expected.optional}
    unknown = [tensor.name for tensor in offered if tensor.name not in known]
    if unknown:
        problems.append(f"unknown to the engine: {listed(unknown, _SHOWN)}")
    present = [tensor for tensor in offered if tensor.name in known]
    shapes = [
        f"{tensor.name} is {tensor.shape}, the engine has {known[tensor.name].shape}"
        for tensor in present
        if tensor.shape != known[tensor.name].shape
    ]
    if shapes:
        problems.append(f"wrong shape: {listed(shapes, _SHOWN)}")
    dtypes = [
        f"{tensor.name} is {tensor.dtype}, the engine takes {known[tensor.name].dtype}"
        for tensor in present
        if tensor.dtype != known[tensor.name].dtype
    ]
    if dtypes:
        problems.append(f"wrong dtype: {listed(dtypes, _SHOWN)}")
    return problems


def check_manifest(manifest: WeightManifest, expected: ExpectedWeights, *, engine: str) -> None:
    """Raises :class:`~rl_backend.contracts.WeightCheckError` with every mismatch between a push and an engine."""
    problems = find_mismatches(manifest.tensors, expected)
    if problems:
        raise WeightCheckError(
            f"{engine} refuses weights of version {manifest.version}, nothing was loaded: {'; '.join(problems)}",
            engine=engine,
            version=manifest.version,
            problems=problems,
        )
