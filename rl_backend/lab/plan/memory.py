"""Bytes on a device by purpose and phase, the workload that they depend on, and the sizes of a model's parameters."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rl_backend.contracts import TARGET_IDS, ConfigError, HasEffect, Head, PackedBatch
from rl_backend.contracts.atoms import Part
from rl_backend.contracts.base_config import BaseConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.parallel.shards import ShardLayout, layout_of, local_tensor
from rl_backend.primitive.float32 import kept_ends, parameters_in_float32

type Phase = Literal["training", "optimizer_step", "log_probs", "weight_sync", "rollout"]
PHASES: tuple[Phase, ...] = ("training", "optimizer_step", "log_probs", "weight_sync", "rollout")
"""Forward and backward passes; clipping and stepping; forward passes alone; the export of weights; no work at all."""

PARTS: Mapping[str, Part] = {"weights": "model", "gradients": "grad", "optimizer": "optimizer"}
"""Component -> the part of a handle that it is: on the device in every phase, unless it is offloaded and not used."""

USED: Mapping[Phase, tuple[str, ...]] = {
    "training": (
        *("weights", "gradients", "adapters", "unreduced_gradients", "gathered_parameters", "activations"),
        "workspace",
    ),
    "optimizer_step": ("weights", "optimizer", "gradients", "adapters"),
    "log_probs": ("weights", "adapters", "gathered_parameters", "evaluation_workspace"),
    "weight_sync": ("weights", "adapters", "sync_bucket"),
    "rollout": ("adapters",),
}
"""What each phase works with: fields of :class:`RankMemory`."""

COMPONENTS = tuple(
    dict.fromkeys(name for names in (PARTS, *USED.values()) for name in names if name != "evaluation_workspace")
)
"""All of :meth:`RankMemory.phase`, in the order of a table."""


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """Bytes that the passes of a step take on a rank, and what they compute.

    Attributes:
        activations: kept for backward passes when the most is needed, of all micro-batches in flight.
        workspace: everything else that passes need then.
        evaluation_workspace: the same of a forward-only pass.
        kept_per_micro_batch: stage -> what one micro-batch keeps there for its backward pass.
        flops: floating-point operations of all passes of a step, in place of bytes; 0 where they are not counted.
    """

    activations: int
    workspace: int
    evaluation_workspace: int
    kept_per_micro_batch: Mapping[int, int]
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class RankMemory(PassMemory):
    """Bytes on the ranks of one pipeline rank, of which the first of each group holds as much as any.

    Attributes:
        weights, gradients, optimizer: what is held at all times, unless it is offloaded.
        adapters: of all LoRA tenants, their weights, gradients and moments, which are held at all times.
        unreduced_gradients: of whole parameters, before they are reduced over the ranks.
        gathered_parameters: whole parameters that FSDP has gathered, in the dtype of the computation.
        logits_chunk: of both workspaces at most, the logits of a chunk of tokens.
        sync_bucket: full tensors, and what they are gathered through, in a weight sync.
    """

    weights: int
    gradients: int
    optimizer: int
    adapters: int = 0
    unreduced_gradients: int = 0
    gathered_parameters: int = 0
    logits_chunk: int
    sync_bucket: int

    def phase(self, phase: Phase, offload: Collection[Part]) -> dict[str, int]:
        """Bytes by purpose; the parts of ``offload`` are on the device only where the phase uses them."""
        kept = (name for name, part in PARTS.items() if part not in offload)
        sizes = {name: int(getattr(self, name)) for name in dict.fromkeys((*kept, *USED[phase]))}
        # Both workspaces are one component: a phase has one of them.
        return {name.removeprefix("evaluation_"): size for name, size in sizes.items() if size}

    def total(self, phase: Phase, offload: Collection[Part]) -> int:
        return sum(self.phase(phase, offload).values())


_OF_PROMPTS = HasEffect(lambda work: work.prompt_length, "is of prompts, and prompt_length=0; set that too")


class Workload(BaseConfig):
    """One step of training, and the offload and weight sync around it.

    Attributes:
        sequence_length: tokens of every sequence; by default 4096, or as many as the model has positions.
        micro_batch_tokens: tokens of every micro-batch.
        num_micro_batches: of a step, on each data-parallel rank.
        prompt_length: tokens that every sequence begins with, and that are not trained.
        samples_per_prompt: sequences that begin with the same ones. The native runtime computes these once, and
            ``micro_batch_tokens`` are then those that are computed.
        trains_prompts: count log-probs of prompts all the same, as an upper bound where prompts may be shorter.
        head: what the model ends in.
        calculate_entropy: whether the loss takes the entropy.
        offload: parts that are in host memory when they are not used.
        sync_dtype: of the weights that the rollout engines get.
        byte_budget: of a weight sync; by default it gathers one tensor at a time.
        tenants: LoRA tenants over the model, which is frozen then; 0 trains the model.
        lora: of each tenant.
    """

    sequence_length: int = Field(default=4096, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    num_micro_batches: int = Field(default=8, ge=1)
    prompt_length: int = Field(default=0, ge=0)
    samples_per_prompt: Annotated[int, _OF_PROMPTS] = Field(default=1, ge=1)
    trains_prompts: Annotated[bool, _OF_PROMPTS] = False
    head: Head = "log_probs"
    calculate_entropy: Annotated[
        bool, HasEffect(lambda work: work.head == "log_probs", "head={0.head!r} has no entropy; leave it out")
    ] = False
    offload: tuple[Part, ...] = ()
    sync_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    byte_budget: int | None = Field(default=None, ge=1)
    tenants: int = Field(default=0, ge=0)
    lora: Annotated[LoRAConfig, HasEffect(lambda work: work.tenants, "is of tenants=0 LoRA tenants; set tenants too")] = (
        LoRAConfig()
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        length, tokens, wrong = self.sequence_length, self.micro_batch_tokens, list[tuple[str, int, str]]()
        if length > tokens:
            problem = f"does not fit into micro_batch_tokens={tokens}; sequences are never split: raise that"
            wrong.append(("Workload.sequence_length", length, problem))
        if self.prompt_length >= length:
            problem = f"leaves no token of sequence_length={length} to train; use less"
            wrong.append(("Workload.prompt_length", self.prompt_length, problem))
        ConfigError.refuse_all(wrong)
        return self

    def micro_batch(self, *, shares_prompts: bool = False) -> PackedBatch:
        """As many whole sequences as fit, and a shorter one; all tokens differ but those of a prompt and its samples.

        ``shares_prompts``: prompts are computed once for their samples.
        """
        sequences, targets, first, end = list[Tensor](), list[Tensor](), 0, self.micro_batch_tokens
        while first < end:
            prompt = torch.arange(first, min(first + self.prompt_length, end))
            first += len(prompt)
            for sample in range(self.samples_per_prompt if shares_prompts else 1):
                answer = torch.arange(first, min(first + self.sequence_length - self.prompt_length, end))
                if sample and not len(answer):
                    break
                first += len(answer)
                sequences.append(torch.cat((prompt, answer)))
                targets.append(torch.cat((torch.full_like(prompt[1:], -100), answer, answer.new_tensor([-100]))))
        lengths, meta = torch.tensor([*map(len, sequences)]), {"calculate_entropy": self.calculate_entropy}
        trained = self.trains_prompts or not self.prompt_length
        fields = {} if trained else {TARGET_IDS: torch.cat(targets)}
        return PackedBatch(torch.cat(sequences), lengths, fields, meta=meta)


class ParameterSize(NamedTuple):
    """Elements of one parameter.

    Attributes:
        held: what this rank keeps of it.
        computed: what this rank computes with, of a parameter that tensor or expert parallelism splits: its part.
        whole: shape on all ranks together.
        trained: whether it has a gradient.
        in_float32: it is computed with in float32, whatever the dtype of the rest.
        layout: which rank has which rectangle of it.
    """

    held: int
    computed: int
    whole: tuple[int, ...]
    trained: bool
    in_float32: bool
    layout: ShardLayout | None = None


@dataclass(frozen=True)
class ShardedStage:
    """Parameters of a stage, or of a model without stages, on one rank.

    Attributes:
        parameters: by name.
        units: name -> names of the parameters that FSDP gathers with that module; those of the root under "". Empty where
            nothing is sharded.
        ends: names of those outside the layers, where they are computed with in float32.
    """

    parameters: Mapping[str, ParameterSize]
    units: Mapping[str, Sequence[str]]
    ends: frozenset[str] = frozenset()

    @classmethod
    def of(cls, sharded: nn.Module, plain: nn.Module) -> Self:
        """``plain`` is the same without FSDP."""
        computed = {name: local_tensor(value).numel() for name, value in plain.named_parameters()}
        in_float32 = parameters_in_float32(plain)
        parameters = {
            name: ParameterSize(
                *(local_tensor(value).numel(), computed[name], tuple(value.shape), value.requires_grad, name in in_float32),
                layout=layout_of(value),
            )
            for name, value in sharded.named_parameters()
        }
        modules = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
        units: dict[str, list[str]] = {module: [] for module in modules}
        for name in parameters if units else ():
            units[max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)].append(name)
        kept = {id(parameter) for end in kept_ends(plain) for parameter in end.parameters()}
        ends = frozenset(name for name, parameter in plain.named_parameters() if id(parameter) in kept)
        return cls(parameters, units, ends)

    def gathered_bytes(self, dtype: torch.dtype, *, all_at_once: bool) -> int:
        of_ends = sum(self.parameters[name].computed for names in self.units.values() for name in names if name in self.ends)
        wider = torch.float32.itemsize - dtype.itemsize
        return self.gathered(all_at_once=all_at_once) * dtype.itemsize + of_ends * wider

    def held_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of what this rank keeps of a model that is not trained."""
        wide = torch.float32.itemsize
        return sum(size.held * (wide if name in self.ends else dtype.itemsize) for name, size in self.parameters.items())

    def gathered(self, *, all_at_once: bool, trained: bool = False) -> int:
        """Elements of whole parameters that exist at one time.

        Args:
            all_at_once: nothing is freed between forward and backward.
            trained: count those that have gradients only.
        """
        sizes = {
            unit: sum(self.parameters[name].computed for name in names if self.parameters[name].trained or not trained)
            for unit, names in self.units.items()
        }
        if all_at_once:
            return sum(sizes.values())
        # Two layers, the one that computes and the one that is fetched ahead, and the parameters outside of layers.
        layers = [unit for unit in sizes if unit and not any(unit.startswith(f"{other}.") for other in sizes if other)]
        whole = [sum(size for unit, size in sizes.items() if f"{unit}.".startswith(f"{layer}.")) for layer in layers]
        return sizes.get("", 0) + 2 * max(whole, default=0)
