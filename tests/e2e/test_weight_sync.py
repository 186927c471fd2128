"""Weights from a trainer into running vLLM engines: what is refused, what goes on serving, and what is served afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from actors.rollout.config import SamplingConfig
from actors.rollout.group.engines import EngineSet
from actors.rollout.group.group import RolloutGroup
from actors.sync.push import WeightSync, make_transport
from actors.sync.source import SourceRanks, WeightSource
from actors.sync.staged_transports import (
    PushPlan,
    SharedMemoryTransport,
    Staged,
    TransportName,
    reserve_segment,
    write_segment,
)
from rl_backend.contracts import (
    ConfigError,
    RolloutError,
    UnsupportedError,
    WeightCheckError,
    WeightSyncError,
    WeightVersionError,
)
from tests.support.rollout import ReferenceTrainer

# The last prompt fills whole blocks of vLLM's prefix cache (32 tokens on a CPU).
PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [3 + i % 120 for i in range(300)]]
SAMPLING = SamplingConfig(max_new_tokens=8)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def group(rollout_pair: RolloutGroup) -> RolloutGroup:
    return rollout_pair


@pytest.fixture
def trainer(rollout_trainer: ReferenceTrainer, sync: WeightSync) -> ReferenceTrainer:
    """The trainer, with its weights of a new version pushed."""
    rollout_trainer.advance()
    sync.push()
    return rollout_trainer


@pytest.fixture
def sync(rollout_sync: WeightSync) -> WeightSync:
    return rollout_sync


def assert_serves(group: RolloutGroup, trainer: ReferenceTrainer, version: int) -> None:
    samples = group.generate(PROMPTS * 2, SAMPLING)
    assert {sample.engine for sample in samples} == set(group.engines)
    assert {v for sample in samples for v in sample.weight_versions} == {version}
    assert trainer.mean_gap(samples) <= TOLERANCE


def push_of(weights: dict[str, Tensor], group: RolloutGroup, version: int) -> None:
    with WeightSync(WeightSource(weights, version), group) as other:
        other.push()


@pytest.mark.shows("weight sync: every engine is updated and every sample carries its weight version")
def test_a_push_reaches_every_engine_and_samples_carry_its_version(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    trainer.advance()
    report = sync.push()
    assert report.transport == "shared_memory"
    assert report.engines == (0, 1)
    assert report.nbytes == sum(tensor.nbytes for _, tensor in trainer.named_weights())
    # With "turns" where a test before has asked these engines for turns of episodes.
    assert set(report.seconds) - {"turns"} == {"plan", "stage", "verify", "load", "resume", "total"}
    assert_serves(group, trainer, report.version)


@pytest.mark.shows("weight sync: the prefix cache never serves old keys")
def test_keys_and_values_of_old_weights_are_not_reused(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    prompts = [PROMPTS[2]] * 2
    assert trainer.mean_gap(group.generate(prompts, SAMPLING)) <= TOLERANCE
    trainer.advance()
    sync.push()
    assert trainer.mean_gap(group.generate(prompts, SAMPLING)) <= TOLERANCE


def test_writing_to_the_staging_buffer_after_a_push_changes_no_engine(
    group: RolloutGroup, trainer: ReferenceTrainer
) -> None:
    version = trainer.source.version
    plan_state = trainer.source.run_on_ranks(lambda context: context.state)[0]
    for segment in plan_state.values():
        segment.buffer.fill_(0x5A)
    assert_serves(group, trainer, version)


def test_a_partial_fused_group_is_refused_by_name(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    weights = dict(trainer.named_weights())
    del weights["model.layers.0.self_attn.k_proj.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(WeightCheckError) as error:
        push_of(weights, group, trainer.source.version + 1)
    assert "half of a fused group" in str(error.value)
    assert "without model.layers.0.self_attn.k_proj.weight" in str(error.value)
    assert "without model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert_serves(group, trainer, trainer.source.version)


def _without_norm(weights: dict[str, Tensor]) -> str:
    del weights["model.norm.weight"]
    return "missing: model.norm.weight"


def _with_a_stranger(weights: dict[str, Tensor]) -> str:
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    return "unknown to the engine: model.layers.7.mlp.up_proj.weight"


def _with_a_wrong_shape(weights: dict[str, Tensor]) -> str:
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(127, 64)
    return "wrong shape: model.layers.0.mlp.up_proj.weight is (127, 64), the engine has (128, 64)"


def _with_a_wrong_dtype(weights: dict[str, Tensor]) -> str:
    weights["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)
    return "wrong dtype: model.norm.weight is int32, the engine takes float32"


def _with_nan(weights: dict[str, Tensor]) -> str:
    weights["model.norm.weight"] = weights["model.norm.weight"].clone()
    weights["model.norm.weight"][3] = float("nan")
    return "NaN or infinity and were not loaded: model.norm.weight"


def _with_infinity(weights: dict[str, Tensor]) -> str:
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][-1, -1] = float("-inf")
    return "NaN or infinity and were not loaded: model.embed_tokens.weight"


@pytest.mark.shows(
    "weight sync: wrong names, shapes, dtypes or non-finite weights are refused, and the old ones keep serving"
)
@pytest.mark.parametrize(
    "damage", [_without_norm, _with_a_stranger, _with_a_wrong_shape, _with_a_wrong_dtype, _with_nan, _with_infinity]
)
def test_wrong_weights_are_refused_and_the_old_ones_serve_on(
    group: RolloutGroup, trainer: ReferenceTrainer, damage: Callable[[dict[str, Tensor]], str]
) -> None:
    weights = dict(trainer.named_weights())
    expected = damage(weights)
    with pytest.raises(WeightCheckError) as error:
        push_of(weights, group, trainer.source.version + 1)
    assert expected in str(error.value)
    assert "engine 0" in str(error.value) and "engine 1" in str(error.value)
    assert_serves(group, trainer, trainer.source.version)


class TornTransport(SharedMemoryTransport):
    """Shared memory in which one byte changes after staging."""

    def stage(self, plan: PushPlan, train: SourceRanks, rollout: EngineSet) -> Staged:
        staged = super().stage(plan, train, rollout)
        segment = train.run_on_ranks(lambda context: context.state[plan.key])[0]
        segment.buffer[staged.manifest.tensors[3].offset] ^= 1
        return staged


@pytest.mark.shows("weight sync: a flipped byte is found before anything is loaded")
def test_a_byte_that_changes_after_staging_is_found_before_anything_is_loaded(
    group: RolloutGroup, trainer: ReferenceTrainer
) -> None:
    weights = dict(trainer.named_weights())
    other = WeightSync(WeightSource(weights, trainer.source.version + 1), group)
    other._transport = TornTransport()
    with pytest.raises(WeightCheckError, match="differ from the manifest's digests") as error:
        other.push()
    assert list(weights)[3] in str(error.value)
    other.close()
    assert_serves(group, trainer, trainer.source.version)


@pytest.mark.shows("weight sync: an older version is refused")
def test_an_older_version_is_refused_and_the_same_version_may_be_pushed_again(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    version = trainer.source.version
    with pytest.raises(WeightVersionError, match=f"version {version} and refuses the older version {version - 1}"):
        push_of(dict(trainer.named_weights()), group, version - 1)
    assert sync.push().version == version
    assert_serves(group, trainer, version)


def test_sampling_refuses_weights_older_than_required(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    version = trainer.source.version
    assert group.generate(PROMPTS, SAMPLING, require_version=version)
    with pytest.raises(WeightVersionError, match=f"version {version + 1} is required"):
        group.generate(PROMPTS, SAMPLING, require_version=version + 1)


@pytest.mark.shows("weight sync: sampling during an update is refused and the engines survive")
def test_sampling_during_an_update_is_refused_and_the_engines_survive(
    group: RolloutGroup, trainer: ReferenceTrainer, sync: WeightSync
) -> None:
    trainer.advance()
    plan = sync._plan()
    staged = SharedMemoryTransport().stage(plan, trainer.source, group.engine_set)
    verified = group.engine_set.call("verify", staged.manifest, each=lambda engine: (staged.segments[engine],))
    assert all(isinstance(seconds, float) for seconds in verified.values())
    assert set(group.engine_set.call("begin_update").values()) == {None}
    with pytest.raises(RolloutError, match="a weight update is in progress"):
        group.generate(PROMPTS, SAMPLING)
    assert set(group.engine_set.call("update", {"manifest": staged.manifest.model_dump_json()}).values()) == {None}
    with pytest.raises(RolloutError, match="a weight update is in progress"):
        group.generate(PROMPTS, SAMPLING)
    group.engine_set.call("finish_update", plan.version)
    group.engine_set.call("resume")
    assert_serves(group, trainer, plan.version)


def test_an_engine_loads_only_what_it_has_verified(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    outcomes = group.engine_set.call("load", trainer.source.version + 5)
    assert all(
        isinstance(outcome, WeightCheckError) and "were not verified" in str(outcome) for outcome in outcomes.values()
    )
    assert_serves(group, trainer, trainer.source.version)


def test_gloo_brings_the_same_weights(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    with WeightSync(trainer.source, group, transport="gloo") as gloo:
        for _ in range(2):
            trainer.advance()
            report = gloo.push()
            assert report.transport == "gloo"
            assert_serves(group, trainer, report.version)
        gloo.close()
        assert gloo.push().transport == "gloo"


ONE_SIZE = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("fault", ["swapped", "renamed", "short", "long"])
def test_an_export_in_another_order_than_announced_is_refused_and_the_old_weights_serve_on(
    group: RolloutGroup, trainer: ReferenceTrainer, transport: TransportName, fault: str
) -> None:
    announced, faulty, reads = dict(trainer.named_weights()), False, 0
    first, second = ONE_SIZE
    order = {
        "swapped": [{first: second, second: first}.get(name, name) for name in announced],
        "renamed": [{first: second, second: "x"}.get(name, name) for name in announced],
        "short": list(announced)[:-1],
        "long": [*announced, first],
    }[fault]

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal reads
        reads += 1
        # The first read of a push is for names and shapes alone.
        names = order if faulty and reads == 2 else announced
        yield from ((name, announced.get(name, announced[first])) for name in names)

    with WeightSync(WeightSource(weights, trainer.source.version), group, transport=transport) as other:
        for faulty in (False, True, False):
            reads, started = 0, time.monotonic()
            if faulty:
                with pytest.raises(WeightCheckError, match="the export"):
                    other.push()
            else:
                other.push()
            assert time.monotonic() - started < 60
            assert_serves(group, trainer, trainer.source.version)


def test_gloo_works_again_after_an_export_that_failed_half_way(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    failing, reads = False, 0

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal reads
        reads += 1
        for index, pair in enumerate(trainer.named_weights()):
            if failing and reads == 2 and index == 3:
                raise ValueError("lost a shard")
            yield pair

    with WeightSync(WeightSource(weights, trainer.source.version), group, transport="gloo") as gloo:
        for failing in (False, True, False):
            reads, started = 0, time.monotonic()
            if failing:
                with pytest.raises(ValueError, match="lost a shard"):
                    gloo.push()
            else:
                gloo.push()
            assert time.monotonic() - started < 60
            assert_serves(group, trainer, trainer.source.version)


def test_a_budget_smaller_than_a_tensor_is_refused_before_anything_starts(
    group: RolloutGroup, trainer: ReferenceTrainer
) -> None:
    sync = WeightSync(trainer.source, group, transport="gloo", byte_budget=1000)
    with pytest.raises(ConfigError, match=r"byte_budget=1000: must hold the largest tensor, model\.embed_tokens\.weight"):
        sync.push()
    assert_serves(group, trainer, trainer.source.version)


def test_the_transport_is_chosen_again_when_the_engines_are_others(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    with WeightSync(trainer.source, group) as other:
        other._transport = make_transport("gloo")
        other._chosen_for = {engine: info.pid for engine, info in group.infos.items()}
        assert other.push().transport == "gloo"
        other._chosen_for[1] += 1
        assert other.push().transport == "shared_memory"


def test_gloo_refuses_damaged_weights_and_works_again_afterwards(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    weights = dict(trainer.named_weights())
    good = weights["model.norm.weight"]
    weights["model.norm.weight"] = torch.full_like(good, float("nan"))
    source = WeightSource(weights, trainer.source.version + 1)
    with WeightSync(source, group, transport="gloo") as gloo:
        with pytest.raises(WeightCheckError, match="NaN or infinity"):
            gloo.push()
        assert_serves(group, trainer, trainer.source.version)
        weights["model.norm.weight"] = good
        assert gloo.push().version == source.version
    assert_serves(group, trainer, source.version)
    trainer.source.version = source.version


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_gpu_transports_are_refused_without_cuda(group: RolloutGroup, trainer: ReferenceTrainer, transport: str) -> None:
    with (
        WeightSync(trainer.source, group, transport=transport) as other,
        pytest.raises(UnsupportedError, match=f"transport='{transport}'"),
    ):
        other.push()
    assert_serves(group, trainer, trainer.source.version)


def test_a_full_shared_memory_file_system_is_reported_before_anything_moves(
    group: RolloutGroup,
    trainer: ReferenceTrainer,
) -> None:
    huge = WeightSource({"model.norm.weight": torch.zeros(1).expand(1 << 45)}, trainer.source.version + 1)
    with WeightSync(huge, group) as other, pytest.raises(WeightSyncError, match=r"/dev/shm has .* MiB free, but"):
        other.push()
    assert_serves(group, trainer, trainer.source.version)


def test_staging_functions_run_unchanged_in_a_rank(trainer: ReferenceTrainer, sync: WeightSync) -> None:
    plan = sync._plan()
    segment = trainer.source.run_on_ranks(reserve_segment, plan)[0]
    assert segment.nbytes >= plan.nbytes
    written = trainer.source.run_on_ranks(write_segment, plan, segment)[0]
    assert [info.name for info in written] == [name for name, _ in trainer.named_weights()]
    assert all(len(info.digest) == 16 and info.offset % 64 == 0 for info in written)
