"""Data: from a caller's sequences to balanced, packed micro-batches, and back to the caller's order."""

from rl_backend.data.balance import MicroBatchPlan, plan_micro_batches
from rl_backend.data.packing import check_same_fields, pack, pack_plan, prepare_micro_batches, restore_order

__all__ = [
    "MicroBatchPlan",
    "check_same_fields",
    "pack",
    "pack_plan",
    "plan_micro_batches",
    "prepare_micro_batches",
    "restore_order",
]
