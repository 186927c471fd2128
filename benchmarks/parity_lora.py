"""``python -m benchmarks.parity --lora``: LoRA tenants in one batch against peft, one by one, in each runtime and layout.

Tenants have different ranks and targets, and some are DoRA. There are sequences of the base alone and of one token,
and a micro-batch that has none of one tenant.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import machine, update_result
from rl_backend.contracts import OptimizerConfig, PackedBatch, TokenSequence
from rl_backend.contracts.lora import BASE_ONLY, LORA_FIELD, LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.lab.parity.config import start_of
from tests.support.models import write_tiny
from tests.support.peft_reference import Steps, load_factors, peft_factors, peft_model, train_with_peft
from tests.support.rank_pool import RankPool
from tests.support.tenant_events import OPENS
from tests.support.tenants import nll

STEPS, LR = 5, 1e-4
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-6, 1e-5
TIMEOUT_SECONDS = 300.0
SIZES: Mapping[str, Any] = {"vocab_size": 127, "num_hidden_layers": 4, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dense": ("qwen3", SIZES),
    "mixture": ("qwen3_moe", {**SIZES, **EXPERTS}),
    "one head of keys": ("qwen3", {**SIZES, "num_key_value_heads": 1, "intermediate_size": 90}),
}
"""Name -> family of transformers and its settings. The vocabulary is odd; two ranks have two stages of a layer each."""

TENANTS: Mapping[str, Mapping[str, LoRAConfig]] = {
    "dense": {
        "rank 4": LoRAConfig(rank=4, alpha=8.0, targets=("attention",)),
        "rank 16": LoRAConfig(rank=16, targets=("feed_forward", "q_proj")),
        "rank 64": LoRAConfig(rank=64, alpha=16.0, targets=("v_proj", "down_proj", "head"), use_rslora=True),
        "DoRA": LoRAConfig(rank=8, targets=("attention", "down_proj"), use_dora=True),
        "DoRA, odd": LoRAConfig(rank=5, targets=("model.layers.2.mlp.up_proj", "o_proj"), use_dora=True),
    },
    "mixture": {
        "rank 4": LoRAConfig(rank=4, alpha=8.0, targets=("experts", "head")),
        "rank 16": LoRAConfig(rank=16, targets=("k_proj", "experts")),
        "rank 64": LoRAConfig(rank=64, alpha=16.0, targets=("embedding", "v_proj", "experts"), use_rslora=True),
        "DoRA": LoRAConfig(rank=8, targets=("attention", "experts"), use_dora=True),
        "DoRA, odd": LoRAConfig(rank=5, targets=("down_proj", "o_proj"), use_dora=True),
    },
    "one head of keys": {
        "rank 1": LoRAConfig(rank=1, targets=("model.layers.1.self_attn.q_proj",)),
        "rank 3": LoRAConfig(rank=3, targets=("k_proj", "v_proj", "embedding")),
        "rank 100": LoRAConfig(rank=100, alpha=10.0, targets=("model.layers.3.mlp.down_proj", "gate_proj", "head")),
        "DoRA": LoRAConfig(rank=7, targets=("attention", "feed_forward"), use_dora=True),
    },
}
LENGTHS: Sequence[Sequence[Sequence[int]]] = (
    ((17, 1), (40, 9)),
    ((1, 24), ()),
    ((33, 2, 5), (21, 30)),
    ((12, 7), (1, 1, 28)),
    ((3, 19), (11, 6)),
)
"""Lengths of the sequences of each tenant, by micro-batch; data-parallel ranks take turns. For the second tenant
one rank of two has one token, and no loss."""
LENGTHS_OF_BASE = ((8,), (1,))


class Layout(NamedTuple):
    """Attributes:
    settings: of the runtime's configuration.
    mixture_only: whether only a mixture of experts has it.
    """

    backend: str
    name: str
    world_size: int
    settings: Mapping[str, Any]
    mixture_only: bool = False

    @property
    def title(self) -> str:
        return f"{self.backend} {self.name}"


def _layouts() -> tuple[Layout, ...]:
    found = []
    for backend in ("native", "bridge"):
        found += [
            Layout(backend, "one rank", 1, {}),
            Layout(backend, "dp2", 2, {}),
            Layout(backend, "tp2", 2, {"parallel": {"tp": 2}}),
            Layout(backend, "ep2", 2, {"parallel": {"ep": 2}}, mixture_only=True),
            Layout(backend, "pp2 1f1b", 2, {"parallel": {"pp": 2}}),
        ]
    return (*found, Layout("native", "pp2 zbv", 2, {"parallel": {"pp": 2, "vpp": 2}, "pipeline_schedule": "zbv"}))


LAYOUTS = {layout.title: layout for layout in _layouts()}


def cases() -> list[tuple[str, str]]:
    """(layout, model) of every cell. Megatron does not cut one head of keys in two."""
    return [
        (title, model)
        for title, layout in LAYOUTS.items()
        for model in MODELS
        if not (layout.mixture_only and model != "mixture") and (title, model) != ("bridge tp2", "one head of keys")
    ]


def write_models(folder: Path) -> dict[str, Path]:
    return {name: write_tiny(family, folder / name, **settings) for name, (family, settings) in MODELS.items()}


def train_alone(model: str, path: Path) -> dict[str, Steps]:
    """Each tenant by peft, without the others."""
    found = {}
    for number, (name, config) in enumerate(TENANTS[model].items()):
        wrapped = peft_model(path, config)
        load_factors(wrapped, {key: start_of(key, value.shape, number) for key, value in peft_factors(wrapped).items()})
        halves = [[_draw(LENGTHS[number], number, step, half) for half in range(2)] for step in range(STEPS)]
        found[name] = train_with_peft(wrapped, [[*first, *second] for first, second in halves], LR)
    return found


def train_together(model: str, path: str, backend: str, settings: Mapping[str, Any]) -> dict[str, Steps]:
    """All tenants in one batch, on this rank; losses on ranks of the last stage, of the tokens of all ranks."""
    with OPENS[backend](path, **settings) as runtime:
        base = runtime.build_model(trainable=False)
        tenants = []
        for number, (name, config) in enumerate(TENANTS[model].items()):
            tenant = runtime.create_lora_adapter(base, config, OptimizerConfig(lr=LR), name=name)
            exported = runtime.export_lora_adapter(tenant)
            runtime.import_lora_adapter(tenant, {key: start_of(key, value.shape, number) for key, value in exported})
            tenants.append(tenant)
        found = {tenant.name: Steps([], []) for tenant in tenants}
        rank, size = base.data_parallel_rank, base.data_parallel_size
        for step in range(STEPS):
            data = [_micro_batch([each.lora_id for each in tenants], step, half, rank, size) for half in range(2)]
            result = runtime.forward_backward(base, data, dict.fromkeys(found, nll))
            losses = torch.tensor([result.tenants[name].loss for name in found], dtype=torch.float64) / size
            if size > 1:
                dist.all_reduce(losses, group=base.groups.dp_group)
            for tenant, loss, stepped in zip(tenants, losses.tolist(), runtime.optimizer_step(tenants), strict=True):
                found[tenant.name].losses.append(loss)
                found[tenant.name].norms.append(stepped.grad_norm)
            runtime.zero_grad(tenants)
        return found


def compare(ranks: RankPool, title: str, model: str, path: Path, alone: Mapping[str, Steps]) -> dict[str, Any]:
    """One cell: the largest relative differences over steps and ranks, of tenants without and with DoRA."""
    layout = LAYOUTS[title]
    arguments = (model, str(path), layout.backend, layout.settings)
    together = ranks.run(train_together, *arguments, world_size=layout.world_size, timeout=TIMEOUT_SECONDS)
    cell: dict[str, dict[str, float]] = {}
    for name, expected in alone.items():
        losses = [rank[name].losses for rank in together if any(rank[name].losses)]
        figures = {
            "max_loss_rel_diff": max(_difference(each, expected.losses) for each in losses),
            "max_grad_norm_rel_diff": max(_difference(rank[name].norms, expected.norms) for rank in together),
        }
        kind = "DoRA" if TENANTS[model][name].use_dora else "LoRA"
        cell[kind] = {key: max(value, cell.get(kind, figures)[key]) for key, value in figures.items()}
    return cell


def is_close(cell: Mapping[str, Mapping[str, float]]) -> bool:
    return all(
        each["max_loss_rel_diff"] < LOSS_TOLERANCE and each["max_grad_norm_rel_diff"] < NORM_TOLERANCE
        for each in cell.values()
    )


def run_lora() -> bool:
    """Writes ``lora`` of the result after every cell. Returns whether all are within the tolerances."""
    cells: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="rl-backend-parity-") as folder, closing(RankPool(2, [__name__])) as ranks:
        models = write_models(Path(folder))
        alone = {name: train_alone(name, path) for name, path in models.items()}
        for title, model in cases():
            cell = compare(ranks, title, model, models[model], alone[model])
            cells.setdefault(title, {})[model] = cell
            print(f"{title}, {model}: {_in_words(cell)}", flush=True)
            update_result("parity", {"lora": _summary(cells)})
    return all(is_close(cell) for of_layout in cells.values() for cell in of_layout.values())


def _summary(cells: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]]) -> dict[str, Any]:
    measured = [each for of_layout in cells.values() for cell in of_layout.values() for each in cell.values()]
    return {
        **{figure: max(each[figure] for each in measured) for figure in ("max_loss_rel_diff", "max_grad_norm_rel_diff")},
        "steps": STEPS,
        "lr": LR,
        "tenants": {
            model: {name: config.model_dump(mode="json", exclude_defaults=True) for name, config in configs.items()}
            for model, configs in TENANTS.items()
        },
        "layouts": dict(cells),
        "machine": machine(),
    }


def _in_words(cell: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(
        f"{kind} loss {each['max_loss_rel_diff']:.1e}, grad norm {each['max_grad_norm_rel_diff']:.1e}"
        for kind, each in cell.items()
    )


def _difference(found: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(found, expected, strict=True))


def _draw(lengths: Sequence[Sequence[int]], number: int, step: int, half: int) -> list[Tensor]:
    """The sequences of a tenant, or of the base, in one micro-batch."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * step + half)
    return [torch.randint(0, SIZES["vocab_size"], (length,), generator=generator) for length in lengths[half]]


def _micro_batch(ids: Sequence[int], step: int, half: int, rank: int, size: int) -> PackedBatch:
    """The sequences that this data-parallel rank has of all tenants, and of the base alone."""
    rows: list[TokenSequence] = []
    for number, key in enumerate([*ids, BASE_ONLY]):
        lengths = LENGTHS_OF_BASE if key == BASE_ONLY else LENGTHS[number]
        fields = {LORA_FIELD: torch.tensor(key)}
        rows += [TokenSequence(each, sequence_fields=fields) for each in _draw(lengths, number, step, half)[rank::size]]
    facts = {key: {"batch_num_tokens": float(sum(map(sum, LENGTHS[number])))} for number, key in enumerate(ids)}
    return pack(rows, {"tenants": facts, "dp_size": size})
