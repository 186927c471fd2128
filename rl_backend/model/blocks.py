"""Contracts of the blocks of a decoder layer: module, sharding, Hugging Face names, divisibility.

Each kind of block is one file in ``mixers/`` or ``feedforward/`` with two classes: a module that computes and cuts itself
over ranks, and a specification that builds it, names its parameters and refuses layouts. Nothing else knows the kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rl_backend.contracts import ConfigError, ModelOptions, NativeConfig, ParallelConfig, WeightName
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.primitive.attention import Segments, has_operator
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.rope import Rotary
from rl_backend.primitive.router import RouterSettings, RowSequences

type Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of a micro-batch's positions; see :func:`~rl_backend.primitive.rope.rotary_cos_sin`."""


class RouterInput(NamedTuple):
    """Facts about the tokens that a router routes.

    Attributes:
        loss_weight: factor of the router's losses of these tokens.
        padding: (T,) bool, tokens that do not count in the router's losses.
        experts: (T, top_k), experts chosen elsewhere.
        sequences: which sequence of the micro-batch each token is from; None where there is one.
    """

    loss_weight: float = 1.0
    padding: Tensor | None = None
    experts: Tensor | None = None
    sequences: RowSequences | None = None


class KeyChoice(NamedTuple):
    """What a mixer that attends to chosen keys is told.

    Attributes:
        longest: tokens of the longest sequence, the same on every rank.
        loss_weight: factor of the losses of what chooses.
        chosen: keys of the layer before (:func:`~rl_backend.primitive.sparse_attention.choose_keys`); None where it has all.
        recorded: what this layer must attend to; rows of -1 alone for the tokens for which it chooses, None where for all.
    """

    longest: int
    loss_weight: float = 1.0
    chosen: Tensor | None = None
    recorded: Tensor | None = None


type Mixed = Tensor | tuple[Tensor, Tensor | None]
"""What a mixer gives; of one that is told a :class:`KeyChoice`, beside it what it attended to."""


def attention_compiles(groups: ParallelGroups, config: NativeConfig, window: int | None, *, sinks: bool = False) -> bool:
    """Whether compiled code can hold :func:`~rl_backend.primitive.attention.packed_attention` in this layout."""
    # A rank that has a part of each sequence gathers keys.
    one_rank = groups.cp_group.size() == 1
    return one_rank and has_operator(groups.device, getattr(torch, config.param_dtype), window, sinks=sinks)


class CacheBytes(NamedTuple):
    """What an engine keeps of one sequence while it generates: keys and values, and states of any length's size."""

    tokens: int = 0
    state: int = 0


class Mixer(nn.Module, ABC):
    """Mixes the tokens of each sequence; (rows, hidden_size) -> (rows, hidden_size)."""

    @abstractmethod
    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Mixed:
        """``rotation`` is that of the specification's ``rotary``; one that ``chooses`` takes a :class:`KeyChoice` too."""

    @abstractmethod
    def split(self, groups: ParallelGroups) -> None:
        """Cuts the module over tensor- and context-parallel ranks, in place."""

    def choose_kernels(self, groups: ParallelGroups, config: NativeConfig) -> None:
        """Takes the kernels of the family's options; raises :class:`ConfigError` for one that cannot run here."""

    def compiles(self, groups: ParallelGroups, config: NativeConfig) -> bool:
        """Whether compiled code can hold it."""
        return False


class FeedForward(nn.Module, ABC):
    """Works on each token alone; (rows, hidden_size) -> (rows, hidden_size)."""

    compiles: ClassVar[bool] = False
    """Whether compiled code can hold it."""

    @abstractmethod
    def forward(self, x: Tensor, router: RouterInput) -> Tensor:
        """``router`` is read only where there are experts to choose."""

    @abstractmethod
    def split(self, groups: ParallelGroups) -> Sequence[nn.Module]:
        """Cuts the module over tensor- and expert-parallel ranks, in place; returns the parts of ``groups.edp_mesh``."""


class BlockSpec(ABC):
    """The sizes of a block; equal values describe equal blocks."""

    @property
    def options(self) -> frozenset[str]:
        """Names of the :class:`~rl_backend.model.options.DecoderOptions` that it takes."""
        return frozenset()

    @abstractmethod
    def weight_names(self, layer: str) -> Mapping[str, WeightName]:
        """Parameter in the module -> its Hugging Face name or names, in a layer called such as ``model.layers.0``."""

    @abstractmethod
    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises :class:`~rl_backend.contracts.ConfigError` for a layout whose sizes do not divide the block."""


class MixerSpec(BlockSpec):
    """``rotary`` determines the angles of queries and keys, None without any; ``module`` is a layer's name for the mixer."""

    rotary: Rotary | None
    module: ClassVar[str] = "self_attn"

    @property
    def chooses(self) -> bool:
        """Whether it attends to chosen keys."""
        return False

    @property
    def follows(self) -> bool:
        """Whether it attends to those that the layer before has chosen."""
        return False

    @property
    def shares_prefixes(self) -> bool:
        """Whether it works on the runs of ``Segments.tree`` as on whole sequences."""
        return False

    @property
    def chosen_keys(self) -> int | None:
        """How many keys it chooses for a query; None where it chooses none."""
        return None

    @abstractmethod
    def build(self, hidden_size: int, norm: NormSpec) -> Mixer:
        """``norm`` is the model's, for norms inside the block."""

    def cache_bytes(self, num_tokens: int, itemsize: int) -> CacheBytes | None:
        """What an engine keeps of ``num_tokens`` in numbers of ``itemsize`` bytes; None where the mixer does not say."""
        return None


class FeedForwardSpec(BlockSpec):
    """``router`` is that of a mixture of experts; None for a block without experts."""

    router: RouterSettings | None

    @abstractmethod
    def build(self, hidden_size: int, options: ModelOptions) -> FeedForward:
        """``options`` are the family's."""


class LayerNorms(NamedTuple):
    """Names of a layer's norms, before and after its blocks, in the directory as in the module; None without one."""

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


class LayerSpec(NamedTuple):
    """The blocks of one layer, each added to the residual stream."""

    mixer: MixerSpec
    feed_forward: FeedForwardSpec


def linear_names(modules: Sequence[str], block: str, *, bias: bool) -> dict[str, WeightName]:
    """Parameter -> Hugging Face name, of the linear layers of ``block``, which are called as in the directory."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{module}.{kind}": f"{block}.{module}.{kind}" for module in modules for kind in kinds}


def require_divided(dimension: str, ranks: int, name: str, size: int) -> None:
    """Raises :class:`~rl_backend.contracts.ConfigError` unless ``ranks`` divides ``size``."""
    if size % ranks:
        raise ConfigError.of(
            f"ParallelConfig.{dimension}",
            ranks,
            f"does not divide {name}={size} ({size} / {ranks} = {size / ranks:.2f}); {nearest(ranks, divisors(size))}",
        )


def divisors(size: int) -> list[int]:
    return [candidate for candidate in range(1, size + 1) if size % candidate == 0]


def nearest(ranks: int, working: Sequence[int]) -> str:
    """The advice to use the next number of ``working``, which ascends, below or above ``ranks``."""
    below = [size for size in working if size < ranks][-1:]
    above = [size for size in working if size > ranks][:1]
    return f"use {' or '.join(map(str, below + above))}"
