"""``rl-backend plan`` as a user meets it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rl_backend.cli.main import main
from rl_backend.contracts import PackedBatch
from rl_backend.lab.plan.make import candidate_layouts, make_plan
from rl_backend.lab.plan.memory import Workload
from rl_backend.parallel.groups import fake_rank
from tests.support.claims import ROOT
from tests.support.models import write_tiny
from tests.support.native import make_config, open_runtime, token_loss

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
PARAMETERS = 2 * 32000 * 1024 + 4 * (3 * 1024 * 4096 + 2 * 1024 * 1024 + 2 * 1024 * 512 + 2 * 1024 + 2 * 64) + 1024
SIZES = ("--sequence-length", "128", "--micro-batch-tokens", "256", "--micro-batches", "2")
SMALL_WORK = (*SIZES, "--param-dtype", "bfloat16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory without weights."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == status
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_bytes_of_each_phase_follow_from_the_number_of_parameters(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--model", str(model / "config.json"), "--ranks", "4", *SMALL_WORK)
    assert found["parallel"]["dp"] == 4
    assert found["sync_bytes"] == 2 * PARAMETERS
    (rank,) = found["ranks"]
    training = rank["phases"]["training"]
    for name, size in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        assert training[name] == pytest.approx(size * PARAMETERS / 4, rel=1e-3)
    assert training["unreduced_gradients"] == 4 * PARAMETERS
    assert training["total"] == sum(size for name, size in training.items() if name != "total")
    assert found["peak"]["rollout"] == rank["phases"]["rollout"]["total"] == found["peak"]["optimizer_step"]


@pytest.mark.parametrize(("has_gpu", "dtype", "size"), [(False, "float32", 4), (True, "bfloat16", 2)])
def test_the_dtype_is_that_of_a_run_on_this_machine(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_gpu: bool, dtype: str, size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    work = ("--model", str(model), "--ranks", "1", *SIZES, "--tenants", "1")
    found = as_json(capsys, *work)
    assert found["workload"]["sync_dtype"] == dtype and found["sync_bytes"] == size * PARAMETERS
    assert found["ranks"][0]["phases"]["training"]["weights"] == size * PARAMETERS
    assert as_json(capsys, *work, "--sync-dtype", "bfloat16")["sync_bytes"] == 2 * PARAMETERS


def test_tenants_take_four_numbers_for_each_of_their_parameters(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a rank that is padded to 16; slots of engines have the next rank of vLLM."""
    work = ("--model", str(model), "--ranks", "1", *SMALL_WORK, "--tenants", "3", "--lora.rank", "9")
    found = as_json(capsys, *work, "--lora.targets", "q_proj,down_proj")
    (rank,) = found["ranks"]
    sizes = 4 * (1024 + 1024 + 4096 + 1024)
    assert rank["phases"]["rollout"]["adapters"] == 3 * 4 * 4 * 16 * sizes
    assert rank["phases"]["optimizer_step"].keys() == {"weights", "adapters", "total"}
    assert rank["phases"]["training"]["weights"] == 2 * PARAMETERS
    layer = 3 * (1024 + 4096) + 2 * (1024 + 1024) + 2 * (1024 + 512)
    assert found["engine_slots"] == (3 + 1) * 16 * 2 * (4 * layer + 2 * (32000 + 1024))
    assert main(["plan", *work]) == 0
    assert "each vLLM engine keeps" in capsys.readouterr().out


