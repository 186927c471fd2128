"""Arguments of a model: of its construction and of its forward."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl_backend.contracts import Head, ModelOptions, SamplingCuts
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.primitive.attention import Segments
from rl_backend.primitive.log_prob import IGNORE_LABEL
from rl_backend.primitive.router import RowSequences


class SecondTokens(NamedTuple):
    """What multi-token prediction is trained on: a rank's T tokens of whole sequences, in which each has one next token.

    Attributes:
        next_ids: (T,) int64, the next token, -100 at each sequence's last position.
        labels: (T,) int64, the token after the next, -100 at each sequence's last two positions.
        total: how many of them there are in the whole micro-batch.
        position_ids, segments, padding, sequences: as of :class:`ModelInput`.
        of_rows: int64, which of the model's rows each row between this rank's blocks is of, where prefixes are shared; None
            where they are the same.
    """

    next_ids: torch.Tensor
    labels: torch.Tensor
    total: int
    position_ids: torch.Tensor
    segments: Segments
    padding: torch.Tensor | None = None
    sequences: RowSequences | None = None
    of_rows: torch.Tensor | None = None


class ModelInput(NamedTuple):
    """The argument of a model's ``forward``: a rank's T tokens of one packed micro-batch.

    Without context and tensor parallelism these are all tokens of the micro-batch, sequence after sequence; where prefixes
    are shared, the rows of ``segments.tree``, and ``labels``, ``temperature`` and outputs are then W predictions.

    Attributes:
        input_ids, position_ids: (T,) int64.
        segments: which tokens attend to which.
        longest: tokens of the longest sequence.
        labels: (T,) or (T, K) int64, the tokens that log-probs are of, -100 for none: the next token, if not the batch's
            ``target_ids``.
        temperature: number or (T,) float32.
        num_top: how many of the likeliest tokens are wanted after each of the T tokens.
        cuts: what the distributions are cut to; its mask is (T, K), or (W, K).
        router_loss_weight: factor of a router's losses: 1 / number of micro-batches, which gives a step their mean.
        padding: bool, which of the rows between this rank's blocks stand for no token; None where all do. Their label is
            -100.
        routes: (rows, layers with experts of the whole model, top_k) integers, the experts that the routers must take; -1
            for the rows for which they choose. None where they choose for all.
        keys: (T, layers with an indexer of the whole model, top_k) integers, the keys that these layers must attend to, by
            their places in the sequence; -1 alone for the tokens for which they choose. None where they choose for all.
        adapters: which adapters work on which of the T tokens.
        head_adapters: and on which of the W labels; None where these are the tokens'.
        heads: the outputs that are wanted; empty asks for those of the model's own head. Rows of tenants with a value head
            have no log-probs, and the others no values: they are 0 there.
        sequences: which sequence each row between this rank's blocks is from; None where there is one.
        of_rows: (W,) int64, which of the rows each label, temperature and output is of; None for each row's own.
        second: the tokens after the next; None for a model that is not trained on them.
        hidden: (rows, hidden_size), the output of the pipeline stage before; None for the first.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: Segments
    longest: int
    labels: torch.Tensor
    temperature: torch.Tensor | float
    calculate_entropy: bool
    num_top: int = 0
    cuts: SamplingCuts | None = None
    router_loss_weight: float = 1.0
    padding: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    adapters: Sequence[AdapterRun] = ()
    head_adapters: Sequence[AdapterRun] | None = None
    heads: Sequence[Head] = ()
    sequences: RowSequences | None = None
    of_rows: torch.Tensor | None = None
    second: SecondTokens | None = None
    hidden: torch.Tensor | None = None


def second_labels(next_ids: torch.Tensor) -> torch.Tensor:
    """``SecondTokens.labels`` of all tokens of a micro-batch from their ``next_ids``: none is of another sequence."""
    following = torch.cat((next_ids[1:], next_ids.new_full((1,), IGNORE_LABEL)))
    return following.masked_fill(next_ids == IGNORE_LABEL, IGNORE_LABEL)


class Predictions(NamedTuple):
    """What a head is asked for.

    Attributes:
        labels, temperature, cuts, of_rows: as of :class:`ModelInput`.
        of_tokens: (T,) int64, which of the W predictions is each token's; None where each row predicts for itself.
    """

    labels: torch.Tensor
    temperature: torch.Tensor | float
    cuts: SamplingCuts | None = None
    of_rows: torch.Tensor | None = None
    of_tokens: torch.Tensor | None = None


def each_prediction_once(
    rows: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor | float, cuts: SamplingCuts | None = None
) -> Predictions:
    """The predictions of T tokens, once where row, labels and temperature are equal; by ascending rows.

    With a mask of the engine only those without a label are once: each sample has been sampled from words of its own.

    Args:
        rows: (T,) int64, of each token.
        labels, temperature: (T,) or (T, K) int64, and a number or (T,) float32.
        cuts: of the tokens.
    """
    columns, mask = [rows[:, None], labels.reshape(len(rows), -1)], None if cuts is None else cuts.mask
    if mask is not None:
        columns.append(torch.arange(len(rows), device=rows.device).where(labels != IGNORE_LABEL, 0)[:, None])
    if isinstance(temperature, torch.Tensor):
        # By their bits, as whole numbers like the others.
        columns.append(temperature.view(torch.int32)[:, None].to(torch.int64))
    found, of_tokens = torch.unique(torch.cat(columns, dim=1), dim=0, return_inverse=True)
    of_rows, *wanted = found.t().contiguous()
    if isinstance(temperature, torch.Tensor):
        temperature = wanted.pop().to(torch.int32).view(torch.float32)
    if cuts is not None and mask is not None:
        cuts = cuts._replace(mask=mask[wanted.pop()])
    return Predictions(torch.stack(wanted, dim=1).view(-1, *labels.shape[1:]), temperature, cuts, of_rows, of_tokens)


class ModelStage(NamedTuple):
    """A part of a model that one rank of a pipeline runs; the first has the embeddings, the last the head."""

    first: bool
    layers: range
    last: bool


class BuildSettings(NamedTuple):
    """How to build a model, beside its architecture.

    Attributes:
        options: of the family's ``options_type``.
        stage: the part to build; None builds the whole model.
        layer_dtype: dtype of what goes into layers, where the ends compute in float32; None where all is of one dtype.
    """

    options: ModelOptions
    head: Head
    log_prob_chunk_tokens: int
    stage: ModelStage | None = None
    layer_dtype: torch.dtype | None = None
