"""Gradients of a transformers model by the names of its directory, where experts may be single tensors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def stored_gradients(model: Any) -> dict[str, Tensor]:
    """What ``save_pretrained`` would write of the model if its weights were their gradients; zeros where there are none."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
