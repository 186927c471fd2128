"""docs/verl.md and docs/reference/verl_fields.md are true: verl takes the lines, and the tables are the decisions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapters.verl.options.decisions import ADAM, DDP, DECISIONS, TRANSFORMER
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.model import find_model
from rl_backend.runtime.bridge import config as bridge_config
from tests.support.claims import ROOT
from tests.support.small_models import FAMILIES, WRITERS
from tests.support.verl_configs import TARGET, write_config
from tests.support.verl_fields import TITLES, field_table

SWITCHES = re.findall(
    r"^    (.*(?:megatron|engine).*)$",
    (ROOT / "docs" / "verl.md").read_text().split("**Without an override.**")[0],
    re.MULTILINE,
)


ELSEWHERE = {
    TRANSFORMER: set(bridge_config.SIZES),
    ADAM: {"optimizer_cpu_offload", "optimizer_offload_fraction"},
}
"""Megatron's fields that other fields of verl's are compared with."""


@pytest.mark.parametrize("where", TITLES)
def test_the_tables_have_every_decision(where: str) -> None:
    table, of_megatron = field_table(where), where in (TRANSFORMER, DDP, ADAM)
    if of_megatron:
        assert table.keys() == DECISIONS[where].keys() | ELSEWHERE.get(where, set())
    for name, decision in DECISIONS[where].items():
        values = [f"`{value!r}`" for value in decision.accepts]
        if not of_megatron:
            assert table[name] == (f"refused unless {' or '.join(values)}: {decision.reason}",)
            continue
        accepts, native, bridge = table[name]
        assert accepts == ", ".join(values), name
        assert native.startswith("no meaning") == decision.is_kernel, name
        assert decision.reason is None or decision.reason == native == bridge, name
    others = table.keys() - DECISIONS[where].keys()
    assert of_megatron or not any(table[name][0].startswith("refused unless") for name in others)


def test_families_whose_routers_round_logits_are_named(tmp_path: Path) -> None:
    rounding = set()
    for name in FAMILIES:
        config = read_hf_config(WRITERS[name](tmp_path / name))
        blocks = [layer.feed_forward for layer in find_model("auto", config).parse_config(config).layers]
        routers = [router for block in blocks if (router := getattr(block, "router", None)) is not None]
        if any(router.rounded_logits for router in routers):
            rounding.add(name)
    assert rounding == set(re.findall("`(.*?)`", field_table(TRANSFORMER)["moe_router_dtype"][1]))


def lines(*starts: str) -> list[str]:
    found = [part for line in SWITCHES for part in line.partition(" #")[0].split() if part.startswith(starts)]
    assert len(found) >= len(starts), "the page has lines for each"
    return found


def test_the_lines_for_main_ppo_put_each_role_on_our_configuration(tmp_path: Path) -> None:
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass

    overrides = lines("model_engine=", "actor_rollout_ref.", "critic.", "+actor_rollout_ref.")
    overrides.append(f"critic.model.path={write_config('qwen3', 'Qwen3ForCausalLM', tmp_path)}")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=overrides)
    roles = [config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.critic]
    engines = [omega_conf_to_dataclass(role.megatron) for role in roles]
    assert {type(engine).__name__ for engine in engines} == {TARGET.rpartition(".")[2]}
    assert [engine.backend for engine in engines] == ["bridge", "native", "native"]
    assert (engines[0].dtype, engines[0].backend_options) == ("float32", {"pipeline_schedule": "zbv"})


def test_the_lines_for_sft_put_it_on_our_configuration() -> None:
    hydra = pytest.importorskip("hydra")
    from verl.utils.config import omega_conf_to_dataclass

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("sft_trainer_engine", overrides=lines("engine=", "optim=", "engine._target_"))
    assert type(omega_conf_to_dataclass(config.engine)).__name__ == TARGET.rpartition(".")[2]
