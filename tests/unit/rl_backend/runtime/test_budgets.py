"""How often the host waits for the device, and how many kernels it launches, for each micro-batch.

Counted on a CPU, as the difference between passes of three and of two micro-batches. There a tensor on the host is no other
than one on the device, so that reads of either count, and attention and norms are made of other kernels than on CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_backend.contracts import PackedBatch
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data import pack
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import VOCAB_SIZE, open_runtime, token_loss
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import create, nll

READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
_NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "detach", "alias")


class Counts(NamedTuple):
    reads: int  # of a number from the device, for which the host waits
    launches: int  # of operations that are no views


BUDGETS = {
    "dense": Counts(20, 508),
    "mixture": Counts(26, 879),
    "tenants": Counts(38, 706),
}
"""Two layers, or three of a mixture; two tenants. Two of the reads, three with tenants, are of the caller's batch, which
is on the host: beginnings that sequences share are looked for there."""


class _Calls(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.cpu):
            self.counts["reads"] += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts["reads"] += name in READS
        self.counts["launches"] += not (func.is_view or name in READS or name in _NO_KERNEL)
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> Counts:
    counts = Counter[str]()
    with _Calls(counts), _Operations(counts):
        work()
    return Counts(counts["reads"], counts["launches"])


def of_a_micro_batch(run: Callable[[Sequence[PackedBatch]], object], batch: PackedBatch) -> Counts:
    # The first pass makes what all later ones keep.
    run([batch])
    two, three = (counted(lambda: run([batch] * number)) for number in (2, 3))  # noqa: B023 - called at once
    return Counts(three.reads - two.reads, three.launches - two.launches)


def batch_of(sequences: int, tenants: Sequence[int] = ()) -> PackedBatch:
    """Sequences of 8 tokens, shared out over the tenants with these numbers, in their order."""
    rows = random_token_sequences([8] * sequences, VOCAB_SIZE)
    facts = {lora_id: {"batch_num_tokens": 1.0} for lora_id in tenants}
    if tenants:
        owners = torch.tensor(tenants).repeat_interleave(sequences // len(tenants))
        rows = [row.with_fields(sequence_fields={LORA_FIELD: owner}) for row, owner in zip(rows, owners, strict=True)]
    return pack(rows, {"batch_num_tokens": 1.0, "dp_size": 1, **({"tenants": facts} if tenants else {})})


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("budgets")
    dense = write_tiny("qwen3", folder / "dense")
    return {"dense": dense, "mixture": write_moe("qwen3_moe", folder / "mixture"), "tenants": dense}


def measured(kind: str, path: Path, sequences: int = 4, change: Callable[[nn.Module], object] | None = None) -> Counts:
    with open_runtime(path) as runtime:
        model = runtime.build_model(trainable=kind != "tenants")
        tenants = create(runtime, model, ["narrow", "wide"]) if kind == "tenants" else {}
        if change is not None:
            change(next(model.model.each_layer()).mixer)  # type: ignore[operator, union-attr]
        losses: Any = dict.fromkeys(tenants, nll) or token_loss
        batch = batch_of(sequences, [tenant.lora_id for tenant in tenants.values()])
        return of_a_micro_batch(lambda batches: runtime.forward_backward(model, batches, losses), batch)


@pytest.mark.parametrize("kind", BUDGETS)
def test_a_micro_batch_stays_within_its_budget_however_many_sequences_it_has(kind: str, paths: dict[str, Path]) -> None:
    found = measured(kind, paths[kind])
    assert found.reads <= BUDGETS[kind].reads
    assert found.launches <= BUDGETS[kind].launches
    more = measured(kind, paths[kind], sequences=8)
    # What a pass returns of each sequence is a copy.
    assert more.reads == found.reads
    assert more.launches <= found.launches + 2 * 4


def _read(module: nn.Module, _: Any, output: Tensor) -> None:
    float(output.detach().sum())


def _loop_over_sequences(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return torch.cat([rows * 1.0 for rows in output.split(list(args[2].query_lens))])


@pytest.mark.parametrize("kind", BUDGETS)
def test_one_more_read_and_a_loop_over_sequences_are_noticed(kind: str, paths: dict[str, Path]) -> None:
    read = measured(kind, paths[kind], change=lambda mixer: mixer.register_forward_hook(_read))
    assert read.reads > BUDGETS[kind].reads
    looped = measured(kind, paths[kind], change=lambda mixer: mixer.register_forward_hook(_loop_over_sequences))
    assert looped.launches > BUDGETS[kind].launches
