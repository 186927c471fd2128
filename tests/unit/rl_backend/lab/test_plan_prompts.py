"""Plans of prompts that samples share: operations, tokens, bytes, and what keeps prompts from being shared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tests.support.drafting  # noqa: F401 - registers a family
from rl_backend.cli.main import main
from rl_backend.contracts import TARGET_IDS, ConfigError, PackedBatch
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, make_config, open_runtime, token_loss
from tests.support.saved_bytes import SavedBytes
from tests.unit.rl_backend.cli.test_plan_command import CONFIG

PROMPT, LENGTH, SAMPLES = 96, 128, 4
ROWS = PROMPT + SAMPLES * (LENGTH - PROMPT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def work(tokens: int = ROWS, prompt: int = PROMPT, samples: int = SAMPLES) -> Workload:
    return Workload(
        sequence_length=LENGTH,
        micro_batch_tokens=tokens,
        num_micro_batches=1,
        prompt_length=prompt,
        samples_per_prompt=samples,
    )


@pytest.mark.shows(
    "plan: operations are counted by rows in layers, by pairs of tokens in scores, by wanted rows in the head"
)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_is_computed_once_and_its_samples_attend_to_all_of_it(
    tmp_path: Path, shares: bool, window: int | None
) -> None:
    windowed = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **(windowed if window else {})}))
    rows = ROWS if shares else SAMPLES * LENGTH
    config = make_config(tmp_path, max_tokens=rows, share_prefixes="auto" if shares else "off")
    plan = make_plan(config, 1, work(rows))
    assert plan.sequence_tokens == SAMPLES * LENGTH
    layers, hidden, heads = 4, 1024, 16 * 64
    matrices = 2 * hidden * heads + 2 * hidden * heads // 2 + 3 * hidden * 4096
    seen = [min(place + 1, window or LENGTH) for place in range(LENGTH)]
    pairs = (sum(seen[:PROMPT]) + SAMPLES * sum(seen[PROMPT:])) if shares else SAMPLES * sum(seen)
    wanted = SAMPLES * (LENGTH - PROMPT)
    # Forward and backward: scores and values of a pair twice, and five products to go back.
    assert plan.ranks[0].flops == layers * (6 * rows * matrices + 14 * pairs * heads) + 6 * wanted * hidden * 32000


def test_multi_token_prediction_is_planned_for_whole_sequences(tmp_path: Path) -> None:
    fields = {**CONFIG, "model_type": "drafting", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    kept, trained = (
        make_plan(make_config(tmp_path, max_tokens=ROWS, model="drafting", model_cfg=options), 1, work()).ranks[0].flops
        for options in ({}, {"mtp": "joint"})
    )
    tokens, hidden, heads = SAMPLES * LENGTH, 1024, 16 * 64
    matrices = 2 * hidden * heads + 2 * hidden * heads // 2 + 3 * hidden * 4096 + 2 * hidden * hidden
    pairs = tokens * (LENGTH + 1) // 2
    assert trained - kept == 6 * tokens * (matrices + hidden * 32000) + 14 * pairs * heads


def test_log_probs_of_prompts_count_where_prompts_may_be_shorter(model: Path) -> None:
    exact, most = (
        make_plan(make_config(model, max_tokens=ROWS), 1, each).ranks[0]
        for each in (work(), work().replace(trains_prompts=True))
    )
    # Those of all rows of a prompt but its last, and of the last row of each sample.
    assert most.flops - exact.flops == 6 * (PROMPT - 1 + SAMPLES) * 1024 * 32000
    assert most.activations > exact.activations


def test_prompts_fill_a_micro_batch_and_the_rest_is_a_shorter_sequence() -> None:
    shared, alone = (work(500).micro_batch(shares_prompts=shares) for shares in (True, False))
    # 224 rows and 224, and 52 of a third prompt; whole sequences, and 116 of one.
    assert shared.seq_lens.tolist() == [128] * 8 + [52] and alone.seq_lens.tolist() == [128] * 3 + [116]
    assert len(shared.input_ids.unique()) == len(alone.input_ids.unique()) == 500
    first, second = shared.split(shared.input_ids)[:2]
    assert torch.equal(first[:PROMPT], second[:PROMPT]) and not set(first[PROMPT:].tolist()) & set(second.tolist())
    targets = shared.split(shared.token_fields[TARGET_IDS])[1].tolist()
    assert targets == [-100] * (PROMPT - 1) + second[PROMPT:].tolist() + [-100]
    assert not Workload().micro_batch().token_fields
    assert Workload(sequence_length=3, micro_batch_tokens=7).micro_batch().seq_lens.tolist() == [3, 3, 1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "prompts of 96 tokens are computed once for up to 4 samples: a micro-batch has 512 tokens of sequences"),
        (("--options", '{"share_prefixes": "off"}'), "because of share_prefixes='off'"),
        (("--cp", "2"), "prompts are computed for each of their 4 samples, because of cp=2"),
        (("--tenants", "1"), "because of tenants=1"),
        (("--prompt-length", "31"), "because of prompt_length=31, below 32"),
        (("--backend", "bridge", "--options", '{"device": "cpu"}'), "because of backend='bridge'"),
    ],
    ids=str,
)
def test_a_plan_says_whether_prompts_are_shared(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    sizes = ("--sequence-length", "128", "--prompt-length", "96", "--samples-per-prompt", "4", "--micro-batch-tokens", "224")
    assert main(["plan", "--model", str(model), "--ranks", "2", "--micro-batches", "2", *sizes, *arguments]) == 0
    assert said in capsys.readouterr().out


def test_prompts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prompt_length=128: leaves no token of sequence_length=128 to train; use less"):
        work(prompt=128)
    with pytest.raises(ConfigError, match=r"samples_per_prompt=4: is of prompts, and prompt_length=0; set that too"):
        work(prompt=0)


def test_activations_are_those_of_a_runtime_that_shares(tmp_path: Path) -> None:
    path = write_tiny("qwen3", tmp_path / "model", num_hidden_layers=4)
    batch = work().micro_batch(shares_prompts=True)
    targets = batch.token_fields[TARGET_IDS]
    fields = {"loss_mask": (targets >= 0).float(), TARGET_IDS: targets.where(targets < 0, targets % VOCAB_SIZE)}
    meta = {"batch_num_tokens": 128.0, "dp_size": 1}
    data = [PackedBatch(batch.input_ids % VOCAB_SIZE, batch.seq_lens, fields, {}, meta)]
    with open_runtime(path, max_tokens=ROWS) as runtime:
        handle = runtime.build_model()
        saved = SavedBytes(lambda: handle.model.parameters())
        with saved:
            result = runtime.forward_backward(handle, data, token_loss)
    assert result.metrics["tokens_computed"] == (ROWS, SAMPLES * LENGTH)
    (memory,) = make_plan(make_config(path, max_tokens=ROWS), 1, work()).ranks
    assert memory.activations == pytest.approx(saved.peak, rel=0.25)
