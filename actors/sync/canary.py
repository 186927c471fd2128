"""Canaries of adapters: what an engine computes with a new one, and without it, against the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actors.rollout.config import SamplingConfig
from actors.rollout.group.engines import EngineSet
from actors.rollout.messages import AdapterVersion, Generated, Request
from actors.sync.source import SourceRanks
from actors.sync.transport.staged import raise_failures
from actors.train.context import HandleRef, RankContext
from rl_backend.contracts import EngineDeadError, TokenSequence, WeightCheckError
from rl_backend.data.micro_batches import pack

_TOLERANCES = {"float32": 1e-5, "bfloat16": 0.2, "float16": 0.05}
_SAMPLING = SamplingConfig(max_new_tokens=8)


@dataclass(frozen=True)
class Canary:
    """A prompt that an engine answers with and without an adapter before the adapter is served.

    Attributes:
        prompt: token ids; None takes eight, spread over the vocabulary.
        tolerance: largest difference of a log-prob from the trainer's, in nats, times the log-prob where that is beyond -1.
            None takes 1e-5 in float32, 0.05 in float16 and 0.2 in bfloat16.
    """

    prompt: tuple[int, ...] | None = None
    tolerance: float | None = None


class _Answer(NamedTuple):
    """Attributes:
    ids: of prompt and response.
    start: where the response begins.
    log_probs: of the response.
    """

    ids: tuple[int, ...]
    start: int
    log_probs: Tensor


def send_canary(
    canary: Canary, train: SourceRanks, rollout: EngineSet, tenant: HandleRef, adapter: AdapterVersion
) -> tuple[int, ...]:
    """Lets every living engine answer, and the trainer judge.

    Returns:
        Engines where the adapter visibly has its effect. Not those without weights to sample with; none where an adapter
        changes nothing yet (B = 0), or where the trainer has moved on.

    Raises:
        WeightCheckError: log-probs that are not the trainer's: an adapter that vLLM took and does not apply, or applies in
            part, or weights that it was not trained on.
    """
    info = rollout.infos[rollout.engines[0]]
    prompt = canary.prompt or tuple(5 + index * info.vocab_size // 8 for index in range(min(8, info.max_model_len - 1)))
    request = Request([token % info.vocab_size for token in prompt], 1, 0)
    outcomes = rollout.call("probe_adapter", adapter, request, _SAMPLING)
    raise_failures({engine: each for engine, each in outcomes.items() if not isinstance(each, EngineDeadError)})
    answers = {engine: _answers(request, found) for engine, found in outcomes.items() if isinstance(found, Generated)}
    different = list(dict.fromkeys(answer.ids for pair in answers.values() for answer in pair))
    if not different:
        return ()
    judged = train.run_on_ranks(log_probs_of_trainer, tenant, adapter.version, different)[tenant.source_ranks[0]]
    if judged is None:
        return ()
    tolerance = _TOLERANCES[rollout.config.dtype] if canary.tolerance is None else canary.tolerance
    return tuple(
        engine for engine, pair in answers.items() if _judge(rollout.infos[engine].name, adapter, pair, judged, tolerance)
    )


def _judge(
    engine: str,
    adapter: AdapterVersion,
    pair: Sequence[_Answer],
    judged: Mapping[tuple[int, ...], tuple[Tensor, Tensor]],
    tolerance: float,
) -> bool:
    """Whether the adapter's effect is seen; raises where it is another than the trainer's."""
    plain, adapted = pair
    gap = _gap(plain, judged[plain.ids][0])
    if not gap <= tolerance:
        raise WeightCheckError(
            f"{engine}: its log-probs without any adapter are {gap:.1e} from those of the base that {adapter.tenant!r} was "
            f"trained on (tolerance {tolerance:.1e}): it serves other weights; push the base model",
            engine=engine,
        )
    base, tenant = judged[adapted.ids]
    gap, unapplied = _gap(adapted, tenant), _gap(adapted, base)
    if not gap <= tolerance:
        what = "vLLM has taken the adapter and does not apply it" if unapplied <= tolerance else "it is applied wrongly"
        raise WeightCheckError(
            f"{engine}: {adapter.name}: log-probs are {gap:.1e} from the trainer's (tolerance {tolerance:.1e}): {what}",
            engine=engine,
        )
    return unapplied > 2 * tolerance


def _gap(answer: _Answer, log_probs: Tensor) -> float:
    """Largest difference, relative beyond one nat; NaN is infinite."""
    expected = log_probs[answer.start - 1 : -1]
    gaps = (answer.log_probs - expected).abs() / expected.abs().clamp(min=1.0)
    return float(gaps.nan_to_num(nan=torch.inf).max())


def _answers(request: Request, generated: Generated) -> list[_Answer]:
    start = len(request.prompt_ids)
    return [
        _Answer((*request.prompt_ids, *response.token_ids), start, torch.tensor(response.log_probs))
        for (response,) in generated.responses
    ]


def log_probs_of_trainer(
    context: RankContext, tenant: HandleRef, version: int, sequences: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[Any, Any]] | None:
    """Runs on every rank, between two operations. Of each sequence the log-probs without and with the adapter, on the CPU.

    None where the tenant has stepped since ``version``.
    """
    handle = context.handle(tenant)
    if handle.weight_version != version:
        return None
    assert handle.base is not None, "a tenant has a base"
    data = [pack([TokenSequence(torch.tensor(ids)) for ids in sequences])] * handle.micro_batch_multiple
    found = []
    for model in (handle.base, handle):
        with context.runtime.eval_mode(model):
            result = context.runtime.forward_backward(model, data, None, forward_only=True)
        found.append([each.cpu() for each in result.outputs.get("log_probs", ())][: len(sequences)])
    return dict(zip(sequences, zip(*found, strict=True), strict=False))
