"""A push through shared memory: what is kept between pushes, and what engines check while the trainer still stages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors import RankContext, RolloutGroup, SamplingConfig, TrainGroup, WeightSync
from actors.sync import staged_transports as staged_module
from actors.sync.source import WeightSource
from actors.sync.staged_transports import PushPlan, SharedMemoryTransport, Staged
from actors.wire.segment import DIRECTORY, Segment, remove_stale_segments
from rl_backend.contracts import GroupFailedError, NativeConfig, RuntimeConfig, TensorInfo, WeightCheckError
from tests.support.rollout import ReferenceTrainer

PROMPTS = [[5, 6, 7, 8], list(range(10, 60))]
SAMPLING = SamplingConfig(max_new_tokens=6)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def group(rollout_pair: RolloutGroup) -> RolloutGroup:
    return rollout_pair


@pytest.fixture
def trainer(rollout_trainer: ReferenceTrainer, rollout_sync: WeightSync) -> ReferenceTrainer:
    """The trainer, with its weights of a new version pushed."""
    rollout_trainer.advance()
    rollout_sync.push()
    return rollout_trainer


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are told of the tiny model's tensors in many parts."""
    monkeypatch.setattr(staged_module, "PART_BYTES", 1)


def assert_serves(group: RolloutGroup, trainer: ReferenceTrainer, version: int) -> None:
    samples = group.generate(PROMPTS * 2, SAMPLING)
    assert {v for sample in samples for v in sample.weight_versions} == {version}
    assert trainer.mean_gap(samples) <= TOLERANCE


def segments_of(pid: int) -> list[Path]:
    return sorted(DIRECTORY.glob(f"rl_backend_weights-*-{pid}-*"))


