"""The memory of the bridge runtime, by arithmetic: Megatron's buffers, and what its own layers keep for backward passes.

Without Transformer Engine nothing is fused, and the scores of attention are kept. The terms are the tensors that autograd
saves in Megatron-Core 0.19, in the order of the computation.
"""

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from rl_backend.contracts import (
    TARGET_IDS,
    NativeConfig,
    PackedWeight,
    RuntimeConfig,
    TensorInfo,
    UnsupportedError,
)
from rl_backend.lab.plan.memory import ParameterSize, RankMemory, Workload
from rl_backend.lab.plan.native import (
    StageMemory,
    layouts_of,
    most_in_flight,
    rank_actions,
    rank_stages,
    sent_by_rank,
    tenants_of,
    weights_to_sync,
)
from rl_backend.lora.rows import TenantRows
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.feedforward.dense import SwiGLUSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.mixers.gqa import GQASpec
from rl_backend.primitive.log_prob import IGNORE_LABEL, kept_logits_bytes
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.runtime.native.layout import check_model_layout, describe_model

# Elements. Megatron-Core 0.19, optimizer/param_layout.py: where a parameter starts, and, as the least common multiple with
# the number of ranks, what the end of a bucket is a multiple of.
PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128

_FLOAT = torch.float32.itemsize
_INT = torch.int64.itemsize

# Fields of blocks that are not as in every model, but counted.
_COUNTED = {"window", "qkv_bias", "output_bias", "qk_norm", "bias"}

# A parameter of Megatron, its parts from other ranks, what is put together of them, and the tensor in another dtype.
COPIES_OF_EXPORTED = 4


def bridge_memory(
    config: RuntimeConfig, num_ranks: int, workload: Workload
) -> tuple[list[RankMemory], Sequence[TensorInfo], Callable[[], list[int]]]:
    """Memory of each pipeline rank, the tensors of a weight sync, and what counts the bytes of them that each rank sends.

    Raises:
        ConfigError: a layout that does not fit the model, or targets of tenants that it does not have.
        UnsupportedError: a model that the native runtime does not have, or options that change what is counted here.
        BatchError: a number of micro-batches that the pipeline schedule does not take.
    """
    options = config.options(BridgeConfig)
    _require_countable(options)
    # The same layout, with Megatron's schedule.
    native = NativeConfig(
        parallel=options.parallel,
        param_dtype=options.param_dtype,
        activation_checkpointing="full" if options.recompute_granularity == "full" else "none",
        log_prob_chunk_tokens=options.log_prob_chunk_tokens,
        share_prefixes="off",
    )
    model = describe_model(config.hf_path, native, workload.head)
    check_model_layout(model.family, model.architecture, native)
    layers = LocalLayers(model.architecture, options, workload)
    # Megatron's own attention takes a row per sequence.
    padded = _round_up(workload.micro_batch_tokens, workload.sequence_length)
    workload = workload.replace(micro_batch_tokens=padded)
    num_stages = options.parallel.pp * options.parallel.vpp
    layers_of_a_stage = int(model.architecture.num_layers) // num_stages
    actions = rank_actions(native, workload.num_micro_batches)
    ranks = [rank_stages(model, native, rank, num_ranks, workload) for rank in range(native.parallel.pp)]
    weights = weights_to_sync(model, ranks, workload)
    bucket = COPIES_OF_EXPORTED * max(weight.nbytes for weight in weights)
    experts = {name for name, stored in model.weight_names.items() if isinstance(stored, PackedWeight)}
    found = []
    for stages, passes, tenant in zip(ranks, actions, tenants_of(ranks, workload), strict=True):
        low_rank = layers.low_rank(tenant) // len(stages.measured)
        chunks = [stage.parameters for stage in stages.sharded.values()]
        measured = {
            number: layers.stage(memory, layers_of_a_stage, last=number == num_stages - 1, low_rank=low_rank)
            for number, memory in stages.measured.items()
        }
        held = _frozen(options, chunks) if workload.tenants else _buffers(options, num_ranks, experts, chunks)
        taken = vars(most_in_flight(passes, measured)) | held | {"adapters": workload.tenants * tenant.nbytes}
        found.append(RankMemory(logits_chunk=stages.logits_chunk, sync_bucket=bucket, **taken))
    # Data-parallel ranks, which are the first dimension of both meshes, have copies here.
    layouts = {
        name: layout._replace(shards=replace(layout.shards, cuts=tuple(cut for cut in layout.shards.cuts if cut[0])))
        for name, layout in layouts_of(ranks).items()
    }
    return found, weights, partial(sent_by_rank, model, layouts, num_ranks, workload.sync_dtype)


