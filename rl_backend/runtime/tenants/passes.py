"""One pass for several LoRA tenants: each sequence belongs to one of them, and each has its own loss."""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import BatchError, ForwardResult, Head, LossFn, Metric, MetricValue, ModelOutput, PackedBatch
from rl_backend.contracts.lora import BASE_ONLY, LORA_FIELD
from rl_backend.primitive.adapters import AdapterRun
from rl_backend.runtime.passes import CUT, TOP, check_returned
from rl_backend.runtime.tenants.handle import TenantHandle

_MOST_RUNS = 2**20
"""Runs of neighbouring sequences of one tenant that a rank has in one pass."""


@dataclass
class PassTenants:
    """The tenants of one ``forward_backward``."""

    by_id: Mapping[int, TenantHandle]  # those whose sequences may come
    trains: bool
    heads: Sequence[Head]  # the outputs of the pass
    losses: Mapping[str, LossFn] | None = None  # by the tenant's name, in a pass of several; None without a loss
    sole: TenantHandle | None = None  # the tenant of all sequences; None where a field of each sequence says whose it is
    begun: bool = False  # whether anything has run
    _draws: dict[tuple[int, int], int] = field(default_factory=dict)
    """By micro-batch and place of the run among its runs, so that no two runs of a tenant drop the same."""

    def ids(self, batch: PackedBatch) -> list[int]:
        """For each sequence its tenant's ``lora_id``, -1 for the base alone."""
        if self.sole is not None:
            return [self.sole.lora_id] * batch.num_sequences
        return _owners(batch) if LORA_FIELD in batch.sequence_fields else []

    def problem(self, data: Sequence[PackedBatch]) -> BatchError | None:
        """Sequences that are nobody's, another's than the pass is, or of a tenant without a loss."""
        known = ", ".join(f"{key} ({handle.name})" for key, handle in self.by_id.items()) or "none"
        for index, batch in enumerate(data):
            where = f"micro-batch {index}, sequence field {LORA_FIELD!r}"
            if LORA_FIELD not in batch.sequence_fields:
                if self.sole is not None:
                    continue
                return BatchError(
                    f"{where}: missing; it says whose a sequence is: the lora_id of the tenant's handle, or {BASE_ONLY} for "
                    "the base model alone",
                    micro_batch=index,
                )
            for key in _owners(batch):
                if key not in self.by_id and (key != BASE_ONLY or self.sole is not None):
                    whose = "is no tenant of this model; there are" if self.sole is None else "in a pass of"
                    return BatchError(f"{where}: {key} {whose} {known}", micro_batch=index)
        for tenant in self.trained(data) if self.sole is None else ():
            if tenant.name not in (self.losses or ()):
                return BatchError(f"loss_fn has no loss for {tenant.name!r}, whose sequences are in the data")
        return None

    def present(self, data: Sequence[PackedBatch]) -> list[TenantHandle]:
        """Those that have sequences, in the order of their numbers."""
        found = {each for batch in data for each in self.ids(batch)}
        return [handle for key, handle in sorted(self.by_id.items()) if key in found]

    def trained(self, data: Sequence[PackedBatch]) -> list[TenantHandle]:
        return self.present(data) if self.trains else []

    def with_loss(self, data: Sequence[PackedBatch]) -> list[TenantHandle]:
        # The same on every rank; others may be present on one rank alone.
        return [each for each in self.present(data) if self.sole is not None or each.name in (self.losses or ())]

    def fingerprint(self, data: Sequence[PackedBatch]) -> int:
        # Steps and failures of tenants with a loss are those of all ranks.
        counted = [str(each.lora_id) for each in self.with_loss(data)]
        return zlib.crc32(",".join(counted).encode())

    def begin(self, data: Sequence[PackedBatch]) -> None:
        self.begun = True
        trained = self.trained(data)
        for handle in trained:
            handle.trainer.expect_gradients()
        # A tenant's own counts, so that it drops the same alone and beside others. Ranks may have other numbers of its runs;
        # passes are the same on all, and a checkpoint has one number for all.
        drawing = [each for each in trained if each.lora.dropout and each.rows.training]
        passes = {each.lora_id: each.rows.num_draws for each in drawing}
        runs = Counter[int]()
        for index, batch in enumerate(data if passes else ()):
            for place, (key, _) in enumerate(groupby(self.ids(batch))):
                if key in passes:
                    ranks = self.by_id[key].trainer.groups.dense.data
                    self._draws[index, place] = (passes[key] * _MOST_RUNS + runs[key]) * ranks.size() + ranks.rank()
                    runs[key] += 1
        for handle in drawing:
            handle.rows.num_draws += 1

    def sharing(self, batch: PackedBatch) -> list[int]:
        """Of one tenant all may share, unless it has dropout, which drops something else of each sequence."""
        found = []
        for place, key in enumerate(self.ids(batch)):
            drops = key in self.by_id and self.by_id[key].lora.dropout > 0
            found.append(BASE_ONLY - 1 - place if drops else key)
        return found

    def runs(self, index: int, batch: PackedBatch, sequence_rows: Sequence[int]) -> tuple[AdapterRun, ...]:
        found, start = list[AdapterRun](), 0
        for place, (key, rows) in enumerate(runs_of_equal(self.ids(batch), sequence_rows)):
            handle = self.by_id.get(key)
            if handle is not None and rows:
                found.append(handle.rows.run(start, start + rows, self._draws.get((index, place)), key))
            start += rows
        # Without any, as where all sequences are the base's, a backward pass still needs something to go back to.
        of_experts = {key: each.rows.modules for key, each in self.by_id.items() if "experts" in each.kinds.values()}
        return tuple(replace(run, of_experts=of_experts) for run in found or [AdapterRun(0, 0, {})])


