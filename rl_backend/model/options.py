"""Options of the decoder families."""

from typing import Any, Literal

from pydantic import Field

from rl_backend.contracts import ModelOptions

type MTPTraining = Literal["keep", "detached", "joint"]
type IndexerTraining = Literal["frozen", "warm_up", "sparse"]

# Names of options that a part of a model takes. A model without the part refuses any other value than the default.
ROUTER_OPTIONS = frozenset({"router_aux_loss_coef", "router_z_loss_coef", "router_sequence_loss_coef", "freeze_router"})
EXPERT_BIAS_OPTIONS = frozenset({"expert_bias_rate"})
MTP_OPTIONS = frozenset({"mtp", "mtp_loss_weight"})
INDEXER_OPTIONS = frozenset({"indexer", "indexer_loss_weight"})
DELTA_OPTIONS = frozenset({"delta_kernel"})


class DecoderOptions(ModelOptions):
    """What a decoder can be told beside its ``config.json``: ``NativeConfig.model_cfg``.

    Losses of routers, indexers and multi-token prediction act on the gradients; the loss that is reported is the caller's
    alone. Those of routers are off by default, whatever ``config.json`` says. Each is added for every mixture of experts and
    averaged over the micro-batches of a ``forward_backward`` and the data-parallel ranks.

    Attributes:
        freeze_router: leave the weights of routers as they are.
        router_aux_loss_coef: of :func:`rl_backend.primitive.router.load_balancing_loss`.
        router_z_loss_coef: of :func:`rl_backend.primitive.router.router_z_loss`.
        router_sequence_loss_coef: of :func:`rl_backend.primitive.router.sequence_balancing_loss`.
        expert_bias_rate: what loss-free balancing adds to the bias of an expert that the tokens of a step chose less often
            than the mean, and takes from that of one they chose more often; see :mod:`rl_backend.runtime.balance`.
            0, the default, leaves biases as they are, as RL does: every push would change what engines route. DeepSeek-V3
            was pre-trained with 0.001.
        mtp: of a layer for multi-token prediction. ``keep`` leaves it out of the model, and a saved model has it as it was;
            ``detached`` trains it alone, on what the model computes; ``joint`` trains the model, its embeddings and its
            head with its loss too.
        mtp_loss_weight: factor of its loss, the mean over all tokens that have another two behind them in their sequence of
            the negative log-prob of the second.
        indexer: of the indexers of sparse attention. ``frozen`` leaves them as they are; ``warm_up`` trains them alone, on
            attention to all keys, for a model that has not been sparse before; ``sparse`` trains them on attention to the
            keys that they choose, beside the model, which learns from its own loss only.
        indexer_loss_weight: factor of their loss, the divergence of what they score from what is attended to, averaged over
            the tokens.
        delta_kernel: what computes the gated delta rule: ``torch`` on every device and in every layout, in float32; ``fla``
            for the kernels of flash-linear-attention, on CUDA with ``param_dtype="bfloat16"`` and without context
            parallelism, whose states are float32 and whose products are not.
    """

    router_aux_loss_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    router_z_loss_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    router_sequence_loss_coef: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    freeze_router: bool = False
    expert_bias_rate: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    mtp: MTPTraining = "keep"
    mtp_loss_weight: float = Field(default=0.1, gt=0.0, allow_inf_nan=False)
    indexer: IndexerTraining = "frozen"
    indexer_loss_weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    delta_kernel: Literal["torch", "fla"] = "torch"

    @classmethod
    def of(cls, options: ModelOptions | None) -> "DecoderOptions":
        """``options``, or the defaults for a family outside that has a type of its own for its decoders."""
        return options if isinstance(options, cls) else _DEFAULTS

    def changed(self) -> dict[str, Any]:
        """Names and values of those that are not as by default."""
        fields = type(self).model_fields
        return {name: value for name in fields if (value := getattr(self, name)) != fields[name].default}


_DEFAULTS = DecoderOptions()
