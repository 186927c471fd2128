"""A comparison whose sides run in processes of their own, one for each rank."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import ParityError
from rl_backend.lab.parity.config import ParityConfig, ParitySide
from rl_backend.lab.parity.run import record_side
from tests.support.faulty_runtime import Fault
from tests.support.models import write_tiny
from tests.support.moe import write_moe

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "tests.support.faulty_runtime"


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rl_backend.cli", "parity", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.shows("parity: native and Megatron train alike, dense and mixture of experts: loss to 1e-6, grad norm to 1e-5")
@pytest.mark.parametrize("kind", ["dense", "mixture of experts"])
def test_the_native_runtime_agrees_with_megatron(kind: str, tied_model: Path, tmp_path: Path) -> None:
    model = tied_model if kind == "dense" else write_moe("qwen3_moe", tmp_path / "model")
    output = tmp_path / "parity.json"
    sides = ("--reference", "bridge", "--candidate", "native")
    result = run_command("--model", str(model), *sides, "--steps", "5", "--lr", "1e-4", "--json", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(output.read_text())
    assert report["first_divergence"] is None
    assert report["max_loss_rel_diff"] < 1e-6
    assert report["max_grad_norm_rel_diff"] < 1e-5


@pytest.mark.shows("parity: native on 2 ranks trains as transformers does on one, each side in its own processes")
@pytest.mark.long
def test_native_on_two_ranks_agrees_with_transformers(tied_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "parity.json"
    result = run_command("--model", str(tied_model), "--dp", "2", "--steps", "5", "--lr", "1e-4", "--json", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no divergence" in result.stdout
    report = json.loads(output.read_text())
    assert report["first_divergence"] is None
    assert report["max_loss_rel_diff"] < 1e-6
    assert report["max_grad_norm_rel_diff"] < 1e-5
    assert (report["reference"]["world_size"], report["candidate"]["world_size"]) == (1, 2)
    assert report["candidate"]["layout"]["dp"] == 2
    assert report["candidate"]["versions"].keys() == {"python", "torch"}
    assert len(report["steps"]) == 5


@pytest.mark.long
@pytest.mark.shows("parity: the command compares two ranks that compute shared prefixes once with transformers")
def test_ranks_that_share_prefixes_agree_with_transformers(tmp_path: Path) -> None:
    # Of so few tokens many sequences begin alike.
    model = write_tiny("qwen3", tmp_path / "model", vocab_size=4)
    result = run_command("--model", str(model), "--plugin", "tests.support.short_runs", "--dp", "2", "--steps", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no divergence" in result.stdout


@pytest.mark.shows("parity: LoRA on native and on Megatron, 2 ranks each, trains as with peft: loss to 1e-6, grad norm 1e-5")
@pytest.mark.long
@pytest.mark.parametrize("sides", ["--candidate native --dp 2", "--candidate bridge --tp 2"])
def test_an_adapter_trains_as_peft_trains_it(tied_model: Path, tmp_path: Path, sides: str) -> None:
    output = tmp_path / "parity.json"
    lora = "--lora.rank 4 --lora.alpha 8 --lora.targets q_proj v_proj feed_forward --lora.use_rslora"
    result = run_command("--model", str(tied_model), *f"{sides} {lora} --steps 5 --lr 1e-4 --json {output}".split())
    assert result.returncode == 0, result.stdout + result.stderr
    assert "LoRA of rank 4, scale 4, on q_proj, v_proj, feed_forward; all else is frozen" in result.stdout
    report = json.loads(output.read_text())
    assert report["max_loss_rel_diff"] < 1e-6
    assert report["max_grad_norm_rel_diff"] < 1e-5
    assert report["lora"]["rank"] == 4
    compared = {stage["stage"]: stage["compared"] for stage in report["stages"]}
    # Two factors of five projections in two layers.
    assert compared["gradient"] == 20
    assert compared["weights"] == compared["loaded weights"] > 20


@pytest.mark.long
@pytest.mark.shows("parity: a norm with another eps, in a runtime from a plugin, is named by the command")
def test_a_fault_of_a_third_partys_runtime_is_named_and_the_exit_status_says_so(tied_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "parity.json"
    settings = ["--reference", "native", "--candidate", "faulty", "--plugin", PLUGIN, "--steps", "1", "--json", str(output)]
    result = run_command("--model", str(tied_model), *settings, "--candidate-options", '{"fault": "norm eps"}')
    assert result.returncode == 1, result.stderr
    assert "first divergence: activations model.layers.1.post_attention_layernorm (step 0): " in result.stdout
    assert json.loads(output.read_text())["first_divergence"]["name"] == "model.layers.1.post_attention_layernorm"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def record(*args: Any, **settings: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **settings))
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", record)
    return processes


def run_faulty(model: Path, folder: Path, fault: Fault, *, dp: int = 2, timeout: float = 120.0) -> None:
    candidate = ParitySide(runtime="faulty", dp=dp, options={"fault": fault})
    reference = ParitySide(runtime="native")
    config = ParityConfig(
        plugins=(PLUGIN,), model=str(model), reference=reference, candidate=candidate, timeout=timeout, steps=1, device="cpu"
    )
    folder.mkdir(exist_ok=True)
    record_side(config, "candidate", folder / "candidate")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("refusal", "^the candidate 'faulty' stopped: this runtime refuses to work$", marks=pytest.mark.long),
        pytest.param(
            "crash", "rank 1 of the candidate 'faulty' failed:\n(.*\n)*ZeroDivisionError: a bug", marks=pytest.mark.long
        ),
        pytest.param("death", "rank 1 of the candidate 'faulty' died with status 9", marks=pytest.mark.long),
    ],
    ids=["refusal", "crash", "death"],
)
def test_a_rank_that_ends_early_ends_the_side_with_its_error(
    tied_model: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]], fault: Fault, message: str
) -> None:
    with pytest.raises(ParityError, match=message):
        run_faulty(tied_model, tmp_path, fault)
    assert all(process.returncode is not None for process in started)


@pytest.mark.long
def test_a_model_that_the_runtime_refuses_is_told_apart_from_other_errors(tied_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tied_model, tmp_path / "model")
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "hidden_act": "gelu"}))
    side = ParitySide(runtime="native")
    config = ParityConfig(model=str(model), reference=side, candidate=side, device="cpu")
    with pytest.raises(ParityError, match=r"the candidate 'native' stopped: .*hidden_act='gelu'") as refused:
        record_side(config, "candidate", tmp_path / "candidate")
    assert refused.value.details["refused"] is True
    with pytest.raises(ParityError) as other:
        run_faulty(tied_model, tmp_path / "other", "refusal", dp=1)
    assert other.value.details["refused"] is False


def test_a_side_that_takes_too_long_is_ended(
    tied_model: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(ParityError, match=r"did not end within 0\.3 s; ranks still running"):
        run_faulty(tied_model, tmp_path, "none", dp=1, timeout=0.3)
    assert all(process.returncode is not None for process in started)