def _owners(batch: PackedBatch) -> list[int]:
    # One wait for the device.
    return [int(key) for key in batch.sequence_fields[LORA_FIELD].tolist()]


def runs_of_equal(ids: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of one id as one: [(id, sum of sizes)]."""
    runs: list[tuple[int, int]] = []
    for key, size in zip(ids, sizes, strict=True):
        if runs and runs[-1][0] == key:
            runs[-1] = key, runs[-1][1] + size
        else:
            runs.append((key, size))
    return runs


@dataclass
class LossOfTenants:
    """A loss that gives each tenant its own sequences, losses and denominators; an error in one is that one's result."""

    tenants: PassTenants
    results: dict[int, list[tuple[Tensor | None, Mapping[str, MetricValue]]]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def __call__(
        self, model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
    ) -> tuple[Tensor | None, Mapping[str, MetricValue]]:
        ids, losses = self.tenants.ids(data), self.tenants.losses or {}
        total = _nothing(model_output)
        metrics: dict[str, MetricValue] = {}
        for key in dict.fromkeys(ids):
            handle = self.tenants.by_id.get(key)
            if handle is None or key in self.failures or handle.name not in losses:
                continue
            own, rows = sequences_of(data, [index for index, each in enumerate(ids) if each == key], key)
            wanted = own_outputs(model_output._asdict(), handle.head)
            output = ModelOutput(**{name: value[rows] for name, value in wanted.items() if value is not None})
            try:
                loss, found = losses[handle.name](output, own, dp_group)
                check_returned(f"the loss of {handle.name!r}", loss, found, forward_only=not self.tenants.trains)
            except Exception as error:  # noqa: BLE001 - one tenant's loss is not the others' affair
                self.failures[key] = f"{type(error).__name__}: {error}"
                continue
            self.results.setdefault(key, []).append((None if loss is None else loss.detach(), found))
            # By number: a tenant's name may be the beginning of another's.
            metrics |= {f"{key}/{name}": value for name, value in found.items()}
            total = total if loss is None else total + loss
        return total, metrics


def sequences_of(batch: PackedBatch, chosen: Sequence[int], key: int) -> tuple[PackedBatch, Tensor | slice]:
    """The sequences ``chosen`` of a micro-batch as a micro-batch, and the rows of their tokens.

    Facts under ``meta["tenants"][key]`` take the place of the batch's.
    """
    lengths = batch.seq_lens.tolist()
    starts = batch.seq_lens.cumsum(0).sub(batch.seq_lens).tolist()
    rows: Tensor | slice
    if list(chosen) == list(range(chosen[0], chosen[-1] + 1)):
        rows = slice(starts[chosen[0]], starts[chosen[-1]] + lengths[chosen[-1]])
    else:
        rows = torch.cat([torch.arange(starts[each], starts[each] + lengths[each]) for each in chosen])
        rows = rows.to(batch.device, non_blocking=True)
    index = torch.tensor(chosen)
    meta = {**batch.meta, **batch.meta.get("tenants", {}).get(key, {})}
    own = replace(
        batch,
        input_ids=batch.input_ids[rows],
        seq_lens=batch.seq_lens[list(chosen)],
        token_fields={name: value[rows] for name, value in batch.token_fields.items()},
        sequence_fields={
            name: value[index.to(value.device, non_blocking=True)] for name, value in batch.sequence_fields.items()
        },
        meta=meta,
    )
    return own, rows


def agree_on_failures(failures: Mapping[int, str], tenants: Sequence[TenantHandle]) -> dict[int, str]:
    if not tenants:
        return {}
    groups = tenants[0].groups
    flags = torch.tensor([float(tenant.lora_id in failures) for tenant in tenants], device=groups.device)
    if groups.world_size > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=groups.world_group)
    return {
        tenant.lora_id: failures.get(tenant.lora_id, "its loss failed on another rank")
        for tenant, failed in zip(tenants, flags.tolist(), strict=True)
        if failed
    }


def results_of_tenants(
    loss: LossOfTenants | None, tenants: PassTenants, data: Sequence[PackedBatch], result: ForwardResult
) -> dict[str, ForwardResult]:
    """The part of each tenant that has sequences, by its name; ``outputs`` in the order of its own sequences."""
    ids = [key for batch in data for key in tenants.ids(batch)]
    found: dict[str, ForwardResult] = {}
    for key in sorted(set(ids) & tenants.by_id.keys()):
        name, head = tenants.by_id[key].name, tenants.by_id[key].head
        outputs = {
            name: [value for value, each in zip(values, ids, strict=True) if each == key]
            for name, values in own_outputs(result.outputs, head).items()
        }
        error = loss.failures.get(key, "") if loss is not None else ""
        # Of a failed loss other ranks may have other micro-batches.
        own = loss.results.get(key, []) if loss is not None and not error else []
        prefix = f"{key}/"
        metrics = (
            {}
            if error
            else {each.removeprefix(prefix): value for each, value in result.metrics.items() if each.startswith(prefix)}
        )
        found[name] = ForwardResult(_numbers([value for value, _ in own]), metrics, outputs, error=error, lora_id=key)
    return found


def _numbers(losses: Sequence[Tensor | None]) -> tuple[float, ...]:
    # One wait for the device.
    found = iter(torch.stack([loss for loss in losses if loss is not None] or [torch.zeros(())]).tolist())
    return tuple(0.0 if loss is None else next(found) for loss in losses)


def metrics_by_name(metrics: Mapping[str, Metric], tenants: PassTenants) -> dict[str, Metric]:
    found = ((each.partition("/"), metric) for each, metric in metrics.items())
    return {f"{tenants.by_id[int(key)].name}/{name}": metric for (key, _, name), metric in found}


def own_outputs[V](outputs: Mapping[str, V], head: Head) -> dict[str, V]:
    foreign = ("values",) if head == "log_probs" else ("log_probs", "entropy", *TOP, CUT)
    return {name: value for name, value in outputs.items() if name not in foreign}


def _nothing(output: ModelOutput) -> Tensor:
    """0 with a gradient of zeros, for a micro-batch without any loss."""
    return sum((value[:0].sum() for value in output if value is not None), start=torch.zeros(()))
