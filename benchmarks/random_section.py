"""The section of docs/capabilities.md on trials with random shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.edge_routes import MARGIN
from benchmarks.markdown import number, table
from benchmarks.parity_random import FROM_FLOAT64, MOST_OVER_TRANSFORMERS

RANDOM = {
    "random_shapes": """\
## Random shapes
Odd shapes of stacks with gated DeltaNet (heads, sizes, kinds of layers, vocabularies), drawn by seed and compared with
transformers.
""",
    "random_latents": """\
### Latent attention and grouped routers
The same for stacks of latent attention (heads, ranks, widths of keys and values, rotary embeddings) and of mixtures behind
routers with groups. Where two groups are equal to a token but for rounding, sides that agree in the first step part later.
""",
    "random_mixtures": """\
### GLM-4.5, gpt-oss and MiniMax-M2
The same for these, 30 of each: heads, parts of them that rotate, windows, groups, widths of experts and of dense blocks.
""",
}
"""Section of the results -> what it is."""
ROUNDING = f"""\
### When a shape parts
Rounding parts a shape from transformers where it is at most {MOST_OVER_TRANSFORMERS:.0f} times as far from transformers in
float64 as transformers in float32 is, and within {FROM_FLOAT64["max_loss_rel_diff"]:.0e} of its losses and
{FROM_FLOAT64["gradient_rel_diff"]:.0e} of the gradient of the first step. A shape parts at an edge where it is
within these, and the first tokens that it gives other experts than float64 does are indifferent between them by a
margin below {MARGIN:.0e}.
"""
"""Of all trials, below the last."""
_WORDS = {"failed": "failed", "rounding": "parted by rounding", "edge": "parted at an edge"}


def random_shapes(title: str, trial: Mapping[str, Any]) -> str:
    """The section of one trial: how many of its shapes passed, and how far the others are from transformers."""
    rows = [
        (
            runtime,
            str(accepted),
            str(trial["accepted_mixtures"][runtime]),
            str(trial["passed"][runtime]),
            *(str(trial.get(how, {}).get(runtime, 0)) for how in ("parted_by_rounding", "parted_at_an_edge")),
            str(len(trial["refusals"][runtime])),
        )
        for runtime, accepted in trial["accepted"].items()
    ]
    titles = ("runtime", "accepted", "mixtures among them", "passed", "parted by rounding", "parted at an edge", "refused")
    failed = did_not_pass(trial)
    return "\n".join([title, table(titles, rows), *(["Not passed:", "", *failed, ""] if failed else [])])


def did_not_pass(trial: Mapping[str, Any]) -> list[str]:
    """A line for each shape of a trial that failed or parted."""
    return [
        f"- {_WORDS[shape[runtime]['outcome']]}: {runtime}, seed {seed}, {shape['family']}: {shape[runtime]['error']}"
        f"{_to_float64(shape[runtime])}"
        for seed, shape in trial["shapes"].items()
        for runtime in trial["accepted"]
        if shape.get(runtime, {}).get("outcome") in _WORDS
    ]


def _to_float64(outcome: Mapping[str, Any]) -> str:
    """How far both sides of a failure are from transformers in float64, where that was measured."""
    if "to_float64" not in outcome:
        return ""
    if outcome["outcome"] == "edge":
        step, tokens, margin = outcome["first_other_routes"].values()
        return (
            f". Tokens with other experts in step {step}, the first with any: {tokens}, by a margin of at most {margin:.0e}"
        )
    sides = outcome["to_float64"].values()
    gradient, norm = (
        " and ".join(number(found[figure]) for found in sides) for figure in ("gradient_rel_diff", "max_grad_norm_rel_diff")
    )
    return (
        f". It and transformers in float32 are from transformers in float64: {gradient} in the gradient of the first step, "
        f"{norm} in the gradient norm of a step"
    )
