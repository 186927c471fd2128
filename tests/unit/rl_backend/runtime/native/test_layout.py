"""Where the stages and parameters of a native model lie, what a family may get wrong, and what a rank has of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backend.contracts import (
    ConfigError,
    NativeConfig,
    PackedWeight,
    RoutedLayers,
    UnsupportedError,
)
from rl_backend.runtime.native import layout
from rl_backend.runtime.native.build import _parameters
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.native.routers import _places_on_ranks
from tests.support.outside_plugin import BIGRAM
from tests.support.rank_threads import run_ranks


def native(schedule: str = "auto", layers: tuple[int, ...] | None = None, **parallel: int) -> NativeConfig:
    return NativeConfig(device="cpu", parallel=parallel, pipeline_schedule=schedule, pipeline_layers=layers)


def family(**changes: Any) -> Any:
    """Of models that are a number of layers."""
    facts = {"name": "layered", "num_layers": lambda layers: layers, "stage_copies": {}, "check_layout": lambda *_: None}
    return SimpleNamespace(**{**facts, "float32_head": False, **changes})


@pytest.mark.parametrize(
    ("config", "name", "multiple", "last"),
    [
        (native(), None, 1, [True]),
        (native(pp=3), "1f1b", 1, [False, False, True]),
        (native(vpp=2), "interleaved-1f1b", 1, [True]),
        (native(pp=3, vpp=2), "interleaved-1f1b", 3, [False, False, True]),
        (native("1f1b"), "1f1b", 1, [True]),
        (native("zb-h1", pp=2), "zb-h1", 1, [False, True]),
        (native("zbv", pp=3, vpp=2), "zbv", 1, [True, False, False]),
        (native("dualpipev", pp=2, vpp=2), "dualpipev", 4, [True, False]),
    ],
    ids=["none", "1f1b", "one rank of several stages", "interleaved", "asked for", "zb-h1", "zbv", "dualpipev"],
)
def test_a_schedule_says_how_many_micro_batches_it_takes_and_who_has_the_loss(
    config: NativeConfig, name: str | None, multiple: int, last: list[bool]
) -> None:
    assert layout.schedule_name(config) == name
    assert (layout.algorithm(config) is None) is (name is None)
    assert layout.micro_batch_multiple(config) == multiple
    assert [layout.has_last_stage(config, rank) for rank in range(config.parallel.pp)] == last


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (native(pp=3), [{0: (0, 1)}, {1: (2, 3, 4)}, {2: (5, 6)}]),
        (native(pp=2, vpp=2), [{0: (0, 1), 2: (4, 5)}, {1: (2, 3), 3: (6,)}]),
        (native("zbv", (1, 2, 3, 1), pp=2, vpp=2), [{0: (0,), 3: (6,)}, {1: (1, 2), 2: (3, 4, 5)}]),
        (native(), [{}]),
    ],
    ids=["loop", "interleaved", "v", "none"],
)
def test_stages_have_their_layers_and_the_ends_know_that_they_are(
    config: NativeConfig, expected: list[dict[int, tuple[int, ...]]]
) -> None:
    found = [layout.model_stages(family(), 7, config, rank) for rank in range(config.parallel.pp)]
    assert [{stage: tuple(each.layers) for stage, each in stages.items()} for stages in found] == expected
    last = config.parallel.pp * config.parallel.vpp - 1
    for stages in found:
        assert all((each.first, each.last) == (stage == 0, stage == last) for stage, each in stages.items())


def test_layers_of_stages_are_refused_where_there_are_no_stages() -> None:
    for config, each in ((native(layers=(7,)), family()), (native(layers=(3, 4), pp=2), family(num_layers=None))):
        with pytest.raises(ConfigError, match=r"NativeConfig\.pipeline_layers=.*without a pipeline there are no stages"):
            layout.model_stages(each, 7, config, 0)
    assert layout.model_stages(family(num_layers=None), 7, native(pp=2), 1) == {}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (native(pp=2), {}, None),
        (native(tp=2), {"check_layout": None}, r"ParallelConfig\.tp=2: model family 'layered' .*ModelFamily\.check_layout$"),
        (native(ep=2), {"check_layout": None}, r"ParallelConfig\.ep=2: .*ModelFamily\.check_layout$"),
        (native(pp=2), {"num_layers": None}, r"ParallelConfig\.pp=2: .*ModelFamily\.num_layers$"),
        (native(vpp=2), {"num_layers": None}, r"ParallelConfig\.vpp=2: .*ModelFamily\.num_layers$"),
        (
            native("1f1b"),
            {"num_layers": None},
            r"pipeline_schedule='1f1b': model family 'layered' has no stages; use 'auto'",
        ),
        (native(), {"num_layers": None, "check_layout": None}, None),
        (native(pp=8), {}, r"ParallelConfig\.pp=8: pp \* vpp stages need as many layers, the model has 7"),
        (native("zbv", pp=2), {}, r"zbv"),
        (native("1f1b", pp=2).replace(reduce_gradients="per_micro_batch"), {}, None),
        (
            native("zb-h1", pp=2).replace(reduce_gradients="per_micro_batch"),
            {},
            r"reduce_gradients='per_micro_batch': pipeline_schedule='zb-h1' computes all gradients .*; use 'once', or",
        ),
    ],
    ids=str,
)
def test_layouts_that_a_family_does_not_have_are_refused(
    config: NativeConfig, changes: dict[str, Any], message: str | None
) -> None:
    if message is None:
        layout.check_model_layout(family(**changes), 7, config)
        return
    with pytest.raises(ConfigError, match=message):
        layout.check_model_layout(family(**changes), 7, config)


def test_a_head_in_float32_is_refused_of_a_family_without_and_the_family_is_asked_for_its_layout() -> None:
    asked: list[Any] = []
    config = NativeConfig(device="cpu", param_dtype="bfloat16", head_in_float32=True)
    with pytest.raises(ConfigError, match=r"head_in_float32=True: model family 'layered' computes its head in param_dtype"):
        layout.check_model_layout(family(), 7, config)
    layout.check_model_layout(family(float32_head=True, check_layout=lambda *given: asked.append(given)), 7, config)
    assert asked == [(7, config.parallel)]


def test_every_rank_knows_the_layouts_of_all_stages() -> None:
    names = [["first", "shared"], ["second", "shared"]]

    def of_rank(group: dist.ProcessGroup) -> dict[str, layout.TensorLayout]:
        rank = group.rank()
        mesh = SimpleNamespace(mesh=torch.tensor([0]))
        groups: Any = SimpleNamespace(mesh=mesh, pp_group=group)
        parameters = {name: torch.zeros(2 + rank, dtype=(torch.float32, torch.bfloat16)[rank]) for name in names[rank]}
        return layout.model_layouts(parameters, groups, {"second"})

    for found in run_ranks(of_rank):
        assert list(found) == ["first", "shared", "second"]
        facts = [(each.shards.shape, each.dtype, each.in_float32) for each in found.values()]
        assert facts == [((2,), torch.float32, False), ((3,), torch.bfloat16, False), ((3,), torch.bfloat16, True)]
    elsewhere: Any = SimpleNamespace(mesh=SimpleNamespace(mesh=torch.tensor([[0, 1]])), pp_group=None)
    with pytest.raises(
        UnsupportedError, match=r"^x is laid out over the ranks \(0,\) of \(0, 1\); parallelize must"
    ) as caught:
        layout.model_layouts({"x": torch.zeros(1)}, elsewhere)
    assert caught.value.details["parameter"] == "x"


class Two(nn.Module):
    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if name.startswith("buffer"):
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor))


def test_parameters_come_in_the_order_of_export_with_copies_last() -> None:
    modules = [Two(b=torch.zeros(1), head=torch.zeros(3)), Two(a=torch.zeros(2))]
    names: Any = {"a": "x.a", "elsewhere": "x.e", "b": "x.b"}
    found = _parameters(modules, family(stage_copies={"head": "a"}), names)
    assert list(found) == ["a", "b", "head"] and found["head"].shape == (3,)


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        (Two(a=torch.zeros(1), buffer=torch.zeros(1)), {"a": "x"}, r"it has the buffers buffer; compute them in forward"),
        (Two(a=torch.zeros(1), z=torch.zeros(1)), {"a": "x"}, r"its weight_names does not cover its param.* name \['z'\]"),
        (
            Two(a=torch.zeros(3, 2)),
            {"a": PackedWeight((2,), ("x", "y"))},
            r"its weight_names packs \(2,\) tensors into a, which has shape \(3, 2\); the first dimensions must be the same",
        ),
    ],
    ids=["buffer", "unnamed", "packed"],
)
def test_what_a_family_got_wrong_is_said(module: nn.Module, names: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"model family 'layered': {message}"):
        _parameters([module], family(), names)
    good: Any = {"a": PackedWeight((3,), ("x", "y", "z"))}
    assert list(_parameters([Two(a=torch.zeros(3, 2))], family(), good)) == ["a"]


def test_layers_with_experts_are_counted_in_the_order_of_each_ranks_stages() -> None:
    handle: Any = object.__new__(NativeHandle)
    routers = RoutedLayers(4, 1, (False, True, True, False, True, True, True))
    handle.stages, handle.family, handle.architecture = {}, family(), 7
    assert _places_on_ranks(handle, routers) == [[0, 1, 2, 3, 4]]
    handle.stages = {0: nn.Module()}
    handle.config = SimpleNamespace(options=lambda kind: native("zbv", (2, 2, 1, 2), pp=2, vpp=2))
    # Layers 0 and 1, and 5 and 6; 2 and 3, and 4.
    assert _places_on_ranks(handle, routers) == [[0, 3, 4], [1, 2]]


def test_a_family_from_outside_is_described_with_its_options(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bigram", "vocab_size": 16}')
    options = {"model": "bigram", "model_cfg": {"scale": 2.0}, "log_prob_chunk_tokens": 77, "param_dtype": "bfloat16"}
    model = layout.describe_model(tmp_path, NativeConfig(device="cpu", **options), "log_probs")
    assert model.family is BIGRAM and model.architecture == 16 and model.hf_config["vocab_size"] == 16
    settings: Any = model.settings
    assert settings.options.scale == 2.0 and (settings.head, settings.layer_dtype) == ("log_probs", None)
    assert 77 in settings and list(model.weight_names) == ["table.weight", "out.weight", "out.bias"]
    defaults: Any = layout.describe_model(tmp_path, NativeConfig(device="cpu", head_in_float32=False), "log_probs").settings
    assert defaults.options.scale == 1.0
    in_float32 = NativeConfig(device="cpu", param_dtype="bfloat16", head_in_float32=True)
    assert layout.describe_model(tmp_path, in_float32, "log_probs").settings.layer_dtype == torch.bfloat16
    with pytest.raises(UnsupportedError, match="values"):
        layout.describe_model(tmp_path, NativeConfig(device="cpu"), "values")


@pytest.mark.parametrize(
    ("settings", "compiles", "named"),
    [
        ({}, True, []),
        ({"parallel": {"pp": 2}}, True, []),
        ({"activation_checkpointing": "full"}, True, []),
        ({}, False, ["ModelFamily.compiles"]),
        ({"activation_checkpointing": "selective"}, True, ["activation_checkpointing='selective'"]),
        ({"parallel": {"pp": 2}, "pipeline_schedule": "zb-h2"}, True, ["pipeline_schedule='zb-h2'"]),
        (
            {"parallel": {"pp": 2}, "pipeline_schedule": "zb-h1", "activation_checkpointing": "selective"},
            False,
            ["pipeline_schedule='zb-h1'", "ModelFamily.compiles", "activation_checkpointing='selective'"],
        ),
    ],
    ids=str,
)
def test_all_that_keeps_layers_from_being_compiled_is_named(
    settings: dict[str, Any], compiles: bool, named: list[str]
) -> None:
    config = NativeConfig(device="cpu", compile=True, **settings)
    if not named:
        layout.check_model_layout(family(compiles=compiles), 7, config)
        return
    with pytest.raises(ConfigError, match=r"^NativeConfig\.compile=True: ") as failure:
        layout.check_model_layout(family(compiles=compiles), 7, config)
    every = ("pipeline_schedule=", "ModelFamily.compiles", "activation_checkpointing=")
    assert [word in str(failure.value) for word in every] == [any(each.startswith(word) for each in named) for word in every]
    assert all(each in str(failure.value) for each in named)
    # Without it none of these is a reason.
    layout.check_model_layout(family(compiles=compiles), 7, config.replace(compile=False))
