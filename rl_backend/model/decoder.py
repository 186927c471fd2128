"""A decoder: a stack of layers between embeddings and a head, on packed micro-batches."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from rl_backend.contracts import BatchError, ModelOptions, ModelOutput, NativeConfig
from rl_backend.model.activation_checkpointing import checkpoint_layers
from rl_backend.model.blocks import KeyChoice, Mixed, RouterInput
from rl_backend.model.decoder_layer import DecoderLayer
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.input import BuildSettings, ModelInput, ModelStage
from rl_backend.model.multi_token import MultiTokenPrediction
from rl_backend.parallel.fsdp import apply_fsdp
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.adapter_runs import adapters_at_work
from rl_backend.primitive.added_loss import with_added_loss
from rl_backend.primitive.float32 import EndsInFloat32
from rl_backend.primitive.log_prob import NextToken, next_token_log_probs
from rl_backend.primitive.rope import Rotations
from rl_backend.primitive.value_head import ValueHead, labels_without_values, values_of_tenants

STAGE_COPIES = {"tied_head.weight": "embed_tokens.weight", "mtp_embed_tokens.weight": "embed_tokens.weight"}
"""See :attr:`~rl_backend.model.ModelFamily.stage_copies`."""


class Decoder(EndsInFloat32):
    """The whole model, or a stage of it.

    Keeps no buffers, so a copy built on the meta device needs its parameters and nothing else. Every token is trained:
    unlike in transformers, ``pad_token_id`` has no part in it, because padding never reaches a model.
    """

    end_names = ("embed_tokens", "norm", "score", "lm_head", "tied_head", "mtp_embed_tokens")

    def __init__(self, spec: DecoderSpec, settings: BuildSettings) -> None:
        super().__init__()
        self.layer_dtype = settings.layer_dtype
        stage = settings.stage or ModelStage(True, range(spec.num_layers), True)
        has_language_head = stage.last and settings.head == "log_probs"
        tied = spec.tie_word_embeddings
        spec.require_stage(stage.layers)
        self.spec = spec
        self.log_prob_chunk_tokens = settings.log_prob_chunk_tokens
        self.next_token_log_probs: Callable[..., NextToken] = next_token_log_probs
        self.values_of_tenants: Callable[..., Tensor] = values_of_tenants
        self.embed_tokens = self._make_embeddings() if stage.first else None
        self.layers = nn.ModuleDict({str(index): DecoderLayer(spec, index, settings.options) for index in stage.layers})
        self.norm = spec.norm.build(spec.hidden_size) if stage.last else None
        self.score = ValueHead(spec.hidden_size) if stage.last and settings.head == "values" else None
        self.lm_head = self._make_head() if has_language_head and not tied else None
        self.tied_head = self._make_embeddings() if has_language_head and tied and not stage.first else None
        self.mtp = self._make_mtp(settings.options) if has_language_head else None
        has_embeddings = self.embed_tokens is not None or self.tied_head is not None
        self.mtp_embed_tokens = self._make_embeddings() if self.mtp is not None and not has_embeddings else None
        if spec.trained_part is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(spec.trained_part in name.split("."))

    def _make_mtp(self, options: ModelOptions) -> MultiTokenPrediction | None:
        spec = self.spec
        if spec.mtp is None or not spec.mtp.is_trained:
            return None
        one_more = replace(spec, layers=(*spec.layers, spec.mtp.layer))
        return MultiTokenPrediction(spec.hidden_size, spec.norm, DecoderLayer(one_more, spec.num_layers, options))

    def _make_embeddings(self) -> nn.Embedding:
        return nn.Embedding(self.spec.vocab_size, self.spec.hidden_size)

    def _make_head(self) -> nn.Linear:
        return nn.Linear(self.spec.hidden_size, self.spec.vocab_size, bias=self.spec.head_bias)

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
        rotations = Rotations(inputs.position_ids, hidden.dtype)
        choice = KeyChoice(inputs.longest, inputs.router_loss_weight)
        for layer in self.each_layer():
            experts = None if inputs.routes is None or layer.place is None else inputs.routes[:, layer.place]
            router = RouterInput(inputs.router_loss_weight, inputs.padding, experts, inputs.sequences)
            recorded = None if inputs.keys is None or layer.key_place is None else inputs.keys[:, layer.key_place]
            told = choice._replace(recorded=recorded) if layer.chooses else None
            mixed: Mixed = layer(hidden, rotations.of(layer.rotary), inputs.segments, router, inputs.adapters, told)
            if isinstance(mixed, tuple):
                hidden, chosen = mixed
                choice = choice._replace(chosen=chosen)
            else:
                hidden = mixed
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden if self.layer_dtype is None else hidden.to(torch.float32))
        values = self._values(hidden, inputs)
        if self.score is not None or "log_probs" not in (inputs.heads or ("log_probs",)):
            return ModelOutput(values=values)
        head = self.lm_head or self.tied_head or self.embed_tokens
        assert head is not None, "a last stage has one of them"
        log_probs, entropy = self.next_token_log_probs(
            hidden,
            head.weight,
            labels_without_values(inputs.labels, inputs.adapters) if inputs.adapters else inputs.labels,
            bias=head.bias if isinstance(head, nn.Linear) else None,
            temperature=inputs.temperature / self.spec.logit_scale,
            chunk_tokens=self.log_prob_chunk_tokens,
            calculate_entropy=inputs.calculate_entropy,
            adapters=inputs.adapters,
        )
        if self.mtp is not None and torch.is_grad_enabled():
            log_probs = with_added_loss(log_probs, self._mtp_loss(self.mtp, hidden, inputs, rotations, head))
        return ModelOutput(log_probs=log_probs, entropy=entropy, values=values)

    def _mtp_loss(
        self, mtp: MultiTokenPrediction, hidden: Tensor, inputs: ModelInput, rotations: Rotations, head: nn.Module
    ) -> Tensor:
        """Of this rank's tokens, with all of its factors; see :class:`~rl_backend.model.multi_token.MTPOptions`."""
        spec, second, layer = self.spec.mtp, inputs.second, cast(DecoderLayer, mtp.layer)
        assert spec is not None, "a model with such a layer has one"
        assert second is not None, "the runtime gives it to every model with such a layer"
        embeddings = self.embed_tokens or self.tied_head or self.mtp_embed_tokens
        assert embeddings is not None, "a stage with such a layer has them or a copy"
        # The last token of a sequence has no next one, and nothing attends to what is made of it.
        embedding, weight = self._look_up(embeddings, inputs.labels.clamp(min=0)), cast(Tensor, head.weight)
        bias: Tensor | None = head.bias if isinstance(head, nn.Linear) else None
        if spec.training == "detached":
            hidden, embedding, weight = hidden.detach(), embedding.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        router = RouterInput(inputs.router_loss_weight, inputs.padding, sequences=inputs.sequences)
        choice = KeyChoice(inputs.longest, inputs.router_loss_weight) if layer.chooses else None
        rotation = rotations.of(layer.rotary)
        predicted = mtp(hidden.to(embedding.dtype), embedding, rotation, inputs.segments, router, (), choice)
        log_probs, _ = self.next_token_log_probs(
            predicted.to(weight.dtype),
            weight,
            second.labels,
            bias=bias,
            temperature=1.0 / self.spec.logit_scale,
            chunk_tokens=self.log_prob_chunk_tokens,
        )
        return -log_probs.sum() * (spec.loss_weight * inputs.router_loss_weight / max(second.total, 1))

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
            hidden = self._look_up(self.embed_tokens, inputs.input_ids)
        # Above a frozen embedding something has to ask for the gradients of adapters.
        return hidden.requires_grad_() if inputs.adapters and torch.is_grad_enabled() else hidden

    def _look_up(self, embeddings: nn.Embedding, input_ids: Tensor) -> Tensor:
        hidden: Tensor = embeddings(input_ids)
        if self.layer_dtype is not None:
            hidden = hidden.to(self.layer_dtype)
        if self.spec.embedding_scale == 1.0:
            return hidden
        return hidden * torch.tensor(self.spec.embedding_scale, dtype=hidden.dtype).item()

    def split_ends(self, tensor: TensorParallel) -> None:
        """Splits the vocabulary of embeddings and head; each rank has norms and a value head for its own tokens."""
        for embeddings in (self.embed_tokens, self.tied_head, self.mtp_embed_tokens):
            if embeddings is not None:
                tensor.vocabulary(embeddings)
        if self.norm is None:
            return
        tensor.replicate(self.norm)
        self.values_of_tenants = tensor.tenant_heads
        if self.score is not None:
            tensor.gather_input(self.score, sum_gradients=False)
            tensor.replicate(self.score, partial=False)
            return
        if self.lm_head is not None:
            tensor.split_rows(self.lm_head)
        self.next_token_log_probs = tensor.vocabulary_head(self.spec.vocab_size)


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    """Tensor, context and expert parallelism, activation checkpointing and FSDP2, each layer a separate unit.

    Experts are separate units where their copies are on other ranks than those of the rest of the layer.
    """
    if not isinstance(module, Decoder):
        raise TypeError(f"parallelize got a {type(module).__name__}; expected Decoder")
    units: list[nn.Module] = list(module.each_layer())
    layers = list(module.each_layer())
    if module.mtp is not None:
        units.append(module.mtp)
        layers.append(cast(DecoderLayer, module.mtp.layer))
    experts: list[nn.Module] = []
    for layer in layers:
        layer.mixer.choose_kernels(groups, config)
        layer.mixer.split(groups)
        experts += layer.mlp.split(groups)
    if groups.tp_group.size() > 1:
        tensor = TensorParallel(groups.tp_mesh)
        module.split_ends(tensor)
        for layer in layers:
            for norm in layer.each_norm():
                tensor.replicate(norm)
        if module.mtp is not None:
            module.mtp.replicate_own(tensor)
    if config.activation_checkpointing == "full":
        checkpoint_layers(units)
    apply_fsdp(module, units, groups, config, experts=experts)
