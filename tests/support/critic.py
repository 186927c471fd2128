"""Critics: directories of them, a loss for them, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForTokenClassification

from rl_backend.contracts import Metric, MetricValue, ModelOutput, PackedBatch
from tests.support.native import Split, deal, gradients, micro_batches, open_runtime, optimizer_state, train_with, weights


def write_critic(path: Path, language_model: Path, **changes: Any) -> Path:
    """transformers' critic on the language model's weights, with a random head."""
    torch.manual_seed(1)
    critic = AutoModelForTokenClassification.from_pretrained(
        language_model, num_labels=1, dtype=torch.float32, ignore_mismatched_sizes=True, **changes
    )
    with torch.no_grad():
        critic.score.weight.normal_(std=0.2)
        critic.score.bias.fill_(0.3)
    critic.save_pretrained(path)
    return path


def transformers_values(path: Path, sequences: Sequence[Tensor]) -> Tensor:
    """(T,) values, one forward pass for each sequence."""
    critic, report = AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    critic.eval()
    with torch.no_grad():
        return torch.cat([critic(sequence[None]).logits[0, :, 0] for sequence in sequences])


def squared_error(
    model_output: ModelOutput, data: PackedBatch, dp_group: Any = None
) -> tuple[Tensor, Mapping[str, MetricValue]]:
    """Mean squared distance of the values to each token's id divided by 50."""
    assert model_output.values is not None
    assert model_output.log_probs is None
    total = (model_output.values - data.input_ids / 50).square().sum()
    loss = total / data.meta["batch_num_tokens"] * data.meta["dp_size"]
    return loss, {"error": Metric(float(total.detach()), float(data.num_tokens))}


def critic_job(model: str, split: list[Split], settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Whole gradients of a critic, and this rank's values, on the micro-batches that ``split`` gives to this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open_runtime(model, **settings) as runtime:
        handle = runtime.build_model(head="values")
        result = runtime.forward_backward(handle, micro_batches(split[rank], dp_size=len(split)), squared_error)
        return gradients(handle), [value.clone() for value in result.output("values")]


def critic_layout_job(
    model: str, layout: dict[str, int], schedule: str | None = None
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Whole gradients of a critic in a layout, and the values by sequence on the ranks that have them."""
    options = {"pipeline_schedule": schedule} if schedule else {}
    with open_runtime(model, parallel=layout, **options) as runtime:
        handle = runtime.build_model(head="values")
        mine = deal([[0, 1], [2, 3], [4, 5], [6, 7]], handle.data_parallel_size)[handle.data_parallel_rank]
        batches = micro_batches(mine, dp_size=handle.data_parallel_size)
        result = runtime.forward_backward(handle, batches, squared_error)
        exported = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
        order = [index for indices in mine for index in indices]
        values = dict(zip(order, result.output("values"), strict=True)) if result.outputs else {}
        return exported, values


def critic_state_job(model: str, path: str, load: bool) -> tuple[dict[str, Tensor], list[tuple[float, float]]]:
    """State of a critic that was saved after two steps, or that loaded it, and the curve of what follows."""
    with open_runtime(model, seed=int(load)) as runtime:
        handle = runtime.build_model(head="values")
        if load:
            runtime.load_checkpoint(handle, path)
        else:
            train_with(squared_error, runtime, handle, 2)
            runtime.save_checkpoint(handle, path)
        state = {**weights(handle), **optimizer_state(handle)}
        return state, train_with(squared_error, runtime, handle, 2, first_seed=2)


def critic_hf_job(model: str, path: str) -> None:
    with open_runtime(model) as runtime:
        handle = runtime.build_model(head="values")
        train_with(squared_error, runtime, handle, 2)
        runtime.save_checkpoint(handle, path, hf=True)
