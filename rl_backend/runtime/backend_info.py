"""Facts about a backend, its models and their optimizers."""

import importlib.metadata
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.checkpoint.training_state import MOMENTS, StateTensors, TensorPieces
from rl_backend.contracts import UnsupportedError, dtype_from_name
from rl_backend.contracts.result import BackendInfo, OptimizerState, OptimizerStateInfo
from rl_backend.primitive.adapters import rows_are_exact
from rl_backend.runtime.handle import GuardedHandle
from rl_backend.runtime.tenants.handle import TenantHandle

_PACKAGES = ("rl-backend", "torch", "megatron-core", "megatron-bridge", "transformers", "peft", "ray", "vllm", "verl")


def backend_info(base: GuardedHandle, tenants: Iterable[TenantHandle]) -> BackendInfo:
    sizes = base.config.backend_cfg.parallel.model_dump()
    return BackendInfo(
        runtime=base.config.backend,
        device=base.groups.device.type,
        layout={"world": base.groups.world_size, "dp": base.groups.dp_size, **sizes},
        base=base.name,
        hf_path=base.config.hf_path,
        model_type=str(base.hf_config.get("model_type", "")),
        head=base.head,
        tenants=tuple(tenant.info() for tenant in tenants),
        bit_exact=is_bit_exact(base),
        installed=_installed_packages(),
    )


def is_bit_exact(base: GuardedHandle) -> bool:
    """Whether tenants compute the same alone and beside others; a warning is logged once where they do not."""
    return rows_are_exact(dtype_from_name(base.weights[0].dtype), base.groups.device)


def _installed_packages() -> dict[str, str]:
    found = ((name, each.version) for name in _PACKAGES for each in importlib.metadata.distributions(name=name))
    return dict(found)


def optimizer_info(handle: GuardedHandle) -> OptimizerStateInfo:
    held = handle.part_tensors().get("optimizer", ())
    steps = handle.trainer.num_steps
    return OptimizerStateInfo(handle.name, steps, sum(tensor.nbytes for tensor in held))


def optimizer_state(handle: GuardedHandle, held: StateTensors) -> OptimizerState:
    """The state of all ranks. A collective.

    Args:
        held: what a checkpoint of ``handle`` has on this rank.
    """
    optimizer, group = handle.trainer, handle.groups.host_group
    moments = [_gathered(prefix, held, handle.saved_shapes, group) for prefix in MOMENTS.values()]
    return OptimizerState(optimizer.num_steps, optimizer.learning_rate, *moments)


def _gathered(
    prefix: str, held: StateTensors, shapes: Mapping[str, tuple[int, ...]], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """Whole tensors from the pieces that ranks write, in the order of ``shapes``, without those that no rank has."""
    pieces = {name: held.get(prefix + name) for name in shapes}
    mine = [isinstance(each, TensorPieces) and each.writes for each in pieces.values()]
    foreign = [name for name in held if name.startswith(prefix) and name.removeprefix(prefix) not in shapes]
    here = torch.tensor([*mine, bool(foreign)], dtype=torch.int32)
    dist.all_reduce(here, group=group)
    if here[-1]:
        raise UnsupportedError(
            "get_optimizer_state: the runtime keeps moments of parameters that are no Hugging Face tensors "
            f"({', '.join(foreign[:4]) or 'on other ranks'}); use backend='native'"
        )
    found: dict[str, Tensor] = {}
    for (name, part), there in zip(pieces.items(), here[:-1].tolist(), strict=True):
        if not there:
            continue
        whole = torch.zeros(shapes[name])
        if isinstance(part, TensorPieces) and part.writes:
            for offsets, piece in part.pieces.items():
                place = tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))
                whole[place] = piece.to("cpu", torch.float32)
        # Each number is one rank's, so that the sum is that number.
        dist.all_reduce(whole, group=group)
        found[name] = whole
    return found