def mappings(pid: int, segment: Path) -> list[str]:
    """Addresses at which a process has mapped a segment."""
    return [line.split()[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(segment) in line]


def staged_of(sync: WeightSync, trainer: ReferenceTrainer, group: RolloutGroup) -> tuple[PushPlan, Staged, Tensor]:
    plan = sync._plan()
    assert isinstance(sync._transport, SharedMemoryTransport)
    staged = sync._transport.stage(plan, trainer.source, group.engine_set)
    return plan, staged, trainer.source.run_on_ranks(lambda context: context.state[plan.key].buffer)[0]


def segment_and_key(staged: Staged, engine: int) -> tuple[Segment, str]:
    return staged.segments[engine], staged.key


def test_the_segment_and_its_mappings_are_the_same_in_the_next_push(
    group: RolloutGroup, trainer: ReferenceTrainer, rollout_sync: WeightSync
) -> None:
    key = rollout_sync._key
    processes = [os.getpid(), *(info.pid for info in group.infos.values())]

    def kept() -> Any:
        segment = trainer.source.run_on_ranks(lambda context: context.state[key])[0]
        return segment.path, segment.path.stat().st_ino, {pid: mappings(pid, segment.path) for pid in processes}

    before = kept()
    assert all(addresses for addresses in before[2].values())
    for _ in range(2):
        trainer.advance()
        rollout_sync.push()
        assert kept() == before
    assert_serves(group, trainer, trainer.source.version)


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_a_weight_sync_that_is_closed_leaves_no_memory_behind(
    group: RolloutGroup, trainer: ReferenceTrainer, transport: Any
) -> None:
    processes = [os.getpid(), *(info.pid for info in group.infos.values())]

    def mapped() -> set[str]:
        lines = [line for pid in processes for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        return {line.split()[5] for line in lines if str(DIRECTORY / "rl_backend_weights") in line}

    before = mapped()
    with WeightSync(trainer.source, group, transport=transport) as sync:
        sync.push()
        assert mapped() - before
    assert_serves(group, trainer, trainer.source.version)  # after what closing has asked of the engines
    assert not mapped() - before


def test_engines_that_are_sent_what_changed_serve_all_of_it(group: RolloutGroup, trainer: ReferenceTrainer) -> None:
    with WeightSync(trainer.source, group, transport="gloo", changed_only=True) as sync:
        first = sync.push()
        assert first.changed is None and sum(first.sent) == first.nbytes
        weights = dict(trainer.named_weights())
        with torch.no_grad():
            weights["model.embed_tokens.weight"][5:8] += 0.5
            weights["model.norm.weight"] *= 1.5
        trainer.source.version += 1
        report = sync.push()
        assert report.changed == weights["model.embed_tokens.weight"][5:8].numel() + weights["model.norm.weight"].numel()
        assert sum(report.sent) < report.nbytes / 20
        assert_serves(group, trainer, trainer.source.version)


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_byte_that_changes_once_its_tensor_is_staged_is_found_before_anything_is_loaded(
    place: int, group: RolloutGroup, trainer: ReferenceTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = dict(trainer.named_weights())
    torn = list(weights)[place]
    other = WeightSync(WeightSource(weights, trainer.source.version + 1), group, transport="shared_memory")
    tell = staged_module._StagedParts.add

    def damage(parts: Any, info: TensorInfo) -> None:
        if info.name == torn:
            with open(parts._segment.path, "r+b") as file:
                file.seek(info.offset + info.nbytes - 1)
                last = file.read(1)[0]
                file.seek(info.offset + info.nbytes - 1)
                file.write(bytes([last ^ 1]))
        tell(parts, info)

    with other:
        with monkeypatch.context() as patch:
            patch.setattr(staged_module._StagedParts, "add", damage)
            with pytest.raises(WeightCheckError, match="differ from the manifest's digests") as error:
                other.push()
        assert torn in str(error.value)
        assert "engine 0" in str(error.value) and "engine 1" in str(error.value)
        assert_serves(group, trainer, trainer.source.version)


def test_engines_check_parts_while_the_trainer_stages_and_read_only_the_rest_afterwards(
    group: RolloutGroup, trainer: ReferenceTrainer, rollout_sync: WeightSync
) -> None:
    for place, found in ((0, False), (-1, True)):
        _, staged, buffer = staged_of(rollout_sync, trainer, group)
        # Calls of one process arrive in order: each engine has checked its parts when it answers.
        group.engine_set.call("describe")
        torn = staged.manifest.tensors[place]
        buffer[torn.offset] ^= 1
        verify = {"each": partial(segment_and_key, staged)}
        outcomes = group.engine_set.call("verify", staged.manifest, **verify)
        assert [isinstance(outcome, WeightCheckError) for outcome in outcomes.values()] == [found] * 2
        # What was found under the push's key is forgotten with it.
        outcomes = group.engine_set.call("verify", staged.manifest, **verify)
        assert all(isinstance(outcome, WeightCheckError) and torn.name in str(outcome) for outcome in outcomes.values())
    assert_serves(group, trainer, trainer.source.version)


def test_weights_that_were_verified_are_not_loaded_once_others_are_being_staged(
    group: RolloutGroup, trainer: ReferenceTrainer, rollout_sync: WeightSync
) -> None:
    plan, staged, _ = staged_of(rollout_sync, trainer, group)
    group.engine_set.call("verify", staged.manifest, each=partial(segment_and_key, staged))
    # A late message of the same push changes nothing; one of the next push does.
    group.engine_set.call("verify_part", staged.key, staged.manifest, staged.segments[0])
    group.engine_set.call("verify_part", "next", staged.manifest, staged.segments[0])
    for outcome in group.engine_set.call("load", plan.version).values():
        assert isinstance(outcome, WeightCheckError) and "were not verified" in str(outcome)
    trainer.advance()
    rollout_sync.push()
    assert_serves(group, trainer, trainer.source.version)


def test_a_part_that_cannot_be_checked_is_left_to_the_whole(
    group: RolloutGroup, trainer: ReferenceTrainer, rollout_sync: WeightSync
) -> None:
    _, staged, _ = staged_of(rollout_sync, trainer, group)
    gone = Segment(str(DIRECTORY / "rl_backend_weights-none"), 64)
    assert set(group.engine_set.call("verify_part", staged.key, staged.manifest, gone).values()) == {None}
    rollout_sync.push()
    assert_serves(group, trainer, trainer.source.version)


@pytest.mark.long
def test_a_trainer_that_dies_while_it_stages_leaves_the_engines_with_the_old_weights(
    group: RolloutGroup, trainer: ReferenceTrainer, rollout_sync: WeightSync, tied_model: Path
) -> None:

    def die_while_exporting(context: RankContext, tensors: int) -> None:
        """From now on this rank ends, as if killed, in the middle of an export."""
        staged_module.PART_BYTES = 1
        export = context.runtime.export_weights

        def dying(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
            for count, pair in enumerate(export(*args, **kwargs)):
                if count == tensors:
                    os._exit(1)
                yield pair

        context.runtime.export_weights = dying

    config = RuntimeConfig(hf_path=str(tied_model), backend_cfg=NativeConfig(device="cpu"))
    version = trainer.source.version
    ranks = TrainGroup(config, failure_grace=1.0)
    try:
        policy = ranks.build_model()
        pid = ranks.ranks[0].pid
        ranks.run_on_ranks(die_while_exporting, 9)
        sync = WeightSync(ranks, group, policy, transport="shared_memory")
        with pytest.raises(GroupFailedError, match="died"):
            sync.push()
    finally:
        ranks.shutdown()
    assert_serves(group, trainer, version)
    remove_stale_segments()
    assert not segments_of(pid)
    trainer.advance()
    rollout_sync.push()
    assert_serves(group, trainer, trainer.source.version)
