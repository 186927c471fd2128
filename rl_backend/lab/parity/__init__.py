"""Do two runtimes train alike? Each trains in its own processes, from one checkpoint on the same batches."""

from rl_backend.lab.parity.compare import Comparison, Divergence, StageResult, StepComparison, compare
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide
from rl_backend.lab.parity.differences import Difference, Tolerances
from rl_backend.lab.parity.record import SideRecord
from rl_backend.lab.parity.run import compare_sides, record_side, run_parity

__all__ = [
    "TRANSFORMERS",
    "Comparison",
    "Difference",
    "Divergence",
    "ParityConfig",
    "ParitySide",
    "SideRecord",
    "StageResult",
    "StepComparison",
    "Tolerances",
    "compare",
    "compare_sides",
    "record_side",
    "run_parity",
]
