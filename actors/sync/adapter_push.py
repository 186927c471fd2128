"""Pushes of a LoRA tenant to rollout engines: only its factors move, with their own version, while engines keep serving.

A canary compares what an engine computes with a new adapter, and without it, with the trainer.
"""

from __future__ import annotations

import itertools
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from torch import Tensor

from actors.cluster import prometheus
from actors.rollout.config import SamplingConfig
from actors.rollout.group.engines import EngineSet, raise_failures
from actors.rollout.group.group import RolloutGroup
from actors.rollout.messages import AdapterVersion, PushedAdapter, Request
from actors.sync.report import PushClock, PushReport
from actors.sync.source import SourceRanks, pinned
from actors.sync.staged_transports import SOURCE_RANK, from_source
from actors.train.context import HandleRef, RankContext
from actors.train.group import TrainGroup
from actors.train.outcome import Apart
from actors.wire.factors import FactorMemories, FactorMemory, PackedFactors, SharedFactors
from actors.wire.segment import Segment, host_identity
from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import (
    EngineDeadError,
    RLBackendError,
    RolloutError,
    TokenSequence,
    UnsupportedError,
    WeightCheckError,
    WeightSyncError,
    dtype_from_name,
)
from rl_backend.data.micro_batches import pack

# Of versions. vLLM keeps keys and values by an adapter's name, so neither names nor numbers are ever used again.
_numbers = itertools.count(1)
_STAGING = "adapter staging"


# In float32 log-probs of SmolLM2-135M are up to 4e-5 from those in float64, the trainer's and the engine's alike.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.2, "float16": 0.05}
_PROBE = SamplingConfig(max_new_tokens=8)


@dataclass(frozen=True)
class Canary:
    """A prompt that an engine answers with and without an adapter before the adapter is served.

    Attributes:
        prompt: token ids; None takes eight, spread over the vocabulary.
        tolerance: largest difference of a log-prob from the trainer's, in nats, times the log-prob where that is beyond -1.
            None takes 1e-4 in float32, 0.05 in float16 and 0.2 in bfloat16.
    """

    prompt: tuple[int, ...] | None = None
    tolerance: float | None = None


class _Answer(NamedTuple):
    ids: tuple[int, ...]
    start: int
    log_probs: Tensor


