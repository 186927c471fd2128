"""What decoders with mixtures of experts share: a family's own folder says what is different."""

from rl_backend.model.moe.architecture import MoEArchitecture, MoEOptions
from rl_backend.model.moe.config import num_experts, top_k
from rl_backend.model.moe.family import moe_family
from rl_backend.model.moe.model import MoEDecoder
from rl_backend.model.moe.weights import ExpertNames

__all__ = ["ExpertNames", "MoEArchitecture", "MoEDecoder", "MoEOptions", "moe_family", "num_experts", "top_k"]
