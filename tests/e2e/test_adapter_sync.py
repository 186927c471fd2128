"""LoRA tenants in running engines: pushed in memory, several in one batch, versions that never mix."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors import Canary, HandleRef, WeightSource, WeightSync
from actors.rollout.messages import AdapterVersion, Sample
from actors.wire.factors import PackedFactors
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import (
    BatchError,
    NativeConfig,
    OptimizerConfig,
    RolloutError,
    RuntimeConfig,
    WeightCheckError,
    WeightVersionError,
)
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lab.plan.make import make_plan
from rl_backend.lab.plan.memory import Workload
from tests.support.prometheus import Served, await_served, values
from tests.support.served_tenants import PROMPTS, SAMPLING, TOLERANCE, ServedTenants, tokens

EVERYONE = ["narrow", "middle", "wide", None, "wide", "narrow"]
"""Of each prompt: on both engines several tenants are in one batch."""


@pytest.mark.shows("lora: log-probs of three tenants and the base in one batch are the trainer's after each of five pushes")
def test_tenants_in_one_batch_are_the_trainers_after_every_push(served: ServedTenants) -> None:
    plain = served.tokens(None)
    for number in range(5):
        for index, (name, sync) in enumerate(served.syncs.items()):
            served.step(name, 10 * index + number)
            report = sync.push()
            assert report.version == served.train.weight_version(served.tenants[name])
            assert (report.transport, report.engines, report.skipped) == ("shared_memory", (0, 1), ())
            assert 0 < report.nbytes < 2**19 and report.seconds["total"] > report.seconds["stage"] > 0
        served.assert_served(EVERYONE, served.versions())
        served.assert_served(["narrow"] * len(PROMPTS), served.versions())
        other = served.sample("middle")
        assert served.gap(served.tenants["wide"], other) > 1e-3
    assert served.tokens(None) == plain
    memory = served.rollout.lora.memory
    # Three versions are served, two segments are kept, and one may have been dropped just now.
    assert len(memory._in_use) == 3 and len(memory._read) <= 1 and len(memory._spare) <= 2
    newest = served.versions()["narrow"]

    def check(found: Served) -> None:
        for name, version in served.versions().items():
            assert values(found, "rl_backend_adapter_version", tenant=name) == [version]

    await_served(check)
    with pytest.raises(WeightVersionError, match=f"serves 'narrow' at version {newest}, version {newest + 1} is required"):
        served.sample("narrow", require_version=newest + 1)
    with pytest.raises(RolloutError, match="adapter='nobody' has not been pushed"):
        served.sample("nobody")
    with pytest.raises(BatchError, match="adapter has 1 names for 6 prompts"):
        served.sample(["narrow"])


def assert_same(found: Any, expected: Any) -> None:
    # In other company, or with another share from the prefix cache, the last bits of log-probs are others.
    assert found[0] == expected[0] and found[1] == pytest.approx(expected[1], abs=TOLERANCE)


@pytest.mark.shows("lora: requests made before a push finish on the version before, and nothing is served stale")
def test_requests_made_before_pushes_finish_on_the_versions_before(served: ServedTenants) -> None:
    before, old = served.tokens(EVERYONE), served.versions()
    pending = [served.submit(EVERYONE) for _ in range(2)]
    during: list[Sample] = []
    stop = threading.Event()

    def ask_on() -> None:
        while not stop.is_set():
            during.extend(served.submit(EVERYONE).result())

    asking = threading.Thread(target=ask_on)
    asking.start()
    for index, (name, sync) in enumerate(served.syncs.items()):
        served.step(name, 50 + index)
        sync.push()
    last = served.submit(EVERYONE)
    stop.set()
    asking.join()
    for each in pending:
        for sample, same in zip(tokens(each.result()), before, strict=True):
            assert_same(sample, same)
    after, new = served.tokens(EVERYONE), served.versions()
    assert len(during) >= len(before) and not len(during) % len(before)
    for index, sample in enumerate([*during, *last.result()]):
        number = index % len(before)
        owner = EVERYONE[number // SAMPLING.n]
        ((answer, log_probs),) = tokens([sample])
        if owner is None or set(sample.weight_versions) == {old[owner]}:
            assert index < len(during) or owner is None, "what is asked after a push is answered by its version"
            assert_same((answer, log_probs), before[number])
        else:
            assert set(sample.weight_versions) == {new[owner]}
            assert_same((answer, log_probs), after[number])
    for number, owner in enumerate(name for name in EVERYONE for _ in range(SAMPLING.n)):
        assert (after[number] == before[number]) is (owner is None)
    served.assert_served(EVERYONE, new)


@pytest.mark.shows("lora: an adapter that an engine cannot serve as it is leaves every engine on the version before")
def test_what_an_engine_cannot_load_is_refused_and_the_version_before_serves_on(served: ServedTenants) -> None:
    train, tenant, sync = served.train, served.tenants["wide"], served.syncs["wide"]
    before = served.tokens("wide")
    kept = train.export_lora_adapter(tenant)
    train.run_on_ranks(spoil, tenant)
    with pytest.raises(WeightCheckError, match="not finite"):
        sync.push()
    assert served.tokens("wide") == before
    train.import_lora_adapter(tenant, kept)
    sync.push()
    assert served.tokens("wide") == before
    large = train.create_lora_adapter(served.base, LoRAConfig(rank=64), name="large")
    with pytest.raises(WeightCheckError, match=r"rank 64 is more than the 32 .* raise max_adapter_rank"):
        WeightSync(train, served.rollout, large).push()
    with pytest.raises(RolloutError, match="has not been pushed"):
        served.sample("large")
    train.remove_lora_adapter(large)
    served.rollout.remove_adapter("wide")
    with pytest.raises(RolloutError, match="has not been pushed"):
        served.sample("wide")


@pytest.mark.shows("lora: factors that vLLM would take without a word and serve wrongly are refused by name")
def test_factors_that_vllm_would_take_are_refused(served: ServedTenants) -> None:
    (a, of_a), (b, of_b), *_ = served.train.export_lora_adapter(served.tenants["wide"]).items()
    assert a.endswith("lora_A.weight") and b.endswith("lora_B.weight")
    unknown = a.replace("layers.0", "layers.99")
    for factors, message in (
        ({a: of_a}, f"{b} is missing"),
        ({b: of_b}, f"{a} is missing"),
        ({a: of_a[:, 1:], b: of_b}, rf"{a} has shape \(32, .*, expected \(32, "),
        ({a: of_a, b: of_b[:, 1:]}, rf"{b} has shape .* 31\), expected .* 32\)"),
        ({a: of_a, b: of_b, unknown: of_a}, r"layers\.99\.\S+ takes no adapters in this engine"),
    ):
        packed = PackedFactors.of({name: (value, 1.0) for name, value in factors.items()}, "float32")
        refusals = served.rollout.engine_set.call("push_adapter", AdapterVersion("x", 1, 10**9, 32), packed, packed.digest)
        for refusal in refusals.values():
            assert isinstance(refusal, WeightCheckError) and re.search(message, str(refusal))
    adapter, packed = AdapterVersion("x", 1, 10**9, 32), PackedFactors.of({a: (of_a, 1.0), b: (of_b, 1.0)}, "float32")
    torn = replace(packed, values=packed.values.copy())
    torn.values[-4] ^= 1
    for refusal in served.rollout.engine_set.call("push_adapter", adapter, torn, packed.digest).values():
        assert isinstance(refusal, WeightCheckError) and "x@1#1000000000: it was damaged on its way" in str(refusal)
    served.rollout.engine_set.call("drop_adapter", adapter)


def spoil(context: Any, tenant: HandleRef) -> None:
    context.handle(tenant).rows.weights[0] = float("nan")


@pytest.mark.shows("lora: more tenants than an engine has slots are all served right, the newest version of each")
@pytest.mark.shows("lora: engines serve adapters of one end alone of tied embeddings, the head or the embedding")
def test_more_tenants_than_slots_are_all_served(served: ServedTenants) -> None:
    train, rollout = served.train, served.rollout
    names = [f"user {number}" for number in range(6)]
    for number, name in enumerate(names):
        targets = (("q_proj",), ("attention", "head"), ("embedding", "head"))[number % 3]
        config = LoRAConfig(rank=2 + number, seed=number, targets=targets)
        served.tenants[name] = train.create_lora_adapter(served.base, config, OptimizerConfig(lr=2e-2), name=name)
        served.syncs[name] = WeightSync(train, rollout, served.tenants[name])
    try:
        for push in range(2):
            for number, name in enumerate(names):
                served.step(name, 60 + 10 * push + number)
                served.syncs[name].push()
            served.assert_served(names, served.versions())
            served.assert_served(names[::-1], served.versions())
            served.assert_served(EVERYONE, served.versions())
        assert rollout.adapters.keys() == {"narrow", "middle", "wide", *names}
    finally:
        for name in names:
            rollout.remove_adapter(name)
            train.remove_lora_adapter(served.tenants.pop(name))
            del served.syncs[name]


def test_slots_of_engines_take_what_a_plan_says(served: ServedTenants) -> None:
    rollout = served.rollout.config
    config = RuntimeConfig(hf_path=rollout.model_path, backend_cfg=NativeConfig(device="cpu"))
    lora = LoRAConfig(rank=rollout.max_adapter_rank)
    work = {"sequence_length": 8, "micro_batch_tokens": 8, "num_micro_batches": 1}
    plan = make_plan(config, 1, Workload(**work, sync_dtype="float32", tenants=rollout.max_adapters, lora=lora))
    assert {nbytes for _, nbytes in served.rollout.engine_set.call("slots").values()} == {plan.engine_slots}


@pytest.mark.shows("lora: pushes of the base, of adapters and of merged weights mix")
def test_pushes_of_weights_and_of_adapters_mix(served: ServedTenants) -> None:
    train, rollout, tenant = served.train, served.rollout, served.tenants["middle"]
    before, plain = served.tokens(EVERYONE), served.tokens(None)
    numbers = {adapter.number for adapter in rollout.adapters.values()}
    served.push_base()
    # vLLM drops them, and would load each again when it is sampled.
    assert all(loaded == numbers for loaded, _ in rollout.engine_set.call("slots").values())
    assert served.tokens(EVERYONE) == before
    served.step("middle", 70)
    served.syncs["middle"].push()
    served.assert_served(EVERYONE, served.versions())
    expected = served.tokens("middle")
    with WeightSync(train, rollout, tenant, merged=True) as of_both:
        report = of_both.push()
    assert report.version == train.weight_version(tenant) and report.transport == "shared_memory"
    samples = served.sample(None, require_version=report.version)
    assert served.gap(tenant, samples) < TOLERANCE
    assert [ids for ids, _ in tokens(samples)] == [ids for ids, _ in expected]
    for use in (lambda: served.sample("narrow"), served.syncs["narrow"].push):
        with pytest.raises(RolloutError, match="serve weights with 'middle' merged into them"):
            use()
    rollout.forget_weights()
    served.push_base()
    assert served.tokens(None) == plain
    served.assert_served(EVERYONE, served.versions())


@pytest.mark.shows("lora: an adapter that vLLM takes and does not apply, or applies wrongly, is found before it is served")
def test_a_canary_finds_what_vllm_does_not_say(served: ServedTenants, tied_model: Path) -> None:
    rollout, train, tenant = served.rollout, served.train, served.tenants["narrow"]
    before = served.tokens("narrow")
    for fault in ("names", "scale"):
        rollout.engine_set.call("falsify_adapters", fault, False)
        with pytest.raises(WeightCheckError, match=r"vLLM's kernels read another .* than was sent"):
            served.syncs["narrow"].push()
    for fault, message in (("names", "taken the adapter and does not apply it"), ("scale", "it is applied wrongly")):
        rollout.engine_set.call("falsify_adapters", fault)
        with pytest.raises(WeightCheckError, match=message):
            WeightSync(train, rollout, tenant).push()
        # What has had its canary since the engines started is not asked again.
        WeightSync(train, rollout, tenant, canary=None).push()
        assert served.tokens("narrow") != before
        rollout.engine_set.call("falsify_adapters", "")
        served.syncs["narrow"].push()
        assert served.tokens("narrow") == before
    reader = HFReader(str(tied_model))
    other = {name: reader.read(name) * (1.01 if "down_proj" in name else 1.0) for name in reader.infos}
    with WeightSync(WeightSource(other), rollout) as of_another:
        of_another.push()
    with pytest.raises(WeightCheckError, match="it serves other weights; push the base model"):
        served.syncs["narrow"].push()
    WeightSync(train, rollout, tenant, canary=Canary(tolerance=100.0)).push()
    served.push_base()
    served.syncs["narrow"].push()
    assert served.tokens("narrow") == before
