"""Checkpoints of one LoRA tenant: its factors and moments by peft's names, without the base, for any layout."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.checkpoint.manifest import TenantFacts, TrainingManifest, read_manifest
from rl_backend.checkpoint.state_in_memory import StateSource
from rl_backend.checkpoint.training_state import MOMENTS, WEIGHTS, StateTensors, TensorPieces, on_every_rank
from rl_backend.contracts import CheckpointError, Head
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime import checkpoints
from rl_backend.runtime.tenants.handle import TenantHandle
from rl_backend.weights.inspection import tensor_digest

_LOADED = "+"
"""Between the digest of the weights on disk and that of a checkpoint."""


def tenant_state(handle: TenantHandle) -> tuple[StateTensors, TrainingManifest]:
    optimizer = handle.trainer
    manifest = checkpoints.training_manifest(
        handle,
        schedule_steps=optimizer.schedule.num_steps,
        optimizer_steps=int(handle.rows.num_steps),
        lora=TenantFacts(
            config=handle.lora.model_dump(mode="json"),
            base=_base_digest(handle),
            num_draws=handle.rows.num_draws,
        ),
    )
    return dict(_pieces(handle)), manifest


def load_tenant_state(handle: TenantHandle, path: StateSource, *, optimizer: bool) -> TrainingManifest:
    """Restores a tenant from ``path``, whatever layout or runtime saved it; without ``optimizer`` that begins anew.

    Raises:
        CheckpointError: on every rank: no checkpoint of a tenant, one of another configuration, or of another base.
    """
    # A collective, so before what one rank may refuse.
    base = _base_digest(handle)

    def check(manifest: TrainingManifest) -> None:
        facts = manifest.lora
        if facts is None:
            # Refused next by the names of its parameters.
            return
        mine = handle.lora.model_dump(mode="json")
        # What is newer than the checkpoint has its default.
        saved = LoRAConfig.model_validate(facts.config).model_dump(mode="json")
        # Weights alone do not depend on how they began.
        free = () if optimizer else ("seed", "dropout")
        for name, value in mine.items():
            if name not in free and saved[name] != value:
                raise CheckpointError.at(
                    path,
                    f"holds a tenant with LoRAConfig.{name}={saved[name]!r}, {handle.name!r} has {value!r}; make the "
                    "adapter with the configuration that was saved",
                    name=name,
                )
        if facts.base != base:
            loaded = ", beside which the model has loaded a checkpoint," if handle.model.loaded else ""
            theirs = ", and a checkpoint that its base had loaded" if _LOADED in facts.base else ""
            raise CheckpointError.at(
                path,
                f"is an adapter of another base model: the weights of {handle.config.hf_path}{loaded} are others than those "
                f"that it was trained on (hf_path={manifest.runtime_config.get('hf_path')!r}{theirs})",
            )

    def wanted(each: TenantHandle) -> StateTensors:
        return {name: pieces for name, pieces in _pieces(each) if optimizer or name.startswith(WEIGHTS)}

    manifest, _ = checkpoints.load_state(handle, path, wanted, check=check)
    assert manifest.lora is not None, "checked"
    handle.rows.num_draws = manifest.lora.num_draws
    if optimizer:
        handle.rows.num_steps.fill_(manifest.optimizer_steps)
    else:
        handle.trainer.reset()
    handle.trainer.schedule.num_steps = manifest.schedule_steps if optimizer else 0
    return manifest


def saved_tenant(path: Path | str) -> tuple[LoRAConfig, Head]:
    """Of a tenant's checkpoint, what :meth:`~rl_backend.runtime.Runtime.create_lora_adapter` makes one from to load it.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of a whole model.
    """
    manifest = read_manifest(Path(path))
    if manifest.lora is None:
        raise CheckpointError.at(Path(path), "holds a whole model, and no LoRA tenant")
    return LoRAConfig.model_validate(manifest.lora.config), manifest.head


def problem_of_import(given: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What is wrong with the tensors of an adapter; empty where nothing is."""
    if missing := sorted(shapes.keys() - given.keys()):
        return f"{missing[0]} is missing, and {len(missing) - 1} others"
    if unknown := sorted(given.keys() - shapes.keys()):
        return f"{unknown[0]} is no tensor of this adapter (rank and targets must be those of its LoRAConfig)"
    for name, shape in shapes.items():
        tensor = given[name]
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {tuple(tensor.shape)}; expected {shape}"
        if not bool(torch.isfinite(tensor).all()):
            return f"{name} has values that are not finite"
    return ""


def _pieces(handle: TenantHandle) -> Iterator[tuple[str, TensorPieces]]:
    rows, groups = handle.rows, handle.trainer.groups
    kinds = ((WEIGHTS, rows.weights), (MOMENTS["exp_avg"], rows.exp_avg), (MOMENTS["exp_avg_sq"], rows.exp_avg_sq))
    for prefix, row in kinds:
        for tensor, view in rows.views(row):
            writes = groups.counts(of_experts=tensor.module.is_expert, summed=tensor.summed)
            yield prefix + tensor.name, TensorPieces(tensor.size, {tensor.first: view}, writes=writes)


def _base_digest(handle: TenantHandle) -> str:
    """Of the base's weights on disk, and of the checkpoint that it has loaded. A collective; rank 0 reads them, once."""
    group, hf_path, found = handle.groups.host_group, handle.config.hf_path, [""]
    with on_every_rank(group, f"the weights in {hf_path}, by which a base is known, cannot be read"):
        if dist.get_rank(group) == 0:
            found = [_digest_of_directory(hf_path)]
    dist.broadcast_object_list(found, group_src=0, group=group)
    return found[0] + (f"{_LOADED}{handle.model.loaded}" if handle.model.loaded else "")


@lru_cache(maxsize=8)
def _digest_of_directory(hf_path: str) -> str:
    reader = HFReader(hf_path)
    digest = xxhash.xxh3_64()
    # Whichever files the weights are in.
    for name in sorted(reader.infos):
        digest.update(f"{name} {tensor_digest(reader.read(name))}".encode())
    return str(digest.hexdigest())
