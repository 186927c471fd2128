"""Plans that are made by hand, as text, as JSON and as layouts to choose from."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rl_backend.contracts import ConfigError, NativeConfig, RuntimeConfig
from rl_backend.contracts.atoms import Part
from rl_backend.lab.plan import make as module
from rl_backend.lab.plan.make import Plan, as_json, as_text, candidate_layouts, suggest_layout
from rl_backend.lab.plan.memory import PHASES, RankMemory, Workload
from rl_backend.model.blocks import CacheBytes

MIB, GIB = 2**20, 2**30


def rank(**changes: Any) -> RankMemory:
    sizes: dict[str, Any] = {
        "weights": 10 * MIB,
        "gradients": 20 * MIB,
        "optimizer": 40 * MIB,
        "adapters": 0,
        "unreduced_gradients": 5 * MIB,
        "gathered_parameters": 7 * MIB,
        "activations": 100 * MIB,
        "workspace": 9 * MIB,
        "evaluation_workspace": 6 * MIB,
        "logits_chunk": 4 * MIB,
        "sync_bucket": 8 * MIB,
        "kept_per_micro_batch": {0: 11, 2: 13},
        "flops": 2_500_000_000,
    }
    return RankMemory(**{**sizes, **changes})


def plan(*ranks: RankMemory, layout: dict[str, int] | None = None, **changes: Any) -> Plan:
    config = RuntimeConfig(hf_path="m", backend_cfg={"parallel": layout or {"pp": 2}})
    work: dict[str, Any] = {"num_micro_batches": 3, "sequence_length": 512, "micro_batch_tokens": 1024}
    workload = Workload(**{**work, **changes.pop("workload", {})})
    made = ranks or (rank(), rank(activations=40 * MIB, optimizer=90 * MIB))
    return Plan(config, 4, workload, 2, made, **{"sync_bytes": 30 * MIB, **changes})


def test_a_phase_takes_what_it_works_with_and_what_is_not_offloaded() -> None:
    one = rank()
    held = {"weights": 10, "gradients": 20, "optimizer": 40}
    expected: dict[str, dict[str, int]] = {
        "training": {
            **held,
            "unreduced_gradients": 5,
            "gathered_parameters": 7,
            "activations": 100,
            "workspace": 9,
        },
        "optimizer_step": held,
        "log_probs": {**held, "gathered_parameters": 7, "workspace": 6},
        "weight_sync": {**held, "sync_bucket": 8},
        "rollout": held,
    }
    for phase in PHASES:
        assert {name: size // MIB for name, size in one.phase(phase, ()).items()} == expected[phase]
        assert one.total(phase, ()) == sum(expected[phase].values()) * MIB
    offloaded = {phase: one.total(phase, ("model", "optimizer", "grad")) // MIB for phase in PHASES}
    assert offloaded == {"training": 151, "optimizer_step": 70, "log_probs": 23, "weight_sync": 18, "rollout": 0}
    gradients: tuple[Part, ...] = ("grad",)
    assert one.total("rollout", gradients) == 50 * MIB
    assert rank(adapters=MIB).total("rollout", ("model", *gradients)) == 41 * MIB


def test_the_largest_rank_is_another_in_another_phase() -> None:
    made = plan()
    assert made.largest("training") is made.ranks[0] and made.largest("rollout") is made.ranks[1]
    assert [made.peak(phase) // MIB for phase in PHASES] == [191, 120, 133, 128, 120]
    assert made.phases_over(128 * MIB) == ["training", "log_probs"] and made.phases_over(204 * MIB) == []
    assert made.num_parameters == 15 * MIB and plan(workload={"sync_dtype": "float32"}).num_parameters == 30 * MIB // 4
    assert made.layout == {"dp": 2, **made.config.backend_cfg.parallel.model_dump()} and made.layout["pp"] == 2


def cells(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name).split()


def test_the_text_has_a_table_and_what_follows_from_it() -> None:
    cache = CacheBytes(3 * MIB, MIB // 2)
    text = as_text(plan(engine_slots=6 * MIB, sequence_cache=cache, workload={"tenants": 1}), None, None)
    assert text.startswith("native on 4 ranks, dp=2 pp=2; 3 micro-batches of 1024 tokens in sequences of 512\n\nMiB on the")
    assert cells(text, "activations") == ["100.00"]
    assert cells(text, "optimizer  ") == ["40.00", "90.00", "90.00", "90.00", "90.00"]
    assert cells(text, "workspace") == ["9.00", "6.00"]
    assert cells(text, "sync bucket") == ["8.00"] and "adapters  " not in text
    assert cells(text, "total") == ["191.00", "120.00", "133.00", "128.00", "120.00"]
    assert cells(text, "0 ") == ["191.00", "70.00", "83.00", "78.00", "70.00"]
    assert cells(text, "1 ") == ["181.00", "120.00", "133.00", "128.00", "120.00"]
    for line in (
        "the busiest rank computes 2.50 GFLOP in a step, recomputed layers included",
        "logits: 4.00 MiB at one time, in the workspace",
        "each vLLM engine keeps 6.00 MiB for the adapters of 1 tenant",
        "a vLLM engine keeps 3.50 MiB of a sequence of 512 tokens: 3.00 of keys and values, "
        "0.50 of states, which do not grow",
    ):
        assert f"\n{line}\n" in f"{text}\n"
    kept = (
        "with recover=memory the ranks' nodes keep two states of 180.00 MiB in host memory, other nodes as much again, "
        "and the "
    )
    assert f"\n{kept}driver about 0.2 MiB of each step since" in as_text(plan(), None, None)
    tenants = plan(rank(adapters=4 * MIB), rank(adapters=8 * MIB), workload={"tenants": 2})
    assert "keep two states of 9.00 MiB in host memory" in as_text(tenants, None, None)
    assert "a weight sync sends 30.00 MiB in bfloat16; through shared memory or gloo" in text and "Megatron" not in text


def test_links_of_a_weight_sync_are_that_of_the_rank_that_sends_most_and_that_of_an_engine() -> None:
    made = plan(count_sent=lambda: [10 * MIB, 20 * MIB, 0, 0])
    text = as_text(made, None, None, [0.5, 2])
    assert "\na rank sends at most 20.00 MiB of it, and each engine's host receives all\n" in text
    assert "\nat 0.5 GiB/s a link takes 0.04 s to send that, and 0.06 s to receive\nat 2 GiB/s a link takes 0.01 s" in text
    facts = as_json(made, None, None, [0.5])
    assert facts["sync_sent"] == [10 * MIB, 20 * MIB, 0, 0]
    assert facts["sync_seconds"] == {"0.5": {"send": 40 / 1024, "receive": 60 / 1024}}


def test_a_large_plan_is_in_larger_units_and_leaves_out_what_it_has_not() -> None:
    big = rank(activations=3 * GIB, flops=3 * 10**12, logits_chunk=0)
    text = as_text(plan(big, layout={}, sequence_cache=CacheBytes(MIB)), 8 * GIB, None)
    assert "GiB on the largest rank" in text and "of pipeline rank" not in text and "logits:" not in text
    assert "computes 3.00 TFLOP" in text and "keeps 1.00 MiB of a sequence of 512 tokens\n" in text
    assert text.endswith("\n\nfits 8.00 GiB, of which 4.91 are left")
    silent = as_text(plan(rank(flops=0)), None, None)
    assert "FLOP" not in silent and "engine keeps" not in silent


def test_what_does_not_fit_is_said_with_what_would() -> None:
    made = plan()
    text = as_text(made, 128 * MIB, plan(rank(activations=0), layout={"tp": 2}))
    assert text.endswith(
        "\n\ndoes not fit 128.00 MiB: training needs 191.00, log probs needs 133.00\nfits with 91.00 MiB: dp=2 tp=2"
    )
    assert as_text(made, 128 * MIB, None).splitlines()[-1].startswith("no layout of 4 ranks fits: take more ranks")


def test_json_has_every_rank_and_phase() -> None:
    made = plan(workload={"offload": ("optimizer",)}, sequence_cache=CacheBytes(5, 7), engine_slots=9)
    facts = json.loads(json.dumps(as_json(made, 128 * MIB, plan(rank(activations=0)))))
    assert [(each["pipeline_rank"], each["first_rank"], each["num_ranks"]) for each in facts["ranks"]] == [
        (0, 0, 2),
        (1, 2, 2),
    ]
    assert facts["ranks"][1]["phases"]["rollout"] == {"weights": 10 * MIB, "gradients": 20 * MIB, "total": 30 * MIB}
    assert facts["ranks"][0]["kept_per_micro_batch"] == {"0": 11, "2": 13}
    assert (facts["sequence_cache"], facts["engine_slots"], facts["sync_bytes"]) == ({"tokens": 5, "state": 7}, 9, 30 * MIB)
    assert (facts["state_bytes"], facts["step_bytes"]) == (180 * MIB, 2 * 3 * 1024 * 32)
    assert facts["peak"] == {phase: made.peak(phase) for phase in PHASES} and facts["parallel"]["dp"] == 2
    assert (facts["fits"], facts["phases_over"], facts["device_bytes"]) == (False, ["training"], 128 * MIB)
    assert facts["suggestion"]["peak"]["training"] == 91 * MIB and facts["suggestion"]["suggestion"] is None
    plain = as_json(plan(), None, None)
    assert plain["sequence_cache"] is None and not {"fits", "suggestion", "device_bytes"} & plain.keys()


def test_layouts_divide_the_ranks_and_keep_tensor_and_expert_parallelism_in_a_node() -> None:
    config = RuntimeConfig(hf_path="m")
    layouts = candidate_layouts(config, 16)
    sizes = [(each.tp * each.pp * each.cp, each.pp, each.cp, each.ep) for each in layouts]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)
    assert max(each.tp for each in layouts) == max(each.ep for each in layouts) == 8
    assert max(each.pp for each in layouts) == max(each.cp for each in layouts) == 16
    assert all(16 % replica == 0 and 16 % (pp * ep) == 0 for replica, pp, _, ep in sizes)
    assert {each.tp for each in candidate_layouts(config, 6)} == {1, 2, 3, 6}


def test_the_first_layout_that_fits_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[int, int, str]] = []

    def make(config: RuntimeConfig, num_ranks: int, workload: Workload) -> Plan:
        parallel, reduction = config.backend_cfg.parallel, config.options(NativeConfig).reduce_gradients
        tried.append((parallel.tp, parallel.pp, reduction))
        if parallel.cp > 1 or parallel.ep > 1:
            raise ConfigError("not this")
        assert num_ranks == 4 and workload == made.workload
        whole = 5 * MIB if reduction == "once" else 0
        sizes = {"activations": 100 * MIB // parallel.tp, "unreduced_gradients": whole}
        return Plan(config, num_ranks, workload, 1, [rank(**sizes)], 30 * MIB)

    monkeypatch.setattr(module, "make_plan", make)
    made = plan()
    assert suggest_layout(made, 204 * MIB) is made and not tried
    found = suggest_layout(made, 150 * MIB)
    assert found is not None and found.config.backend_cfg.parallel.tp == 2
    assert tried[:3] == [(1, 2, "per_micro_batch"), (1, 1, "once"), (1, 1, "per_micro_batch")]
    assert (1, 2, "once") not in tried, "its own layout is known not to fit"
    found = suggest_layout(plan(rank(activations=130 * MIB)), 188 * MIB)
    assert found is not None and tried[-1] == (1, 2, "per_micro_batch")
    said = as_text(plan(), 150 * MIB, found)
    assert said.endswith("fits with 186.00 MiB: dp=1 pp=2 reduce_gradients=per_micro_batch")
    assert as_json(plan(), 150 * MIB, found)["suggestion"]["reduce_gradients"] == "per_micro_batch"
    for given in ("per_micro_batch", "once"):
        options = {"parallel": {"pp": 2}, "reduce_gradients": given}
        asked = dataclasses.replace(plan(), config=RuntimeConfig(hf_path="m", backend_cfg=options))
        tried.clear()
        assert suggest_layout(asked, 150 * MIB) is not None and {reduction for _, _, reduction in tried} == {given}
    assert suggest_layout(made, 100 * MIB) is None
    tried.clear()
    # Master weights, gradients and moments alone are 16 bytes for each parameter, over 4 ranks.
    assert suggest_layout(made, 59 * MIB) is None and tried == []