class LocalLayers:
    """The layers of one rank; an architecture whose memory is not known raises :class:`UnsupportedError`.

    Attributes:
        scores: bytes of one layer's attention probabilities, float32; 0 with LoRA tenants, whose attention keeps none.
        logits: bytes of those that the head keeps for the backward pass.
    """

    def __init__(self, architecture: DecoderSpec, options: BridgeConfig, workload: Workload) -> None:
        if not isinstance(architecture, DecoderSpec):
            raise UnsupportedError(
                f"{type(architecture).__name__}: a plan knows what Megatron's layers keep of this package's own "
                "families only; plan with backend='native'"
            )
        blocks = {block for layer in architecture.layers for block in layer}
        attentions = {replace(block, window=None) for block in blocks if isinstance(block, GQASpec)}
        if len(attentions) != 1 or not all(isinstance(block, GQASpec | SwiGLUSpec | MoESpec) for block in blocks):
            kinds = ", ".join(sorted({type(block).__name__ for block in blocks}))
            raise UnsupportedError(
                f"layers of {kinds}: a plan knows what Megatron keeps of one kind of grouped-query attention in all layers, "
                "with dense blocks or mixtures of experts; plan with backend='native'"
            )
        (mixer,) = attentions
        parts: list[Any] = [architecture, architecture.norm, *blocks]
        special = {
            each.name
            for part in parts
            for each in fields(part)
            if each.default is not MISSING and getattr(part, each.name) != each.default
        } - _COUNTED
        if mixer.rotary.head_dim != mixer.head_dim:
            special.add("rotary")
        if special:
            raise UnsupportedError(
                f"a model whose {', '.join(sorted(special))} is not as in Llama: a plan does not know what Megatron "
                "keeps of it; plan with backend='native'"
            )
        tp = options.parallel.tp
        self.architecture, self.options, self.workload = architecture, options, workload
        # Of every layer: they differ in their windows alone, and scores are kept whole.
        self._mixer = mixer
        self._itemsize = int(getattr(torch, options.param_dtype).itemsize)
        self._length = _round_up(workload.sequence_length, tp)
        rows = -(-workload.micro_batch_tokens // workload.sequence_length)
        self._tokens = rows * self._length
        # Elements of a layer's input, which sequence parallelism divides.
        self._hidden = self._tokens // tp * architecture.hidden_size
        # Beside adapters the linear layers and the attention compute on tokens without padding.
        self._packed = workload.micro_batch_tokens if workload.tenants else 0
        self.scores = 0 if self._packed else rows * (self._mixer.num_heads // tp) * self._length**2 * _FLOAT
        self.logits = _kept_logits(workload, -(-architecture.vocab_size // tp))

    def stage(self, native: StageMemory, num_layers: int, *, last: bool, low_rank: int = 0) -> StageMemory:
        """A stage of ``num_layers``; ``native`` says what the same stage of the native model takes.

        ``low_rank`` is what :meth:`low_rank` says of the stage.
        """
        layer = self._norms() + self._attention() + self._feed_forward() + low_rank // num_layers
        recomputes = self.options.recompute_granularity == "full"
        # Of a layer that is computed again, its input is kept.
        kept = num_layers * (self._hidden * self._itemsize if recomputes else layer)
        if last:
            # The last norm, and the hidden states that log-probs or values are computed from.
            kept += self._hidden * _FLOAT * (1 if self._packed else 2) + self.logits
            kept += self.workload.micro_batch_tokens * self.architecture.hidden_size * self._itemsize
        return StageMemory(
            kept=kept,
            put_off=0,
            forward_peak=kept + native.forward_peak - native.kept + self.scores,
            backward_peak=kept + native.backward_peak - native.kept + 2 * self.scores + (layer if recomputes else 0),
            evaluation_peak=native.evaluation_peak + 2 * self.scores,
        )

    def low_rank(self, tenant: TenantRows) -> int:
        """What the adapters of a rank's stages keep for a tenant whose tokens these are: what lies between both factors, and
        factors in the dtype of the passes.
        """
        blocks = [layer.feed_forward for layer in self.architecture.layers]
        mixture = next((block for block in blocks if isinstance(block, MoESpec)), None)
        rows = 0
        for tensor in tenant.tensors:
            if tensor.role != "a":
                continue
            # Every expert is chosen as often.
            chosen = mixture.router.top_k / mixture.router.num_experts if mixture and tensor.module.is_expert else 1
            rows += int(self._packed * chosen) * tensor.shape[-2] * max(len(tensor.experts), 1)
        return (rows + (tenant.weights.numel() if self._itemsize < _FLOAT else 0)) * self._itemsize

    def _norms(self) -> int:
        """Two norms and the inputs of two projections behind them."""
        of_tokens = 2 * self._tokens // self.options.parallel.tp * _FLOAT
        if self._packed:
            # A frozen norm keeps what it normalises, in float32; inputs of adapters are copies of all tokens.
            projections = 2 * self._packed * self.architecture.hidden_size * self._itemsize
            return 2 * self._hidden * _FLOAT + of_tokens + projections
        # Norms keep it twice, projections what they take.
        return 4 * self._hidden * _FLOAT + 2 * self._hidden * self._itemsize + of_tokens

    def _attention(self) -> int:
        model, tp, size = self._mixer, self.options.parallel.tp, self._itemsize
        head = self._tokens * model.head_dim
        queries, groups = head * model.num_heads // tp, head * model.num_kv_heads // tp
        # Cosines and sines of queries and of keys.
        kept = 4 * self._length * model.head_dim * size
        recomputes = self.options.recompute_granularity == "selective"
        if recomputes:
            kept += (queries + 2 * groups) * size
        if self._packed:
            # What the output projection takes; and queries, keys, values, outputs and logarithms of the sums of attention.
            packed = self._packed * model.num_heads // tp
            kept += packed * model.head_dim * size
            if not recomputes:
                kept += packed * (2 * model.head_dim + 1) * size
                kept += 2 * self._packed * model.num_kv_heads // tp * model.head_dim * size
        else:
            # The mask, and the context that the output projection takes.
            kept += self._length**2 + queries * size
            if not recomputes:
                # Keys and values are repeated for each query head; a copy of the probabilities is in the dtype of values.
                kept += 3 * queries * size + self.scores
                kept += 0 if size == _FLOAT else self.scores * size // _FLOAT
        if model.qk_norm:
            norms = (queries + groups) // model.head_dim * _FLOAT
            # What is normalised, which a norm that is trained keeps twice.
            normalised = 0 if self._packed else (queries + groups) * _FLOAT
            if size == _FLOAT:
                # It is a view of the joint projection, of which queries of several groups are copied out.
                copied = queries if model.num_kv_heads > tp else 0
                kept += (queries + 2 * groups + copied) * _FLOAT + normalised + norms
            else:
                kept += (queries + groups) * _FLOAT + normalised + norms
        return kept

    def _feed_forward(self) -> int:
        parallel, blocks = self.options.parallel, [layer.feed_forward for layer in self.architecture.layers]
        # Megatron builds mixtures in all layers or in none.
        block = next((block for block in blocks if isinstance(block, MoESpec)), blocks[0])
        if isinstance(block, SwiGLUSpec):
            # Both halves of the first projection, the activation, a copy of the other half, and what the second takes.
            second = self._packed or self._tokens
            return (4 * self._tokens + second) * block.intermediate_size // parallel.tp * self._itemsize
        assert isinstance(block, MoESpec), "checked above"
        chosen = self._tokens // parallel.tp * block.router.top_k
        # Every expert is chosen as often. Expert-tensor ranks gather tokens and divide what is inside of experts.
        inside = 6 * chosen * block.intermediate_size * self._itemsize
        tokens = chosen * parallel.etp * (self.architecture.hidden_size * self._itemsize + _FLOAT + 2 * _INT)
        return inside + tokens + chosen * (_INT + _FLOAT)


def _kept_logits(workload: Workload, vocab_size: int) -> int:
    if workload.head != "log_probs":
        return 0
    batch = workload.micro_batch()
    targets = batch.token_fields.get(TARGET_IDS)
    trained = batch.num_tokens if targets is None else int((targets != IGNORE_LABEL).sum())
    return kept_logits_bytes(batch.num_tokens, trained, vocab_size)


def _frozen(options: BridgeConfig, chunks: Iterable[Mapping[str, ParameterSize]]) -> dict[str, int]:
    """A model that is not trained has its parameters alone, in no buffer."""
    itemsize = int(getattr(torch, options.param_dtype).itemsize)
    elements = sum(size.computed for parameters in chunks for size in parameters.values())
    return {"weights": elements * itemsize, "gradients": 0, "optimizer": 0}


def _buffers(
    options: BridgeConfig, num_ranks: int, experts: set[str], chunks: Iterable[Mapping[str, ParameterSize]]
) -> dict[str, int]:
    # Every data-parallel rank has the buffers of parameters and gradients whole. Moments are shared out, and so are float32
    # masters, where parameters are not float32 themselves.
    parallel, itemsize = options.parallel, int(getattr(torch, options.param_dtype).itemsize)
    dense_ranks = parallel.data_parallel_size(num_ranks) * parallel.cp
    expert_ranks = num_ranks // (parallel.pp * parallel.ep * parallel.etp)
    found = Counter[str]()
    for parameters, (ranks, is_expert) in product(chunks, ((dense_ranks, False), (expert_ranks, True))):
        sizes = [size.computed for name, size in parameters.items() if (name in experts) is is_expert]
        elements = 0
        for size in sizes:
            elements = _round_up(elements, PARAMETER_ALIGNMENT) + size
        elements = _round_up(elements, math.lcm(ranks, BUCKET_ALIGNMENT))
        moments_and_masters = 2 if itemsize == _FLOAT else 3
        share = min(elements // ranks, sum(sizes))
        optimizer = (share * moments_and_masters + len(sizes)) * _FLOAT
        found.update(weights=elements * itemsize, gradients=elements * _FLOAT, optimizer=optimizer)
    return dict(found)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _require_countable(options: BridgeConfig) -> None:
    has_cuda = torch.cuda.is_available()
    runs_on_cpu = options.device == "cpu" or (options.device == "auto" and not has_cuda)
    if not runs_on_cpu and (not has_cuda or importlib.util.find_spec("transformer_engine") is not None):
        # What Transformer Engine's layers keep depends on its kernels.
        raise UnsupportedError(
            f"BridgeConfig.device={options.device!r}: a plan knows what Megatron's own layers keep for backward passes, "
            "not what those of Transformer Engine do, which CUDA ranks have where it is installed; use device='cpu' to "
            "plan with Megatron's own, which keep more, or backend='native'"
        )
    overrides = ("override_transformer_config", "override_ddp_config", "override_optimizer_config")
    found = {name: value for name in overrides if (value := getattr(options, name))}
    if options.recompute_granularity == "full" and options.recompute_method != "uniform":
        found["recompute_method"] = options.recompute_method
    if options.recompute_granularity == "full" and options.recompute_num_layers != 1:
        found["recompute_num_layers"] = options.recompute_num_layers
    if options.recompute_granularity == "selective" and options.recompute_modules not in (None, ("core_attn",)):
        found["recompute_modules"] = options.recompute_modules
    if found:
        raise UnsupportedError(
            f"BridgeConfig has {', '.join(f'{name}={value!r}' for name, value in found.items())}: a plan does not know what "
            "overrides take, and counts layers that are recomputed one by one ('uniform' with 1) or ('core_attn',) alone"
        )
