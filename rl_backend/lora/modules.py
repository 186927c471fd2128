"""Modules that adapters can stand beside, and what one rank has of them."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rl_backend.contracts import VALUE_HEAD_WEIGHTS, ConfigError, UnsupportedError
from rl_backend.contracts.lora import LORA_KINDS, LoRAConfig, LoRAKind

# The features that a rank has: the first, and the one behind the last.
type Part = tuple[int, int]


@dataclass(frozen=True)
class AdaptedModule:
    """A linear layer, an embedding or a head.

    Attributes:
        name: Hugging Face name of the module.
        in_features, out_features: of the whole module. An embedding has the vocabulary as inputs.
        inputs, outputs: the features that this rank computes with.
        holds_outputs: whether this rank keeps the factor of its outputs whole and computes with a view of it: heads of
            keys and values that several ranks share.
        is_expert: whether it belongs to one of the experts that a router chooses between, which have ranks of their own.
    """

    name: str
    kind: LoRAKind
    in_features: int
    out_features: int
    inputs: Part
    outputs: Part
    holds_outputs: bool = False
    is_expert: bool = False

    @property
    def cuts_inputs(self) -> bool:
        """Whether ranks have different columns of A. Otherwise they all have A, and each a part of its gradient."""
        return self.inputs != (0, self.in_features)

    @property
    def cuts_outputs(self) -> bool:
        """As :attr:`cuts_inputs`, for rows of B."""
        return self.outputs != (0, self.out_features) and not self.holds_outputs


def value_head(hidden_size: int) -> AdaptedModule:
    """The head of a critic, which tenants may have one of their own in place of."""
    name = VALUE_HEAD_WEIGHTS[0].removesuffix(".weight")
    return AdaptedModule(name, "head", hidden_size, 1, (0, hidden_size), (0, 1))


def select_modules(config: LoRAConfig, whole: Mapping[str, LoRAKind]) -> tuple[str, ...]:
    """The names among ``whole``, of the whole model, that ``config`` targets; :class:`ConfigError` for one without any."""
    for target in config.targets:
        if not any(config.replace(targets=(target,)).selects(name, kind) for name, kind in whole.items()):
            kinds = sorted(set(whole.values()))
            ends = sorted({name.rpartition(".")[2] for name in whole})
            unknown = target not in LORA_KINDS
            raise ConfigError.of(
                "LoRAConfig.targets",
                target,
                f"{'no module of this name' if unknown else 'the model has none, or none that can be adapted here'}; kinds "
                f"that it has: {', '.join(kinds)}; names: {', '.join(ends)}",
            )
    return tuple(name for name, kind in whole.items() if config.selects(name, kind))


def modules_of_rank(names: Iterable[str], held: Mapping[str, AdaptedModule]) -> tuple[AdaptedModule, ...]:
    """Those of ``names`` that this rank has a part of."""
    return tuple(held[name] for name in names if name in held)


_STACKS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def stack_of(module: str) -> tuple[str, int]:
    """Where experts that share factors have those of an expert's module: the name of the tensors, as Tinker and vLLM give
    it, and its place in them.
    """
    experts, number, projection = module.rsplit(".", 2)
    return f"{experts}.{_STACKS.get(projection, projection)}", int(number)


def stack_sizes(kinds: Mapping[str, LoRAKind]) -> Counter[str]:
    """How many experts each stack is of, among modules of the whole model."""
    return Counter(stack_of(name)[0] for name, kind in kinds.items() if kind == "experts")


def require_trainable(config: LoRAConfig, names: Collection[str], kinds: Mapping[str, LoRAKind]) -> None:
    """Raises for what cannot be trained of ``names``, among ``kinds`` of the whole model.

    Raises:
        UnsupportedError: DoRA of an embedding or a head.
        ConfigError: factors to share, and no experts that share them, or not all of a layer.
    """
    if config.experts_share_factor:
        chosen, every = stack_sizes({name: kinds[name] for name in names}), stack_sizes(kinds)
        if not chosen:
            raise ConfigError.of("LoRAConfig.experts_share_factor", True, "no target is an expert; add experts to targets")
        if part := next((stack for stack, number in chosen.items() if number < every[stack]), ""):
            raise ConfigError.of(
                "LoRAConfig.targets", config.targets, f"has some experts of {part}, which share a factor; name all or none"
            )
    for name in names:
        if config.use_dora and kinds[name] in ("embedding", "head"):
            raise UnsupportedError(
                f"LoRAConfig.use_dora=True with {name}: embeddings and heads have no magnitudes here; take it out of the "
                "targets, or set use_dora=False",
                use_dora=True,
            )
