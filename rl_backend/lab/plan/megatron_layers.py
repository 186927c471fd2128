"""What Megatron-Core's own layers keep for the backward pass, by arithmetic.

These are the layers of the bridge runtime where there is no Transformer Engine: nothing is fused, and the scores of
attention are kept. The terms are the tensors that autograd saves in Megatron-Core 0.19, in the order of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rl_backend.contracts import UnsupportedError
from rl_backend.lab.plan.activations import StageMemory
from rl_backend.lab.plan.memory import Workload
from rl_backend.model.decoder import DecoderSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.feedforward.swiglu import SwiGLUSpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.runtime.bridge_config import BridgeConfig

_FLOAT = torch.float32.itemsize
_INT = torch.int64.itemsize


@dataclass(frozen=True)
class LocalLayers:
    """The layers of one rank.

    Args:
        architecture: of the model.
        options: of the runtime.
        workload: what a micro-batch is. Attention takes a row per sequence, padded to the longest.

    Raises:
        UnsupportedError: an architecture that is none of this package's, or blocks whose memory is not known here.
    """

    architecture: DecoderSpec
    options: BridgeConfig
    workload: Workload

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, DecoderSpec):
            raise UnsupportedError(
                f"{type(self.architecture).__name__}: a plan knows what Megatron's layers keep of this package's own "
                "families only; plan with backend='native'"
            )
        blocks = {block for layer in self.architecture.layers for block in layer}
        attentions = {replace(block, window=None) for block in blocks if isinstance(block, GQASpec)}
        if len(attentions) != 1 or not all(isinstance(block, GQASpec | SwiGLUSpec | MoESpec) for block in blocks):
            kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
            raise UnsupportedError(
                f"layers of {kinds}: a plan knows what Megatron keeps of one kind of grouped-query attention in all layers, "
                "with dense blocks or mixtures of experts; plan with backend='native'"
            )

    @property
    def _mixer(self) -> GQASpec:
        """Of every layer: they differ in their windows alone, and scores are kept whole."""
        mixer = self.architecture.layers[0].mixer
        assert isinstance(mixer, GQASpec), "checked above"
        return mixer

    @property
    def scores(self) -> int:
        """Bytes of one layer's attention probabilities, float32."""
        heads = self._mixer.num_heads // self.options.parallel.tp
        return self._rows * heads * self._length**2 * _FLOAT

    def stage(self, native: StageMemory, num_layers: int, *, last: bool) -> StageMemory:
        """A stage of ``num_layers``, given what the native model's takes beside what it keeps."""
        layer = self._layer()
        kept = num_layers * (self._checkpoint() if self.options.recompute_granularity == "full" else layer)
        kept += self._end() if last else 0
        recomputed = layer if self.options.recompute_granularity == "full" else 0
        return StageMemory(
            kept=kept,
            put_off=0,
            forward_peak=kept + native.forward_peak - native.kept + self.scores,
            backward_peak=kept + native.backward_peak - native.kept + 2 * self.scores + recomputed,
            evaluation_peak=native.evaluation_peak + 2 * self.scores,
        )

    @property
    def _itemsize(self) -> int:
        return int(getattr(torch, self.options.param_dtype).itemsize)

    @property
    def _rows(self) -> int:
        return -(-self.workload.micro_batch_tokens // self.workload.sequence_length)

    @property
    def _length(self) -> int:
        """Of a row: sequence parallelism divides it."""
        tp = self.options.parallel.tp
        return -(-self.workload.sequence_length // tp) * tp

    @property
    def _tokens(self) -> int:
        return self._rows * self._length

    def _layer(self) -> int:
        hidden = self._tokens // self.options.parallel.tp * self.architecture.hidden_size
        # Two norms keep what they normalise, twice, in float32; two projections keep what they take.
        norms = 4 * hidden * _FLOAT + 2 * hidden * self._itemsize + 2 * self._tokens // self.options.parallel.tp * _FLOAT
        return norms + self._attention() + self._feed_forward()

    def _attention(self) -> int:
        model, tp, size = self._mixer, self.options.parallel.tp, self._itemsize
        head = self._tokens * model.head_dim
        queries, groups = head * model.num_heads // tp, head * model.num_kv_heads // tp
        # Cosines and sines of queries and of keys, the mask, and the context that the output projection takes.
        kept = 4 * self._length * model.head_dim * size + self._length**2 + queries * size
        if self.options.recompute_granularity == "selective":
            kept += (queries + 2 * groups) * size
        else:
            # Keys and values are repeated for each query head; a copy of the probabilities is in the dtype of the values.
            kept += 3 * queries * size + self.scores
            kept += 0 if size == _FLOAT else self.scores * size // _FLOAT
        if model.qk_norm:
            norms = (queries + groups) // model.head_dim * _FLOAT
            if size == _FLOAT:
                # What is normalised is a view of the joint projection, of which queries of several groups are copied out.
                copied = queries if model.num_kv_heads > tp else 0
                kept += (queries + 2 * groups + copied + queries + groups) * _FLOAT + norms
            else:
                kept += 2 * (queries + groups) * _FLOAT + norms
        return kept

    def _feed_forward(self) -> int:
        parallel, blocks = self.options.parallel, [layer.feed_forward for layer in self.architecture.layers]
        # Megatron builds mixtures in all layers or in none.
        block = next((block for block in blocks if isinstance(block, MoESpec)), blocks[0])
        if isinstance(block, SwiGLUSpec):
            return 5 * self._tokens * block.intermediate_size // parallel.tp * self._itemsize
        assert isinstance(block, MoESpec), "checked above"
        chosen = self._tokens // parallel.tp * block.router.top_k
        # Every expert is chosen as often. Expert-tensor ranks gather tokens and divide what is inside of experts.
        inside = 6 * chosen * block.intermediate_size * self._itemsize
        tokens = chosen * parallel.etp * (self.architecture.hidden_size * self._itemsize + _FLOAT + 2 * _INT)
        return inside + tokens + chosen * (_INT + _FLOAT)

    def _checkpoint(self) -> int:
        """What is kept of a layer that is computed again: its input."""
        return self._tokens // self.options.parallel.tp * self.architecture.hidden_size * self._itemsize

    def _end(self) -> int:
        """The last norm, and the hidden states that log-probs or values are computed from."""
        hidden = self._tokens // self.options.parallel.tp * self.architecture.hidden_size
        return 2 * hidden * _FLOAT + self.workload.micro_batch_tokens * self.architecture.hidden_size * self._itemsize
