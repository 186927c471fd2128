"""docs/verl.md and docs/reference/verl_fields.md are true: verl takes the lines, and the tables are the decisions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adapters.verl.megatron_decisions import TRANSFORMER
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.model import find_model
from tests.support.claims import ROOT
from tests.support.small_models import FAMILIES, WRITERS
from tests.support.verl_configs import TARGET, write_config
from tests.support.verl_fields import PAGE, page_with_tables

SWITCHES = re.findall(
    r"^    (.*(?:megatron|engine).*)$",
    (ROOT / "docs" / "verl.md").read_text().split("**Without an override.**")[0],
    re.MULTILINE,
)


def test_the_tables_are_those_of_the_decisions() -> None:
    assert PAGE.read_text() == page_with_tables(), "run: python -m tests.support.verl_fields"


def test_families_whose_routers_round_logits_are_named(tmp_path: Path) -> None:
    rounding = set()
    for name in FAMILIES:
        config = read_hf_config(WRITERS[name](tmp_path / name))
        blocks = [layer.feed_forward for layer in find_model("auto", config).parse_config(config).layers]
        routers = [router for block in blocks if (router := getattr(block, "router", None)) is not None]
        if any(router.rounded_logits for router in routers):
            rounding.add(name)
    assert rounding == set(re.findall("`(.*?)`", TRANSFORMER["moe_router_dtype"].native))


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
