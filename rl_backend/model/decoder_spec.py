"""A decoder's architecture as a value: sizes, blocks, norms, scales and Hugging Face names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    ConfigError,
    CopiedWeight,
    Head,
    IndexedLayers,
    ModelOptions,
    ParallelConfig,
    RoutedLayers,
    WeightName,
)
from rl_backend.model.blocks import CacheBytes, LayerNorms, LayerSpec
from rl_backend.model.options import MTP_OPTIONS, DecoderOptions, MTPTraining
from rl_backend.primitive.norm import NormSpec


class MTPNames(NamedTuple):
    """How a directory calls a layer for multi-token prediction and its parts.

    Attributes:
        module, layer: all of it, and its decoder layer.
        embedding_norm, hidden_norm, projection, norm: of what comes in, of both together, and of what goes to the head,
            within ``module``.
        embedding, head: copies of the model's within ``module``, empty where there are none.
    """

    module: str
    layer: str
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = "shared_head.norm"
    embedding: str = "embed_tokens.weight"
    head: str = "shared_head.head.weight"

    @classmethod
    def after_layers(cls, prefix: str, num_layers: int) -> "MTPNames":
        """DeepSeek's and GLM's: behind the last of the model's layers."""
        return cls(f"{prefix}.layers.{num_layers}", f"{prefix}.layers.{num_layers}")


@dataclass(frozen=True)
class MTPSpec:
    """A layer for multi-token prediction, with options as in :class:`~rl_backend.model.options.DecoderOptions`."""

    layer: LayerSpec
    names: MTPNames
    training: MTPTraining = "keep"
    loss_weight: float = 0.1

    @property
    def is_trained(self) -> bool:
        return self.training != "keep"

    def own_weight_names(self, norm: NormSpec) -> dict[str, WeightName]:
        """Of all but the decoder layer, by their names in :class:`MultiTokenPrediction`."""
        stored = self.names
        norms = {"embedding_norm": stored.embedding_norm, "hidden_norm": stored.hidden_norm, "norm": stored.norm}
        names: dict[str, WeightName] = {"projection.weight": f"{stored.module}.{stored.projection}.weight"}
        for module, called in norms.items():
            names |= {f"{module}.{name}": f"{stored.module}.{called}.{name}" for name in norm.parameters}
        return names

    def copies(self, *, tied: bool) -> Mapping[str, tuple[str, ...]]:
        """Parameter of the model -> names of the copies of it that a directory has in this module."""
        names = self.names.embedding, self.names.head
        embedding, head = (tuple(f"{self.names.module}.{name}" for name in (copy,) if name) for copy in names)
        own_head = "embed_tokens.weight" if tied else "lm_head.weight"
        return {"embed_tokens.weight": embedding} | {own_head: embedding + head if tied else head}


