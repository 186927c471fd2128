"""Adapters beside the linear layers, experts, embedding and head of a native model."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import batched

from torch import Tensor, nn

from rl_backend.contracts import ModelOptions, PackedWeight, WeightName, stored_names
from rl_backend.contracts.lora import LoRAKind
from rl_backend.lora.modules import AdaptedModule, value_head
from rl_backend.model.blocks import FeedForward, Mixer
from rl_backend.model.decoder import Decoder
from rl_backend.model.feedforward.moe import MoE
from rl_backend.model.mixers.mla import Indexer
from rl_backend.model.options import DecoderOptions
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.shards import chunk
from rl_backend.parallel.tensor import LinearPart
from rl_backend.primitive.adapters import (
    HEAD,
    adapted_embedding,
    adapted_linear,
    adapters_at_work,
    runs_at_work,
    runs_of_share,
)
from rl_backend.primitive.experts import ClampedExperts, SwiGLUExperts
from rl_backend.runtime.adaptable import COUPLES, TRAINS_BASE, Adaptable, SumGroups


def attach_adapters(module: nn.Module, weight_names: Mapping[str, WeightName]) -> None:
    """Lets adapters work beside every layer that can have them. Replaces their ``forward``, before they are laid out."""
    for place, block in module.named_modules():
        if isinstance(block, ClampedExperts):
            block.beside_adapters = True
        elif isinstance(block, MoE) and isinstance(block.experts, SwiGLUExperts):
            gate_up, down = (weight_names[f"{place}.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
            assert isinstance(gate_up, PackedWeight), "as in MoESpec.weight_names"
            assert isinstance(down, PackedWeight), "as in MoESpec.weight_names"
            pairs = zip(batched(_modules(gate_up), 2), _modules(down), strict=True)
            block.experts.names = [(*gate_and_up, last) for gate_and_up, last in pairs]
    for kind, layer, name in _adaptable_layers(module, weight_names):
        # A head is no call of its module: see next_token_log_probs.
        if kind != "head":
            setattr(layer, "forward", partial(_forward, layer, name))  # noqa: B010 - a method


def adaptable_modules(
    modules: Mapping[int, nn.Module],
    weight_names: Mapping[str, WeightName],
    groups: ParallelGroups,
    options: ModelOptions | None,
    hidden_size: int,
) -> Adaptable:
    """What tenants can adapt of a model that is laid out. A collective over the ranks that have parts of it.

    Args:
        modules: the stages of this rank.
    """
    held = held_modules(modules.values(), weight_names, groups)
    etp = groups.ep_mesh.get_group(1) if groups.parallel.etp > 1 else None
    in_replica = groups.token_group.size() % groups.expert_group.size() == 0
    return Adaptable.of_ranks(
        held,
        stored_names(weight_names),
        (groups.expert_group, groups.pp_group),
        tensor_group=groups.tp_group,
        data_group=groups.fsdp_mesh.get_group(),
        expert_groups=SumGroups(etp, groups.edp_mesh.get_group()),
        whole_group=groups.replica_group if in_replica else groups.world_group,
        refused_by=_refused_by(options),
        value_head=value_head(hidden_size) if all(isinstance(module, Decoder) for module in modules.values()) else None,
        holds_head=any(isinstance(module, Decoder) and module.norm is not None for module in modules.values()),
    )


_REFUSED = {
    "router_aux_loss_coef": COUPLES,
    "router_z_loss_coef": COUPLES,
    "router_sequence_loss_coef": COUPLES,
    "mtp": COUPLES,
    "indexer": TRAINS_BASE,
    "expert_bias_rate": TRAINS_BASE,
}
"""Options of a base with which there can be no tenants, and why."""


def _refused_by(options: ModelOptions | None) -> str:
    for name, value in DecoderOptions.of(options).changed().items():
        if name in _REFUSED:
            return f"NativeConfig.model_cfg.{name}={value!r}: {_REFUSED[name]}"
    return ""


def held_modules(
    modules: Iterable[nn.Module], weight_names: Mapping[str, WeightName], groups: ParallelGroups
) -> dict[str, AdaptedModule]:
    held: dict[str, AdaptedModule] = {}
    for module in modules:
        for kind, layer, name in _adaptable_layers(module, weight_names):
            if isinstance(layer, nn.Embedding):
                sizes = layer.num_embeddings, layer.embedding_dim
            else:
                sizes = layer.in_features, layer.out_features
            part = getattr(layer, "part", LinearPart((0, sizes[0]), (0, sizes[1])))
            if isinstance(layer, nn.Embedding) and kind == "head":
                sizes, part = sizes[::-1], LinearPart(part.outputs, part.inputs)
            held[name] = AdaptedModule(name, kind, *sizes, *part)
        for block in module.modules():
            if isinstance(block, SwiGLUExperts):
                held |= {each.name: each for each in _modules_of_experts(block, groups)}
    return held


def _adaptable_layers(
    module: nn.Module, weight_names: Mapping[str, WeightName]
) -> Iterator[tuple[LoRAKind, nn.Linear | nn.Embedding, str]]:
    """(kind, layer, Hugging Face name), all but experts that a router chooses between."""
    found: list[tuple[LoRAKind, str, nn.Module]] = []
    for place, block in module.named_modules():
        if isinstance(block, Mixer):
            found.append(("attention", place, block))
        elif isinstance(block, MoE):
            if block.shared_expert_gate is not None:
                found.append(("feed_forward", f"{place}.shared_expert_gate", block.shared_expert_gate))
        elif isinstance(block, FeedForward):
            found.append(("feed_forward", place, block))
    if isinstance(module, Decoder) and module.embed_tokens is not None:
        found.append(("embedding", "embed_tokens", module.embed_tokens))
    choosing = {layer for block in module.modules() if isinstance(block, Indexer) for layer in block.modules()}
    for kind, place, block in found:
        for path, layer in block.named_modules(prefix=place):
            if layer in choosing:
                # No gradient of a loss reaches what chooses keys.
                continue
            stored = weight_names.get(f"{path}.weight")
            if isinstance(layer, nn.Linear | nn.Embedding) and isinstance(stored, str):
                yield kind, layer, stored.removesuffix(".weight")
    # By this name also where it is the embedding: an adapter of one of the two leaves the other as it is.
    if isinstance(module, Decoder) and (head := module.language_head) is not None:
        yield "head", head, HEAD


def _modules_of_experts(experts: SwiGLUExperts, groups: ParallelGroups) -> Iterator[AdaptedModule]:
    assert experts.names is not None, "adapters are attached"
    num_experts, _, features, hidden_size = experts.gate_up_proj.shape
    ep, etp = groups.parallel.ep, groups.parallel.etp
    cut = chunk(slice(0, features), etp, groups.ep_mesh.get_local_rank(1)) if etp > 1 else slice(0, features)
    whole, part = (0, hidden_size), (int(cut.start), int(cut.stop))
    for names in experts.names[experts.first_expert : experts.first_expert + num_experts // ep]:
        for name in names[:2]:
            yield AdaptedModule(name, "experts", hidden_size, features, whole, part, is_expert=True)
        yield AdaptedModule(names[2], "experts", features, hidden_size, part, whole, is_expert=True)


def _modules(packed: PackedWeight) -> Iterator[str]:
    return (name.removesuffix(".weight") for name in packed.names)


def _forward(layer: nn.Linear | nn.Embedding, name: str, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Embedding):
        return adapted_embedding(x, layer.weight, name)
    share = getattr(layer, "token_share", None)
    with adapters_at_work(runs_at_work() if share is None else runs_of_share(runs_at_work(), x.shape[0], *share)):
        return adapted_linear(x, layer.weight, layer.bias, {name: None})
