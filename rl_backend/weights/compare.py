"""Whether what a trainer offers is what an engine can load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest

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
        problems.append(f"missing: {_list(missing)}")
    known = {**expected.required, **expected.optional}
    unknown = [tensor.name for tensor in offered if tensor.name not in known]
    if unknown:
        problems.append(f"unknown to the engine: {_list(unknown)}")
    present = [tensor for tensor in offered if tensor.name in known]
    shapes = [
        f"{tensor.name} is {tensor.shape}, the engine has {known[tensor.name].shape}"
        for tensor in present
        if tensor.shape != known[tensor.name].shape
    ]
    if shapes:
        problems.append(f"wrong shape: {_list(shapes)}")
    dtypes = [
        f"{tensor.name} is {tensor.dtype}, the engine takes {known[tensor.name].dtype}"
        for tensor in present
        if tensor.dtype != known[tensor.name].dtype
    ]
    if dtypes:
        problems.append(f"wrong dtype: {_list(dtypes)}")
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


def _list(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more