def send_canary(
    canary: Canary, train: SourceRanks, rollout: EngineSet, tenant: HandleRef, adapter: AdapterVersion
) -> tuple[int, ...]:
    """Lets every living engine answer, and the trainer judge; the engines where the adapter visibly has its effect."""
    info = rollout.infos[rollout.engines[0]]
    prompt = canary.prompt or tuple(5 + index * info.vocab_size // 8 for index in range(min(8, info.max_model_len - 1)))
    # Engines that return masks take no request without top_k; this one keeps all words too.
    probe = _PROBE.replace(top_k=info.vocab_size) if rollout.config.returns_masks else _PROBE
    request = Request([token % info.vocab_size for token in prompt], probe, 0, adapter)
    outcomes = rollout.call("probe_adapter", request)
    raise_failures({engine: each for engine, each in outcomes.items() if not isinstance(each, EngineDeadError)})
    prompt_ids = tuple(request.prompt_ids)
    answers = {
        engine: [
            _Answer((*prompt_ids, *response.token_ids), len(prompt_ids), torch.tensor(response.log_probs))
            for response in found
        ]
        for engine, found in outcomes.items()
        if isinstance(found, list)
    }
    different = list(dict.fromkeys(answer.ids for pair in answers.values() for answer in pair))
    if not different:
        return ()
    # Of the first rank that has outputs in the layout of now.
    judged = next(filter(None, train.run_on_ranks(log_probs_of_trainer, tenant, adapter.version, different)), None)
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
    """Largest difference; NaN is infinite."""
    expected = log_probs[answer.start - 1 : -1]
    # Relative beyond one nat: what is unlikely has larger rounding errors.
    gaps = (answer.log_probs - expected).abs() / expected.abs().clamp(min=1.0)
    return float(gaps.nan_to_num(nan=torch.inf).max())


def log_probs_of_trainer(
    context: RankContext, tenant: HandleRef, version: int, sequences: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[Any, Any]] | None:
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


class AdapterPush:
    def __init__(
        self,
        train: SourceRanks,
        rollout: RolloutGroup,
        tenant: HandleRef,
        *,
        directory: Path | str | None,
        canary: Canary | None,
    ) -> None:
        if not rollout.config.max_adapters:
            raise UnsupportedError(
                f"{tenant.name!r} is a LoRA tenant, and engines with RolloutConfig.max_adapters=0 serve none; set it, or "
                "push base and adapter as one model with WeightSync(..., merged=True)",
                tenant=tenant.name,
            )
        self._train = train
        self._ranks = pinned(train)
        self._rollout = rollout
        self._tenant = tenant
        self._directory = None if directory is None else Path(directory)
        self._canary = canary
        self._source: _Source | None = None
        # Engine -> its process, and how many pushes of weights it had seen, when its canary came back: one for each will do.
        self._proven: dict[int, tuple[int, int]] = {}

    def push(self) -> PushReport:
        clock, tenant, group = PushClock(), self._tenant, self._rollout
        if (ranks := pinned(self._train)) != self._ranks:
            self._ranks, self._source = ranks, None
        group.lora.require_plain_base(tenant.name)
        with clock.phase("stage"):
            staged, factors = self._stage()
            clock.version = staged.version
        adapter = AdapterVersion(tenant.name, staged.version, next(_numbers), staged.rank)
        pushed = PushedAdapter(adapter, factors, staged.digest)
        with group.engine_set.changing:
            engines = group.engine_set.fixed()
            skipped = tuple(engines.lost_engines)
            try:
                group.lora.require_same_tenant(tenant.name, (tenant.group_id, tenant.key), self)
                group.lora.require_pushable(adapter)
                with clock.phase("load"):
                    infos = engines.infos
                    sent_to = group.lora.sent_to
                    _raise_refusal(engines.call("push_adapter", each=lambda engine: sent_to(pushed, infos[engine])))
                with clock.phase("probe"):
                    self._probe(engines, adapter)
            except BaseException:
                self._drop(engines, pushed)
                raise
            with clock.phase("switch"):
                before = group.lora.switch(pushed)
                if before is not None:
                    engines.wait_for_calls()
                    self._drop(engines, before)
        prometheus.set_gauge("rl_backend_adapter_version", adapter.version, tenant=adapter.tenant)
        for engine, error in engines.lost_engines.items():
            if engine not in skipped:
                raise error
        return PushReport(adapter.version, staged.nbytes, clock.seconds(), _transport_of(factors), engines.engines, skipped)

    @property
    def is_over(self) -> bool:
        return isinstance(self._train, TrainGroup) and self._train.ended

    def close(self) -> None:
        self._rollout.lora.release_name(self._tenant.name, self)

    def _stage(self) -> tuple[StagedAdapter, Any]:
        dtype = self._rollout.config.dtype
        if self._directory is not None:
            return self._stage_in(dtype, (self._directory, uuid.uuid4().hex[:8]))
        segment = self._take_segment(dtype)
        if segment is None:
            return self._stage_in(dtype, None)
        try:
            return self._stage_in(dtype, segment)
        except BaseException:
            self._rollout.lora.memory.discard(segment.path)
            raise

    def _stage_in(self, dtype: str, place: Place) -> tuple[StagedAdapter, Any]:
        answer: Apart[StagedAdapter] = from_source(self._ranks.run_on_ranks(stage_adapter, self._tenant, dtype, place))
        staged = answer.value
        if isinstance(place, Segment):
            if staged.layout:
                return staged, SharedFactors(place, staged.layout)
            self._rollout.lora.memory.discard(place.path)
        return staged, staged.directory or answer.stored

    def _take_segment(self, dtype: str) -> Segment | None:
        if self._source is None:
            self._source = from_source(self._ranks.run_on_ranks(describe_source, self._tenant, dtype))
        source = self._source
        if not self._rollout.lora.is_on_node(source.node_id, source.host):
            return None
        try:
            return self._rollout.lora.memory.take(source.nbytes)
        except (WeightSyncError, OSError):
            # Ray's object store goes to disk where memory is full; the report says which of the two it was.
            return None

    def _probe(self, engines: EngineSet, adapter: AdapterVersion) -> None:
        pushes = self._rollout.lora.base_pushes
        present = {engine: (engines.infos[engine].pid, pushes) for engine in engines.engines}
        if self._canary is not None and any(self._proven.get(engine) != each for engine, each in present.items()):
            proven = send_canary(self._canary, self._ranks, engines, self._tenant, adapter)
            self._proven = {engine: present[engine] for engine in proven}

    def _drop(self, engines: EngineSet, pushed: PushedAdapter) -> None:
        # Not waited for: it comes before what is asked of the engine later.
        calls = engines.start_call("drop_adapter", pushed.adapter) if engines.engines else {}
        self._rollout.lora.free(pushed, calls.values())


def push_directory(rollout: RolloutGroup, name: str, directory: Path | str) -> AdapterVersion:
    """Serves the adapter of a directory in peft's format under a name of its own, as it is and without a trainer.

    ``RolloutGroup.generate(adapter=name)`` samples with it from then on, and ``remove_adapter(name)`` frees it. The
    directory is read here, once; engines get its factors, even those that are restarted later.

    Raises:
        CheckpointError, UnsupportedError: a directory that cannot be read, or holds more than plain factors.
        RolloutError: the name is taken, or an adapter is merged into the engines' weights.
        WeightCheckError: values that are not finite, or an adapter that does not fit the model.
    """
    packed = PackedFactors.read(directory, rollout.config.dtype)
    if factor := packed.not_finite():
        raise WeightCheckError(f"{directory}: {factor} has values that are not finite; nothing was sent", name=factor)
    rank = max(shape[-2] for factor, shape in packed.shapes.items() if factor.removesuffix(".weight").endswith("_A"))
    pushed = PushedAdapter(AdapterVersion(name, 0, next(_numbers), rank), ray.put(packed), packed.digest)
    with rollout.engine_set.changing:
        if name in rollout.adapters:
            raise RolloutError(f"adapter={name!r} is served already; choose another name, or remove_adapter() it", name=name)
        rollout.lora.require_pushable(pushed.adapter)
        engines = rollout.engine_set.fixed()
        try:
            _raise_refusal(engines.call("push_adapter", *pushed))
        except BaseException:
            if engines.engines:
                engines.start_call("drop_adapter", pushed.adapter)
            raise
        rollout.lora.switch(pushed)
    return pushed.adapter


def _raise_refusal(outcomes: Mapping[int, Any]) -> None:
    failed = [outcome for outcome in outcomes.values() if isinstance(outcome, RLBackendError)]
    # An engine that refuses is why nothing is switched; one that died is so only where none is left.
    refused = [error for error in failed if not isinstance(error, EngineDeadError)]
    if refused or len(failed) == len(outcomes):
        raise (refused or failed)[0]


def _transport_of(factors: Any) -> str:
    if isinstance(factors, SharedFactors):
        return "shared_memory"
    return "directory" if isinstance(factors, str) else "object_store"


type Place = Segment | tuple[Path, str] | None
"""For factors: shared memory; where to write a directory in peft's format, and a part of its name; Ray's object store."""


class _Source(NamedTuple):
    nbytes: int
    node_id: str
    host: str


def describe_source(context: RankContext, tenant: HandleRef, dtype: str) -> _Source | None:
    if context.rank != SOURCE_RANK:
        return None
    shapes = context.runtime.get_lora_adapter(context.handle(tenant)).shapes
    nbytes = sum(map(prod, shapes.values())) * dtype_from_name(dtype).itemsize
    return _Source(nbytes, ray.get_runtime_context().get_node_id(), host_identity())


class StagedAdapter(NamedTuple):
    """An adapter as rank 0 has it: with the ``directory`` of its factors, or their ``layout`` in shared memory, else
    neither.
    """

    version: int
    rank: int
    digest: str
    nbytes: int
    directory: str = ""
    layout: bytes = b""


def stage_adapter(context: RankContext, tenant: HandleRef, dtype: str, place: Place) -> Apart[StagedAdapter] | None:
    """Runs on every rank, between two operations. Rank 0 answers, and leaves the factors in their place.

    Raises:
        UnsupportedError: DoRA.
        WeightCheckError: a value is not finite in the engines' dtype.
    """
    handle = context.handle(tenant)
    info = context.runtime.get_lora_adapter(handle)
    if info.config.use_dora:
        raise UnsupportedError(
            f"{info.name!r} has LoRAConfig.use_dora=True: its change has full rank, and engines take no such adapter; "
            "push base and adapter as one model with WeightSync(..., merged=True)",
            tenant=info.name,
        )
    # What is answered is copied before the rank begins another operation.
    whole: Iterable[tuple[str, Tensor]] = context.runtime.export_lora_adapter(handle, copy=False)
    if context.rank != SOURCE_RANK:
        deque(whole, maxlen=0)
        return None
    if isinstance(place, tuple) and not isinstance(place, Segment):
        whole = [(name, value.cpu()) for name, value in whole]
    memories = context.state.setdefault(_STAGING, FactorMemories())
    memory = _mapped(memories, place)
    packed = PackedFactors.pack(info.shapes, _scaled(whole, info.config.scale), dtype, memory or memories.at(None))
    if name := packed.not_finite():
        raise WeightCheckError(f"{info.name!r}: {name} has values that are not finite; nothing was sent", name=name)
    staged = StagedAdapter(info.weight_version, info.config.rank, packed.digest, packed.values.nbytes)
    if memory is not None:
        return Apart(staged._replace(layout=packed.layout), None)
    if place is None or isinstance(place, Segment):
        return Apart(staged, packed)
    root, key = place
    directory = str(root / f"{info.name.replace('/', '_')}@{info.weight_version}-{key}")
    write_peft_directory(directory, whole, info.config, info.hf_path)
    return Apart(staged._replace(directory=directory), None)


def _mapped(memories: FactorMemories, place: Place) -> FactorMemory | None:
    if not isinstance(place, Segment):
        return None
    try:
        return memories.at(place)
    except (WeightSyncError, OSError, RuntimeError):
        # Its driver has given up, or Ray's workers are of another user. An error here would be of one rank alone: where
        # nobody reads it, the others would wait for this one in their next operation. Ray's object store takes the factors.
        return None


def _scaled(factors: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor, float]]:
    for name, values in factors:
        # An engine knows no scale, so B is multiplied by it beforehand.
        yield name, values, scale if name.removesuffix(".weight").endswith("_B") else 1.0
