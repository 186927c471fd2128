"""What the ``config.json`` of every decoder with mixtures of experts says."""

from __future__ import annotations

from rl_backend.model.hf_config import HFConfig


def num_experts(config: HFConfig) -> int:
    """``num_experts`` or ``num_local_experts``: transformers 5 writes the one, published directories may have the other.

    Raises:
        UnsupportedError: neither is there, or they differ.
    """
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    numbers = {name: config.positive_int(name) for name in names or ["num_experts"]}
    if len(set(numbers.values())) > 1:
        config.refuse("num_local_experts", numbers["num_local_experts"], f"num_experts is {numbers['num_experts']}")
    return next(iter(numbers.values()))


def top_k(config: HFConfig) -> int:
    """``num_experts_per_tok``.

    Raises:
        UnsupportedError: it is missing, or more than there are experts.
    """
    chosen, experts = config.positive_int("num_experts_per_tok"), num_experts(config)
    if chosen > experts:
        config.refuse("num_experts_per_tok", chosen, f"there are {experts} experts")
    return chosen
