"""The sizes of a layout as options of commands."""

SIZES = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline ranks",
    "vpp": "stages per pipeline rank",
    "cp": "context-parallel ranks",
    "ep": "expert-parallel ranks",
    "etp": "tensor-parallel ranks inside an expert",
}
"""Field of :class:`~rl_backend.contracts.ParallelConfig` -> help."""
