"""Kept weights: those of a directory that nothing trains, and that a saved model has unchanged."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from rl_backend.checkpoint.hf_reader import TORCH_DTYPES, HFReader
from rl_backend.checkpoint.quantisation import plain_dtype
from rl_backend.contracts import CheckpointError, TensorInfo, dtype_from_name
from rl_backend.contracts.errors import listed

STALE = "they are not trained, so they fit the rest less with every step: drafts by MTP weights are accepted less often"


class KeptWeights(NamedTuple):
    """Weights to copy, as their directory stores them, or in the model's dtype where it stores them in FP8.

    ``tensors`` are read when they are taken, one at a time, to the CPU.
    """

    infos: list[TensorInfo]
    tensors: Iterator[tuple[str, Tensor]]


def find_kept(reader: HFReader, prefixes: tuple[str, ...], trained: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the kept tensors of a directory: not ``trained``, with names that begin with a prefix."""
    kept = [name for name in reader.infos if name.startswith(prefixes) and name not in trained]
    return {info.name: info.shape for info in _infos(reader, kept)}


def open_kept(source: Path, kept: Mapping[str, tuple[int, ...]]) -> KeptWeights:
    """What :func:`find_kept` found, in the directory that it was found in, or in a copy. Only headers are read yet."""
    if not kept:
        return KeptWeights([], iter(()))
    reader = HFReader(source)
    others = [name for name, shape in kept.items() if name not in reader.infos or reader.infos[name].shape != shape]
    if others:
        raise CheckpointError.at(
            source,
            f"lacks {listed(others)}, or has another shape of it, which are kept beside the trained weights; give the "
            "directory that the run began from, or a copy of it",
        )
    infos = _infos(reader, kept)
    tensors = ((info.name, reader.read(info.name).to(dtype_from_name(info.dtype))) for info in infos)
    return KeptWeights(infos, tensors)


def _infos(reader: HFReader, names: Iterable[str]) -> list[TensorInfo]:
    infos, dequantised = [], reader.dequantised
    for name in names:
        shape, dtype = reader.infos[name]
        if isinstance(dtype, str) and dtype not in TORCH_DTYPES:
            raise CheckpointError.at(
                reader.path,
                f"has {name} in {dtype}, which is not copied to a saved model; expected {', '.join(TORCH_DTYPES)}",
            )
        written = TORCH_DTYPES[dtype] if isinstance(dtype, str) else dtype
        if name in dequantised:
            written = plain_dtype(reader.config)
        infos.append(TensorInfo.of(name, shape, written))
    return infos


def describe_kept(kept: Collection[str]) -> str:
    """Modules and numbers of their tensors: ``model.visual (153), mtp (15)``."""
    modules: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for name in sorted(kept):
        *path, _ = name.split(".")
        modules.setdefault(tuple(path[: 2 if path[:1] == ["model"] else 1]), []).append(tuple(path))
    return ", ".join(f"{'.'.join(_common_path(paths))} ({len(paths)})" for paths in modules.values())


def _common_path(paths: Sequence[tuple[str, ...]]) -> list[str]:
    return [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
