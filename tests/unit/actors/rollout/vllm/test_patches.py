"""Changes to vLLM: what each one does, and what it leaves as it was."""

from __future__ import annotations

import importlib
import inspect
import itertools
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models.gpt_oss import GptOssModel
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from actors.rollout.vllm import patches
from actors.wire import segment


def method(kind: Any, **fields: Any) -> Any:
    made = kind.__new__(kind)
    if isinstance(made, nn.Module):
        nn.Module.__init__(made)
    vars(made).update(fields)
    return made


class Layer(nn.Module):
    def __init__(self, quant_method: Any) -> None:
        super().__init__()
        self.quant_method = quant_method


def test_experts_are_packed_again_where_they_are_loaded_and_others_keep_their_kernel() -> None:
    methods = [method(UnquantizedFusedMoEMethod, moe_kernel=f"kernel {number}") for number in range(3)]
    other = SimpleNamespace(moe_kernel="of another kind")
    model = nn.ModuleList([*(Layer(each) for each in methods), Layer(other), nn.Linear(1, 1)])
    with patches.packing_experts_again(model):
        assert [each.moe_kernel for each in methods] == [None] * 3
        methods[1].moe_kernel = "packed again"
    kernels = ["kernel 0", "packed again", "kernel 2"]
    assert [each.moe_kernel for each in methods] == kernels and other.moe_kernel == "of another kind"
    with pytest.raises(ZeroDivisionError), patches.packing_experts_again(model):
        raise ZeroDivisionError
    assert [each.moe_kernel for each in methods] == kernels


