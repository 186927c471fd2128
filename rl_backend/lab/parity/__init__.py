"""Do two runtimes train alike? Each trains in its own processes, from one checkpoint on the same batches."""

from rl_backend.lab.parity.compare import Comparison, compare
from rl_backend.lab.parity.config import TRANSFORMERS, ParityConfig, ParitySide
from rl_backend.lab.parity.differences import Tolerances
from rl_backend.lab.parity.record import SideRecord
from rl_backend.lab.parity.run import compare_sides, record_side, run_parity

__all__ = [
    "TRANSFORMERS",
    "Comparison",
    "ParityConfig",
    "ParitySide",
    "SideRecord",
    "Tolerances",
    "compare",
    "compare_sides",
    "record_side",
    "run_parity",
]
