"""Batches as verl's trainers send them, in each layout, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

LENGTHS = ((3, 5), (2, 1), (4, 26), (2, 2), (6, 7), (1, 12), (9, 3), (5, 20))
"""(prompt, response) tokens of each sequence."""

VOCAB_SIZE = 128

GROUPS = (0, 0, 0, 1, 2, 2, 2, 2)
"""Which prompt each sequence of :func:`grouped_rows` has."""

type Layout = Literal["full", "response", "dense"]
"""Where masks and what goes with them are: over all tokens (SFT), over the response, or over the response with padding."""


def rows(seed: int = 0, *, spread: float = 0.5) -> list[dict[str, Tensor]]:
    """The sequences' fields without padding; prompts begin alike, and some response tokens are masked.

    Args:
        spread: of log-probs around those of tokens drawn evenly.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index, (prompt, response) in enumerate(LENGTHS):
        mask = torch.ones(response, dtype=torch.int64)
        if index in (2, 5):
            mask[1:4] = 0

        def noise(size: int = response) -> Tensor:
            return torch.randn(size, generator=generator)

        found.append(
            {
                "input_ids": torch.randint(0, VOCAB_SIZE, (prompt + response,), generator=generator),
                "prompt_length": torch.tensor(prompt),
                "response_mask": mask,
                "old_log_probs": -4.8 + spread * noise(),
                "ref_log_prob": -4.8 + spread * noise(),
                "advantages": noise(1).expand(response).clone(),
                "values": noise(),
                "returns": noise(),
                "temperature": 0.5 + torch.rand((), generator=generator),
            }
        )
    longest = max(found, key=lambda row: int(row["prompt_length"]))["input_ids"]
    for row in found:
        prompt = int(row["prompt_length"])
        row["input_ids"][:prompt] = longest[:prompt]
    return found


def grouped_rows(seed: int = 0) -> list[dict[str, Tensor]]:
    """As :func:`rows`, with groups of one prompt each; the prompts of the first and the last begin alike."""
    generator = torch.Generator().manual_seed(1000 + seed)
    system, *own = torch.randint(0, VOCAB_SIZE, (4, 40), generator=generator)
    prompts = [torch.cat([system, own[0]]), own[1], torch.cat([system, own[2]])]
    found = rows(seed)
    for row, group in zip(found, GROUPS, strict=True):
        response = row["input_ids"][row["prompt_length"] :]
        row["input_ids"] = torch.cat([prompts[group], response])
        row["prompt_length"] = torch.tensor(len(prompts[group]))
    return found


def make_batch(found: Sequence[Mapping[str, Tensor]], layout: Layout, **facts: Any) -> TensorDict:
    """A batch of verl's.

    Args:
        facts: what is no tensor, over defaults: one temperature of 1, all in one micro-batch.
    """
    from verl.utils import tensordict_utils as tu

    tensors = _dense(found) if layout == "dense" else _jagged(found, layout)
    defaults = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(found),
        "temperature": 1.0,
        "global_batch_size": len(found),
    }
    batch = tu.get_tensordict(tensors, {**defaults, **facts})
    if layout == "dense":
        from verl.workers.utils.padding import left_right_2_no_padding

        batch = left_right_2_no_padding(batch)
    return batch


def _jagged(found: Sequence[Mapping[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    def jagged(values: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    ids = [row["input_ids"] for row in found]
    tensors = {"input_ids": jagged(ids), "position_ids": jagged([torch.arange(len(each)) for each in ids])}
    if layout == "full":
        masks = [torch.cat([torch.zeros(int(row["prompt_length"])), row["response_mask"]]) for row in found]
        return {**tensors, "loss_mask": jagged(masks)}
    tensors["prompts"] = jagged([row["input_ids"][: row["prompt_length"]] for row in found])
    tensors["responses"] = jagged([row["input_ids"][row["prompt_length"] :] for row in found])
    for name in ("response_mask", "old_log_probs", "ref_log_prob", "advantages", "values", "returns"):
        tensors[name] = jagged([row[name] for row in found])
    return {**tensors, "loss_mask": tensors["response_mask"]}


def _dense(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Prompts padded on the left, responses on the right."""
    prompts = max(int(row["prompt_length"]) for row in found)
    responses = max(len(row["response_mask"]) for row in found)
    shape = (len(found), prompts + responses)
    ids, attention = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    fields = {
        name: torch.zeros(len(found), responses, dtype=found[0][name].dtype)
        for name in ("response_mask", "old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    }
    for index, row in enumerate(found):
        start = prompts - int(row["prompt_length"])
        ids[index, start : start + len(row["input_ids"])] = row["input_ids"]
        attention[index, start : start + len(row["input_ids"])] = 1
        for name, field in fields.items():
            field[index, : len(row[name])] = row[name]
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "prompts": ids[:, :prompts],
        "responses": ids[:, prompts:],
        **fields,
    }


def transformers_outputs(model: nn.Module, found: Sequence[Mapping[str, Tensor]], temperatures: Tensor) -> dict[str, Tensor]:
    """Jagged ``log_probs`` and ``entropy`` of a causal language model, differentiable, one sequence at a time."""
    log_probs, entropies = [], []
    for row, temperature in zip(found, temperatures, strict=True):
        ids = row["input_ids"]
        logits = model(ids[None]).logits[0, :-1] / temperature
        every = logits.log_softmax(-1)
        log_probs.append(torch.cat([every.gather(-1, ids[1:, None])[:, 0], torch.zeros(1)]))
        entropies.append(torch.cat([-(every.exp() * every).sum(-1), torch.zeros(1)]))
    offsets = torch.tensor([0, *(len(each) for each in log_probs)]).cumsum(0)
    return {
        "log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(log_probs), offsets),
        "entropy": torch.nested.nested_tensor_from_jagged(torch.cat(entropies), offsets),
    }


def transformers_gradients(
    path: Path, found: Sequence[Mapping[str, Tensor]], loss: Callable[..., Any], layout: Layout
) -> tuple[float, dict[str, Tensor]]:
    """verl's loss on transformers' log-probs of the whole batch, and its gradients."""
    from verl.utils import tensordict_utils as tu

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = make_batch(found, layout)
    tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=float(batch["loss_mask"].values().sum()))
    value, _ = loss(model_output=transformers_outputs(model, found, torch.ones(len(found))), data=batch, dp_group=None)
    value.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return float(value.detach()), gradients


def ppo(**changes: Any) -> Callable[..., Any]:
    """verl's PPO loss with an entropy bonus and a KL penalty."""
    from functools import partial

    from verl.workers.utils.losses import ppo_loss

    from tests.support.verl_reference import actor_config

    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01, "loss_agg_mode": "token-mean"}
    return partial(ppo_loss, config=actor_config({}, **{**settings, **changes}))
