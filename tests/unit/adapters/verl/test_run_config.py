"""What is refused of a whole run, told from plain configurations; and which roles are ours."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adapters.verl.options.megatron import ModelFacts, layers_or_period
from adapters.verl.options.settings import require_contents
from adapters.verl.registration import is_ours
from adapters.verl.run_config import require_run
from adapters.verl.trainers import _change
from rl_backend.contracts import ConfigError

OURS = "adapters.verl.engine_config.RLBackendEngineConfig"


class Node(dict[str, Any]):
    """A part of a configuration, read by keys or by attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def role(target: str | None = OURS, strategy: str = "megatron", **checkpoint: Any) -> Node:
    return Node(strategy=strategy, megatron=Node(_target_=target), checkpoint=Node(**checkpoint))


def run(**changes: Any) -> Node:
    lora = Node(changes.pop("lora", {}))
    model = Node(lora=lora, lora_rank=changes.pop("lora_rank", 0))
    rollout = Node(checkpoint_engine=Node(backend=changes.pop("engine", "naive")))
    mode = changes.pop("trainer_mode", "sync")
    config = Node(
        actor_rollout_ref=Node(actor=changes.pop("actor", role()), model=model, rollout=rollout),
        algorithm=Node(rollout_correction=changes.pop("correction", None)),
        trainer=Node(use_v1=changes.pop("use_v1", True), v1=Node(trainer_mode=mode)),
        distillation=changes.pop("distillation", None),
    )
    assert not changes
    return config


