"""A head in float32 over layers of another dtype."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = [
    Fault(
        "head-from-rounded-states",
        "rl_backend.model.decoder:Decoder.forward",
        "hidden = self.norm(hidden if self.layer_dtype is None else hidden.to(torch.float32))",
        "hidden = self.norm(hidden)",
        ("test_a_head_in_float32_rounds_nothing[untied]",),
        "the last norm would round what the head gets",
    ),
    Fault(
        "head-gathered-rounded",
        "rl_backend.parallel.fsdp:apply_fsdp",
        "as_they_are = [*unrounded, root] if kept_ends(root) else unrounded",
        "as_they_are = unrounded",
        ("test_a_head_in_float32_rounds_nothing[untied]",),
        "the head would compute with rounded weights",
    ),
    Fault(
        "head-of-a-reference-rounded",
        "rl_backend.primitive.float32:round_parameters",
        "end.to(torch.float32)",
        "end.to(dtype)",
        ("test_a_model_that_is_not_trained_has_the_same_head[untied]",),
        "a reference would give other log-probs than the policy with the same weights",
    ),
]
