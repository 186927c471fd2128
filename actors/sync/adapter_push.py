"""Publishing a LoRA tenant to rollout engines: its factors alone, under a version of their own, while all serve on."""

from __future__ import annotations

import itertools
import shutil
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from actors.cluster import prometheus
from actors.rollout.engines import EngineSet
from actors.rollout.group import RolloutGroup
from actors.rollout.messages import AdapterVersion, PushedAdapter
from actors.sync.canary import Canary, send_canary
from actors.sync.report import PushClock, PushReport
from actors.sync.source import SourceRanks
from actors.train.context import HandleRef, RankContext
from actors.train.outcome import Apart
from actors.wire.factors import FactorMemory, PackedFactors
from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import EngineDeadError, RLBackendError, UnsupportedError, WeightCheckError
from rl_backend.runtime.tenant import TenantHandle

_numbers = itertools.count(1)
"""Of versions. vLLM keeps keys and values by an adapter's name, so neither names nor numbers are ever used again."""


_STAGING = "adapter staging"


class AdapterPush:
    """The pushes of one tenant; :class:`~actors.sync.push.WeightSync` says what they promise."""

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
        self._rollout = rollout
        self._tenant = tenant
        self._directory = None if directory is None else Path(directory)
        self._canary = canary
        self._proven: dict[int, tuple[int, int]] = {}
        """Engine -> its process, and how many pushes of weights it had seen, when its canary came back."""

    def push(self) -> PushReport:
        """See :meth:`~actors.sync.push.WeightSync.push`."""
        clock, tenant, group = PushClock(), self._tenant, self._rollout
        group.require_plain_base(tenant.name)
        with clock.phase("stage"):
            staged, factors = self._stage()
            clock.version = staged.version
        adapter = AdapterVersion(tenant.name, staged.version, next(_numbers), staged.rank)
        with group.changing_adapters():
            engines = group.fixed()
            skipped = tuple(engines.lost_engines)
            try:
                group.require_pushable(adapter)
                pushed = PushedAdapter(adapter, factors, staged.digest)
                with clock.phase("load"):
                    _raise_refusal(engines.call("push_adapter", *pushed))
                with clock.phase("probe"):
                    self._probe(engines, adapter)
            except BaseException:
                self._drop(engines, adapter, factors)
                raise
            with clock.phase("switch"):
                before = group.switch_adapter(pushed)
                if before is not None:
                    self._drop(engines, before.adapter, before.factors)
        prometheus.set_gauge("rl_backend_adapter_version", adapter.version, tenant=adapter.tenant)
        for engine, error in engines.lost_engines.items():
            if engine not in skipped:
                raise error
        transport = "object_store" if self._directory is None else "directory"
        return PushReport(adapter.version, staged.nbytes, clock.seconds(), transport, engines.engines, skipped)

    def _stage(self) -> Apart[StagedAdapter]:
        """What is staged, and its factors: a reference to them, which only engines follow; or their directory."""
        dtype = self._rollout.config.dtype
        directory = None if self._directory is None else (self._directory, uuid.uuid4().hex[:8])
        (answer, *_) = self._train.run_on_ranks(stage_adapter, self._tenant, dtype, directory)
        assert answer is not None, "rank 0 answers"
        return answer if directory is None else Apart(answer.value, answer.value.directory)

    def _probe(self, engines: EngineSet, adapter: AdapterVersion) -> None:
        """A canary, where an engine has not had one since it started or since its weights were pushed."""
        pushes = self._rollout.base_pushes
        present = {engine: (engines.infos[engine].pid, pushes) for engine in engines.engines}
        if self._canary is not None and any(self._proven.get(engine) != each for engine, each in present.items()):
            proven = send_canary(self._canary, self._train, engines, self._tenant, adapter)
            self._proven = {engine: present[engine] for engine in proven}

    @staticmethod
    def _drop(engines: EngineSet, adapter: AdapterVersion, factors: Any) -> None:
        if engines.engines:
            # Not waited for: it comes after what was asked of the engine before, and before what is asked of it later.
            engines.start_call("drop_adapter", adapter)
        if isinstance(factors, str):
            shutil.rmtree(factors, ignore_errors=True)


def _raise_refusal(outcomes: Mapping[int, Any]) -> None:
    """Raises the error of an engine that refuses, and of one that died where none is left."""
    failed = [outcome for outcome in outcomes.values() if isinstance(outcome, RLBackendError)]
    refused = [error for error in failed if not isinstance(error, EngineDeadError)]
    if refused or len(failed) == len(outcomes):
        raise (refused or failed)[0]


class StagedAdapter(NamedTuple):
    """An adapter as rank 0 has it.

    Attributes:
        version, rank: of the tenant.
        digest, nbytes: of its factors.
        directory: that they are in; empty where they are in memory.
    """

    version: int
    rank: int
    digest: str
    nbytes: int
    directory: str


def stage_adapter(
    context: RankContext, tenant: HandleRef, dtype: str, directory: tuple[Path, str] | None
) -> Apart[StagedAdapter] | None:
    """Runs on every rank, between two operations. Rank 0 answers, and keeps the factors in Ray's object store: in the
    engines' dtype, the scale multiplied into B.

    Args:
        directory: where to write a directory in peft's format, and a part of its name.

    Raises:
        UnsupportedError: DoRA.
        WeightCheckError: a value is not finite in the engines' dtype.
    """
    handle = context.handle(tenant)
    assert isinstance(handle, TenantHandle), "lora_id says so"
    if handle.lora.use_dora:
        raise UnsupportedError(
            f"{handle.name!r} has LoRAConfig.use_dora=True: its change has full rank, and engines take no such adapter; "
            "push base and adapter as one model with WeightSync(..., merged=True)",
            tenant=handle.name,
        )
    # What is answered is copied before the rank begins another operation.
    whole: Iterable[tuple[str, Tensor]] = context.runtime.export_lora_adapter(handle, copy=False)
    if context.rank != 0:
        deque(whole, maxlen=0)
        return None
    if directory is not None:
        whole = [(name, value.cpu()) for name, value in whole]
    memory = context.state.setdefault(_STAGING, FactorMemory())
    packed = PackedFactors.pack(handle.saved_shapes, _scaled(whole, handle.lora.scale), dtype, memory)
    if name := packed.not_finite():
        raise WeightCheckError(f"{handle.name!r}: {name} has values that are not finite; nothing was sent", name=name)
    written = ""
    if directory is not None:
        root, key = directory
        written = str(root / f"{handle.name.replace('/', '_')}@{handle.weight_version}-{key}")
        write_peft_directory(written, whole, handle.lora, str(handle.config.hf_path))
    staged = StagedAdapter(handle.weight_version, handle.lora.rank, packed.digest, packed.values.nbytes, written)
    return Apart(staged, None if written else packed)


def _scaled(factors: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor, float]]:
    """Name, values, and by what an engine multiplies each beforehand."""
    for name, values in factors:
        yield name, values, scale if name.removesuffix(".weight").endswith("_B") else 1.0
