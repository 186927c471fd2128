"""Decoders on packed micro-batches: a stack of layers between embeddings and a head, and activation checkpointing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rl_backend.contracts import BatchError, ConfigError, ModelOptions, ModelOutput, NativeConfig
from rl_backend.contracts.runtime_config import Checkpointing
from rl_backend.model.blocks import KeyChoice, Mixed, Mixer, Rotation, RouterInput
from rl_backend.model.compiled import compiled, require_compiler
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.input import BuildSettings, ModelInput, ModelStage
from rl_backend.model.options import DecoderOptions
from rl_backend.model.registry import ModelFamily
from rl_backend.parallel.fsdp import apply_fsdp
from rl_backend.parallel.groups import ParallelGroups
from rl_backend.parallel.tensor import TensorParallel
from rl_backend.primitive.adapters import AdapterRun, adapters_at_work
from rl_backend.primitive.attention import ATTENDS, Segments
from rl_backend.primitive.backward import with_added_loss
from rl_backend.primitive.float32 import wide_dtype
from rl_backend.primitive.log_prob import NextToken, next_token_log_probs
from rl_backend.primitive.norm import NormSpec
from rl_backend.primitive.prefix_tree import take_rows
from rl_backend.primitive.rope import Rotations
from rl_backend.primitive.value_head import ValueHead, labels_without_values, values_of_tenants


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward block, added to the residual stream.

    Attributes:
        place: number among the layers of the whole model that have a router; None for a layer without.
        key_place: number among those that choose keys; None for a layer that chooses none.
    """

    def __init__(self, decoder: DecoderSpec, index: int, options: ModelOptions) -> None:
        super().__init__()
        spec = decoder.layers[index]
        self.decoder, self.spec = decoder, spec
        self.rotary, self.chooses, self._mixer_name = spec.mixer.rotary, spec.mixer.chooses, spec.mixer.module
        self.place = sum(decoder.sparse[:index]) if decoder.sparse[index] else None
        indexed = decoder.indexed_layers
        self.key_place = indexed.layers.index(index) if indexed is not None and index in indexed.layers else None
        self._add_norm(decoder.norms.before_mixer)
        self.add_module(spec.mixer.module, spec.mixer.build(decoder.hidden_size, decoder.norm))
        self._add_norm(decoder.norms.after_mixer)
        self._add_norm(decoder.norms.before_feed_forward)
        self.mlp = spec.feed_forward.build(decoder.hidden_size, options)
        self._add_norm(decoder.norms.after_feed_forward)
        self.compiled: Callable[[Tensor, Rotation | None, Segments], Tensor] | None = None

    @property
    def mixer(self) -> Mixer:
        found: Mixer = getattr(self, self._mixer_name)
        return found

    def _add_norm(self, name: str | None) -> None:
        if name is not None:
            self.add_module(name, self.decoder.norm.build(self.decoder.hidden_size))

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        segments: Segments,
        router: RouterInput,
        adapters: Sequence[AdapterRun] = (),
        key_choice: KeyChoice | None = None,
    ) -> Mixed:
        """(rows, hidden_size) -> the same; with a ``key_choice``, beside it what the mixer attended to."""
        # Here and not around the model: recomputation and pipelines run layers of other micro-batches in between.
        with adapters_at_work(adapters):
            if self.compiled is not None:
                return self.compiled(x, rotation, segments)
            mixed, read, chosen = self.mix(x, rotation, segments, *(() if key_choice is None else (key_choice,)))
            hidden = self.feed(mixed, read, router)
            return hidden if key_choice is None else (hidden, chosen)

    def compile_parts(self, groups: ParallelGroups, config: NativeConfig) -> bool:
        """Compiles the layer, or the half of it that can be; whether there is one."""
        mixes, feeds = self.mixer.compiles(groups, config), self.mlp.compiles
        if not (mixes or feeds):
            return False
        part = (DecoderLayer.dense if feeds else DecoderLayer.mix) if mixes else DecoderLayer.feed
        others = set(() if mixes and feeds else (self.mlp if mixes else self.mixer).modules())
        modules = [module for module in self.modules() if module not in others]
        name = "compiled" if part is DecoderLayer.dense else part.__name__
        setattr(self, name, compiled(part, self, (self.decoder.hidden_size, self.spec), modules))
        return True

    def dense(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        """:meth:`forward` of a layer without experts that does not choose keys, without adapters."""
        mixed, read, _ = self.mix(x, rotation, segments)
        return self.feed(mixed, read)

    def mix(
        self, x: Tensor, rotation: Rotation | None, segments: Segments, *chosen_keys: KeyChoice
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual stream with what the mixer adds, what the feed-forward block reads, and what was attended to."""
        norms = self.decoder.norms
        read = self._norm(norms.before_mixer, x)
        output: Mixed = self.mixer(read, rotation, segments, *chosen_keys)
        output, chosen = output if isinstance(output, tuple) else (output, None)
        mixed = x + self._added(norms.after_mixer, output)
        if not self.decoder.parallel_blocks:
            read = self._norm(norms.before_feed_forward, mixed)
        elif norms.before_feed_forward is not None:
            read = self._norm(norms.before_feed_forward, x)
        return mixed, read, chosen

    def feed(self, mixed: Tensor, read: Tensor, *router: RouterInput) -> Tensor:
        """The residual stream with what the feed-forward block adds to it; ``router`` is one where there are experts."""
        return mixed + self._added(self.decoder.norms.after_feed_forward, self.mlp(read, *router))

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        normed: Tensor = x if name is None else getattr(self, name)(x)
        return normed

    def _added(self, norm: str | None, output: Tensor) -> Tensor:
        """What a block with this ``output`` adds to the residual stream."""
        normed, scale = self._norm(norm, output), self.decoder.residual_scale
        return normed if scale == 1.0 else normed * scale

    def each_norm(self) -> Iterator[nn.Module]:
        """Those around the blocks."""
        yield from (getattr(self, name) for name in self.decoder.norms if name is not None)


class MultiTokenPrediction(nn.Module):
    """Makes of a token's state and the next token's embedding what the head predicts the token after that one from.

    norm(layer(projection([embedding_norm(embedding); hidden_norm(hidden)])))
    """

    def __init__(self, hidden_size: int, norm: NormSpec, layer: nn.Module) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = norm.build(hidden_size), norm.build(hidden_size)
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.norm = norm.build(hidden_size)

    def replicate_own(self, tensor: TensorParallel) -> None:
        for norm in (self.embedding_norm, self.hidden_norm, self.norm):
            tensor.replicate(norm)
        tensor.replicate_for_own_tokens(self.projection)

    def forward(self, hidden: Tensor, embedding: Tensor, *context: object) -> Tensor:
        """(N, hidden_size) twice -> (N, hidden_size); ``context`` goes to the decoder layer."""
        both = torch.cat((self.embedding_norm(embedding), self.hidden_norm(hidden)), dim=-1)
        mixed = self.layer(self.projection(both), *context)
        normed: Tensor = self.norm(mixed[0] if isinstance(mixed, tuple) else mixed)
        return normed


STAGE_COPIES = {"tied_head.weight": "embed_tokens.weight", "mtp_embed_tokens.weight": "embed_tokens.weight"}


class Decoder(nn.Module):
    """The whole model, or a stage of it. It has no buffers: a copy built on the meta device needs its parameters alone."""

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
        self.take_rows: Callable[[Tensor, Tensor], Tensor] = take_rows
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

    # Without padding_idx, unlike in transformers: padding never reaches a model, and every token is trained.
    def _make_embeddings(self) -> nn.Embedding:
        return nn.Embedding(self.spec.vocab_size, self.spec.hidden_size)

    def _make_head(self) -> nn.Linear:
        return nn.Linear(self.spec.hidden_size, self.spec.vocab_size, bias=self.spec.head_bias)

    @property
    def language_head(self) -> nn.Linear | nn.Embedding | None:
        """What logits are made with; the embeddings, or a copy of them, where they are tied."""
        if self.norm is None or self.score is not None:
            return None
        return self.lm_head or self.tied_head or self.embed_tokens

    def each_layer(self) -> Iterator[DecoderLayer]:
        yield from cast(Iterable[DecoderLayer], self.layers.values())

    def ends_in_float32(self) -> Sequence[nn.Module]:
        """See :class:`~rl_backend.primitive.float32.EndsInFloat32`."""
        ends = (self.embed_tokens, self.norm, self.score, self.lm_head, self.tied_head, self.mtp_embed_tokens)
        return [] if self.layer_dtype is None else [end for end in ends if end is not None]

    def forward(self, inputs: ModelInput) -> ModelOutput | Tensor:
        """Log-probs and, on request, entropy of (T,) tokens; or their values; or hidden states for the next stage.

        Raises:
            BatchError: a sequence longer than ``max_length``, or a token outside the vocabulary (on a CPU).
        """
        hidden = self._embed(inputs)
        rotations = Rotations(inputs.position_ids, hidden.dtype)
        key_choice = KeyChoice(inputs.longest, inputs.router_loss_weight)
        for layer in self.each_layer():
            experts = None if inputs.routes is None or layer.place is None else inputs.routes[:, layer.place]
            router = RouterInput(inputs.router_loss_weight, inputs.padding, experts, inputs.sequences)
            recorded = None if inputs.keys is None or layer.key_place is None else inputs.keys[:, layer.key_place]
            layer_choice = key_choice._replace(recorded=recorded) if layer.chooses else None
            mixed: Mixed = layer(hidden, rotations.of(layer.rotary), inputs.segments, router, inputs.adapters, layer_choice)
            if isinstance(mixed, tuple):
                hidden, chosen = mixed
                key_choice = key_choice._replace(chosen=chosen)
            else:
                hidden = mixed
        if self.norm is None:
            return hidden
        hidden = self.norm(hidden if self.layer_dtype is None else hidden.to(torch.float32))
        values = self._values(hidden, inputs)
        if self.score is not None or "log_probs" not in (inputs.heads or ("log_probs",)):
            return ModelOutput(values=values)
        head = self.language_head
        assert head is not None, "of a last stage without a critic's head"
        adapters = inputs.adapters if inputs.head_adapters is None else inputs.head_adapters
        # Here and not in the loss: with FSDP the head's weight is whole only during this forward.
        found = self.next_token_log_probs(
            hidden,
            head.weight,
            labels_without_values(inputs.labels, adapters) if adapters else inputs.labels,
            bias=head.bias if isinstance(head, nn.Linear) else None,
            temperature=inputs.temperature / self.spec.logit_scale,
            chunk_tokens=self.log_prob_chunk_tokens,
            calculate_entropy=inputs.calculate_entropy,
            adapters=adapters,
            top=inputs.num_top,
            cuts=inputs.cuts,
            of_rows=inputs.of_rows,
        )
        if self.mtp is not None and torch.is_grad_enabled():
            added = self._mtp_loss(self.mtp, hidden, inputs, rotations, head)
            found = found._replace(log_probs=with_added_loss(found.log_probs, added))
        # A tensor of its own: FSDP's hook would be lost when a loss changes a view in place.
        return found._replace(log_probs=found.log_probs.clone()).as_output(values)

    def _mtp_loss(
        self, mtp: MultiTokenPrediction, hidden: Tensor, inputs: ModelInput, rotations: Rotations, head: nn.Module
    ) -> Tensor:
        """Of this rank's tokens, with all of its factors; see :class:`~rl_backend.model.options.DecoderOptions`."""
        spec, second, layer = self.spec.mtp, inputs.second, cast(DecoderLayer, mtp.layer)
        assert spec is not None, "a model with such a layer has one"
        assert second is not None, "the runtime gives it to every model with such a layer"
        embeddings = self.embed_tokens or self.tied_head or self.mtp_embed_tokens
        assert embeddings is not None, "a stage with such a layer has them or a copy"
        # The last token of a sequence has no next one, and nothing attends to what is made of it.
        embedding, weight = self._look_up(embeddings, second.next_ids.clamp(min=0)), cast(Tensor, head.weight)
        bias: Tensor | None = head.bias if isinstance(head, nn.Linear) else None
        if spec.training == "detached":
            hidden, embedding, weight = hidden.detach(), embedding.detach(), weight.detach()
            bias = None if bias is None else bias.detach()
        if second.of_rows is not None:
            hidden, rotations = self.take_rows(hidden, second.of_rows), Rotations(second.position_ids, embedding.dtype)
        router = RouterInput(inputs.router_loss_weight, second.padding, sequences=second.sequences)
        key_choice = KeyChoice(inputs.longest, inputs.router_loss_weight) if layer.chooses else None
        rotation = rotations.of(layer.rotary)
        predicted = mtp(hidden.to(embedding.dtype), embedding, rotation, second.segments, router, (), key_choice)
        log_probs = self.next_token_log_probs(
            predicted.to(weight.dtype),
            weight,
            second.labels,
            bias=bias,
            temperature=1.0 / self.spec.logit_scale,
            chunk_tokens=self.log_prob_chunk_tokens,
        ).log_probs
        return -log_probs.sum() * (spec.loss_weight * inputs.router_loss_weight / max(second.total, 1))

    def _values(self, hidden: Tensor, inputs: ModelInput) -> Tensor | None:
        """(T,), where they are wanted: of the model's head and of those of tenants."""
        if self.score is not None:
            values: Tensor = self.score(hidden)
        elif "values" in inputs.heads:
            dtype = wide_dtype(hidden.dtype)
            values = hidden.new_zeros(inputs.input_ids.shape[0], dtype=dtype)
        else:
            return None
        values = self.values_of_tenants(hidden, values, inputs.adapters)
        return values if inputs.of_rows is None else take_rows(values, inputs.of_rows)

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
        self.take_rows = tensor.take_rows


def parallelize(module: nn.Module, groups: ParallelGroups, config: NativeConfig) -> None:
    """Tensor, context and expert parallelism, compilation, activation checkpointing, and FSDP2 with each layer a unit."""
    assert isinstance(module, Decoder), "of decoder_family"
    units: list[nn.Module] = list(module.each_layer())
    layers = list(module.each_layer())
    if module.mtp is not None:
        units.append(module.mtp)
        layers.append(cast(DecoderLayer, module.mtp.layer))
    if config.compile and groups.device.type != "meta":  # a plan's layers run as they are
        require_compiler()
        done = [layer.compile_parts(groups, config) for layer in layers]
        # A pipeline's stage may have none of them: another one has.
        if not any(done) and groups.pp_group.size() == 1:
            raise ConfigError.of(
                "NativeConfig.compile",
                True,
                "compiles dense feed-forward blocks, and attention over all keys without a window, or in bfloat16 on CUDA, "
                "on ranks that share no sequence; this model has none of them in this layout, leave it out",
            )
    # Separate units where their copies are on other ranks than those of the rest of the layer.
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
    checkpoint_layers(units, config.activation_checkpointing)
    apply_fsdp(module, units, groups, config, experts=experts)


def decoder_family(
    name: str,
    read: Callable[[HFConfig], DecoderSpec],
    kept_weights: Callable[[DecoderSpec], tuple[str, ...]] = DecoderSpec.kept_prefixes,
) -> ModelFamily:
    """The family of the ``model_type`` called ``name``, all of whose differences are in the decoder that ``read`` gives."""
    return ModelFamily(
        name=name,
        hf_model_types=(name,),
        options_type=DecoderOptions,
        parse_config=lambda hf_config: read(HFConfig(hf_config, name)),
        build=Decoder,
        parallelize=parallelize,
        weight_names=DecoderSpec.weight_names,
        heads=("log_probs", "values"),
        max_length=lambda decoder: decoder.max_length,
        num_layers=lambda decoder: decoder.num_layers,
        stage_copies=STAGE_COPIES,
        check_layout=DecoderSpec.check_layout,
        routed_layers=lambda decoder: decoder.routed_layers,
        indexed_layers=lambda decoder: decoder.indexed_layers,
        float32_head=True,
        kept_weights=kept_weights,
        configured=DecoderSpec.configured,
        why_unshared=DecoderSpec.why_unshared,
        compiles=True,
    )


def checkpoint_layers(layers: Sequence[nn.Module], kept: Checkpointing) -> None:
    """Makes every layer compute again in the backward pass what it does not keep (activation checkpointing).

    With ``full`` it keeps its inputs alone, with ``selective`` attention and every second product of matrices too, as
    torchtitan does; ``none`` leaves layers as they are. Call it before :func:`~rl_backend.parallel.fsdp.apply_fsdp`: the
    gathered parameters then outlive the recomputation. Layers must be deterministic: the state of the random number
    generators is not kept for the recomputation.
    """
    if kept == "none":
        return
    contexts: dict[str, Any] = {"context_fn": _selective} if kept == "selective" else {}
    # In place of ``forward``, not around the module: parameter names stay as they are.
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **contexts)


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default)


def _selective() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Of one pass of one layer: what it runs in, and what the recomputation runs in."""
    done = Counter[bool]()

    def keep(context: SelectiveCheckpointContext, operation: object, *_: object, **__: object) -> CheckpointPolicy:
        if operation in PRODUCTS:
            done[context.is_recompute] += 1
        kept = str(operation) in ATTENDS or (operation in PRODUCTS and done[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[AbstractContextManager[object], AbstractContextManager[object]] = create_selective_checkpoint_contexts(
        keep
    )
    return contexts
