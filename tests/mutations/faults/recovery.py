"""Training ranks that die or hang, and the ones that take their place."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "steps-before-a-checkpoint-run-twice",
        "actors.train.kept:KeptOperations.bound",
        "self._kept = [kept for kept in self._kept if kept is save or not self._is_over(kept)]",
        "pass",
        ("test_what_is_kept_is_bounded", "test_whatever_a_rank_dies_in_all_that_follows_is_the_same"),
        "what a driver keeps would grow for ever, and a recovery would repeat the whole run",
    ),
    Fault(
        "a-boundary-is-not-loaded",
        "actors.train.kept:KeptOperations.bound",
        "save.calls, save.saves_to, save.digest = [cloudpickle.dumps(load)] * len(save.calls), None, ''",
        "pass",
        ("test_whatever_a_rank_dies_in_all_that_follows_is_the_same",),
        "new ranks would go on from the weights that the run began with",
    ),
    Fault(
        "gradients-are-lost-with-a-checkpoint",
        "actors.train.kept:KeptOperations.bound",
        "if not found or self._has_gradients(handle.key, found[-1].number):",
        "if not found:",
        ("test_a_checkpoint_with_gradients_before_it_is_no_boundary",),
        "a step after a save in the middle of an accumulation would have a part of its gradients",
    ),
    Fault(
        "other-results-pass",
        "actors.train.kept:Kept.note",
        "if self.digest and found != self.digest:",
        "if False:",
        ("test_other_results_on_new_ranks_end_the_group",),
        "weights of one version would differ between trainer and engines",
    ),
    Fault(
        "deaths-are-not-counted",
        "actors.train.recovery:Recovery._blame",
        "kept.deaths += 1",
        "pass",
        ("test_an_operation_that_ends_its_ranks_twice_ends_the_group_by_its_name",),
        "an operation that no rank survives would be tried for ever",
    ),
    Fault(
        "pinned-calls-reach-other-ranks",
        "actors.train.recovery:Recovery.send",
        "if epoch is not None and epoch != self.epoch:",
        "if False:",
        ("test_calls_that_are_pinned_to_ranks_are_not_made_on_others",),
        "a push would look for its segment in a process that never had it",
    ),
    Fault(
        "ranks-of-before-live-on",
        "actors.train.recovery:Recovery._replace",
        "end_processes(lost.infos)",
        "pass",
        ("test_a_rank_that_dies_while_another_catches_up_is_replaced_too",),
        "a rank that was stopped would write and send again when it wakes up",
    ),
    Fault(
        "a-sleeping-driver-blames-ranks",
        "actors.train.pulse:Pulse.look",
        "passed, self._looked = min(now - self._looked, 2 * LOOK_SECONDS), now",
        "passed, self._looked = now - self._looked, now",
        ("test_a_driver_that_slept_itself_blames_nobody",),
        "a laptop that is opened again would replace healthy ranks",
    ),
    Fault(
        "no-boundary-after-a-checkpoint",
        "actors.run.saver:RunSaver.finish",
        "model.group.bound(model.handle, draft / name, committed.model(name))",
        "pass",
        ("test_a_group_is_told_of_every_checkpoint_and_gets_one_when_it_keeps_too_much",),
        "a recovery would repeat the whole run",
    ),
    Fault(
        "another-version-under-the-same-number",
        "actors.sync.push:WeightSync._require_same_again",
        "if before is None or before[0] != manifest.version or before[1] == self._ranks:",
        "if True:",
        ("test_a_version_that_other_ranks_have_computed_again_has_the_same_digests",),
        "samples would name a version whose weights the trainer does not have",
    ),
    Fault(
        "a-push-ends-with-its-ranks",
        "actors.sync.push:WeightSync.push",
        "logger.info('the push begins again: %s', error)",
        "raise",
        ("test_a_push_begins_again_when_ranks_were_replaced_in_it",),
        "a rank that dies in a push would end the run",
    ),
]
