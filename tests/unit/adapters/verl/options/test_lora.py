"""What becomes of verl's LoRA options: each is honoured, or refused by name."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from adapters.verl.options.decisions import DECISIONS, LORA, require_supported
from adapters.verl.options.lora import OPTIONS, LoRASettings, TargetModules
from adapters.verl.options.settings import engine_settings
from adapters.verl.run_config import require_run
from rl_backend.contracts import ConfigError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime.bridge.installed import import_megatron
from tests.support.matrix import sampled
from tests.support.models import write_tiny
from tests.support.verl_configs import ROLES, TARGET, RoleConfigs, changed, role_configs, write_config
from tests.support.verl_fields import field_table

REFUSED = list(DECISIONS[LORA])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config("qwen3", "Qwen3ForCausalLM", tmp_path_factory.mktemp("verl") / "dense")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def lora_of(configs: RoleConfigs) -> LoRASettings | None:
    return engine_settings(*configs[:4], model_type=configs.model_type).lora


def test_every_option_of_verls_yaml_and_of_megatron_bridge_is_decided() -> None:
    import_megatron()
    import verl

    yaml = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/model/hf_model.yaml")
    renamed = {"dim": "rank", "lora_dtype": "dtype"}
    known = {str(name) for name in yaml["lora"]}
    for kind in ("lora.LoRA", "canonical_lora.CanonicalLoRA"):
        module, _, name = kind.partition(".")
        fields = dataclasses.fields(getattr(importlib.import_module(f"megatron.bridge.peft.{module}"), name))
        # Fields of the matcher's own are not options.
        known |= {renamed.get(each.name, each.name) for each in fields if each.init} - {
            "canonical_mapping",
            "params_to_save",
        }
    assert known | {"fully_sharded_loras"} == set(OPTIONS) == field_table(LORA).keys()


def test_verls_yaml_asks_for_no_adapter_and_a_rank_for_one_with_its_defaults(dense: Path) -> None:
    assert [lora_of(role_configs(role, dense)) for role in ROLES] == [None] * 4
    found = lora_of(role_configs("actor", dense, "actor_rollout_ref.model.lora.rank=8"))
    assert found == LoRASettings(
        LoRAConfig(rank=8, alpha=32, seed=42),
        TargetModules(
            "HFModelConfig.lora.target_modules", "megatron", ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
        ),
        ("xavier", "zero"),
        merge=False,
        adapter_path=None,
    )


def test_options_reach_the_tenant(dense: Path, adapter: Path) -> None:
    values = {
        "rank": 4,
        "alpha": 6,
        "dropout": 0.25,
        "type": "canonical_lora",
        "target_modules": [],
        "exclude_modules": ["linear_k", "*.layers.0.*"],
        "lora_A_init_method": "normal",
        "lora_B_init_method": "kaiming",
        "dtype": "bfloat16",
        "merge": True,
        "adapter_path": str(adapter),
        "fully_sharded_loras": True,
    }
    found = lora_of(
        changed(role_configs("sft", dense), engine__seed=7, **{f"model__lora__{k}": v for k, v in values.items()})
    )
    assert found is not None
    assert found.config == LoRAConfig(rank=4, alpha=6, dropout=0.25, seed=7)
    assert (found.targets.include, found.targets.exclude) == ((), ("linear_k", "*.layers.0.*"))
    assert (found.initial, found.merge, found.adapter_path) == (("normal", "kaiming"), True, str(adapter))
    assert found.for_rollout() == {
        "task_type": "CAUSAL_LM",
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 6,
        "target_modules": "all-linear",
        "bias": "none",
        "lora_dropout": 0.25,
    }


def test_pefts_options_reach_the_tenant_where_megatrons_rank_is_0(dense: Path, adapter: Path) -> None:
    values = {"lora_rank": 4, "lora_alpha": 6, "lora__merge": True, "lora_adapter_path": str(adapter)}
    sft = changed(role_configs("sft", dense), **{f"model__{name}": value for name, value in values.items()})
    found = lora_of(sft)
    assert found is not None
    assert found.config == LoRAConfig(rank=4, alpha=6, seed=42)
    assert (found.targets.include, found.targets.experts) == ((), False)
    assert (found.initial, found.merge, found.adapter_path) == (("kaiming", "zero"), True, str(adapter))
    by_name = lora_of(changed(sft, model__target_modules=["q_proj", "v_proj"], model__exclude_modules=r".*\.0\..*"))
    assert by_name is not None
    assert (by_name.targets.naming, by_name.targets.include) == ("peft", ("q_proj", "v_proj"))
    assert (by_name.targets.naming_of_excluded, by_name.targets.exclude) == ("expression", (r".*\.0\..*",))
    assert lora_of(changed(sft, model__lora__rank=4)) == lora_of(
        changed(
            role_configs("sft", dense), model__lora__rank=4, model__lora__merge=True, model__lora_adapter_path=str(adapter)
        )
    )


def test_dora_is_asked_for_by_type(dense: Path) -> None:
    found = lora_of(
        role_configs("actor", dense, "actor_rollout_ref.model.lora.rank=8", "actor_rollout_ref.model.lora.type=dora")
    )
    assert found is not None and found.config.use_dora


def test_a_reference_has_no_adapter_of_its_own(dense: Path) -> None:
    assert lora_of(role_configs("ref", dense, "actor_rollout_ref.model.lora.rank=8")) is None


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_option_is_refused_by_name(name: str) -> None:
    require_supported(LORA, SimpleNamespace(**{name: DECISIONS[LORA][name].accepts[0]}))
    with pytest.raises(ConfigError, match=rf"HFModelConfig\.lora\.{name}='another': .*leave it at"):
        require_supported(LORA, SimpleNamespace(**{name: "another"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora__type": "vlm_lora"}, r"lora\.type='vlm_lora': expected one of \('lora', 'canonical_lora', 'dora'"),
        (
            {"lora__type": "dora", "lora__lora_B_init_method": "normal"},
            r"lora_B_init_method='normal': expected one of",
        ),
        ({"lora__lora_A_init_method": "gauss"}, r"lora\.lora_A_init_method='gauss': expected one of \('xavier', 'normal'"),
        ({"lora__dtype": "float16"}, r"lora\.dtype='float16': expected one of \(None, 'bfloat16'"),
        ({"lora__a2a_experimental": True}, r"HFModelConfig\.lora\.a2a_experimental=True: adapters here need no"),
        ({"lora__dropout_position": "post"}, r"HFModelConfig\.lora\.dropout_position='post'"),
        ({"lora__nonsense": 1}, r"HFModelConfig\.lora\.nonsense=1: verl's options are type, rank"),
        ({"lora__target_modules": "linear_qkv"}, r"target_modules='linear_qkv': expected a list of names"),
        ({"lora__exclude_modules": "lm_head"}, r"exclude_modules='lm_head': expected a list of names"),
        ({"lora__target_modules": [1]}, r"target_modules=\[1\]: expected a list of names"),
        ({"lora__exclude_modules": ["linear_q"]}, r"exclude_modules=\['linear_q'\]: read with an empty target_modules only"),
        ({"lora__alpha": 0}, r"LoRAConfig\.alpha=0"),
        ({"lora__adapter_path": "/nowhere"}, r"lora\.adapter_path='/nowhere': expected one directory in peft's format"),
        ({"lora_rank": 8}, r"HFModelConfig\.lora_rank=8: lora\.rank=4 is read"),
        ({"lora__rank": 0, "lora__adapter_path": "x"}, r"lora\.adapter_path='x': expected .* and the adapter's rank"),
        ({"lora__rank": 0, "lora_adapter_path": "x"}, r"lora_adapter_path='x': expected .* and the adapter's rank"),
        ({"lora__rank": 0, "lora_rank": 4, "lora_adapter_path": "x"}, r"lora_adapter_path='x': expected one directory"),
        ({"lora__rank": 0, "lora_rank": 4, "lora__adapter_path": "x"}, r"lora\.adapter_path='x': expected one directory"),
        ({"target_parameters": ["experts.down_proj"]}, r"target_parameters=\['experts\.down_proj'\]: adapters belong to"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(values: dict[str, Any], message: str, dense: Path) -> None:
    actor = role_configs("actor", dense, "actor_rollout_ref.model.lora.rank=4")
    with pytest.raises(ConfigError, match=message):
        lora_of(changed(actor, **{f"model__{name}": value for name, value in values.items()}))


@pytest.mark.parametrize(
    ("rank", "contents", "message"),
    [
        (0, {"save_lora_only": True}, r"save_lora_only=True: there is no LoRA"),
        (4, {"save_lora_only": True, "save_contents": ["hf_model"]}, r"save_lora_only=True: hf_model in save_contents"),
        (4, {"load_contents": ["hf_model"]}, r"load_contents=\['hf_model'\]: an adapter cannot be read"),
        (4, {"save_lora_only": True, "load_contents": ["model", "hf_model"]}, ""),
    ],
)
def test_contents_that_an_adapter_does_not_have_are_refused(
    rank: int, contents: dict[str, Any], message: str, dense: Path
) -> None:
    actor = role_configs("actor", dense, f"actor_rollout_ref.model.lora.rank={rank}")
    given = changed(actor, **{f"checkpoint__{name}": value for name, value in contents.items()})
    if not message:
        assert lora_of(given) is not None
        return
    with pytest.raises(ConfigError, match=message):
        lora_of(given)


@pytest.mark.parametrize("rank", sampled(["lora.rank=4", "lora_rank=4"], "lora.rank=4"))
def test_a_rollout_that_takes_whole_weights_only_needs_a_merged_adapter(rank: str) -> None:
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
    ours = f"actor_rollout_ref.actor.megatron._target_={TARGET}"

    def require(*overrides: str) -> None:
        with initialize_config_module("verl.trainer.config", version_base=None):
            require_run(compose("ppo_trainer", overrides=["model_engine=megatron", *overrides]))

    with pytest.raises(ConfigError, match=r"checkpoint_engine\.backend='nccl': with .*lora\.merge=True"):
        require(ours, rollout, f"{model}.{rank}")
    require(ours, rollout, f"{model}.{rank}", f"{model}.lora.merge=True")
    delta = rollout.replace("nccl", "delta_sharded")
    with pytest.raises(ConfigError, match=r"checkpoint_engine\.backend='delta_sharded': with"):
        require(ours, delta, f"{model}.{rank}", f"{model}.lora.merge=True")
    require(ours, rollout)
    require(ours, f"{model}.{rank}")
    dora = f"{model}.lora.type=dora"
    if rank == "lora.rank=4":
        with pytest.raises(ConfigError, match=r"lora\.merge=False: .*none of type dora"):
            require(ours, f"{model}.{rank}", dora)
        require(ours, f"{model}.{rank}", dora, f"{model}.lora.merge=True")
    require(rollout, f"{model}.{rank}")


def test_targets_are_those_of_the_model_that_is_to_be_loaded(tmp_path: Path, dense: Path) -> None:
    model = write_tiny("qwen3", tmp_path / "model")
    found = lora_of(role_configs("actor", dense, "actor_rollout_ref.model.lora.rank=4"))
    assert found is not None
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert sorted(found.for_model(model).targets) == sorted(every)
    with pytest.raises(ConfigError, match=r"target_modules='router': no linear layer"):
        dataclasses.replace(found, targets=dataclasses.replace(found.targets, include=("router",))).for_model(model)


@pytest.mark.parametrize("option", ["target_modules", "exclude_modules"])
def test_a_text_is_an_expression_of_whole_names_however_plain_and_a_list_has_names(
    option: str, tmp_path: Path, dense: Path
) -> None:
    model, sft = write_tiny("qwen3", tmp_path / "model"), role_configs("sft", dense)
    every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    def targets(value: Any) -> set[str]:
        found = lora_of(changed(sft, model__lora_rank=4, **{f"model__{option}": value}))
        assert found is not None
        return set(found.for_model(model).targets)

    if option == "target_modules":
        assert targets(["q_proj"]) == targets(".*q_proj") == {"q_proj"}
        with pytest.raises(ConfigError, match="target_modules='q_proj': no linear layer of the model has this name"):
            targets("q_proj")
    else:
        assert targets(["q_proj"]) == targets(".*q_proj") == every - {"q_proj"}
        assert targets("q_proj") == every
    whole = "model.layers.0.self_attn.q_proj"
    assert targets(whole) == targets([whole])