def test_embeddings_that_vllm_does_not_pack_are_packed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []

    class Embeddings(UnquantizedEmbeddingMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            packed.append(layer)

    embedding, head, third = (Layer(method(Embeddings)) for _ in range(3))
    for each in (embedding, head):
        vars(each)["cpu_linear"] = "old"
    model = nn.ModuleList([embedding, head, third, Layer(SimpleNamespace())])
    with patches.packing_embeddings_again(model):
        assert "cpu_linear" not in vars(embedding) and "cpu_linear" not in vars(head)
        vars(embedding)["cpu_linear"] = "new"
        assert not packed
    assert packed == [head, third] and vars(embedding)["cpu_linear"] == "new"
    monkeypatch.setattr(patches, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with patches.packing_embeddings_again(model):
        assert vars(embedding)["cpu_linear"] == "new"
    assert packed == [head, third]


def test_views_of_heads_are_rotated_in_torch_and_rows_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rotary:
        @staticmethod
        def forward_native(rotary: Any, *args: Any) -> Any:
            return "native", args

    kernel: Any = lambda rotary, *args: ("kernel", args)  # noqa: E731
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", kernel)
    patches.rotate_views_outside_the_kernel()
    rotate: Any = RotaryEmbedding.forward_cpu
    positions, rows, heads = torch.zeros(3), torch.zeros(3, 8), torch.zeros(3, 2, 4)
    assert rotate(Rotary(), positions, rows) == ("kernel", (positions, rows, None))
    assert rotate(Rotary(), positions, heads, rows) == ("native", (positions, heads, rows))
    assert rotate(Rotary(), torch.zeros(3, 3), heads)[0] == "kernel", "positions of several axes"


def router(scoring: str, grouped: bool, function: Any) -> Any:
    def make(self: Any, groups: Any, *, scoring_func: str) -> None:
        self.scoring_func, self.use_grouped_topk, self.custom_routing_function = scoring_func, grouped, function
        self.num_expert_group = self.topk_group = groups

    return make


@pytest.mark.parametrize(
    ("scoring", "grouped", "function", "changed"),
    [
        ("sigmoid", False, None, True),
        ("softmax", False, None, False),
        ("sigmoid", True, None, False),
        ("sigmoid", False, len, False),
    ],
)
def test_routers_with_sigmoid_scores_have_one_group_where_they_had_none(
    monkeypatch: pytest.MonkeyPatch, scoring: str, grouped: bool, function: Any, changed: bool
) -> None:
    monkeypatch.setattr(CPURouter, "__init__", router(scoring, grouped, function))
    patches.route_by_sigmoid_without_groups()
    made: Any = CPURouter.__new__(CPURouter)
    made.__init__(7, scoring_func=scoring)
    groups = (1, 1) if changed else (7, 7)
    assert (made.use_grouped_topk, made.num_expert_group, made.topk_group) == (grouped or changed, *groups)


def test_loaders_without_a_name_have_that_of_their_type() -> None:
    class Loader:
        def __call__(self) -> None: ...

    def named() -> None: ...

    model: Any = nn.Module()
    for number, loader in enumerate((Loader(), named, None)):
        parameter = nn.Parameter(torch.zeros(1))
        parameter.weight_loader = loader  # type: ignore[attr-defined]
        model.register_parameter(f"p{number}", parameter)
    model.register_buffer("state", torch.zeros(1))
    model.state.weight_loader = Loader()
    model.register_buffer("plain", torch.zeros(1))
    patches.name_weight_loaders(model)
    names = [getattr(each.weight_loader, "__name__", None) for each in (model.p0, model.p1, model.p2, model.state)]
    assert names == ["Loader", "named", None, "Loader"]


def test_experts_choose_their_kernels_as_without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = "select_unquantized_moe_backend"
    monkeypatch.setattr(unquantized_fused_moe_method, choose, lambda config: ("chosen", config.is_lora_enabled))
    patches.keep_adapters_from_experts()
    config = SimpleNamespace(is_lora_enabled=True)
    assert getattr(unquantized_fused_moe_method, choose)(config) == ("chosen", False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("slots", [[2, 2, 2, 2, 2], [0, -1, 2, 0, 2], [-1, -1, -1, -1, -1]])
def test_products_with_adapters_are_vllms_whatever_slots_rows_have(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slots: list[int]
) -> None:
    names = "bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"
    before = {name: getattr(lora_ops, name) for name in names}
    for module, name in itertools.product((lora_ops, punica_cpu), names):
        monkeypatch.setattr(module, name, before[name])
    patches.multiply_adapters_once_for_all_rows()
    drawn = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(*shape, generator=drawn).to(dtype) for shape in ((5, 7), (3, 1, 4, 7), (3, 1, 9, 4)))
    narrow, wide = (torch.randn(5, size, generator=drawn).to(dtype) for size in (4, 12))
    calls: list[tuple[str, Any, Tensor, tuple[Any, ...]]] = [
        ("bgmv_shrink", (x, a), torch.zeros(5, 6, dtype=torch.float64 if dtype == torch.float64 else torch.float32), (0.5,)),
        ("bgmv_expand", (narrow, b), wide, (True,)),
        ("bgmv_expand", (narrow, b), wide, (False,)),
        ("bgmv_expand", (narrow, b), wide[:, :8], (True,)),
        ("bgmv_expand_slice", (narrow, b), wide, (2, 9, True)),
        ("bgmv_expand_slice", (narrow, b[:, 0]), wide, (3, 9, False)),
    ]
    for name, given, out, options in calls:
        expected, found = out.clone(), out.clone()
        before[name](*given, expected, torch.tensor(slots), *options)
        getattr(punica_cpu, name)(*given, found, torch.tensor(slots), *options)
        torch.testing.assert_close(found, expected)
    # A prompt's rows come by runs of one adapter, and end in the same products.
    starts, lengths, which = torch.tensor([0, 2]), torch.tensor([2, 3]), torch.tensor([slots[0], slots[-1]])
    found, expected = wide.clone(), wide.clone()
    lora_ops.sgmv_expand_slice(narrow, b, found, starts, lengths, which, 2, 3, 5, 1, 9, True)
    before["bgmv_expand_slice"](narrow, b, expected, which.repeat_interleave(lengths), 1, 9, True)
    torch.testing.assert_close(found, expected)


def test_a_token_in_the_middle_of_a_prompt_leaves_its_generator_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = {index: torch.Generator().manual_seed(index) for index in (0, 1, 3, 4)}
    mask = SimpleNamespace(np=[True, False, True, False, True, True])
    runner: Any = SimpleNamespace(
        discard_request_mask=mask, input_batch=SimpleNamespace(num_reqs=5, generators=dict(generators))
    )
    states = {index: each.get_state() for index, each in generators.items()}
    noted: list[Any] = []

    def sample(runner: Any, logits: str, *, spec: int) -> tuple[str, int]:
        for each in runner.input_batch.generators.values():
            torch.rand(3, generator=each)
        return logits, spec

    def note(runner: Any, *args: Any, **options: Any) -> Any:
        noted.append((sorted(runner.input_batch.generators), args, options))
        if len(noted) > 1:
            raise ZeroDivisionError
        return "noted"

    monkeypatch.setattr(CPUModelRunner, "_sample", sample)
    monkeypatch.setattr(CPUModelRunner, "_bookkeeping_sync", note)
    patches.turn_generators_back()
    functions: Any = CPUModelRunner
    assert functions._sample(runner, "logits", spec=2) == ("logits", 2)
    same = {index: torch.equal(each.get_state(), states[index]) for index, each in generators.items()}
    assert same == {0: True, 1: False, 3: False, 4: True}
    assert functions._bookkeeping_sync(runner, 7, a=8) == "noted" and runner.input_batch.generators == generators
    with pytest.raises(ZeroDivisionError):
        functions._bookkeeping_sync(runner)
    assert noted == [([1, 3], (7,), {"a": 8}), ([1, 3], (), {})] and runner.input_batch.generators == generators


class Draws(TorchFunctionMode):
    """How many numbers generators draw inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.exponential = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.exponential_:
            self.exponential += args[0].numel()
        return func(*args, **(kwargs or {}))


def generators(seeds: Sequence[int]) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in enumerate(seeds)}


def test_a_seeded_token_takes_one_number_and_not_one_for_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    vllms = inspect.unwrap(TopKTopPSampler.forward_cpu)
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", vllms)
    patches.draw_one_number_for_a_token()
    rows, words = 3, 50
    logits = torch.randn(rows, words, generator=torch.Generator().manual_seed(0)) * 2
    sampler: Any = SimpleNamespace(logprobs_mode="processed_logprobs", use_fp64_gumbel=False)
    with Draws() as draws:
        vllms(sampler, logits.clone(), generators([4, 5, 6]), None, None)
    needed = draws.exponential >= rows * words
    assert needed == (TopKTopPSampler.forward_cpu is not vllms), "it changes nothing where vLLM draws as few itself"
    with Draws() as draws:
        tokens, log_probs = TopKTopPSampler.forward_cpu(sampler, logits.clone(), generators([4, 5, 6]), None, None)
    assert draws.exponential == 0
    assert log_probs is not None
    torch.testing.assert_close(log_probs, logits.log_softmax(-1))
    alone = [
        TopKTopPSampler.forward_cpu(sampler, logits[[row]], generators([4 + row]), None, None)[0] for row in range(rows)
    ]
    assert tokens.dtype == torch.int64 and torch.equal(tokens, torch.cat(alone)), "others in the batch change nothing"
    seeded = generators([4, 5, 6])
    del seeded[1]
    beside = TopKTopPSampler.forward_cpu(sampler, logits.clone(), seeded, None, None)[0]
    assert torch.equal(beside[[0, 2]], tokens[[0, 2]]), "nor does one without a seed"
    # Where no request has a seed, and where vLLM is to return something else, it samples itself.
    sampler.use_fp64_gumbel = True
    with Draws() as draws:
        TopKTopPSampler.forward_cpu(sampler, logits.clone(), {}, None, None)
    assert draws.exponential
    sampler.use_fp64_gumbel = False
    sampler.logprobs_mode = "processed_logits"
    _, returned = TopKTopPSampler.forward_cpu(sampler, logits.clone(), generators([4, 5, 6]), None, None)
    assert returned is not None and torch.equal(returned, logits)


def test_tokens_are_drawn_as_often_as_they_are_likely_and_never_those_that_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", inspect.unwrap(TopKTopPSampler.forward_cpu))
    patches.draw_one_number_for_a_token()
    sampler: Any = SimpleNamespace(logprobs_mode="raw_logprobs", use_fp64_gumbel=False)
    logits = torch.tensor([-torch.inf, 1.0, 0.0, -torch.inf, 2.0, -1.0, -torch.inf])
    draws = 20_000
    tops = torch.full((draws,), 3)
    tokens, returned = TopKTopPSampler.forward_cpu(sampler, logits.repeat(draws, 1), generators(range(draws)), tops, None)
    assert returned is None
    found = torch.bincount(tokens, minlength=7) / draws
    expected = torch.tensor([0, 1.0, 0.0, 0, 2.0, 0, 0]).exp() * torch.tensor([0, 1, 1, 0, 1, 0, 0])
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected / expected.sum(), atol=0.012, rtol=0)
    sampler.logprobs_mode = "processed_logprobs"
    for k, p in ((tops[:1], None), (None, torch.tensor([0.9]))):
        kept = TopKTopPSampler.forward_cpu(sampler, logits[None].clone(), generators([0]), k, p)[1]
        torch.testing.assert_close(kept, (expected / expected.sum()).log()[None])
    # The ends of the interval.
    log_probs = torch.tensor([[-torch.inf, 0.5, 0.5, -torch.inf]]).log_softmax(-1)
    ends = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert patches._tokens_at(log_probs.repeat(2, 1), ends).tolist() == [1, 2]
    # Weights that are no numbers: the token has a log-prob, whatever it is.
    assert 0 <= int(patches._tokens_at(torch.full((1, 4), torch.nan), ends[:1])) < 4


@pytest.mark.parametrize("words", [1, 255, 256, 257, 49_152])
def test_a_token_is_found_in_whatever_part_of_the_vocabulary_it_lies(words: int) -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(7, words, generator=generator)).log_softmax(-1)
    log_probs[:, 1::3] = -torch.inf
    numbers = torch.rand(7, dtype=torch.float64, generator=generator)
    numbers[0], numbers[1] = 0.0, 1.0 - 2**-53
    ends = log_probs.double().exp().cumsum(-1)
    expected = [int((row <= number * row[-1]).sum()) for row, number in zip(ends, numbers, strict=True)]
    expected[1] = int(log_probs[1].isfinite().nonzero()[-1])
    assert patches._tokens_at(log_probs, numbers).tolist() == expected


@pytest.mark.parametrize("greedy", [True, False])
def test_log_probs_of_many_words_are_not_too_high(greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "sample", inspect.unwrap(Sampler.sample))
    vllms = Sampler.sample
    patches.normalise_log_probs_again()
    # A likely word, and very many others that have a part of the probability together.
    logits = 2 * torch.randn(4, 49_152, generator=torch.Generator().manual_seed(0))
    logits[:, 7] += 20.0
    exact, kept = logits.double().log_softmax(-1), "processed_logprobs"
    topk_topp = method(TopKTopPSampler, logprobs_mode=kept, use_fp64_gumbel=False)
    sampler: Any = method(Sampler, logprobs_mode=kept, topk_topp_sampler=topk_topp.forward_cpu)
    options = {"top_k": None, "top_p": None, "max_num_logprobs": 0, "logprob_token_ids": None}
    no_processors = SimpleNamespace(argmax_invariant=[])
    metadata = SimpleNamespace(
        all_greedy=greedy,
        all_random=not greedy,
        temperature=torch.ones(4),
        generators=generators([4, 5, 6, 7]),
        logitsprocs=no_processors,
        **options,
    )

    def error(sample: Any) -> float:
        _, log_probs = sample(sampler, logits.clone(), metadata)
        return float((log_probs - exact)[:, 7].mean())

    assert error(vllms) > 1e-6, "it changes nothing where vLLM is as exact itself"
    assert abs(error(Sampler.sample)) < 2e-7
    # What is no log-prob stays.
    _, returned = Sampler.sample(sampler, logits.clone(), metadata, "processed_logits" if greedy else None)
    assert returned is not None and torch.equal(returned, logits) == greedy


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("features", [576, 128, 24, 7])
def test_a_norm_of_a_cpu_is_one_kernel(
    dtype: torch.dtype, tolerance: float, features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllms = inspect.unwrap(RMSNorm.forward_cpu)
    monkeypatch.setattr(RMSNorm, "forward_cpu", vllms)
    patches.normalise_in_a_kernel()
    generator = torch.Generator().manual_seed(0)
    x, residual = (10 * torch.randn(5, features, generator=generator).to(dtype) for _ in range(2))
    weight = nn.Parameter(torch.rand(features, generator=generator).to(dtype))
    fields = {"weight": weight, "variance_epsilon": 1e-5, "variance_size_override": None}
    norm, plain = (method(RMSNorm, has_weight=has, pass_weight=has, pass_weight_add=has, **fields) for has in (True, False))

    def check(found: Tensor, rows: Tensor, by: float | Tensor) -> None:
        exact = rows.double() / (rows.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * by
        assert found.dtype == rows.dtype
        torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)

    scale = weight.detach().double()
    check(norm.forward_cpu(x.clone()), x, scale)
    check(plain.forward_cpu(x.clone()), x, 1.0)
    found, kept = norm.forward_cpu(x.clone(), residual.clone())
    check(found, x + residual, scale)
    assert torch.equal(kept, x + residual)
    # With vLLM stay parts of other rows, such as queries in a product of all three, rows in another dtype than the weight,
    # and a variance of some features alone.
    parts = torch.randn(5, 3 * features, generator=generator).to(dtype)[:, features : 2 * features]
    check(norm.forward_cpu(parts), parts, scale)
    wide = x.to(torch.float64)
    assert torch.equal(norm.forward_cpu(wide), vllms(norm, wide))
    norm.variance_size_override = 4
    assert torch.equal(norm.forward_cpu(x), vllms(norm, x))

    def operations(forward: Any) -> set[str]:
        with profile(activities=[ProfilerActivity.CPU]) as found:
            forward(plain, x)
        return {event.key for event in found.key_averages()}

    if features % 8:
        return
    if dtype == torch.bfloat16:
        summed = x.clone(), residual.clone()
        torch.ops._C.fused_add_rms_norm(*summed, weight.data, 1e-5)
        assert not torch.equal(summed[1], x + residual), "the kernel rounds to the nearest now"
        return
    assert len(operations(vllms)) > 4, "vLLM does so itself now"
    assert operations(RMSNorm.forward_cpu) <= {"_C::rms_norm", "aten::empty_like", "aten::empty", "aten::empty_strided"}


def test_blocks_of_an_empty_cache_are_taken_from_the_first_on(monkeypatch: pytest.MonkeyPatch) -> None:
    own = inspect.unwrap(BlockPool.reset_prefix_cache)

    def blocks_of_steps(steps: int) -> list[int]:
        """Which blocks a request of three takes, step after step."""
        pool, taken = BlockPool(9, enable_caching=True, hash_block_size=32), []
        for _ in range(steps):
            blocks: Any = pool.get_new_blocks(3)
            for block in blocks:
                # As of prompts, which later requests may begin with.
                block._block_hash = f"prompt {block.block_id}".encode()
            assert not pool.reset_prefix_cache(), "some are in use"
            pool.free_blocks(reversed(blocks))
            taken += [block.block_id for block in blocks]
            assert pool.reset_prefix_cache()
        assert sorted(block.block_id for block in pool.get_new_blocks(8)) == list(range(1, 9)), "all but the null block"
        return taken

    monkeypatch.setattr(BlockPool, "reset_prefix_cache", own)
    assert len(set(blocks_of_steps(2))) == 6, "vLLM does so itself now"
    patches.take_the_first_blocks_again()
    assert blocks_of_steps(3) == [1, 2, 3] * 3


@pytest.mark.parametrize(
    ("change", "owner", "name"),
    [
        (patches.rotate_views_outside_the_kernel, RotaryEmbedding, "forward_cpu"),
        (patches.route_by_sigmoid_without_groups, CPURouter, "__init__"),
        (patches.turn_generators_back, CPUModelRunner, "_sample"),
        (patches.draw_one_number_for_a_token, TopKTopPSampler, "forward_cpu"),
        (patches.normalise_log_probs_again, Sampler, "sample"),
        (patches.normalise_in_a_kernel, RMSNorm, "forward_cpu"),
        (patches.take_the_first_blocks_again, BlockPool, "reset_prefix_cache"),
        (patches.multiply_adapters_once_for_all_rows, punica_cpu, "bgmv_shrink"),
    ],
)
def test_a_gpu_keeps_vllms_own_functions(monkeypatch: pytest.MonkeyPatch, change: Any, owner: type, name: str) -> None:
    before = getattr(owner, name)
    monkeypatch.setattr(owner, name, before)
    monkeypatch.setattr(patches, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    change()
    assert getattr(owner, name) is before


def test_a_store_listens_on_its_own_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(module, "TCPStore", module.TCPStore)
    patches.bind_stores_to_their_address()
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    server = module.TCPStore("127.0.0.2", port, is_master=True, world_size=1, multi_tenant=True)
    client = module.TCPStore("127.0.0.2", port, is_master=False, world_size=1)
    server.set("key", "value")
    assert client.get("key") == b"value"
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.1", port)) != 0


def test_workers_meet_by_a_file_that_goes_when_the_engine_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What makes the patch needed.
    assert Path(get_file_store_init_method().removeprefix("file://")).parent == Path(tempfile.gettempdir())
    for executor in (uniproc_executor, multiproc_executor):
        monkeypatch.setattr(executor, "get_file_store_init_method", get_file_store_init_method)
    for module in (segment, patches):
        monkeypatch.setattr(module, "DIRECTORY", tmp_path)
    patches.meet_in_shared_memory()
    for executor in (uniproc_executor, multiproc_executor):
        file = Path(executor.get_file_store_init_method().removeprefix("file://"))
        assert file.parent == tmp_path and not file.exists()
        file.touch()
    assert segment.stale_segments() == []
    monkeypatch.setattr(segment, "start_time", lambda pid: "")
    assert len(segment.stale_segments()) == 2


class GptOss(nn.Module):
    """vLLM's gpt-oss as far as its parameters go: ``sinks`` of two heads here."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.attn = nn.Module()
        sinks: Any = nn.Parameter(torch.zeros(2, device=device))
        self.layer.attn.sinks = sinks
        self.loaded: list[Any] = []
        sinks.weight_loader = lambda parameter, value: self.loaded.append(value.tolist())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_update_of_gpt_oss_reaches_every_parameter_and_a_start_is_as_before(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr(
        GptOssModel, "load_weights", lambda model, weights: [(name, each.tolist()) for name, each in weights]
    )
    monkeypatch.setattr(patches, "get_tensor_model_parallel_rank", lambda: rank)
    patches.load_through_loaders()
    stack = torch.arange(6.0).view(3, 2)
    weights = [
        ("layer.mlp.experts.w13_weight", stack),
        ("layer.attn.sinks", torch.arange(4.0)),
        ("layer.mlp.experts.w2_bias", stack[:1]),
        ("layer.mlp.experts.w2_weight_scale", stack),
        ("layer.mlp.router.weight", stack),
    ]
    load: Any = GptOssModel.load_weights
    starting, updating = GptOss("cpu"), GptOss("meta")
    assert load(starting, iter(weights)) == [(name, each.tolist()) for name, each in weights] and not starting.loaded
    assert load(updating, iter(weights)) == [
        *((f"layer.mlp.experts.{number}.w13_weight", row.tolist()) for number, row in enumerate(stack)),
        ("layer.mlp.experts.0.w2_bias", stack[0].tolist()),
        *((name, each.tolist()) for name, each in weights[3:]),
    ]
    assert updating.loaded == [[2.0 * rank, 2.0 * rank + 1]]
