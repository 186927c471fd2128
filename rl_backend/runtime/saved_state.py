"""Training states of guarded runtimes: their manifest, loading them, and whose random state a rank takes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rl_backend.checkpoint.manifest import TrainingManifest, read_manifest
from rl_backend.checkpoint.state_files import TensorsReader, require_written
from rl_backend.checkpoint.training_state import StateTensors, on_every_rank, read_training_state
from rl_backend.contracts import CheckpointError, ConfigError, ParallelConfig
from rl_backend.runtime.engine import GuardedHandle

RANDOM = "random."
"""Names of random state begin with it and end with the rank; one that a checkpoint does not have stays as it is."""

type Differs = Literal["replicas", "tensor_ranks", "expert_ranks", "nowhere"]
"""Between which ranks a stream of random numbers differs: those of one replica, or those at one place, have it in common."""


def training_manifest(handle: GuardedHandle, **progress: Any) -> TrainingManifest:
    """Everything of the training state that is not a tensor.

    Args:
        progress: the steps that the optimizer counts, and ``private`` names, as :class:`TrainingManifest` has them.
    """
    return TrainingManifest(
        model_type=_model_type(handle),
        parameters=handle.saved_shapes,
        kept=dict(handle.kept),
        in_float32=tuple(sorted(handle.in_float32)),
        head=handle.head,
        weight_version=handle.weight_version,
        world_size=dist.get_world_size(),
        runtime_config=handle.config.model_dump(mode="json"),
        **progress,
    )


def load_state[H: GuardedHandle](
    handle: H,
    path: Path,
    tensors: Callable[[H], StateTensors],
    *,
    check: Callable[[TrainingManifest], None] = lambda manifest: None,
    differs: Callable[[str], Differs] = lambda name: "replicas",
    earlier: Callable[[str], str] = lambda name: name,
) -> tuple[TrainingManifest, StateTensors]:
    """Fills ``tensors(handle)`` from the checkpoint ``path`` and sets the weight version; the caller restores the rest.

    A collective over all ranks.

    Args:
        tensors: called when the checkpoint is known to be complete and of this model.
        check: raises for another reason to refuse it.
        differs: of a name of random state, between which ranks it does.
        earlier: of a name of random state, the one that older checkpoints have, whatever the device. One of another size is
            another device's, and so not there.

    Raises:
        CheckpointError: on every rank.
    """
    group = handle.groups.host_group
    with on_every_rank(group, f"{path} cannot be read"):
        manifest = read_manifest(path)
        check(manifest)
        if manifest.lora is not None and handle.lora_id < 0:
            raise CheckpointError.at(
                path, f"holds the LoRA tenant of a model; load it into one that create_lora_adapter makes of {handle.name!r}"
            )
        manifest.require_model(_model_type(handle), handle.saved_shapes, handle.head, path)
        manifest.require_readable_by(handle.config.backend, path)
        manifest.require_files(path)
        # Each rank reads its share of the files, so that together they read everything once.
        for name in sorted(manifest.files)[dist.get_rank(group) :: dist.get_world_size(group)]:
            require_written(path, name, manifest.files[name])
        reader = TensorsReader(path, manifest.files)
    saved = reader.metadata.state_dict_metadata
    filled = tensors(handle)
    origins = _origins(handle, manifest, filled, differs)
    for name, origin in origins.items():
        value = filled[name]
        if name.startswith(RANDOM) and origin not in saved and isinstance(value, Tensor):
            older = saved.get(earlier(origin))
            if isinstance(older, TensorStorageMetadata) and older.size == value.shape:
                origins[name] = earlier(origin)
    loaded = {name: value for name, value in filled.items() if origins[name] in saved or not name.startswith(RANDOM)}
    stored = {origins[name]: value for name, value in loaded.items()}
    with on_every_rank(group, f"{path} cannot be compared with the model"):
        for name, value in stored.items():
            held = [value] if isinstance(value, Tensor) else list(value.pieces.values())
            shape = value.shape if isinstance(value, Tensor) else value.whole_size
            reader.require_stored(name, tuple(shape), held[0].dtype if held else None)
    try:
        read_training_state(reader, stored, group)
    except BaseException:
        handle.damaged = f"loading {path} failed in the middle"
        raise
    handle.damaged = handle.broken = ""
    handle.weight_version = manifest.weight_version
    return manifest, loaded


def _origins(
    handle: GuardedHandle, manifest: TrainingManifest, names: Iterable[str], differs: Callable[[str], Differs]
) -> dict[str, str]:
    """Name of this rank's state -> name in the checkpoint."""
    here = RankLayout.of(handle.config.model_dump(mode="json"), dist.get_world_size())
    saved = RankLayout.of(manifest.runtime_config, manifest.world_size)
    origins = {}
    for name in names:
        origins[name] = name
        if name.startswith(RANDOM):
            stream, _, rank = name.rpartition(".")
            source = None if here is None or saved is None else source_rank(int(rank), here, saved, differs(stream))
            origins[name] = f"{stream}.{'none' if source is None else source}"
    return origins


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's generators, on ``device`` too, under names that no two ranks share."""
    states = {f"{RANDOM}cpu.{dist.get_rank()}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RANDOM}cuda.{dist.get_rank()}"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(tensors: StateTensors, device: torch.device) -> None:
    """Sets what :func:`random_state` gave, where ``tensors`` has it."""
    for kind, restore in (("cpu", torch.set_rng_state), ("cuda", lambda state: torch.cuda.set_rng_state(state, device))):
        state = tensors.get(f"{RANDOM}{kind}.{dist.get_rank()}")
        if isinstance(state, Tensor):
            restore(state)


def _model_type(handle: GuardedHandle) -> str:
    return str(handle.hf_config.get("model_type"))


@dataclass(frozen=True)
class RankLayout:
    """A runtime's layout over its ranks, which both runtimes number with tp first, then cp, data parallelism and pp."""

    backend: str
    parallel: ParallelConfig
    world_size: int

    @classmethod
    def of(cls, runtime_config: Mapping[str, Any], world_size: int) -> Self | None:
        """That of a dumped ``RuntimeConfig``; None for a runtime whose configuration has no ``parallel`` of ours."""
        try:
            parallel = ParallelConfig.model_validate(runtime_config["backend_cfg"]["parallel"])
            parallel.data_parallel_size(world_size)
            return cls(str(runtime_config["backend"]), parallel, world_size)
        except (ConfigError, KeyError, TypeError, ValidationError):
            return None


def source_rank(rank: int, here: RankLayout, saved: RankLayout, differs: Differs) -> int | None:
    """The rank of ``saved`` whose state of a stream ``rank`` continues, or None where there is no such rank.

    In the same layout it is the rank itself. In another one all ranks of a replica continue the first rank of the replica of
    their data-parallel rank: ranks that must draw the same numbers do. Streams that differ inside a replica
    continue where the layout still has as many of them.
    """
    if saved == here:
        return rank
    parallel, there = here.parallel, saved.parallel
    match differs:
        case "replicas":
            data_parallel_rank = rank // (parallel.tp * parallel.cp) % parallel.data_parallel_size(here.world_size)
            exists = data_parallel_rank < there.data_parallel_size(saved.world_size)
            return data_parallel_rank * there.tp * there.cp if exists else None
        case "tensor_ranks":
            return rank % parallel.tp if parallel.tp == there.tp else None
        case "expert_ranks":
            same = (parallel.ep, parallel.etp) == (there.ep, there.etp)
            return rank % (parallel.ep * parallel.etp) if same else None
        case "nowhere":
            return 0
