"""Engines of two workers, each of which is sent what its loaders read, from ranks that send what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors import RolloutConfig, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.sync import push as push_module
from actors.sync.source import WeightSource
from rl_backend.contracts import NativeConfig, ParallelConfig, RuntimeConfig, WeightCheckError
from rl_backend.weights.tiles import plan_tiles
from tests.support.rollout import ReferenceTrainer, write_tiny_qwen3_moe

PROMPTS = [[5, 6, 7], list(range(10, 40))]
SAMPLING = SamplingConfig(n=2, max_new_tokens=12)


# Long: three processes of vLLM start. `make test` has what workers read in test_reads.py, what ranks send in test_export.py.
@pytest.mark.shows("sync: each of an engine's two workers is sent at most 1.05 times what it holds, and serves the weights")
@pytest.mark.parametrize(("model", "layout"), [("dense", ParallelConfig(tp=2)), ("mixture", ParallelConfig(ep=2))])
@pytest.mark.long
def test_two_workers_are_sent_what_they_read(
    ray_cluster: None,
    untied_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    layout: ParallelConfig,
) -> None:
    # Experts of one worker alone are in test_reads.py: vLLM's kernel for CPUs ends a worker that has not all experts.
    path = untied_model if model == "dense" else write_tiny_qwen3_moe(tmp_path)
    trainer = ReferenceTrainer(path)
    settings: dict[str, Any] = {"tensor_parallel": 2, "cores": ((0, 1),), "load_format": "dummy"}
    engines = RolloutConfig(
        model_path=str(path), device="cpu", dtype="float32", max_model_len=256, kv_cache_gib=0.05, **settings
    )
    config = RuntimeConfig(hf_path=str(path), backend_cfg=NativeConfig(device="cpu", parallel=layout))

    def assert_serves(version: int) -> None:
        samples = rollout.generate(PROMPTS, SAMPLING)
        assert {each for sample in samples for each in sample.weight_versions} == {version}
        assert max(trainer.gaps(samples)) <= 1e-5

    with RolloutGroup(engines) as rollout:
        with TrainGroup(config, num_ranks=2) as train:
            policy = train.build_model(forward_only=True)
            for transport in ("gloo", "shared_memory"):
                rollout.forget_weights()
                with WeightSync(train, rollout, policy, transport=transport) as sync:
                    report = sync.push()
                    assert len(report.received) == 2 and max(report.received) < 0.6 * report.nbytes
                    assert len(report.sent) == 2 and sum(report.sent) == report.nbytes
                assert_serves(report.version)

        # From one source, and only what changes.
        with WeightSync(trainer.source, rollout, transport="gloo", changed_only=True) as sync:
            rollout.forget_weights()
            sync.push()
            trainer.advance()
            report = sync.push()
            assert report.changed and len(report.received) == 2
            assert_serves(trainer.source.version)

            # Each worker is given what the other one reads: engines refuse before anything is loaded.
            def swapped(*args: Any) -> Any:
                return tuple(
                    each.replace(workers=tuple(1 - number for number in each.workers)) for each in plan_tiles(*args)
                )

            served = trainer.source.version
            other = WeightSource(trainer.named_weights, served + 1)
            with monkeypatch.context() as patch, WeightSync(other, rollout, transport="shared_memory") as wrong:
                patch.setattr(push_module, "plan_tiles", swapped)
                with pytest.raises(WeightCheckError, match="are not those that their loaders read"):
                    wrong.push()
            assert_serves(served)
