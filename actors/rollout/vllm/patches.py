"""Patches of vLLM 0.30; the table of all is in the package's docstring."""

from __future__ import annotations

import importlib
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.lora.ops.torch_ops import lora_ops
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssModel
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from actors.wire.segment import DIRECTORY, owned_name

# That are added up at one time, to find the token at a number.
_WORDS = 256
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.((?:w13|w2)_(?:weight|bias))")


def _on_cpus(change: Callable[[], None]) -> Callable[[], None]:
    """Engines on GPUs go without this change to vLLM."""

    @wraps(change)
    def change_on_cpus() -> None:
        if current_platform.is_cpu():
            change()

    return change_on_cpus


@contextmanager
def packing_experts_again(model: nn.Module) -> Iterator[None]:
    """Experts that are loaded inside the context are packed again; those that are not keep their kernel."""
    methods = [module.quant_method for module in _modules_of(model, UnquantizedFusedMoEMethod)]
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        # A layer packs its experts only while this is unset, that is, once.
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            if method.moe_kernel is None:
                method.moe_kernel = kernel


@contextmanager
def packing_embeddings_again(model: nn.Module) -> Iterator[None]:
    """Embeddings and heads that vLLM does not pack inside the context are packed at its end, from their parameters then."""
    # Of a head that is tied only the embedding is loaded, which is another module: its packed copy would stay old.
    modules = _modules_of(model, UnquantizedEmbeddingMethod)
    for module in modules:
        vars(module).pop("cpu_linear", None)
    yield
    for module in modules:
        if "cpu_linear" not in vars(module):
            module.quant_method.process_weights_after_loading(module)


