"""What the dense decoders share: a family's own folder says what is different."""

from rl_backend.model.dense.architecture import DenseArchitecture, DenseOptions
from rl_backend.model.dense.config import full_attention, read_dense, window_of_every_layer, windows_by_layer_type
from rl_backend.model.dense.family import dense_family
from rl_backend.model.dense.model import DenseDecoder

__all__ = [
    "DenseArchitecture",
    "DenseDecoder",
    "DenseOptions",
    "dense_family",
    "full_attention",
    "read_dense",
    "window_of_every_layer",
    "windows_by_layer_type",
]
