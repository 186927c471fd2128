"""Comparison of what a trainer announces, what its export yields and what an engine loads."""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rl_backend.contracts import TensorInfo, WeightCheckError, WeightManifest, name_of_dtype
from rl_backend.contracts.errors import listed


def as_announced(infos: Sequence[TensorInfo], weights: Iterable[tuple[str, Tensor]]) -> Generator[tuple[TensorInfo, Tensor]]:
    """Each of ``infos`` with its tensor, before anything is done with the tensor.

    The receiver places weights as announced. Two swapped tensors of one size would arrive with right digests under each
    other's names.

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
    """The weights that an engine loads.

    Attributes:
        required: name -> tensor that every push must hold.
        optional: name -> tensor that a push may hold (for example ``lm_head.weight`` of a model that ties it).
        fused_groups: the names that are loaded into one parameter together; a part of a group leaves the rest of that
            parameter undefined.
        in_float32: names of tensors that the engine keeps in float32 whatever its dtype; a push may send them so.
    """

    required: Mapping[str, TensorInfo]
    optional: Mapping[str, TensorInfo] = field(default_factory=dict)
    fused_groups: Sequence[tuple[str, ...]] = ()
    in_float32: frozenset[str] = frozenset()


def find_mismatches(
    offered: Sequence[TensorInfo], expected: ExpectedWeights, kept: Collection[str] = frozenset()
) -> list[str]:
    """One sentence for every kind of mismatch, each with the names concerned; empty when the weights can be loaded.

    Args:
        kept: names that need not be offered, whatever the engine waits for.
    """
    names = {tensor.name for tensor in offered}
    known = {**expected.required, **expected.optional}
    halves = [group for group in expected.fused_groups if 0 < len(names.intersection(group)) < len(group)]
    in_halves = {name for group in halves for name in group}
    pairs = [(tensor, known[tensor.name]) for tensor in offered if tensor.name in known]
    found = {
        "missing": [name for name in expected.required if name not in names and name not in in_halves and name not in kept],
        "unknown to the engine": [tensor.name for tensor in offered if tensor.name not in known],
        "wrong shape": [
            f"{tensor.name} is {tensor.shape}, the engine has {own.shape}"
            for tensor, own in pairs
            if tensor.shape != own.shape
        ],
        "wrong dtype": [
            f"{tensor.name} is {tensor.dtype}, the engine takes {own.dtype}"
            for tensor, own in pairs
            if tensor.dtype != own.dtype and not (tensor.dtype == "float32" and tensor.name in expected.in_float32)
        ],
    }
    return [
        *(
            f"half of a fused group: {', '.join(name for name in group if name in names)} came without "
            f"{', '.join(name for name in group if name not in names)}"
            for group in halves[:_SHOWN]
        ),
        *(f"{problem}: {listed(wrong, _SHOWN)}" for problem, wrong in found.items() if wrong),
    ]


def check_manifest(manifest: WeightManifest, expected: ExpectedWeights, *, engine: str) -> None:
    """Raises :class:`~rl_backend.contracts.WeightCheckError` with every mismatch between a push and an engine."""
    problems = find_mismatches(manifest.tensors, expected, frozenset(manifest.kept))
    if problems:
        raise WeightCheckError(
            f"{engine} refuses weights of version {manifest.version}, nothing was loaded: {'; '.join(problems)}",
            engine=engine,
            version=manifest.version,
            problems=problems,
        )
