"""A decoder: a stack of layers between embeddings and a head, on packed micro-batches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from rl_backend.contracts import (
    VALUE_HEAD_WEIGHTS,
    BatchError,
    ConfigError,
    Head,
    ModelOptions,
    ModelOutput,
    NativeConfig,
    ParallelConfig,
    RoutedLayers,
    WeightName,
)
from rl_backend.model.activation_checkpointing import checkpoint_layers
from rl_backend.model.blocks import LayerSpec, Rotation, RouterInput
from rl_backend.model.input import BuildSettings, ModelInput, ModelStage
from rl_backend.parallel.fsdp import apply_fsdp
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.adapter_runs import AdapterRun, adapters_at_work
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.log_prob import NextToken, next_token_log_probs
from rl_backend.primitive.norm import RMSNorm
from rl_backend.primitive.rope import Rotary, rotary_cos_sin
from rl_backend.primitive.value_head import ValueHead, labels_without_values, values_of_tenants

STAGE_COPIES = {"tied_head.weight": "embed_tokens.weight"}
"""See :attr:`~rl_backend.model.ModelFamily.stage_copies`."""


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder. Its layers may be of different kinds.

    Attributes:
        max_length: longest sequence, in tokens.
        tie_word_embeddings: whether the language-model head is the embedding.
        layers: the blocks of each layer.
    """

    vocab_size: int
    hidden_size: int
    max_length: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layers: tuple[LayerSpec, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """For each layer, whether it has experts."""
        return tuple(layer.feed_forward.router is not None for layer in self.layers)

    @property
    def routed_layers(self) -> RoutedLayers | None:
        """None without experts, and where routers differ: recorded routes are one tensor for all of them."""
        routers = {
            (router.num_experts, router.top_k) for layer in self.layers if (router := layer.feed_forward.router) is not None
        }
        return RoutedLayers(*routers.pop(), self.sparse) if len(routers) == 1 else None

    def weight_names(self, head: Head) -> dict[str, WeightName]:
        """Parameter name -> Hugging Face name or, for packed experts, names, in export order.

        Tied embeddings have no ``lm_head.weight``.
        """
        names: dict[str, WeightName] = {"embed_tokens.weight": "model.embed_tokens.weight"}
        for index, layer in enumerate(self.layers):
            module, stored = f"layers.{index}", f"model.layers.{index}"
            names[f"{module}.input_layernorm.weight"] = f"{stored}.input_layernorm.weight"
            names |= {f"{module}.self_attn.{name}": value for name, value in layer.mixer.weight_names(stored).items()}
            names[f"{module}.post_attention_layernorm.weight"] = f"{stored}.post_attention_layernorm.weight"
            names |= {f"{module}.mlp.{name}": value for name, value in layer.feed_forward.weight_names(stored).items()}
        names["norm.weight"] = "model.norm.weight"
        if head == "values":
            names |= {name: name for name in VALUE_HEAD_WEIGHTS}
        elif not self.tie_word_embeddings:
            names["lm_head.weight"] = "lm_head.weight"
        return names

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Raises :class:`~rl_backend.contracts.ConfigError` for sizes that do not divide the model."""
        for block in dict.fromkeys(block for blocks in zip(*self.layers, strict=True) for block in blocks):
            block.check_layout(parallel)
        for name, size in (("ep", parallel.ep), ("etp", parallel.etp)):
            if size > 1 and not any(self.sparse):
                raise ConfigError.of(f"ParallelConfig.{name}", size, "this model has no experts; use 1")


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward block, each normalised before and added to the residual stream.

    Attributes:
        rotary: the mixer's.
        place: number among the layers of the whole model that have a router; None for a layer without.
    """

    def __init__(self, decoder: DecoderSpec, index: int, options: ModelOptions) -> None:
        super().__init__()
        spec = decoder.layers[index]
        self.rotary = spec.mixer.rotary
        self.place = sum(decoder.sparse[:index]) if decoder.sparse[index] else None
        self.input_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.self_attn = spec.mixer.build(decoder.hidden_size, decoder.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.mlp = spec.feed_forward.build(decoder.hidden_size, options)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        segments: Segments,
        router: RouterInput,
        adapters: Sequence[AdapterRun] = (),
    ) -> Tensor:
        # Here and not around the model: recomputation and pipelines run layers of other micro-batches in between.
        with adapters_at_work(adapters):
            x = x + self.self_attn(self.input_layernorm(x), rotation, segments)
            return x + self.mlp(self.post_attention_layernorm(x), router)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole model, or a stage of it.

    Keeps no buffers, so a copy built on the meta device needs its parameters and nothing else. Every token is trained:
    unlike in transformers, ``pad_token_id`` has no part in it, because padding never reaches a model.
    """

    def __init__(self, spec: DecoderSpec, settings: BuildSettings) -> None:
        super().__init__()
        stage = settings.stage or ModelStage(True, range(spec.num_layers), True)
        has_language_head = stage.last and settings.head == "log_probs"
        tied = spec.tie_word_embeddings
        self.spec = spec
        self.log_prob_chunk_tokens = settings.log_prob_chunk_tokens
        self.next_token_log_probs: Callable[..., NextToken] = next_token_log_probs
        self.values_of_tenants: Callable[..., Tensor] = values_of_tenants
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size) if stage.first else None
        self.layers = nn.ModuleDict({str(index): DecoderLayer(spec, index, settings.options) for index in stage.layers})
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if stage.last else None
        self.score = ValueHead(spec.hidden_size) if stage.last and settings.head == "values" else None
        self.lm_head = self._make_head() if has_language_head and not tied else None
        self.tied_head = self._make_head() if has_language_head and tied and not stage.first else None

    def _make_head(self) -> nn.Linear:
        return nn.Linear(self.spec.hidden_size, self.spec.vocab_size, bias=False)

    def each_layer(self) -> Iterator[DecoderLayer]:
        """The layers of this stage, in their order."""
        yield from cast(Iterable[DecoderLayer], self.layers.values())

    def forward(self, inputs: ModelInput) -> ModelOutput | Tensor:
        """Log-probs and, on request, entropy of (T,) tokens; or their values; or hidden states for the next stage.

        The head is applied here and not by the loss: with FSDP its weight is whole only during this forward.

        Raises:
            BatchError: a sequence longer than ``max_length``, or a token outside the vocabulary (on a CPU).
        """
        hidden = self._embed(inputs)
        rotations: dict[Rotary | None, Rotation | None] = {None: None}
        for layer in self.each_layer():
            if layer.rotary is not None and layer.rotary not in rotations:
                rotations[layer.rotary] = rotary_cos_sin(inputs.position_ids, layer.rotary, hidden.dtype)
            experts = None if inputs.routes is None or layer.place is None else inputs.routes[:, layer.place]
            router = RouterInput(inputs.router_loss_weight, inputs.padding, experts)
            hidden = layer(hidden, rotations[layer.rotary], inputs.segments, router, inputs.adapters)
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden)
        values = self._values(hidden, inputs)
        if self.score is not None or "log_probs" not in (inputs.heads or ("log_probs",)):
            return ModelOutput(values=values)
        head = self.lm_head or self.tied_head or self.embed_tokens
        assert head is not None, "a last stage has one of them"
        log_probs, entropy = self.next_token_log_probs(
            hidden,
            head.weight,
            labels_without_values(inputs.labels, inputs.adapters),
            temperature=inputs.temperature,
            chunk_tokens=self.log_prob_chunk_tokens,
            calculate_entropy=inputs.calculate_entropy,
            adapters=inputs.adapters,
        )
        return ModelOutput(log_probs=log_probs, entropy=entropy, values=values)

    def _values(self, hidden: Tensor, inputs: ModelInput) -> Tensor | None:
        """(T,), where they are wanted: of the model's head and of those of tenants."""
        if self.score is not None:
            values: Tensor = self.score(hidden)
        elif "values" in inputs.heads:
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            values = hidden.new_zeros(inputs.labels.shape[0], dtype=dtype)
        else:
            return None
        return self.values_of_tenants(hidden, values, inputs.adapters)

    def _embed(self, inputs: ModelInput) -> Tensor:
        if self.embed_tokens is None:
            assert inputs.hidden is not None, "only the first stage starts from tokens"
            return inputs.hidden
        if inputs.longest > self.spec.max_length:
            raise BatchError(
                f"a sequence of {inputs.longest} tokens is longer than the model's {self.spec.max_length} positions",
                longest=inputs.longest,
            )
        if inputs.input_ids.device.type == "cpu":
            smallest, largest = (int(value) for value in torch.aminmax(inputs.input_ids))
            if smallest < 0 or largest >= self.spec.vocab_size:
                raise BatchError(
                    f"input_ids reach from {smallest} to {largest}; the vocabulary has {self.spec.vocab_size} tokens"
                )
        with adapters_at_work(inputs.adapters):
            hidden: Tensor = self.embed_tokens(inputs.input_ids)
        # Above a frozen embedding something has to ask for the gradients of adapters.
        return hidden.requires_grad_() if inputs.adapters and torch.is_grad_enabled() else hidden

    def split_ends(self, tensor: TensorParallel) -> None:
        """Splits the vocabulary of embeddings and head; each rank has norms and a value head for its own tokens."""
        if self.embed_tokens is not None:
            tensor.vocabulary(self.embed_tokens)
        if self.norm is None:
            return
        tensor.replicate(self.norm)
        self.values_of_tenants = tensor.tenant_heads
        if self.score is not None:
            tensor.gather_input(self.score, sum_gradients=False)
            tensor.replicate(self.score, partial=False)
            return
        for head in (self.lm_head, self.tied_head):
            if head is not None:
                tensor.split_rows(head)
        self.next_token_log_probs = tensor.vocabulary_head(self.spec.vocab_size)


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    """Tensor, context and expert parallelism, activation checkpointing and FSDP2, each layer a separate unit.

    Experts are separate units where their copies are on other ranks than those of the rest of the layer.
    """
    if not isinstance(module, Decoder):
        raise TypeError(f"parallelize got a {type(module).__name__}; expected Decoder")
    layers = list(module.each_layer())
    experts: list[nn.Module] = []
    for layer in layers:
        layer.self_attn.split(groups)
        experts += layer.mlp.split(groups)
    if groups.tp_group.size() > 1:
        tensor = TensorParallel(groups.tp_mesh)
        module.split_ends(tensor)
        for layer in layers:
            tensor.replicate(layer.input_layernorm)
            tensor.replicate(layer.post_attention_layernorm)
    if config.activation_checkpointing == "full":
        checkpoint_layers(layers)
    apply_fsdp(module, layers, groups, config, experts=experts)
