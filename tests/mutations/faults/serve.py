"""The server: the order of requests, what waits, what a request may ask for, and what a key sees."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "next-request-refused-for-those-that-wait-for-it",
        "actors.serve.training:Training.has_room",
        "run is None or seq_id <= run.next_seq",
        "run is None",
        ("test_what_waits_is_bounded_and_what_is_next_always_comes_in",),
        "a client whose later chunks arrive first would be told to come again for ever",
    ),
    Fault(
        "number-of-the-creation-is-taken-for-a-request",
        "actors.serve.server:Server.submit",
        "seq_id < 1",
        "seq_id < 0",
        ("test_bodies_that_are_too_large_or_are_nothing_fail_through_their_futures_and_the_run_goes_on",),
        "a request without a number would be answered with the creation of its run",
    ),
    Fault(
        "checkpoints-of-other-keys-load",
        "actors.serve.server:Server._find",
        "self.store.get(CHECKPOINTS, run=parts[0], kind=parts[1], name=parts[2], owner=owner)",
        "self.store.get(CHECKPOINTS, run=parts[0], kind=parts[1], name=parts[2])",
        ("test_a_key_never_sees_what_another_has",),
        "whoever guesses a path would have another's weights",
    ),
    Fault(
        "lifetimes-are-forgotten",
        "actors.serve.server:expiry",
        "time.time() + seconds",
        "None",
        ("test_a_silent_session_frees_its_runs_and_its_named_checkpoints_live_for_their_time",),
        "checkpoints that were to be deleted would fill the disk",
    ),
    Fault(
        "sparse-arrays-of-any-size",
        "actors.serve.wire:read_pass",
        "len(message.data) > _MOST_DATA or cells > _MOST_CELLS",
        "len(message.data) > _MOST_DATA",
        ("test_sparse_arrays_that_would_fill_the_memory_are_refused",),
        "a few bytes would fill the server's memory",
    ),
]