@_on_cpus
def rotate_views_outside_the_kernel() -> None:
    """From now on a CPU rotates (tokens, heads, features) in torch; rows of all heads together stay with its kernel."""
    # The kernel takes views of three dimensions for others of two.
    in_kernel = RotaryEmbedding.forward_cpu

    @wraps(in_kernel)
    def forward_cpu(
        rotary: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        forward = in_kernel if query.dim() == positions.dim() + 1 else type(rotary).forward_native
        rotated: tuple[Tensor, Tensor | None] = forward(rotary, positions, query, key)
        return rotated

    RotaryEmbedding.forward_cpu = forward_cpu


@_on_cpus
def route_by_sigmoid_without_groups() -> None:
    """From now on routers with sigmoid scores of a CPU that are made without groups have one, of all experts."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    make = CPURouter.__init__

    @wraps(make)
    def make_with_group(router: Any, *args: Any, **kwargs: Any) -> None:
        make(router, *args, **kwargs)
        if router.scoring_func == "sigmoid" and not router.use_grouped_topk and router.custom_routing_function is None:
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1

    CPURouter.__init__ = make_with_group


def name_weight_loaders(model: nn.Module) -> None:
    """Gives every loader of a weight a name."""
    for tensor in (*model.parameters(), *model.buffers()):
        loader = getattr(tensor, "weight_loader", None)
        # Partial functions, such as those of MiniMax-M2's norms, have none, and an update asks every loader for it.
        if loader is not None and not hasattr(loader, "__name__"):
            loader.__name__ = type(loader).__name__


@_on_cpus
def keep_adapters_from_experts() -> None:
    """From now on experts of a CPU have the kernels that they have without adapters, and take none."""
    chosen = unquantized_fused_moe_method.select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        # Else vLLM chooses Triton's kernels, which a CPU lacks, even where no expert has an adapter.
        moe_config.is_lora_enabled = False
        return chosen(moe_config)

    unquantized_fused_moe_method.select_unquantized_moe_backend = select


@_on_cpus
def multiply_adapters_once_for_all_rows() -> None:
    """From now on a CPU multiplies all rows of an adapter with its factors in one product."""
    from vllm.lora.punica_wrapper import punica_cpu

    # vLLM copies a whole adapter for every token of a step: sampling with one took three times as long as without.
    for name, product in {"bgmv_shrink": _shrink, "bgmv_expand": _expand, "bgmv_expand_slice": _expand_slice}.items():
        for module in (lora_ops, punica_cpu):
            setattr(module, name, product)


def _shrink(inputs: Tensor, weights: Tensor, out: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
    product = _product(inputs, weights, slots, out.dtype)
    out[:, : product.shape[1]] = product.mul_(scaling)


def _expand(inputs: Tensor, weights: Tensor, out: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
    # Adapter and model may pad the vocabulary differently.
    common = min(weights.shape[-2], out.shape[1])
    product = _product(inputs, weights, slots, out.dtype)[:, :common]
    out[:, :common] = out[:, :common] + product if add_inputs else product


def _expand_slice(
    inputs: Tensor, weights: Tensor, out: Tensor, slots: Tensor, start: int, size: int, add_inputs: bool = True
) -> None:
    _expand(inputs, weights, out[:, start : start + size], slots, add_inputs)


def _product(inputs: Tensor, weights: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, outputs): each row times what its slot of (slots, outputs, inputs), or (slots, 1, outputs, inputs), holds."""
    inputs, weights = inputs.to(dtype), weights.flatten(0, -3)
    first, last = (int(slot) for slot in torch.aminmax(slots))
    if first == last:
        return inputs @ weights[first].to(dtype).t()
    result = inputs.new_empty(len(inputs), weights.shape[1])
    for slot in slots.unique().tolist():
        rows = slots == slot
        result[rows] = inputs[rows] @ weights[slot].to(dtype).t()
    return result


@_on_cpus
def turn_generators_back() -> None:
    """From now on a token sampled in the middle of a prompt leaves the request's generator as it was, on a CPU too."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    # vLLM drops a token sampled after each piece of a prompt and turns the generator back by an offset, which generators of
    # a CPU do not have.
    sample, note = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def sample_and_turn_back(runner: Any, *args: Any, **kwargs: Any) -> Any:
        states = {index: generator.get_state() for index, generator in _generators_of_pieces(runner).items()}
        sampled = sample(runner, *args, **kwargs)
        for index, state in states.items():
            runner.input_batch.generators[index].set_state(state)
        return sampled

    def note_without_offsets(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators, of_pieces = runner.input_batch.generators, _generators_of_pieces(runner)
        for index in of_pieces:
            del generators[index]
        try:
            return note(runner, *args, **kwargs)
        finally:
            generators.update(of_pieces)

    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = sample_and_turn_back, note_without_offsets


def _generators_of_pieces(runner: Any) -> dict[int, torch.Generator]:
    incomplete = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
    return {index: generator for index, generator in runner.input_batch.generators.items() if incomplete[index]}


@_on_cpus
def draw_one_number_for_a_token() -> None:
    """From now on a CPU samples a token by one number of its request's generator, where a request has a seed."""
    # vLLM 0.32 does so itself, with a kernel.
    if hasattr(torch.ops._C, "fused_gumbel_argmax"):
        return
    # vLLM 0.30 draws a number for every token of the vocabulary, which takes as long as the model where the model is small.
    forward: Callable[..., tuple[Tensor, Tensor | None]] = TopKTopPSampler.forward_cpu

    @wraps(forward)
    def draw(
        sampler: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        kept = sampler.logprobs_mode
        if not generators or kept not in ("raw_logits", "raw_logprobs", "processed_logprobs"):
            return forward(sampler, logits, generators, k, p)
        log_probs = apply_top_k_top_p(logits, k, p).log_softmax(-1, dtype=torch.float32)
        # Others in the batch, without a seed too, must not change what a seeded request samples.
        numbers = [torch.rand((), generator=generators.get(row), dtype=torch.float64) for row in range(len(logits))]
        return _tokens_at(log_probs, torch.stack(numbers)), log_probs if kept == "processed_logprobs" else None

    TopKTopPSampler.forward_cpu = draw


def _tokens_at(log_probs: Tensor, numbers: Tensor) -> Tensor:
    """(rows,) int64: the token in whose part of the distribution function each number of [0, 1) lies."""
    # By sums of many words each, then word by word where the number lies: word by word from the first takes several times
    # as long.
    rows, words = log_probs.shape
    probabilities = log_probs.new_zeros(rows, words + -words % _WORDS)
    torch.exp(log_probs, out=probabilities[:, :words])
    parts = probabilities.unflatten(-1, (-1, _WORDS))
    sums = parts.sum(-1).double()
    part, left = _place(sums, numbers * sums.sum(-1))
    word, _ = _place(parts[torch.arange(rows), part].double(), left)
    # Of numbers that are none, some token: that its log-prob is none is told where responses are read.
    return (part * _WORDS + word).clamp(max=words - 1)


def _place(sizes: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(rows,) the part of (rows, parts) float64 ``sizes``, laid end to end, in which each number lies; and where in it."""
    ends = sizes.cumsum(-1)
    # Rounding must not reach the end, where parts may follow that have no size.
    inside = torch.minimum(numbers, torch.nextafter(ends[:, -1], torch.zeros_like(numbers)))
    place = torch.searchsorted(ends, inside[:, None], right=True).clamp(max=sizes.shape[-1] - 1)
    return place.squeeze(-1), inside - (ends.gather(1, place) - sizes.gather(1, place)).squeeze(-1)


@_on_cpus
def normalise_log_probs_again() -> None:
    """From now on the log-probs of a CPU's sampler belong to probabilities that add up to 1."""
    # torch's log_softmax adds word after word, and loses what is small beside the sum so far: of 49,152 words all log-probs
    # came out 4e-6 too high. Its sum adds in pairs.
    sample: Callable[..., tuple[Tensor, Tensor | None]] = Sampler.sample

    @wraps(sample)
    def sample_and_normalise(
        sampler: Any, logits: Tensor, metadata: Any, logprobs_mode_override: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        sampled, log_probs = sample(sampler, logits, metadata, logprobs_mode_override)
        if log_probs is not None and (logprobs_mode_override or sampler.logprobs_mode) == "processed_logprobs":
            log_probs -= log_probs.exp().sum(-1, keepdim=True).log()
        return sampled, log_probs

    Sampler.sample = sample_and_normalise


@_on_cpus
def normalise_in_a_kernel() -> None:
    """From now on a CPU computes RMS norms of float32 with vLLM's kernel, which adds the residual too."""
    # vLLM takes six operations of torch for each, a twelfth of the time of sampling with a small model.
    normalise = RMSNorm.forward_cpu

    @wraps(normalise)
    def forward_cpu(norm: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        weight = norm.weight.data if norm.has_weight else None
        # The kernel takes whole rows of eights that follow each other, and does not round bfloat16 to the nearest.
        tensors = [each for each in (x, residual, weight) if each is not None]
        known = all(each.is_contiguous() and each.dtype == torch.float32 for each in tensors)
        if not known or x.shape[-1] % 8 or norm.variance_size_override is not None:
            found: Tensor | tuple[Tensor, Tensor] = normalise(norm, x, residual)
            return found
        if residual is None:
            out = torch.empty_like(x)
            torch.ops._C.rms_norm(out, x, weight, norm.variance_epsilon)
            return out
        torch.ops._C.fused_add_rms_norm(x, residual, weight, norm.variance_epsilon)
        return x, residual

    RMSNorm.forward_cpu = forward_cpu


@_on_cpus
def take_the_first_blocks_again() -> None:
    """From now on a CPU takes blocks of keys and values from the first on when its cache of prefixes has been emptied."""
    # vLLM takes the block that was free longest, so that each step touches others, until all of the cache is in memory.
    reset = BlockPool.reset_prefix_cache

    @wraps(reset)
    def reset_and_sort(pool: Any) -> bool:
        emptied: bool = reset(pool)
        if emptied:
            pool.free_block_queue = FreeKVCacheBlockQueue([block for block in pool.blocks if not block.is_null])
        return emptied

    BlockPool.reset_prefix_cache = reset_and_sort


def bind_stores_to_their_address() -> None:
    """From now on a store that torch's rendezvous serves in this process listens on the address in its URL alone."""
    # By its name: torch.distributed.rendezvous as an attribute is the function.
    importlib.import_module("torch.distributed.rendezvous").TCPStore = _bound_store  # type: ignore[attr-defined]


def _bound_store(host_name: str, port: int, *, is_master: bool = False, **options: Any) -> TCPStore:
    if is_master:
        listener = socket.create_server((host_name, port))
        options |= {"multi_tenant": False, "master_listen_fd": listener.detach()}
    return TCPStore(host_name, port, is_master=is_master, **options)


def meet_in_shared_memory() -> None:
    """From now on the file by which an engine's workers meet has a name that goes when this process has ended."""
    if DIRECTORY.is_dir():
        for executor in (multiproc_executor, uniproc_executor):
            executor.get_file_store_init_method = lambda: f"file://{owned_name()}"


def load_through_loaders() -> None:
    """From now on updates of gpt-oss reach every parameter. A model that is being started loads as before."""
    # During an update vLLM replaces parameters by placeholders and gathers what their loaders are given. Its gpt-oss writes
    # whole stacks of experts, and sinks, past the loaders; experts that come one by one, and sinks given to theirs, arrive.
    load = GptOssModel.load_weights

    @wraps(load)
    def load_weights(model: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        in_update = any(parameter.is_meta for parameter in model.parameters())
        loaded: set[str] = load(model, _as_loaders_take_them(model, weights) if in_update else weights)
        return loaded

    GptOssModel.load_weights = load_weights


def _as_loaders_take_them(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        experts = _EXPERTS.fullmatch(name)
        if experts is not None:
            for number, expert in enumerate(tensor):
                yield f"{experts[1]}.{number}.{experts[2]}", expert
        elif name.endswith(".attn.sinks"):
            sinks, heads = parameters[name], len(parameters[name])
            load = getattr(sinks, "weight_loader", default_weight_loader)
            load(sinks, tensor.narrow(0, heads * get_tensor_model_parallel_rank(), heads))
        else:
            yield name, tensor


def _modules_of(model: nn.Module, method: type) -> list[Any]:
    if not current_platform.is_cpu():
        return []
    return [module for module in model.modules() if isinstance(getattr(module, "quant_method", None), method)]
