"""Adapters in vLLM's workers: which are taken, where they are kept, and what vLLM's managers make of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    FusedMoEWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)

from actors.rollout.vllm import adapters
from actors.rollout.vllm.adapters import AdapterSlots
from actors.wire.factors import factor_digest
from rl_backend.contracts.lora import peft_name

SLOTS, LARGEST = 3, 8


def stacked(*sizes: tuple[int, int]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Slots of slices with (inputs, outputs)."""
    a = tuple(torch.zeros(SLOTS, 1, LARGEST, inputs) for inputs, _ in sizes)
    return a, tuple(torch.zeros(SLOTS, 1, outputs, LARGEST) for _, outputs in sizes)


def layer(kind: Any, a: Any, b: Any, **fields: Any) -> Any:
    made: Any = SimpleNamespace() if kind is None else kind.__new__(kind)
    for name, value in {"lora_a_stacked": a, "lora_b_stacked": b, **fields}.items():
        object.__setattr__(made, name, value)
    return made


def manager_of(layers: dict[str, Any], packed: dict[str, list[str]]) -> Any:
    return SimpleNamespace(
        modules=layers,
        packed_modules=packed,
        lora_config=SimpleNamespace(max_lora_rank=LARGEST),
        lora_index_to_id=[None] * SLOTS,
        _registered_adapters={},
        _active_adapters={},
    )


class Mapper:
    """As vLLM renames a checkpoint's names."""

    def get_rename_mapper(self) -> Mapper:
        return self

    def _map_name(self, name: str) -> str:
        return name.replace("hf.", "model.")


class Worker(AdapterSlots):
    """A worker with a plain linear layer, one of three parts, one whose first part has three slices, an embedding, and one
    that vLLM fuses in a way of its own.
    """

    def __init__(self, *, renames: bool = True) -> None:
        q, v = stacked((5, 4)), stacked((6, 7))
        qkv = stacked((5, 4), (5, 2), (5, 3))
        mixer = stacked((5, 1), (5, 2), (5, 3), (5, 6))
        self.reset: list[int] = []
        fused = layer(None, *stacked((5, 4), (5, 2)))
        fused.reset_lora = self.reset.append
        embedding = torch.zeros(SLOTS, 9, LARGEST), torch.zeros(SLOTS, 1, 5, LARGEST)
        self.layers = {
            "model.layers.0.o_proj": layer(None, q[0][0], q[1][0]),
            "model.layers.0.qkv_proj": layer(MergedColumnParallelLinearWithLoRA, *qkv),
            "model.layers.0.in_proj_qkvz": layer(MergedColumnParallelLinearWithLoRA, *mixer),
            "model.embed": layer(VocabParallelEmbeddingWithLoRA, *embedding),
            "model.layers.0.fused": fused,
            "model.layers.1.o_proj": layer(None, v[0][0], v[1][0]),
        }
        packed = {f"model.layers.0.{whole}": [f"model.layers.0.{part}" for part in parts] for whole, parts in PARTS.items()}
        self.manager = manager_of(self.layers, packed)
        model = SimpleNamespace(hf_to_vllm_mapper=Mapper()) if renames else SimpleNamespace()
        super().__init__(
            SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=self.manager), get_model=lambda: model)
        )


PARTS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
    "fused": ["one", "two", "three"],
}
MODULES = [
    *(f"hf.layers.0.{part}" for parts in PARTS.values() for part in parts),
    *(f"hf.layers.{number}.o_proj" for number in (0, 1)),
    "hf.embed",
]
SIZES = {"q_proj": (5, 4), "k_proj": (5, 2), "v_proj": (5, 3), "in_proj_qkv": (5, 6), "in_proj_z": (5, 6)}


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_kept", {})


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    made.learn_names([f"{name}.weight" for name in MODULES])
    return made


