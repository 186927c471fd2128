"""How often the host waits for the device, how many kernels it launches and how large a tensor may be, by micro-batch.

Counted on a CPU, as the difference between passes of three and of two micro-batches. There a tensor on the host is no other
than one on the device, so reads of either count. Attention is two operations, norms are made of other kernels than on CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl_backend.contracts import PackedBatch
from rl_backend.contracts.lora import LORA_FIELD
from rl_backend.data import pack
from tests.support.bridge_runs import open_bridge
from tests.support.largest_result import LargestResult
from tests.support.models import write_tiny
from tests.support.moe import write_moe
from tests.support.native import VOCAB_SIZE, open_runtime, token_loss
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import create, nll

READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim")
_NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh", "detach", "alias")


class Counts(NamedTuple):
    reads: int  # of a number from the device, for which the host waits
    copies: int  # from the host to the device that wait for all that the device has to do
    launches: int  # of operations that are no views
    largest: int  # bytes of the largest tensor that an operation makes


BUDGETS = {
    "dense": Counts(20, 0, 393, 2**15),
    "mixture": Counts(26, 0, 703, 98_304),
    "tenants": Counts(37, 0, 543, 2**19),
    "bridge, dense": Counts(18, 0, 542, 428_544),
    "bridge, mixture": Counts(40, 3, 1020, 776_704),
    "bridge, tenants": Counts(33, 0, 725, 2**19),
}
"""Four sequences of 8 tokens; two layers, or three of a mixture; two tenants. Two of the reads, three with tenants, are of
the caller's batch, which is on the host: beginnings that sequences share are looked for there. The copies are of Megatron's
routers, whose weights are on no GPU here."""


class _Calls(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.counts["reads"] += func in (Tensor.tolist, Tensor.numpy, Tensor.cpu)
        # "cpu" in letters is the host on every machine.
        placed = isinstance(kwargs.get("device"), torch.device) or any(isinstance(each, torch.device) for each in args)
        made = func in (torch.tensor, torch.as_tensor, Tensor.to) and placed
        self.counts["copies"] += (made or func is Tensor.new_tensor) and not kwargs.get("non_blocking")
        return func(*args, **kwargs)


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
    with LargestResult() as largest, _Calls(counts), _Operations(counts):
        work()
    return Counts(counts["reads"], counts["copies"], counts["launches"], largest.nbytes)


def of_a_micro_batch(run: Callable[[Sequence[PackedBatch]], object], batch: PackedBatch) -> Counts:
    # The first pass makes what all later ones keep.
    run([batch])
    two, three = (counted(lambda: run([batch] * number)) for number in (2, 3))  # noqa: B023 - called at once
    return Counts(*(more - less for more, less in zip(three[:-1], two[:-1], strict=True)), three.largest)


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


@contextmanager
def measured(kind: str, path: Path) -> Iterator[tuple[Callable[[int], Counts], nn.Module]]:
    """What counts a micro-batch of so many sequences, and the first layer's attention."""
    has_tenants, opened = kind.endswith("tenants"), open_bridge if kind.startswith("bridge") else open_runtime
    with opened(path) as runtime:  # type: ignore[operator]
        model = runtime.build_model(trainable=not has_tenants)
        tenants = create(runtime, model, ["narrow", "wide"]) if has_tenants else {}
        losses: Any = dict.fromkeys(tenants, nll) or token_loss

        def count(sequences: int) -> Counts:
            batch = batch_of(sequences, [tenant.lora_id for tenant in tenants.values()])
            return of_a_micro_batch(lambda batches: runtime.forward_backward(model, batches, losses), batch)

        named = dict((unwrap_model(model.chunks[0]) if kind.startswith("bridge") else model.model).named_modules())
        yield count, next(module for name, module in named.items() if name.endswith((".self_attn", ".self_attention")))


def _waste(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    hidden: Tensor = (output[0] if isinstance(output, tuple) else output).detach()
    torch.tensor([float(hidden.sum())], device=hidden.device)
    # Megatron's rows are a sequence each.
    for rows in hidden.split(list(args[2].query_lens)) if hidden.dim() == 2 else hidden.unbind(1):
        rows * 1.0
    torch.outer(hidden.flatten(), hidden.flatten())


@pytest.mark.shows("runtime: reads and copies that wait, kernels and the largest tensor of a micro-batch have a budget")
@pytest.mark.parametrize("kind", BUDGETS)
def test_a_micro_batch_stays_within_its_budget_however_many_sequences_it_has(kind: str, paths: dict[str, Path]) -> None:
    with measured(kind, paths[kind.removeprefix("bridge, ")]) as (count, attention):
        found, more = count(4), count(8)
        attention.register_forward_hook(_waste)
        wasted = count(4)
    budget = BUDGETS[kind]
    assert all(value <= most for value, most in zip(found, budget, strict=True)), f"{found} of {budget}"
    assert (more.reads, more.copies) == (found.reads, found.copies)
    # What a pass returns of each sequence is a copy.
    assert more.launches <= found.launches + 2 * 4
    # What is left of a wasted one would hide in a budget that is too large.
    assert all(value > most for value, most in zip(wasted, budget, strict=True)), f"{wasted} of {budget}"
