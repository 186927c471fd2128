"""``rl-backend parity`` as a user meets it: what it refuses before a process starts, and what it prints and writes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.cli import parity
from rl_backend.cli.main import main
from rl_backend.contracts import ConfigError, RLBackendError
from rl_backend.lab.parity.compare import SideRecord, Tolerances, compare
from rl_backend.lab.parity.config import ParityConfig, ParitySide
from rl_backend.lab.parity.run import ParityResult, as_json, as_text, required_modules


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--model {missing}", "{missing}/config.json cannot be read ("),
        (
            "--model {model} --candidate megatorn",
            "unknown runtime 'megatorn'; known: bridge, ",
        ),
        ("--model {model} --reference jax", "unknown runtime 'jax'; known: "),
        ("--model {model} --tp 3", "--candidate native --tp 3: ParallelConfig.tp=3: does not divide num_attention_heads=4"),
        (
            "--model {model} --reference native --reference-pp 3",
            "--reference native --reference-pp 3: ParallelConfig.pp=3: pp * vpp stages need as many layers",
        ),
        (
            "--model {model} --candidate bridge --vpp 2",
            "--candidate bridge --vpp 2: BridgeConfig.parallel.vpp=2: needs pp > 1",
        ),
        ("--model {model} --ep 3 --dp 2", "--candidate native --ep 3 --dp 2: world size 2 is not a multiple"),
        ("--model {model} --dp 0", "--candidate native --dp 0: "),
        (
            "--model {model} --reference-dp 2",
            "--reference transformers --reference-dp 2: transformers runs on one rank, and takes ",
        ),
        (
            "--model {model} --dp 8",
            "--sequences 16: 4 micro-batches on each data-parallel rank of the candidate (dp=8) need",
        ),
        ("--model {model} --steps 0", "--steps 0: "),
        ("--model {model} --lr 0", "--lr 0.0: "),
        ("--model {model} --max-length 4096", "--max-length 4096: the model has 512 positions"),
        ("--model {model} --min-length 49", "--min-length 49: the longest sequence has max_length=48"),
        ("--model {model} --plugin no.such.module", "RuntimeConfig.plugins='no.such.module': cannot be imported"),
        ("--model {model} --candidate-options [1]", "argument --candidate-options: invalid json_object value: '[1]'"),
        ("--model {model} --candidate-options {{}", "argument --candidate-options: invalid json_object value: '{{}'"),
        (
            '--model {model} --candidate-options {"param_dtype":"bfloat16"}',
            "--candidate native --candidate-options '{\"param_dtype\": \"bfloat16\"}': options['param_dtype']='bfloat16': "
            "both sides have the same: ParityConfig.dtype (--dtype)",
        ),
        (
            '--model {model} --reference native --reference-options {"optimizer":{"lr":1}}',
            "--reference native --reference-options '{\"optimizer\": {\"lr\": 1}}': options['optimizer']=",
        ),
        ('--model {model} --candidate-options {"parallel":{"tp":2}}', "--candidate native --candidate-options "),
        ('--model {model} --candidate-options {"device":"cuda"}', "--candidate native --candidate-options "),
        (
            "--model {model} --candidate bridge --pp 2 --vpp 2 --micro-batches 3",
            "--micro-batches 3: Megatron's interleaved schedule of the candidate (pp=2, vpp=2) takes a multiple of 2",
        ),
        ("--model {model} --lora.rank 0", "--lora.rank 0: "),
        ("--model {model} --lora.alpha 8", "--lora.alpha has no effect without --lora.rank"),
        ("--model {model} --lora.rank 4 --lora.targets .", "--lora.targets ('.',): has an empty name"),
        ("--model {model} --tolerance-factor 0", "argument --tolerance-factor: 0 must be above 0 and finite"),
        ("--model {model} --tolerance-factor inf", "argument --tolerance-factor: inf must be above 0 and finite"),
        (
            "--model {model} --json {missing}/out.json",
            "--json {missing}/out.json: must be a file in a directory that exists",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_flag_and_value_before_a_process_starts(
    tied_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, expected: str
) -> None:
    def filled(text: str) -> str:
        return text.replace("{model}", str(tied_model)).replace("{missing}", str(tmp_path / "x")).replace("{{}", "{")

    assert main(["parity", *filled(arguments).split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {filled(expected)}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.usefixtures("no_processes")
def test_too_few_devices_are_counted_before_a_process_starts(tied_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--model", str(tied_model), "--device", "cuda", "--dp", "2"]) == 2
    assert capsys.readouterr().err.startswith("error: --device 'cuda': the layout needs 2 CUDA devices, found 0")


def test_expert_parallelism_takes_the_fewest_data_parallel_ranks_that_it_needs() -> None:
    layouts = {(1, 2): 2, (2, 2): 1, (2, 4): 2, (1, 1): 1}
    for (tp, ep), copies in layouts.items():
        side = ParitySide(runtime="bridge", parallel={"tp": tp, "ep": ep})
        assert (side.data_parallel_size, side.world_size) == (copies, copies * tp)


def record(losses: list[float], **changes: object) -> SideRecord:
    tensors = {"model.norm.weight": torch.ones(4)}
    fields = {
        "activations": {"model.norm": torch.ones(3, 4)},
        "log_probs": torch.ones(3),
        "losses": losses,
        "grad_norms": [1.0] * len(losses),
        "loaded_weights": tensors,
        "gradients": tensors,
        "weights": {"model.norm.weight": torch.full((4,), 0.9)},
        **changes,
    }
    return SideRecord(**fields)  # type: ignore[arg-type]


def result(
    reference: SideRecord, candidate: SideRecord, modules: Sequence[str] = ("model.norm",), **changes: float
) -> ParityResult:
    side = ParitySide(runtime="native")
    config = ParityConfig(model="some-model", reference=side, candidate=side, steps=len(reference.losses), **changes)
    comparison = compare(reference, candidate, Tolerances.of("float32"), modules)
    return ParityResult(config.replace(device="cpu"), 3, comparison, {"reference": {}, "candidate": {}})


def test_tolerances_are_those_of_five_and_twenty_steps_and_grow_on() -> None:
    tolerances = Tolerances.of("float32")
    growth = {0: 1, 4: 1, 5: 10, 19: 10, 20: 100, 79: 100, 80: 1000}
    for step, factor in growth.items():
        assert tolerances.at_step(step) == pytest.approx((1e-6 * factor, 1e-5 * factor))
    assert Tolerances.of("float32", 3.0).at_step(0) == pytest.approx((3e-6, 3e-5))


def test_equal_sides_have_no_divergence() -> None:
    report = as_json(result(record([2.0, 1.0]), record([2.0, 1.0])))
    assert report["first_divergence"] is None
    assert report["max_loss_rel_diff"] == report["max_grad_norm_rel_diff"] == 0.0
    assert report["loss_fall"] == 0.5
    assert [step["candidate"]["loss"] for step in report["steps"]] == [2.0, 1.0]


def test_json_is_printed_alone_or_written_beside_the_text(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(config: ParityConfig, _: Tolerances, say: Callable[[str], None]) -> ParityResult:
        say("a step")
        return result(record([2.0, 1.0]), record([2.0, 1.0]))

    monkeypatch.setattr(parity, "run_parity", compared)
    assert main(["parity", "--json", "--model", str(tied_model)]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["first_divergence"] is None
    assert printed.err.startswith("a step\n") and "some-model" in printed.err
    file = tmp_path / "parity.json"
    assert main(["parity", "--model", str(tied_model), "--json", str(file)]) == 0
    written = capsys.readouterr()
    assert written.out.startswith("a step\n") and written.err == ""
    assert json.loads(file.read_text()) == json.loads(printed.out)


def test_a_loss_that_is_not_finite_is_a_divergence_and_null_in_the_json() -> None:
    outcome = result(record([2.0, 1.0]), record([2.0, math.nan]))
    report = as_json(outcome)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["max_loss_rel_diff"] is None
    assert report["first_divergence"]["step"] == 1
    assert "first divergence: loss (step 1): one side has another shape or values that are not finite" in as_text(outcome)


@pytest.mark.parametrize(
    ("changes", "stage", "amount"),
    [
        ({"gradients": {"model.norm.weight": torch.zeros(4)}}, "gradient", 1.0),
        ({"gradients": {"model.norm.weight": torch.ones(5)}}, "gradient", None),
        ({"log_probs": torch.tensor([1.0, math.inf, 1.0])}, "log-probs", None),
        ({"weights": {}}, "weights", None),
        ({"activations": {}}, "activations", None),
    ],
)
def test_zero_gradients_other_shapes_infinities_and_absent_names_are_divergences(
    changes: dict[str, object], stage: str, amount: float | None
) -> None:
    divergence = as_json(result(record([1.0]), record([1.0], **changes)))["first_divergence"]
    assert divergence["stage"] == stage
    assert divergence["amount"] == amount


@pytest.mark.parametrize(("size", "diverges"), [(1e-9, False), (1e-6, True)])
def test_a_weight_whose_gradient_is_rounding_may_go_either_way(size: float, diverges: bool) -> None:
    weights = {"model.norm.weight": torch.full((4,), 0.9)}
    gradients = {"model.norm.weight": torch.ones(4), "gate.weight": torch.full((4,), size)}
    before = {"model.norm.weight": torch.ones(4), "gate.weight": torch.ones(4)}
    sides = [
        record([1.0], gradients=gradients, loaded_weights=before, weights={**weights, "gate.weight": torch.full((4,), to)})
        for to in (0.9, 1.1)
    ]
    divergence = as_json(result(*sides))["first_divergence"]
    assert (divergence is not None and divergence["name"] == "gate.weight") is diverges
    infinite = record(
        [1.0], gradients=gradients, loaded_weights=before, weights={**weights, "gate.weight": torch.full((4,), math.inf)}
    )
    assert as_json(result(sides[0], infinite))["first_divergence"]["name"] == "gate.weight"


@pytest.mark.parametrize(("other", "diverges"), [(-1e-8, False), (0.0, True)])
def test_a_gradient_that_cancels_to_zero_on_one_side_is_rounding(other: float, diverges: bool) -> None:
    reference, candidate = (
        record(
            [1.0],
            gradients={"model.norm.weight": torch.tensor([1.0, 1.0, 1.0, last])},
            loaded_weights={"model.norm.weight": torch.ones(4)},
            weights={"model.norm.weight": torch.tensor([0.9, 0.9, 0.9, to])},
        )
        for last, to in ((0.0, 1.0), (other, 1.05))
    )
    divergence = as_json(result(reference, candidate))["first_divergence"]
    assert (divergence is not None and divergence["stage"] == "weights") is diverges


def test_inner_modules_of_one_side_are_listed_and_layers_of_one_side_are_a_divergence() -> None:
    modules = ("model.norm", "model.layers.0")
    inner = {"model.norm": torch.ones(3, 4), "model.layers.0.mlp": torch.ones(3, 4), "model.layers": torch.ones(3, 4)}
    both = {**inner, "model.layers.0": torch.ones(3, 4)}
    without_inner = {path: both[path] for path in modules}
    outcome = result(record([1.0], activations=both), record([1.0], activations=without_inner), modules)
    assert outcome.comparison.first_divergence is None
    assert "not compared, on one side only: model.layers.0.mlp, model.layers" in as_text(outcome)
    divergence = result(record([1.0], activations=both), record([1.0], activations=inner), modules)
    assert str(divergence.comparison.first_divergence) == (
        "activations model.layers.0 (step 0): the candidate does not have it"
    )


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("loaded weights", {"loaded_weights": {}}),
        ("activations model.norm", {"activations": {}}),
        ("log-probs", {"log_probs": torch.ones(0)}),
        ("gradient", {"gradients": {}}),
        ("weights", {"weights": {}}),
    ],
)
def test_a_stage_that_compares_nothing_is_a_divergence(stage: str, changes: dict[str, object]) -> None:
    outcome = result(record([2.0], **changes), record([2.0], **changes))
    assert as_json(outcome)["first_divergence"]["missing_from"] == "both"
    assert f"first divergence: {stage} (step 0): nothing to compare" in as_text(outcome)


def test_a_layer_that_neither_side_recorded_is_a_divergence() -> None:
    outcome = result(record([1.0]), record([1.0]), ("model.norm", "model.layers.0"))
    divergence = outcome.comparison.first_divergence
    assert str(divergence) == "activations model.layers.0 (step 0): nothing to compare: neither side has it"


def test_required_modules_are_the_layers_that_config_json_counts_and_what_stands_beside_them(tied_model: Path) -> None:
    checkpoint = HFReader(tied_model)
    assert set(required_modules(checkpoint.config, checkpoint.infos)) == {
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
    }
    names = [f"model.layers.{index}.mlp.experts.1.up_proj.weight" for index in range(3)]
    assert required_modules({"num_hidden_layers": 2}, names) == ("model.layers.0", "model.layers.1")
    with pytest.raises(ConfigError, match="num_hidden_layers=4: the checkpoint has no layer 3"):
        required_modules({"num_hidden_layers": 4}, names)


@pytest.mark.parametrize(
    ("last", "remarked"), [(1.0, False), (1.9, False), (1.99, True), (3.0, True), (math.nan, True), (-math.inf, False)]
)
def test_a_loss_that_hardly_falls_says_little_of_later_steps(last: float, remarked: bool) -> None:
    losses = [2.0, 1.0, last]
    remark = "so the later steps say little: take more steps or a larger lr"
    assert (remark in as_text(result(record(losses), record(losses)))) is remarked


def test_a_stage_counts_the_tensors_that_both_sides_have() -> None:
    whole = {name: torch.ones(4) for name in ("a.weight", "b.weight", "c.weight")}
    part = {name: whole[name] for name in ("a.weight", "c.weight")}
    for reference, candidate, missing_from in ((whole, part, "candidate"), (part, whole, "reference")):
        outcome = result(record([1.0], gradients=reference), record([1.0], gradients=candidate))
        stages = {stage["stage"]: stage for stage in as_json(outcome)["stages"]}
        assert (stages["gradient"]["compared"], stages["loaded weights"]["compared"]) == (2, 1)
        assert (stages["gradient"]["first_over"]["name"], stages["gradient"]["first_over"]["missing_from"]) == (
            "b.weight",
            missing_from,
        )
        (row,) = [line for line in as_text(outcome).splitlines() if line.startswith("  gradient ")]
        assert row.split()[1:3] == ["2", "missing"]


def test_a_learning_rate_that_hides_wrong_decay_groups_is_remarked_on() -> None:
    remark = "with lr below 1e-05, the weights' tolerance may hide a parameter in a wrong decay group"
    for lr, expected in ((1e-6, True), (1e-5, False)):
        assert (remark in as_text(result(record([1.0]), record([1.0]), lr=lr))) is expected


def test_the_first_dtypes_json_is_there_when_the_second_fails(
    tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(config: ParityConfig, *_: Any) -> ParityResult:
        if config.dtype == "bfloat16":
            raise RLBackendError("out of memory")
        return result(record([1.0]), record([1.0]))

    monkeypatch.setattr(parity, "run_parity", run)
    output = tmp_path / "parity.json"
    assert main(["parity", "--model", str(tied_model), "--dtype", "both", "--json", str(output)]) == 2
    assert json.loads(output.read_text())["dtype"] == "float32"


def test_sigterm_is_an_exit_for_as_long_as_the_command_compares(tied_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> ParityResult:
        assert signal.getsignal(signal.SIGTERM) != before
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was ignored")

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(parity, "run_parity", run)
    with pytest.raises(SystemExit) as exit_status:
        main(["parity", "--model", str(tied_model)])
    assert exit_status.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


WITH_A_CHILD = """
import subprocess, sys, tempfile
from rl_backend.cli.command import exit_on_sigterm
with exit_on_sigterm(), tempfile.TemporaryDirectory(dir=sys.argv[1]):
    child = subprocess.Popen(["sleep", "600"])
    try:
        print(child.pid, flush=True)
        child.wait()
    finally:
        child.kill()
        child.wait()
"""


def test_a_terminated_command_leaves_neither_children_nor_its_temporary_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_A_CHILD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.terminate()
        assert process.wait(timeout=10) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not any(tmp_path.iterdir())