def factors(rank: int, **sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Of modules of layer 0."""
    found = {}
    for module, (inputs, outputs) in sizes.items():
        found[peft_name(f"hf.layers.0.{module}", is_a=True)] = torch.randn(rank, inputs)
        found[peft_name(f"hf.layers.0.{module}", is_a=False)] = torch.randn(outputs, rank)
    return found


def keep(worker: Worker, given: dict[str, Tensor], rank: int = 2, path: str = "memory://a") -> str:
    return worker.keep(path, rank, given, factor_digest(given, given.values()))


class Request:
    def __init__(self, number: int, path: str) -> None:
        self.lora_int_id, self.lora_path = number, path


def activate(worker: Worker, number: int, path: str = "memory://a") -> bool:
    """As vLLM's worker manager does with a new adapter."""
    adapters._add_adapter(worker.manager, adapters._load_adapter(None, Request(number, path)))
    return adapters._activate_adapter(worker.manager, number)


def test_every_module_of_the_checkpoint_has_its_own_slots_and_what_else_is_fused_has_none(worker: Worker) -> None:
    torch.manual_seed(0)
    given = factors(2, **SIZES, o_proj=(5, 4))
    embedding = {
        f"base_model.model.hf.embed.lora_embedding_{part}": value
        for part, value in (("A", torch.randn(2, 9)), ("B", torch.randn(5, 2)))
    }
    given |= embedding
    assert keep(worker, given) == ""
    worker.manager.lora_index_to_id[0] = 99
    assert activate(worker, 7)
    assert worker.manager.lora_index_to_id == [99, 7, None] and worker.manager._active_adapters == {7: None}
    assert worker.reset == [1]

    def product(module: str) -> Tensor:
        return given[peft_name(f"hf.layers.0.{module}", is_a=False)] @ given[peft_name(f"hf.layers.0.{module}", is_a=True)]

    def held(name: str, place: int) -> Tensor:
        found = worker.layers[name]
        a, b = found.lora_a_stacked, found.lora_b_stacked
        a, b = (a, b) if isinstance(a, tuple) else ((a,), (b,))
        product: Tensor = b[place][1, 0] @ a[place][1, 0]
        return product

    torch.testing.assert_close(held("model.layers.0.o_proj", 0), product("o_proj"))
    for place, module in enumerate(PARTS["qkv_proj"]):
        torch.testing.assert_close(held("model.layers.0.qkv_proj", place), product(module))
    of_mixer = torch.cat([held("model.layers.0.in_proj_qkvz", place) for place in range(3)])
    torch.testing.assert_close(of_mixer, product("in_proj_qkv"))
    torch.testing.assert_close(held("model.layers.0.in_proj_qkvz", 3), product("in_proj_z"))
    embed = worker.layers["model.embed"]
    a, b = embedding.values()
    torch.testing.assert_close(embed.lora_b_stacked[1, 0] @ embed.lora_a_stacked[1].T, b @ a)
    assert not worker.layers["model.layers.1.o_proj"].lora_a_stacked.any()
    assert worker.problem("memory://a", 7) == ""
    assert not activate(worker, 7), "it is active already"
    assert worker.manager.lora_index_to_id == [99, 7, None]


A, B = (peft_name("hf.layers.0.o_proj", is_a=is_a) for is_a in (True, False))


@pytest.mark.parametrize(
    ("change", "rank", "problem"),
    [
        ({}, 9, "rank 9 is more than the 8 that this engine was started with; raise max_adapter_rank"),
        ({B: None}, 2, f"{B} is missing"),
        ({A: None}, 2, f"{A} is missing"),
        ({A: (5, 2)}, 2, f"{A} has shape (5, 2), expected (2, 5)"),
        ({B: (3, 2)}, 2, f"{B} has shape (3, 2), expected (4, 2)"),
        ({}, 3, f"{A} has shape (2, 5), expected (3, 5)"),
        (
            {peft_name("hf.layers.0.z_proj", is_a=True): (2, 5), peft_name("hf.layers.0.mlp", is_a=False): (4, 2)},
            2,
            "hf.layers.0.mlp takes no adapters in this engine (those that do: o_proj, q_proj, k_proj, v_proj, in_proj_qkv, "
            "in_proj_z, hf.embed); push base and adapter as one model with WeightSync(..., merged=True)",
        ),
        (
            {peft_name("hf.layers.0.in_proj_z", is_a=is_a): shape for is_a, shape in ((True, (2, 5)), (False, (6, 2)))},
            2,
            "hf.layers.0.in_proj_z takes an adapter beside hf.layers.0.in_proj_qkv only: target both; or push base and "
            "adapter as one model with WeightSync(..., merged=True)",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_and_not_kept(
    worker: Worker, change: dict[str, tuple[int, int] | None], rank: int, problem: str
) -> None:
    fitting = factors(2, o_proj=(5, 4))
    assert keep(worker, fitting, path="memory://before") == ""
    given = dict(fitting)
    for name, shape in change.items():
        given.pop(name, None)
        if shape is not None:
            given[name] = torch.ones(shape)
    for _ in range(2):
        assert keep(worker, given, rank) == problem
    assert list(adapters._kept) == ["memory://before"]
    assert keep(worker, fitting) == "" and keep(worker, factors(2, o_proj=(5, 4))) == ""


def test_the_largest_rank_fits_and_names_are_learned_anew(worker: Worker) -> None:
    assert keep(worker, factors(8, k_proj=(5, 2)), 8) == ""
    worker.learn_names(["other.layers.0.o_proj.weight"])
    assert "hf.layers.0.k_proj takes no adapters" in keep(worker, factors(8, k_proj=(5, 2)), 8)
    plain = Worker(renames=False)
    plain.learn_names(["model.layers.0.o_proj.weight"])
    own = {name.replace("hf.", "model."): value for name, value in factors(2, o_proj=(5, 4)).items()}
    assert keep(plain, own) == ""


def test_what_the_kernels_read_is_told_where_it_differs(worker: Worker) -> None:
    given = factors(2, o_proj=(5, 4), k_proj=(5, 2))
    assert keep(worker, given) == ""
    activate(worker, 4)
    worker.layers["model.layers.0.qkv_proj"].lora_b_stacked[1][0, 0, 1, 0] += 1
    name = peft_name("hf.layers.0.k_proj", is_a=False)
    assert worker.problem("memory://a", 4) == f"vLLM's kernels read another {name} than was sent"
    assert worker.keep("memory://b", 2, given, "of other values") == ""
    assert activate(worker, 5, "memory://b")
    assert worker.problem("memory://b", 5) == "it was damaged on its way"


def test_factors_that_are_owned_stay_as_they_were_and_what_is_forgotten_is_gone(worker: Worker) -> None:
    given = factors(2, o_proj=(5, 4))
    before = {name: value.clone() for name, value in given.items()}
    keep(worker, given)
    keep(worker, given, path="memory://b")
    worker.own("memory://a")
    for value in given.values():
        value.zero_()
    activate(worker, 1)
    torch.testing.assert_close(worker.layers["model.layers.0.o_proj"].lora_b_stacked[0, 0, :, :2], before[B])
    assert worker.problem("memory://a", 1) == ""
    worker.forget("memory://a")
    worker.forget("memory://a")
    assert list(adapters._kept) == ["memory://b"]


def test_adapters_of_directories_are_vllms_own_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Any = []
    for name, answer in (("_load_of_vllm", "loaded"), ("_add_of_vllm", None), ("_activate_of_vllm", 1)):
        monkeypatch.setattr(adapters, name, lambda *args, name=name, answer=answer: asked.append((name, args)) or answer)
    manager: Any = SimpleNamespace(_registered_adapters={3: "adapter"}, _active_adapters={})
    request = Request(3, "/some/memory://folder")
    assert adapters._load_adapter(manager, request) == "loaded"
    adapters._add_adapter(manager, "adapter")
    assert adapters._activate_adapter(manager, 3) is True
    assert asked == [
        ("_load_of_vllm", (manager, request)),
        ("_add_of_vllm", (manager, "adapter")),
        ("_activate_of_vllm", (manager, 3)),
    ]


class Part(Worker):
    """The second of two workers, whose layers are cut by vLLM's own functions: a head of keys and values for both, linear
    layers cut by outputs and by inputs, and experts that share a factor.
    """

    def __init__(self) -> None:
        qkv, up, down = stacked((6, 4), (6, 2), (6, 2)), stacked((6, 4)), stacked((3, 5))
        a = torch.zeros(SLOTS, 1, LARGEST, 6), torch.zeros(SLOTS, 3, LARGEST, 4)
        b = torch.zeros(SLOTS, 3, 4, LARGEST), torch.zeros(SLOTS, 1, 6, LARGEST)
        of_experts = {
            "w13_lora_a_stacked": (a[0], a[0].clone()),
            "w13_lora_b_stacked": (b[0], b[0].clone()),
            "w2_lora_a_stacked": (a[1],),
            "w2_lora_b_stacked": (b[1],),
            "adapter_enabled": torch.zeros(SLOTS + 1, dtype=torch.int),
            "enable_moe_shared_loras": True,
            "moe_config": SimpleNamespace(
                intermediate_size_per_partition=4, moe_parallel_config=SimpleNamespace(use_ep=False)
            ),
        }
        one_of_two = {"tp_size": 2, "tp_rank": 1}
        heads = SimpleNamespace(num_kv_head_replicas=2, output_sizes=[8, 4, 4])
        of_heads = {"output_ids": (1, 0, 0), "output_slices": (4, 2, 2), "n_slices": 3, "base_layer": heads}
        plain = {"is_merged_col_linear": False, "output_size": 4, "base_layer": SimpleNamespace()}
        whole = SimpleNamespace(output_sizes=[4, 4])
        self.layers = {
            "l.qkv_proj": layer(MergedQKVParallelLinearWithLoRA, *qkv, **of_heads, **one_of_two),
            "l.up": layer(ColumnParallelLinearWithLoRA, *up, **plain, **one_of_two),
            "l.down": layer(RowParallelLinearWithLoRA, *down, input_size=3, base_layer=SimpleNamespace(), **one_of_two),
            "l.experts": layer(FusedMoEWithLoRA, [], [], **of_experts, **one_of_two),
            "l.fused": layer(ColumnParallelLinearWithLoRA, *stacked((6, 4)), base_layer=whole, reset_lora=int, **one_of_two),
        }
        packed = {"l.qkv_proj": ["l.q", "l.k", "l.v"], "l.experts": [f"l.experts.w{number}" for number in (1, 2, 3)]}
        self.manager = manager_of(self.layers, packed)
        model = SimpleNamespace()
        runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=self.manager), get_model=lambda: model)
        AdapterSlots.__init__(self, runner)


WHOLE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "q": ((2, 6), (8, 2)),
    **dict.fromkeys("kv", ((2, 6), (2, 2))),
    "up": ((2, 6), (8, 2)),
    "down": ((2, 6), (5, 2)),
    **dict.fromkeys(("experts.w1", "experts.w3"), ((1, 2, 6), (3, 8, 2))),
    "experts.w2": ((3, 2, 8), (1, 6, 2)),
}
"""Shapes of A and B of an adapter of rank 2."""


def test_a_worker_holds_the_parts_of_factors_that_vllm_would_give_it() -> None:
    worker = Part()
    a, b = ({module: torch.randn(pair[place]) for module, pair in WHOLE.items()} for place in (0, 1))
    given = {peft_name(f"l.{each}", is_a=held is a): value for held in (a, b) for each, value in held.items()}
    assert keep(worker, given) == ""
    assert activate(worker, 7) and worker.problem("memory://a", 7) == ""
    qkv, up, down, experts, _ = worker.layers.values()
    for place, cut in enumerate(qkv.slice_lora_b([b["q"], b["k"], b["v"]])):
        assert torch.equal(qkv.lora_b_stacked[place][0, 0, :, :2], cut)
        assert torch.equal(qkv.lora_a_stacked[place][0, 0, :2], a["qkv"[place]])
    assert torch.equal(up.lora_b_stacked[0][0, 0, :, :2], up.slice_lora_b(b["up"]))
    assert torch.equal(down.lora_a_stacked[0][0, 0, :2], down.slice_lora_a(a["down"]))
    assert torch.equal(down.lora_b_stacked[0][0, 0, :, :2], b["down"])
    for place, stack in enumerate(("experts.w1", "experts.w3")):
        assert torch.equal(experts.w13_lora_a_stacked[place][0, :, :2], a[stack])
        assert torch.equal(experts.w13_lora_b_stacked[place][0, ..., :2], experts._slice_w13_b(b[stack]))
    assert torch.equal(experts.w2_lora_a_stacked[0][0, :, :2], experts._slice_w2_a(a["experts.w2"]))
    assert torch.equal(experts.w2_lora_b_stacked[0][0, ..., :2], b["experts.w2"])
    assert experts.adapter_enabled.tolist() == [1, 0, 0, 0]
    experts.w2_lora_b_stacked[0][0, 0, 5, 1] += 1.0
    name = peft_name("l.experts.w2", is_a=False)
    assert worker.problem("memory://a", 7) == f"vLLM's kernels read another {name} than was sent"


def test_factors_that_workers_cannot_cut_are_refused_and_damage_on_the_way_is_seen() -> None:
    worker = Part()
    given = {peft_name(f"l.{each}", is_a=not place): torch.ones(WHOLE[each][place]) for each in WHOLE for place in (0, 1)}
    half = {**given, peft_name("l.up", is_a=False): torch.zeros(4, 2)}
    assert keep(worker, half).endswith("l.up.lora_B.weight has shape (4, 2), expected (8, 2)")
    one = {**given, peft_name("l.experts.w1", is_a=True): torch.zeros(3, 2, 6)}
    assert keep(worker, one).endswith("has shape (3, 2, 6), expected (1, 2, 6)")
    fused = {peft_name("l.fused", is_a=True): torch.zeros(2, 6), peft_name("l.fused", is_a=False): torch.zeros(8, 2)}
    assert keep(worker, fused).startswith("l.fused takes no adapters in this engine")
    assert worker.keep("memory://a", 2, given, "of something else") == "" and activate(worker, 7)
    assert worker.problem("memory://a", 7) == "it was damaged on its way"