def top_k(mode: str, *, enabled: bool = True) -> Node:
    return Node(enabled=enabled, distillation_loss=Node(loss_mode=mode))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"trainer_mode": "separate_async"}, r"^trainer\.v1\.trainer_mode='separate_async': has log-probs computed with"),
        ({"trainer_mode": "separate_async", "correction": Node(bypass_mode=False)}, "trainer_mode='separate_async'"),
        ({"trainer_mode": "separate_async", "correction": Node(bypass_mode=True)}, None),
        ({"trainer_mode": "separate_async", "use_v1": False}, None),
        ({"lora_rank": 4, "engine": "delta_sharded"}, "backend='delta_sharded': with .*: delta_sharded sends changes"),
        ({"lora": {"rank": 4, "merge": True}, "engine": "delta_sharded"}, "backend='delta_sharded': with .*merge=True"),
        ({"engine": "delta_sharded"}, None),
        ({"lora": {"rank": 0, "merge": False}, "engine": "nccl"}, None),
        (
            {"lora": {"rank": 4}, "engine": "nccl"},
            "backend='nccl': with .*merge=False.*others send whole weights",
        ),
        ({"lora_rank": 4, "engine": "nccl"}, "backend='nccl': with .*merge=False"),
        ({"lora_rank": 4, "lora": {"merge": True}, "engine": "nccl"}, None),
        ({"lora": {"rank": 4, "type": "dora"}}, "merge=False: .*rollouts serve none of type dora"),
        ({"lora": {"rank": 4, "type": "dora", "merge": True}}, None),
        ({"lora": {"rank": 4, "type": "lora"}}, None),
        ({"lora": {"rank": 0, "type": "dora"}, "lora_rank": 4}, None),
        ({"distillation": top_k("forward_kl_topk")}, r"loss_mode='forward_kl_topk': reads a batch's logits"),
        ({"distillation": top_k("forward_kl_topk", enabled=False)}, None),
        ({"distillation": top_k("k3")}, None),
    ],
)
def test_a_run_is_refused_by_the_field_that_our_engine_cannot_honour(changes: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        require_run(run(**changes))
        return
    with pytest.raises(ConfigError, match=problem):
        require_run(run(**changes))
    require_run(run(**changes, actor=role("verl.workers.config.McoreEngineConfig")))


@pytest.mark.parametrize(
    ("target", "strategy", "vendor", "ours"),
    [
        (OURS, "megatron", None, True),
        ("adapters.verl.engine_config.Subclass", "megatron", None, True),
        (OURS, "fsdp2", None, False),
        ("verl.McoreEngineConfig", "megatron", None, False),
        (None, "megatron", None, False),
        ("verl.McoreEngineConfig", "megatron", "rl_backend_bridge", True),
        ("verl.McoreEngineConfig", "megatron", "somebody", False),
        ("verl.McoreEngineConfig", "fsdp", "rl_backend", False),
        (f"other.{OURS}", "megatron", None, False),
    ],
)
def test_a_role_is_ours_by_its_class_or_by_the_vendor(
    monkeypatch: pytest.MonkeyPatch, target: str | None, strategy: str, vendor: str | None, ours: bool
) -> None:
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    if vendor:
        monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    assert is_ours(role(target, strategy)) is ours


@pytest.mark.parametrize(
    ("actor", "critic", "use_critic", "finished"),
    [
        (role(async_save=True), role(async_save=True), True, ["actor", "critic"]),
        (role(async_save=True), role(async_save=True), False, ["actor"]),
        (role(async_save=False), role(async_save=True), True, ["critic"]),
        (role(), role("verl.Other", async_save=True), True, []),
    ],
)
def test_saves_of_roles_that_write_in_the_background_are_finished_once_training_has_ended(
    actor: Node, critic: Node, use_critic: bool, finished: list[str]
) -> None:
    calls: list[Any] = []

    class Trainer:
        config = Node(actor_rollout_ref=Node(actor=actor), critic=critic)
        actor_rollout_wg = SimpleNamespace(load_checkpoint=lambda path: calls.append(("actor", path)))
        critic_wg = SimpleNamespace(load_checkpoint=lambda path: calls.append(("critic", path)))

        def __init__(self) -> None:
            self.use_critic = use_critic

        def fit(self, *given: Any, **options: Any) -> Any:
            calls.append("fit")
            if given == ("fail",):
                raise ValueError("mine")
            return given, options

        def _save_checkpoint(self) -> None:
            calls.append("save")

    module = ModuleType("trainers")
    module.Trainer = Trainer  # type: ignore[attr-defined]
    _change("Trainer", module)
    changed = Trainer.fit
    _change("Trainer", module)
    assert Trainer.fit is changed
    assert Trainer().fit(1, a=2) == ((1,), {"a": 2})
    assert calls == ["fit", *((name, None) for name in finished)]
    calls.clear()
    with pytest.raises(ValueError, match="mine"):
        Trainer().fit("fail")
    assert calls == ["fit"]
    if not actor.checkpoint.get("async_save"):
        Trainer()._save_checkpoint()
        assert calls == ["fit", "save"]


@pytest.mark.parametrize(
    ("contents", "sharded", "problem"),
    [
        ({"model"}, False, None),
        ({"hf_model"}, True, None),
        ({"model", "optimizer", "extra", "hf_model"}, True, None),
        (set(), False, None),
        ({"model", "other"}, False, r"checkpoint\.save_contents=\['model', 'other'\]: expected \['extra', 'model', 'opt"),
        ({"model"}, True, "restored together, or 'hf_model' alone for weights"),
        ({"extra"}, False, "restored together, or 'model' or 'hf_model' alone for weights"),
        ({"model", "extra", "hf_model"}, False, r"=\['extra', 'hf_model', 'model'\]: .* are one training state"),
    ],
)
def test_contents_are_weights_alone_or_a_whole_state(contents: set[str], sharded: bool, problem: str | None) -> None:
    if problem is None:
        require_contents("save_contents", frozenset(contents), sharded=sharded)
        return
    with pytest.raises(ConfigError, match=problem):
        require_contents("save_contents", frozenset(contents), sharded=sharded)


def test_a_model_is_the_language_model_with_its_experts_and_the_engines_dtype() -> None:
    facts = ModelFacts(SimpleNamespace(model_type="x", num_hidden_layers=4, num_experts=0, n_routed_experts=3), "float32")
    assert (facts.model_type, facts.num_layers, facts.has_experts) == ("x", 4, True)
    assert facts.of_dtype == {"bf16": False, "fp16": False, "params_dtype": "torch.float32"}
    unknown = ModelFacts(SimpleNamespace(num_experts=None), "bfloat16")
    assert (unknown.model_type, unknown.num_layers, unknown.has_experts) == (None, 0, False)
    assert unknown.of_dtype["bf16"] is True


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([1, 1, 1, 0], 4),
        ([1, 1, 0] * 2, 3),
        ((1, 0, 1, 0), 2),
        ([1, 0, 0, 1], [1, 0, 0, 1]),
        ([0, 0, 0], 1),
        ([1, 1], 3),
        (None, None),
        (4, 4),
    ],
)
def test_the_period_of_layers_is_a_number_or_their_list(layers: Any, expected: Any) -> None:
    assert layers_or_period(layers) == expected
