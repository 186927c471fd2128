"""What Megatron's schedules are given of a pass."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rl_backend.runtime.bridge import installed
from rl_backend.runtime.passes import PassRequest
from tests.support.native import micro_batches, token_loss

SPLIT = [[0, 1], [5], [2, 3, 4]]


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_every_chunk_of_a_rank_sees_every_micro_batch(monkeypatch: pytest.MonkeyPatch, num_chunks: int) -> None:
    installed.import_megatron()
    from rl_backend.runtime.bridge.engine import forward_backward

    given: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    committed: list[int] = []

    def get_schedule(**sizes: Any) -> Any:
        asked.update(sizes)
        return lambda **arguments: given.update(arguments)

    routes = SimpleNamespace(outputs=lambda data: None)
    results = SimpleNamespace(result=lambda outputs: "result")
    monkeypatch.setattr(forward_backward, "get_forward_backward_func", get_schedule)
    monkeypatch.setattr(forward_backward, "PassRoutes", lambda *_: nullcontext(routes))
    monkeypatch.setattr(forward_backward, "PassResults", lambda *_: results)
    monkeypatch.setattr(forward_backward, "_forward_step", lambda *_: "step")
    monkeypatch.setattr(forward_backward, "get_model_config", lambda chunk: chunk)
    monkeypatch.setattr(forward_backward, "KnownShapes", lambda *known: known)
    parallel = SimpleNamespace(pp=2, vpp=num_chunks, tp=1)
    handle: Any = SimpleNamespace(
        chunks=tuple(f"chunk {number}" for number in range(num_chunks)),
        groups=SimpleNamespace(
            parallel=parallel, pg=SimpleNamespace(pp="stages"), dp_group=None, has_outputs=True, device="cpu"
        ),
        provider=SimpleNamespace(sequence_parallel=False, num_moe_experts=None, hidden_size=8),
        packs_sequences=False,
        head="log_probs",
        routers=(),
        pass_loads=lambda forward_only: SimpleNamespace(commit=lambda: committed.append(1)),
    )
    request = PassRequest(micro_batches(SPLIT), token_loss, forward_only=False)
    assert forward_backward.run_micro_batches(handle, request) == "result"
    assert asked == {"pp_size": 2, "vp_size": num_chunks if num_chunks > 1 else None}
    iterators = given["data_iterator"] if num_chunks > 1 else [given["data_iterator"]]
    # In turn, as the chunks of an interleaved schedule ask for them.
    taken = [[next(each) for each in iterators] for _ in SPLIT]
    for index, (of_chunks, indices) in enumerate(zip(taken, SPLIT, strict=True)):
        assert [number for number, _ in of_chunks] == [index] * num_chunks
        assert all(laid_out.shape[0] == len(indices) for _, laid_out in of_chunks)
    assert [next(each, None) for each in iterators] == [None] * num_chunks
    assert given["model"] == (list(handle.chunks) if num_chunks > 1 else "chunk 0")
    stages, chunk, shapes, chunks = given["p2p_communicator"]
    assert (stages, chunk, chunks) == ("stages", "chunk 0", num_chunks) and given["pg_collection"].pp == "stages"
    assert [rows for _, rows, _ in shapes] == [len(indices) for indices in SPLIT] and {shape[2] for shape in shapes} == {8}
    # Buffers between stages hold the largest: 41 tokens, in a micro-batch of its own, and three sequences.
    assert (given["num_microbatches"], given["seq_length"], given["micro_batch_size"]) == (3, 41, 3)
    assert not given["forward_only"] and given["forward_step_func"] == "step" and committed == [1]
