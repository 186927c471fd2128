"""What a run prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHOWN = {
    "reward": ("reward", ".3f"),
    "log_prob_gap": ("gap", ".1e"),
    "kl": ("kl", ".3f"),
    "value_loss": ("value loss", ".3f"),
    "grad_norm": ("grad norm", ".2f"),
    "next_lr": ("next lr", ".1e"),
    "staleness_mean": ("staleness", ".1f"),
    "accuracy": ("accuracy", ".3f"),
}


def print_start(title: str, facts: Sequence[str], accuracy: float | None, held_out: int) -> None:
    print(f"{title}: {', '.join(facts)}")
    if accuracy is not None:
        print(f"held-out accuracy before: {accuracy:.3f} ({held_out} prompts, greedy)", flush=True)


def print_step(step: int, steps: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
    """One line: the metrics of ``SHOWN`` that there are, and the seconds of each phase."""
    shown = "  ".join(f"{label} {metrics[name]:{form}}" for name, (label, form) in SHOWN.items() if name in metrics)
    phases = "  ".join(f"{name.removeprefix('seconds/')} {value:.2f}s" for name, value in seconds.items())
    skipped = "" if metrics["step_ok"] == 1 else "  UPDATE SKIPPED: a gradient is not finite"
    print(f"step {step:4d}/{steps}  {shown}  | {phases}{skipped}", flush=True)
