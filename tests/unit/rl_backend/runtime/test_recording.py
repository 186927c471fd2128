"""Outputs of modules under their Hugging Face paths, for any model whose parameters have Hugging Face names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_backend.runtime.recording import module_paths, record_outputs

HIDDEN = 6


class FusedAttention(nn.Module):
    """One projection of queries, keys and values, as Megatron has it; returns (output, bias) as its layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.proj = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.proj(self.qkv(x)), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.attention = FusedAttention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, HIDDEN)
        self.layers = nn.ModuleList([Layer()])
        self.head = nn.Linear(HIDDEN, 9, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


NAMES = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "layers.0.norm.weight": ("model.layers.0.input_layernorm.weight",),
    "layers.0.attention.qkv.weight": tuple(f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"),
    "layers.0.attention.proj.weight": ("model.layers.0.self_attn.o_proj.weight",),
    "head.weight": ("lm_head.weight",),
}


def test_a_module_has_the_longest_prefix_that_the_names_of_its_parameters_share() -> None:
    assert module_paths(Model(), NAMES) == {
        "embedding": "model.embed_tokens",
        "layers": "model.layers.0",
        "layers.0": "model.layers.0",
        "layers.0.norm": "model.layers.0.input_layernorm",
        "layers.0.attention": "model.layers.0.self_attn",
        "layers.0.attention.qkv": "model.layers.0.self_attn",
        "layers.0.attention.proj": "model.layers.0.self_attn.o_proj",
        "head": "lm_head",
    }


def test_hidden_states_are_kept_in_the_order_of_computation_and_the_outermost_module_of_a_path_counts() -> None:
    model = Model()
    ids = torch.tensor([[1, 2, 3]])
    with record_outputs(model, NAMES, HIDDEN) as outputs:
        model(ids)
    assert list(outputs) == [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.self_attn",
        "model.layers.0",
    ]
    embedded = model.embedding(ids)
    layer: Any = model.layers[0]
    torch.testing.assert_close(outputs["model.layers.0"], layer(embedded))
    torch.testing.assert_close(outputs["model.layers.0.self_attn"], layer.attention(layer.norm(embedded))[0])
    assert not any(output.requires_grad for output in outputs.values())


class Stage(nn.Module):
    """Of a pipeline: the layers from ``first`` on, and before them the embedding."""

    def __init__(self, first: int, count: int, *, embeds: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, HIDDEN) if embeds else nn.Identity()
        self.layers = nn.ModuleDict({str(first + index): Layer() for index in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize(("first", "count", "embeds"), [(1, 1, False), (2, 3, False), (0, 2, True), (0, 1, True)])
def test_a_stage_gives_outputs_of_the_modules_of_the_whole_model_alone(first: int, count: int, embeds: bool) -> None:
    stage, numbers = Stage(first, count, embeds=embeds), range(first, first + count)
    names = {"embedding.weight": ("model.embed_tokens.weight",)} if embeds else {}
    for number in numbers:
        prefix = f"model.layers.{number}"
        names |= {
            f"layers.{number}.norm.weight": (f"{prefix}.input_layernorm.weight",),
            f"layers.{number}.attention.qkv.weight": tuple(f"{prefix}.self_attn.{kind}_proj.weight" for kind in "qkv"),
            f"layers.{number}.attention.proj.weight": (f"{prefix}.self_attn.o_proj.weight",),
        }
    with record_outputs(stage, names, HIDDEN) as outputs:
        hidden = stage(torch.tensor([[1, 2, 3]]) if embeds else torch.randn(1, 3, HIDDEN))
    parts = ("input_layernorm", "self_attn.o_proj", "self_attn")
    assert list(outputs) == [
        *(["model.embed_tokens"] if embeds else []),
        *(f"model.layers.{number}{part}" for number in numbers for part in (*(f".{part}" for part in parts), "")),
    ]
    torch.testing.assert_close(outputs[f"model.layers.{numbers[-1]}"], hidden)


def test_hooks_are_gone_after_an_error() -> None:
    model = Model()
    with pytest.raises(IndexError), record_outputs(model, NAMES, HIDDEN):
        model(torch.tensor([[100]]))
    assert not any(module._forward_hooks for module in model.modules())


class Gives(nn.Module):
    """Gives what it is told, whatever it takes."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def test_of_modules_beside_each_other_that_share_a_path_the_first_to_end_counts() -> None:
    """The name of the second begins that of the first, and it is inside of none."""
    first, second = torch.ones(2, HIDDEN), torch.zeros(2, HIDDEN)
    model = nn.ModuleDict({"gate": Gives(second), "gate_up": Gives(first)})
    names = {f"{name}.weight": ("model.mlp.gate.weight",) for name in ("gate", "gate_up")}
    with record_outputs(model, names, HIDDEN) as outputs:
        for name in ("gate_up", "gate", "gate_up"):
            model[name](first)
    assert list(outputs) == ["model.mlp.gate"] and torch.equal(outputs["model.mlp.gate"], first)


def test_outputs_are_rows_of_hidden_states_alone_or_the_first_of_a_tuple_and_copies() -> None:
    rows = torch.ones(2, 3, HIDDEN)
    given: dict[str, Any] = {
        "rows": rows,
        "tuple": (2 * rows, None),
        "list": [rows],
        "second": (None, rows),
        "empty": (),
        "nothing": None,
        "vector": rows[0, 0],
        "wide": torch.ones(2, HIDDEN + 1),
    }
    model = nn.ModuleDict({f"m_{name}": Gives(output) for name, output in given.items()})
    names: dict[str, tuple[str, ...]] = {f"m_{name}.weight": (f"model.{name}.weight",) for name in given}
    # Of a parameter that another rank has.
    names["elsewhere.weight"] = ("model.elsewhere.weight",)
    with record_outputs(model, names, HIDDEN) as outputs:
        for module in model.values():
            module(rows)
        rows.zero_()
    assert {path: output.unique().tolist() for path, output in outputs.items()} == {
        "model.rows": [1.0],
        "model.tuple": [2.0],
    }