def test_offloaded_parts_are_on_the_device_only_where_they_are_used(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ("--model", str(model), "--ranks", "2", *SMALL_WORK)
    phases = as_json(capsys, *work, "--offload", "model,optimizer,grad")["ranks"][0]["phases"]
    assert phases["rollout"] == {"total": 0}
    assert "optimizer" not in phases["training"]
    assert phases["optimizer_step"].keys() == {"weights", "optimizer", "gradients", "total"}
    assert phases["weight_sync"].keys() == {"weights", "sync_bucket", "total"}


@pytest.mark.shows("plan: `rl-backend plan` says in which phase a model does not fit a device, and which layout does")
def test_a_layout_that_fits_is_found_where_the_given_one_does_not(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = ("--model", str(model), "--ranks", "4", *SMALL_WORK)
    dp = as_json(capsys, *work)["peak"]["training"]
    gib = str(0.7 * dp / 2**30)
    found = as_json(capsys, *work, "--device-gib", gib, status=1)
    assert not found["fits"] and found["phases_over"] == ["training"]
    suggestion = found["suggestion"]
    assert suggestion["fits"] and suggestion["peak"]["training"] < 0.7 * dp
    assert {name: size for name, size in suggestion["parallel"].items() if size > 1} == {"dp": 2, "tp": 2}
    assert main(["plan", *work, "--device-gib", gib]) == 1
    assert "fits with" in (text := capsys.readouterr().out) and "dp=2 tp=2" in text
    assert as_json(capsys, *work, "--device-gib", "0.001", status=1)["suggestion"] is None
    assert as_json(capsys, *work, "--device-gib", "80")["fits"]


def test_less_is_preferred_before_more(model: Path) -> None:
    config = make_config(model)
    layouts = candidate_layouts(config, 4)
    assert [(layout.tp, layout.pp, layout.cp) for layout in layouts if layout.ep == 1][:4] == [
        (1, 1, 1),
        (2, 1, 1),
        (1, 1, 2),
        (1, 2, 1),
    ]
    assert len(set(map(str, layouts))) == len(layouts)


def test_sequences_are_not_longer_than_the_model_has_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 512}))
    found = as_json(capsys, "--model", str(tmp_path), "--ranks", "1")
    assert found["workload"]["sequence_length"] == 512
    message = refusal(capsys, "--model", str(tmp_path), "--ranks", "1", "--sequence-length", "600")
    assert "--sequence-length 600: the model has 512 positions; use at most that" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "3", "--tp", "3"), "--tp 3: does not divide num_attention_heads=16"),
        (("--ranks", "4", "--pp", "8"), "world size 4 is not a multiple of tp*pp*cp = 1*8*1 = 8"),
        (("--ranks", "2", "--ep", "2"), "--ep 2: this model has no experts"),
        (("--ranks", "0"), "--ranks 0: must be at least 1"),
        (("--ranks", "1", "--device-gib", "inf"), "argument --device-gib: inf must be above 0 and finite"),
        (("--ranks", "1", "--sync", "50", "0"), "argument --sync: 0 must be above 0 and finite"),
        (("--ranks", "1", "--sequence-length", "9000"), "--sequence-length 9000: does not fit into micro_batch_tokens=8192"),
        (("--ranks", "1", "--head", "values", "--entropy"), "--entropy True: head='values' has no entropy"),
        (("--ranks", "1", "--lora.rank", "8"), "is of tenants=0 LoRA tenants; set tenants too"),
        (("--ranks", "1", "--tenants", "2", "--lora.targets", "q"), "LoRAConfig.targets='q': no module of this name"),
        (
            ("--ranks", "1", "--tenants", "2", "--backend", "bridge", "--lora.targets", "experts"),
            "LoRAConfig.targets='experts'",
        ),
        (
            ("--ranks", "1", "--offload", "weights"),
            "Workload.offload.0=\"weights\": input should be 'model', 'optimizer' or 'grad'",
        ),
        (("--ranks", "1", "--options", '{"param_dtype": "float32"}'), "param_dtype has a flag; use that"),
        (("--ranks", "1", "--options", '{"unheard": 1}'), "NativeConfig.unheard=1: unknown field"),
        (("--ranks", "1", "--byte-budget", "1000"), "byte_budget=1000 cannot hold model.embed_tokens.weight"),
        (("--ranks", "2", "--pp", "2", "--pipeline-schedule", "zbv"), "zbv needs 2 stages per rank"),
        (
            ("--ranks", "3", "--pp", "3", "--backend", "bridge"),
            "--pp 3: 4 layers do not divide into pp*vpp = 3*1 = 3 stages",
        ),
        (("--ranks", "2", "--cp", "2", "--backend", "bridge"), "--cp 2: the bridge runtime does not split packed sequences"),
        (
            ("--ranks", "1", "--backend", "bridge", "--options", '{"device": "cuda"}'),
            "BridgeConfig.device='cuda': a plan knows what Megatron's own layers keep",
        ),
        (
            ("--ranks", "1", "--reduce-dtype", "float32", "--backend", "bridge"),
            "BridgeConfig.reduce_dtype='float32': unknown field",
        ),
        (
            ("--ranks", "1", "--backend", "bridge", "--options", '{"override_ddp_config": {"overlap_grad_reduce": true}}'),
            "BridgeConfig has override_ddp_config={'overlap_grad_reduce': True}: a plan does not know what overrides take",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_planned_is_refused_with_the_arithmetic(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal(capsys, "--model", str(model), *arguments)


def test_the_output_on_the_page_is_that_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    model = tmp_path / "models" / "Qwen3-8B"
    model.mkdir(parents=True)
    sizes = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0}
    (model / "config.json").write_text(json.dumps(CONFIG | released | sizes))
    monkeypatch.chdir(tmp_path)
    command, output = re.findall(r"^```\n(.*?)```", (ROOT / "docs" / "plan.md").read_text(), re.DOTALL | re.MULTILINE)[:2]
    assert main(shlex.split(command)[1:]) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "config.json cannot be read (" in refusal(capsys, "--model", str(tmp_path / "none"), "--ranks", "1")
    assert "config.json" in refusal(capsys, "--model", str(tmp_path), "--ranks", "1")


def test_ranks_that_do_not_run_leave_nothing_behind(model: Path) -> None:
    with fake_rank(make_config(model).backend_cfg.parallel, 3, 8) as groups:
        assert (groups.dp_rank, groups.dp_size, groups.world_size) == (3, 8, 8)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "lora", [{"targets": ["embed_tokens"]}, {"targets": ["lm_head"]}, {"targets": ["q_proj"], "use_dora": True}], ids=str
)
def test_gradients_of_tenants_are_counted_as_theirs_alone(tmp_path: Path, lora: dict[str, Any]) -> None:
    """Of a higher rank adapters take more, and a micro-batch of few tokens hardly does; logits would hide the embedding."""
    work: dict[str, Any] = {"sequence_length": 16, "micro_batch_tokens": 16, "tenants": 1}
    work["head"] = "log_probs" if "lm_head" in lora["targets"] else "values"
    small = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **small, "num_key_value_heads": 4, "vocab_size": 512}))

    def planned(rank: int) -> Any:
        return make_plan(make_config(tmp_path), 1, Workload(**work, lora={**lora, "rank": rank})).ranks[0]

    low, high = planned(16), planned(256)
    of_tenant = (high.adapters - low.adapters) // 4
    assert of_tenant >= 4 * 240 * (256 + 256)
    assert high.workspace + high.activations - low.workspace - low.activations < of_tenant / 2


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_activations_are_what_the_allocator_says(tmp_path: Path, checkpointing: str) -> None:
    """With recomputation what a layer keeps is no saved tensor, so allocations are counted."""
    path = write_tiny("qwen3", tmp_path / "model", num_hidden_layers=4)
    work = Workload(sequence_length=256, micro_batch_tokens=512, num_micro_batches=1)
    config = make_config(path, activation_checkpointing=checkpointing)
    batch = work.micro_batch()
    meta = {"batch_num_tokens": 512.0, "dp_size": 1}
    # Two sequences that begin alike would be computed as one.
    data = [PackedBatch(batch.input_ids // 4, batch.seq_lens, {"loss_mask": torch.ones(512)}, {}, meta)]
    with open_runtime(path, activation_checkpointing=checkpointing) as runtime:
        handle = runtime.build_model()
        # The first pass allocates what stays.
        runtime.forward_backward(handle, data, token_loss)
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

        def loss_after_forward(*arguments: Any) -> Any:
            profiler.__exit__(None, None, None)
            return token_loss(*arguments)

        profiler.__enter__()
        runtime.forward_backward(handle, data, loss_after_forward)
    allocated = sum(event.self_cpu_memory_usage for event in profiler.events() or ())
    (memory,) = make_plan(config, 1, work).ranks
    assert memory.activations == pytest.approx(allocated, rel=0.25)
