"""A layer of a decoder: a mixer and a feed-forward block around the residual stream."""

from collections.abc import Iterator, Sequence
from typing import cast

from torch import Tensor, nn

from rl_backend.contracts import ModelOptions
from rl_backend.model.blocks import KeyChoice, Mixed, Mixer, Rotation, RouterInput
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.primitive.adapter_runs import AdapterRun, adapters_at_work
from rl_backend.primitive.attention import Segments


class DecoderLayer(nn.Module):
    """A mixer and a feed-forward block, added to the residual stream; norms have the names of ``DecoderSpec.norms``, and the
    mixer that of its specification.

    Attributes:
        rotary, chooses: the mixer's.
        place: number among the layers of the whole model that have a router; None for a layer without.
        key_place: number among those that choose keys; None for a layer that chooses none.
    """

    def __init__(self, decoder: DecoderSpec, index: int, options: ModelOptions) -> None:
        super().__init__()
        spec = decoder.layers[index]
        self.decoder = decoder
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

    @property
    def mixer(self) -> Mixer:
        return cast(Mixer, self.get_submodule(self._mixer_name))

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
        choice: KeyChoice | None = None,
    ) -> Mixed:
        """(rows, hidden_size) -> the same; with a ``choice``, beside it what the mixer attended to."""
        # Here and not around the model: recomputation and pipelines run layers of other micro-batches in between.
        norms = self.decoder.norms
        with adapters_at_work(adapters):
            read = self._norm(norms.before_mixer, x)
            told = () if choice is None else (choice,)
            output: Mixed = self.mixer(read, rotation, segments, *told)
            output, chosen = output if isinstance(output, tuple) else (output, None)
            mixed = x + self._added(norms.after_mixer, output)
            if not self.decoder.parallel_blocks:
                read = self._norm(norms.before_feed_forward, mixed)
            elif norms.before_feed_forward is not None:
                read = self._norm(norms.before_feed_forward, x)
            hidden = mixed + self._added(norms.after_feed_forward, self.mlp(read, router))
            return hidden if choice is None else (hidden, chosen)

    def _norm(self, name: str | None, x: Tensor) -> Tensor:
        return x if name is None else self.get_submodule(name)(x)

    def _added(self, norm: str | None, output: Tensor) -> Tensor:
        """What a block with this ``output`` adds to the residual stream."""
        normed, scale = self._norm(norm, output), self.decoder.residual_scale
        return normed if scale == 1.0 else normed * scale

    def each_norm(self) -> Iterator[nn.Module]:
        """Those around the blocks."""
        yield from (self.get_submodule(name) for name in self.decoder.norms if name is not None)
