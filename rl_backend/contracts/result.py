"""Outputs of a model, the losses that see them, and the results of the atoms: the same for every runtime."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from rl_backend.contracts.batch import PackedBatch
from rl_backend.contracts.errors import BatchError
from rl_backend.contracts.lora import LoRAInfo


class ModelOutput(NamedTuple):
    """Outputs of one micro-batch of T tokens, each (T,) float32 unless it says so. A field that was not asked for is None.

    Attributes:
        log_probs: of the next token at the batch's temperature; 0 at each sequence's last position. Of ``target_ids`` where
            the batch has them, in their shape, (T,) or (T, K); 0 where one is -100.
        entropy: nats, of the distribution that ``log_probs`` is taken from; 0 where none is.
        values: of each token's state.
        top_ids: (T, K) int64, the K likeliest tokens after each token, the last of a sequence included, likeliest first;
            ``meta["top_log_probs"]`` is K.
        top_log_probs: (T, K), theirs, at the batch's temperature; without a gradient.
        mask_disagreement: with :attr:`PackedBatch.cuts`, 1 where they leave the next token out, by this model, and 0
            elsewhere; ``log_probs`` and ``entropy`` are of the distribution over the tokens that are kept, and the next one.
            With their ``mask`` they are over its tokens, and this is the share of the tokens in it, or kept by this model,
            that only one of the two has.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None
    mask_disagreement: Tensor | None = None


TOKENS_COMPUTED = "tokens_computed"
"""Metric: the tokens that were computed, and as its weight those of the batch; below 1 where prefixes are shared."""


class Metric(NamedTuple):
    """A mean as (sum, weight): adding both over micro-batches and ranks keeps the mean right when they are uneven."""

    sum: float
    weight: float

    @property
    def mean(self) -> float:
        return self.sum / self.weight if self.weight else float("nan")

    def merge(self, other: Self) -> Self:
        return type(self)(self.sum + other.sum, self.weight + other.weight)


type MetricValue = float | Tensor | Metric | tuple[Tensor | float, Tensor | float]


class LossFn(Protocol):
    """A loss.

    Losses of micro-batches are summed and gradients are averaged over the data-parallel ranks; nothing is divided by the
    number of micro-batches. A mean over all tokens of all ranks is therefore
    ``(loss * mask).sum() / meta["batch_num_tokens"] * meta["dp_size"]``. A mask may be all 0, as of copies that fill ranks.

    Returns:
        a 0-d loss with a gradient (None only in a forward-only pass), and metrics by name: a (sum, weight) pair, or a bare
        number, which counts with weight 1.
    """

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor | None, Mapping[str, MetricValue]]: ...


@runtime_checkable
class ConfigurableLoss(Protocol):
    """A loss whose options are checked when they are given, before anything runs."""

    def with_options(self, **options: Any) -> LossFn:
        """Raises TypeError for an option that it does not have, :class:`ConfigError` for a value that cannot work."""


type Losses = LossFn | Mapping[str, LossFn]
"""One loss, or one for each LoRA tenant by its name."""


@dataclass(frozen=True)
class ForwardResult:
    """Result of ``forward_backward`` on one rank.

    Attributes:
        losses: one number per micro-batch, as the loss returned it; empty when there was no loss.
        metrics: merged over this rank's micro-batches.
        outputs: ``log_probs``, ``entropy``, ``values``, ``routed_experts`` -> one detached tensor (L_i, ...) per sequence,
            in the order of ``data``. Only on source ranks (``is_mp_src_rank_with_outputs``); empty elsewhere.
        tenants: name -> its own part, of a pass with sequences of several LoRA tenants.
        error: of a tenant's part: what its loss raised. It has no gradients then, and the others are not touched.
        lora_id: of the tenant, of its part.
    """

    losses: tuple[float, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    outputs: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    tenants: Mapping[str, "ForwardResult"] = field(default_factory=dict)
    error: str = ""
    lora_id: int = -1

    @property
    def loss(self) -> float:
        return float(sum(self.losses))

    @property
    def means(self) -> dict[str, float]:
        return {name: metric.mean for name, metric in self.metrics.items()}

    def output(self, name: str) -> Sequence[Tensor]:
        """Raises :class:`BatchError` when the pass did not produce it."""
        if name not in self.outputs:
            raise BatchError(f"output {name!r} was not computed; the result has {sorted(self.outputs)}", name=name)
        return self.outputs[name]


def merge_metrics(results: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    merged: dict[str, Metric] = {}
    for metrics in results:
        for name, metric in metrics.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


class TenantStep(NamedTuple):
    """Result of one of several LoRA tenants that step together: as :class:`StepResult`, or why it had nothing to step on.

    Attributes:
        error: without gradients, or with those of a pass that failed; ``ok`` is False then and ``grad_norm`` 0.
    """

    ok: bool
    grad_norm: float
    num_zeros: int | None
    error: str = ""


class StepResult(NamedTuple):
    """Result of ``optimizer_step``.

    Attributes:
        ok: False when any rank's gradient was not finite; then no parameter, moment or step count changed.
        grad_norm: global 2-norm before clipping; not finite when ``ok`` is False.
        num_zeros: zeros in the global gradient; None unless ``OptimizerConfig.log_num_zeros_in_grad``.
    """

    ok: bool
    grad_norm: float
    num_zeros: int | None


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """What AdamW knows of a model, or of a LoRA tenant.

    ``exp_avg`` and ``exp_avg_sq`` are whole moments, float32, on the CPU, by Hugging Face names or a tenant's in peft.
    ``learning_rate`` is that of the next step.
    """

    step: int
    learning_rate: float
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]


@dataclass(frozen=True)
class OptimizerStateInfo:
    """State of a model's or tenant's optimizer: steps taken, and the bytes that this rank holds."""

    name: str
    step: int
    bytes: int


@dataclass(frozen=True)
class BackendInfo:
    """What runs a model.

    Attributes:
        layout: ``world``, ``dp`` and the sizes of ``ParallelConfig``.
        base: name of the model.
        bit_exact: whether tenants compute the same alone and beside others to the last bit, as far as this process has tried
            matrix products in the base's dtype. False on a GPU.
        installed: package -> version, of those that the backend knows.
    """

    runtime: str
    device: str
    layout: Mapping[str, int]
    base: str
    hf_path: str
    model_type: str
    head: str
    tenants: tuple[LoRAInfo, ...]
    bit_exact: bool
    installed: Mapping[str, str]