PRE_NORMS = LayerNorms()
"""Llama's: before each block."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A decoder. Its layers may be of different kinds; defaults are those of Llama.

    Attributes:
        max_length: longest sequence, in tokens.
        norm: of all norms.
        norms: which norms a layer has around its blocks.
        parallel_blocks: whether both blocks of a layer read the residual stream as it enters the layer; without
            ``norms.before_feed_forward`` they share the mixer's norm. Otherwise the feed-forward block reads what the mixer
            has added.
        final_norm: name of the last norm in Hugging Face directories, within ``prefix``.
        embedding_scale: factor of the embeddings, rounded to their dtype.
        residual_scale: factor of what a block adds to the residual stream.
        logit_scale: factor of the logits.
        prefix: of the Hugging Face names of all parameters but those of the head.
        mtp: a layer for multi-token prediction beside the others; None without one.
        trained_part: name of the modules that are trained alone; None trains all.

    Raises:
        ConfigError: a bias of a head that is the embedding.
    """

    vocab_size: int
    hidden_size: int
    max_length: int
    norm: NormSpec
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]
    norms: LayerNorms = PRE_NORMS
    parallel_blocks: bool = False
    final_norm: str = "norm"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    head_bias: bool = False
    prefix: str = "model"
    mtp: MTPSpec | None = None
    trained_part: str | None = None

    def __post_init__(self) -> None:
        if self.head_bias and self.tie_word_embeddings:
            raise ConfigError.of("DecoderSpec.head_bias", True, "embeddings have none; set tie_word_embeddings=False")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(layer.feed_forward.router is not None for layer in self.layers)

    @property
    def routed_layers(self) -> RoutedLayers | None:
        """None without experts, and where routers differ: recorded routes are one tensor for all of them."""
        routers = {
            (router.num_experts, router.top_k) for layer in self.layers if (router := layer.feed_forward.router) is not None
        }
        return RoutedLayers(*routers.pop(), self.sparse) if len(routers) == 1 else None

    @property
    def indexed_layers(self) -> IndexedLayers | None:
        """None where no layer chooses keys."""
        chosen = {index: keys for index, layer in enumerate(self.layers) if (keys := layer.mixer.chosen_keys) is not None}
        return IndexedLayers(next(iter(chosen.values())), tuple(chosen)) if len({*chosen.values()}) == 1 else None

    def configured(self, options: ModelOptions) -> "DecoderSpec":
        """With what the options say; raises :class:`ConfigError` for one of a part that the model does not have."""
        chosen = DecoderOptions.of(options)
        layers = self.layers if self.mtp is None else (*self.layers, self.mtp.layer)
        taken = frozenset[str]().union(*(block.options for layer in layers for block in layer))
        taken |= frozenset() if self.mtp is None else MTP_OPTIONS
        known = f"it takes {', '.join(sorted(taken))}" if taken else "it takes none"
        ConfigError.refuse_all(
            (f"NativeConfig.model_cfg.{name}", value, f"config.json describes no part that takes it; {known}")
            for name, value in chosen.changed().items()
            if name not in taken
        )
        if self.mtp is None or chosen.mtp == "keep":
            return self
        return replace(self, mtp=replace(self.mtp, training=chosen.mtp, loss_weight=chosen.mtp_loss_weight))

    def why_unshared(self, given: ModelOptions | None) -> str:
        """What keeps shared prefixes from being computed once; empty where nothing does."""
        chosen = DecoderOptions.of(given)
        # The kernel starts every sequence from an empty state.
        options = ["model_cfg.delta_kernel='fla'"] if chosen.delta_kernel == "fla" else []
        mixers = sorted({type(layer.mixer).__name__ for layer in self.layers if not layer.mixer.shares_prefixes})
        return ", ".join((*mixers, *options))

    def require_stage(self, layers: range) -> None:
        """Raises :class:`~rl_backend.contracts.ConfigError` for a stage that begins with a layer which follows another."""
        if layers and self.layers[layers.start].mixer.follows:
            starts = [index for index, layer in enumerate(self.layers) if not layer.mixer.follows]
            raise ConfigError.of(
                "NativeConfig.pipeline_layers",
                layers.start,
                "a stage would begin with this layer, which attends to the keys that the one before has chosen; let stages "
                f"begin with layers of {starts}",
            )

    def kept_prefixes(self) -> tuple[str, ...]:
        """See ``ModelFamily.kept_weights``."""
        return () if self.mtp is None else (f"{self.mtp.names.module}.",)

    def cache_bytes(self, num_tokens: int, itemsize: int) -> CacheBytes | None:
        """As :meth:`~rl_backend.model.blocks.MixerSpec.cache_bytes`, of all layers."""
        found = [layer.mixer.cache_bytes(num_tokens, itemsize) for layer in self.layers]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        return CacheBytes(sum(each.tokens for each in known), sum(each.state for each in known))

    def weight_names(self, head: Head) -> dict[str, WeightName]:
        """Parameter name -> Hugging Face name or names, in export order; tied embeddings have no ``lm_head.weight``."""
        names: dict[str, WeightName] = {"embed_tokens.weight": f"{self.prefix}.embed_tokens.weight"}
        for index, layer in enumerate(self.layers):
            names |= self._layer_names(layer, f"layers.{index}", f"{self.prefix}.layers.{index}")
        names |= {f"norm.{name}": f"{self.prefix}.{self.final_norm}.{name}" for name in self.norm.parameters}
        if head == "values":
            names |= {name: name for name in VALUE_HEAD_WEIGHTS}
        elif not self.tie_word_embeddings:
            names |= {name: name for name in ("lm_head.weight", "lm_head.bias")[: 1 + self.head_bias]}
        return names if head == "values" else self._with_mtp(names)

    def _layer_names(self, layer: LayerSpec, module: str, stored: str) -> dict[str, WeightName]:
        mixer = layer.mixer.weight_names(stored)
        names = self._norm_names(self.norms.before_mixer, module, stored)
        names |= {f"{module}.{layer.mixer.module}.{name}": value for name, value in mixer.items()}
        names |= self._norm_names(self.norms.after_mixer, module, stored)
        names |= self._norm_names(self.norms.before_feed_forward, module, stored)
        names |= {f"{module}.mlp.{name}": value for name, value in layer.feed_forward.weight_names(stored).items()}
        return names | self._norm_names(self.norms.after_feed_forward, module, stored)

    def _with_mtp(self, names: dict[str, WeightName]) -> dict[str, WeightName]:
        if self.mtp is None or not self.mtp.is_trained:
            return names
        for parameter, copies in self.mtp.copies(tied=self.tie_word_embeddings).items():
            original = names[parameter]
            assert isinstance(original, str), "embeddings and head are one tensor each"
            names[parameter] = CopiedWeight(original, copies) if copies else original
        own = self.mtp.own_weight_names(self.norm) | self._layer_names(self.mtp.layer, "layer", self.mtp.names.layer)
        return names | {f"mtp.{name}": value for name, value in own.items()}

    def _norm_names(self, norm: str | None, module: str, stored: str) -> dict[str, WeightName]:
        parameters = () if norm is None else self.norm.parameters
        return {f"{module}.{norm}.{name}": f"{stored}.{norm}.{name}" for name in parameters}

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises :class:`~rl_backend.contracts.ConfigError` for sizes that do not divide the model."""
        trained = self.mtp if self.mtp is not None and self.mtp.is_trained else None
        layers = self.layers if trained is None else (*self.layers, trained.layer)
        for block in dict.fromkeys(block for blocks in zip(*layers, strict=True) for block in blocks):
            block.check_layout(parallel)
        of_experts = {} if any(self.sparse) else {"ep": parallel.ep, "etp": parallel.etp}
        problem = "this model has no experts; use 1"
        ConfigError.refuse_all((f"ParallelConfig.{name}", n, problem) for name, n in of_experts.items() if n > 1)
