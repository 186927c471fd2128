"""Pushes of what changed: what is found, coded, sent, applied, and doubted."""

from __future__ import annotations

from tests.mutations.fault import Fault

_BITS = "test_a_patch_brings_a_tensor_to_the_bits_of_another"
_ZEROS = "test_zeros_of_both_signs_and_all_nans_differ_where_their_bits_do"
_GAPS = "test_gaps_at_the_edges_of_their_codes_keep_their_place"
_DOUBTS = "test_where_an_engine_or_a_rank_may_have_something_else_all_is_sent"
_STALE = "test_a_stale_element_is_found_by_the_digest_of_the_whole_and_all_is_sent"

FAULTS = [
    Fault(
        "changes-of-values-not-bits",
        "rl_backend.weights.changes:_patch_run",
        "np.flatnonzero(held != now)",
        'np.flatnonzero(held.view(f"f{now.itemsize}") != now.view(f"f{now.itemsize}"))',
        (_ZEROS,),
        "-0.0 in place of 0.0 would stay what it was",
    ),
    Fault(
        "a-senders-copy-stays-behind",
        "rl_backend.weights.changes:_patch_run",
        "held[:] = now",
        "held[:1] = now[:1]",
        (_BITS,),
        "an element that goes back to what it was would be stale in every engine",
    ),
    Fault(
        "whole-runs-never",
        "rl_backend.weights.changes:_patch_run",
        "if len(where) * (min(_WIDTHS) + now.itemsize) >= now.nbytes:",
        "if len(where) * (min(_WIDTHS) + now.itemsize) >= 9 * now.nbytes:",
        ("test_what_changed_in_most_of_a_run_is_sent_whole_and_the_other_runs_are_not",),
        "a patch would be larger than the tensor",
    ),
    Fault(
        "gaps-count-the-element",
        "rl_backend.weights.changes:_indices",
        "np.cumsum(codes, dtype=np.int64)[ends] + np.arange(len(ends))",
        "np.cumsum(codes, dtype=np.int64)[ends]",
        (_GAPS,),
        "values would land before their places",
    ),
    Fault(
        "a-gap-of-the-largest-number-ends",
        "rl_backend.weights.changes:_gaps",
        "np.flatnonzero(gaps >= _most(width))",
        "np.flatnonzero(gaps > _most(width))",
        (_GAPS,),
        "a gap of 255 elements would be read as one that continues",
    ),
    Fault(
        "gaps-of-two-bytes-always",
        "rl_backend.weights.changes:_gaps",
        "width = min(_WIDTHS, key=lambda each: each * (len(gaps) + skips[each].sum()))",
        "width = max(_WIDTHS)",
        ("test_a_patch_takes_a_byte_for_each_gap_that_one_holds",),
        "pushes of one element in a hundred would be a third larger",
    ),
    Fault(
        "runs-of-a-payload-overlap",
        "rl_backend.weights.changes:_parts",
        "gaps = range(end, end + codes * width)",
        "gaps = range(end and end - width, end + codes * width)",
        ("test_elements_on_both_sides_of_a_run_are_not_taken_for_each_other",),
        "each run would begin with what belongs to the one before it",
    ),
    Fault(
        "a-run-that-begins-a-byte-too-late",
        "rl_backend.weights.changes:_elements",
        "slice(block.start // array.itemsize, block.stop // array.itemsize)",
        "slice(-(-block.start // array.itemsize) + bool(block.start), block.stop // array.itemsize)",
        ("test_elements_on_both_sides_of_a_run_are_not_taken_for_each_other",),
        "the first element of each further run would be stale",
    ),
    Fault(
        "patches-of-something-else-applied",
        "rl_backend.weights.changes:apply_patch",
        "if len(where) != count or (count and where[-1] >= len(run)):",
        "if len(where) != count:",
        ("test_a_patch_of_something_else_is_refused",),
        "a damaged patch would end the engine's push with an error of NumPy",
    ),
    Fault(
        "patches-whatever-engines-hold",
        "actors.sync.staged_transports:GlooTransport._mode",
        'return "patch" if set(held.values()) == {self._push[0]} else "keep"',
        'return "patch" if any(held.values()) else "keep"',
        (_DOUBTS,),
        "an engine that was replaced would get a patch of weights that it never had",
    ),
    Fault(
        "one-engine-that-holds-is-enough",
        "actors.sync.staged_transports:GlooTransport._mode",
        'return "patch" if set(held.values()) == {self._push[0]} else "keep"',
        'return "patch" if self._push[0] in held.values() else "keep"',
        (_DOUBTS,),
        "an engine that was replaced would get a patch of weights that it never had",
    ),
    Fault(
        "patches-of-other-rectangles",
        "actors.sync.staged_transports:GlooTransport._mode",
        "self._push[1] != (plan.infos, plan.parts, plan.tiles)",
        "self._push[1][0] != plan.infos",
        (_DOUBTS,),
        "a rank would patch a rectangle of which it has no copy",
    ),
    Fault(
        "patches-by-ranks-without-copies",
        "actors.sync.staged_transports:GlooTransport._connect",
        "self._push = None",
        "self._push = self._push",
        (_DOUBTS,),
        "ranks that were replaced would patch what they do not have",
    ),
    Fault(
        "copies-are-the-parameters",
        "actors.sync.staged_transports:_Connection.send",
        "self.copies[info] = tensor.clone()",
        "self.copies[info] = tensor",
        ("test_after_the_first_push_only_what_changed_is_sent",),
        "what a step changes in place would change in the copy, and no change be found",
    ),
    Fault(
        "a-push-is-held-before-it-is-verified",
        "actors.rollout.engine.weights:WeightReceiver.receive",
        'self._verified, self._held_push = None, ""',
        "self._verified = None",
        ("test_an_engine_holds_a_push_from_its_verification_to_the_next_byte_it_receives", _STALE),
        "an engine that received half of a push would be patched as if it had the one before",
    ),
    Fault(
        "another-segments-push-is-held",
        "actors.rollout.engine.weights:WeightReceiver.verify",
        "if self._own_segment is not None and segment.path == str(self._own_segment.path):",
        "if self._own_segment is not None:",
        ("test_an_engine_holds_a_push_from_its_verification_to_the_next_byte_it_receives",),
        "a push through shared memory would be taken for what the own segment holds",
    ),
    Fault(
        "a-segment-that-is-gone-is-held",
        "actors.rollout.engine.weights:WeightReceiver.close",
        'segment, self._own_segment, self._held_push = self._own_segment, None, ""',
        "segment, self._own_segment = self._own_segment, None",
        (_DOUBTS,),
        "a new segment of zeros would be patched",
    ),
    Fault(
        "refused-patches-end-the-push",
        "actors.sync.push:WeightSync._push_staged",
        "if staged.changed is None:",
        "if staged.changed is not None:",
        (_STALE, "test_a_patch_that_was_damaged_on_its_way_is_found_by_the_digest_and_all_is_sent"),
        "one stale element would end the run",
    ),
    Fault(
        "what-changed-is-not-counted",
        "actors.sync.staged_transports:broadcast_weights",
        "nbytes, changed = nbytes + of_tensor[0], changed + of_tensor[1]",
        "nbytes, changed = nbytes + info.nbytes, changed + of_tensor[1]",
        ("test_after_the_first_push_only_what_changed_is_sent",),
        "reports would say that all weights were sent",
    ),
]
