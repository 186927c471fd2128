"""Fixtures of the tests that run Ray and vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

# Every engine that samples would compile a function of vLLM's sampler, and that takes as long as its start. The examples
# that test_copied_examples.py runs as their users do compile it.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

import pytest
import ray

from actors.cluster.session import init_local_ray
from actors.rollout.config import RolloutConfig
from actors.rollout.group.group import RolloutGroup
from actors.run import RunResult
from actors.run.session import Session, open_session
from actors.sync.push import WeightSync
from actors.train.group import TrainGroup
from examples import grpo
from examples.demo.__main__ import DemoConfig, demo_settings, reinforce, warm_start
from examples.demo.task import write_task
from examples.sft import SFTConfig
from rl_backend.cli.main import main
from rl_backend.contracts import NativeConfig, OptimizerConfig, RuntimeConfig
from tests.support.deltanet_engines import DeltaNetEngines
from tests.support.engines import AdapterGroupOfFaults, GroupOfMixture, GroupOfTurns
from tests.support.models import write_tiny, write_tiny_qwen3
from tests.support.native import open_runtime, train
from tests.support.rollout import ReferenceTrainer
from tests.support.served_tenants import CONFIGS, ServedTenants

WARM_STEPS = 350
"""Of the demo's warm start: half of what ``make demo`` takes, enough for answers that rewards can mend."""
LEARNED_STEPS = 12
MAX_NUM_SEQS = 120
"""Of ``rollout_pair``."""
CLUSTER_CPUS = 24
"""Logical cores of Ray: for all engines and ranks that the fixtures of a session keep, and what runs beside them."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of this test session alone, with as many logical cores whatever the machine has."""
    init_local_ray(
        num_cpus=CLUSTER_CPUS,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=200 * 2**20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def rollout_pair(ray_cluster: None, tied_model: Path) -> Iterator[RolloutGroup]:
    """Two engines of the tied model, whose engine steps are as short as a prompt may be, and so are blocks of the cache."""
    config = RolloutConfig(
        model_path=str(tied_model),
        num_engines=2,
        device="cpu",
        dtype="float32",
        max_model_len=384,
        max_num_batched_tokens=384,
        kv_cache_gib=0.25,
        engine_args={"max_num_seqs": MAX_NUM_SEQS},
    )
    with GroupOfTurns(config) as group:
        yield group


@pytest.fixture(scope="session")
def rollout_trainer(tied_model: Path) -> ReferenceTrainer:
    """A transformers model that pushes to ``rollout_pair``."""
    return ReferenceTrainer(tied_model)


@pytest.fixture(scope="session")
def rollout_sync(rollout_pair: RolloutGroup, rollout_trainer: ReferenceTrainer) -> Iterator[WeightSync]:
    """Weight sync from ``rollout_trainer`` to ``rollout_pair``."""
    with WeightSync(rollout_trainer.source, rollout_pair) as sync:
        yield sync


@pytest.fixture(scope="session")
def train_config(tied_model: Path) -> RuntimeConfig:
    """Of :func:`two_ranks`, and of what is compared with them."""
    optimizer = OptimizerConfig(lr=1e-3, lr_decay_style="linear", total_training_steps=20, clip_grad=1.0)
    native = NativeConfig(device="cpu", optimizer=optimizer)
    return RuntimeConfig(hf_path=str(tied_model), max_tokens_per_micro_batch=64, backend_cfg=native)


@pytest.fixture(scope="session")
def two_ranks(ray_cluster: None, train_config: RuntimeConfig) -> Iterator[TrainGroup]:
    """Two native ranks of the tied model, for tests that build models of their own and end no rank."""
    with TrainGroup(train_config, num_ranks=2) as group:
        yield group


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("four_layers"), num_hidden_layers=4)


@pytest.fixture(scope="session")
def random_engine(ray_cluster: None, four_layers: Path) -> Iterator[RolloutGroup]:
    """An engine of the model of four layers that started with random weights; the last test that has it may close it."""
    config = RolloutConfig(
        model_path=str(four_layers), device="cpu", dtype="float32", load_format="dummy", max_model_len=256, kv_cache_gib=0.25
    )
    with RolloutGroup(config) as group:
        yield group


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of experts, with a dense layer between; its head is its embedding."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return write_tiny("qwen3_moe", tmp_path_factory.mktemp("mixture"), num_hidden_layers=3, mlp_only_layers=[1], **experts)


@pytest.fixture(scope="session")
def exported_mixture(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After two steps, by way of a training checkpoint and ``rl-backend export``."""
    folder = tmp_path_factory.mktemp("exported")
    with open_runtime(mixture) as runtime:
        policy = runtime.build_model()
        train(runtime, policy, 2)
        runtime.save_checkpoint(policy, folder / "checkpoint")
    assert main(["export", "--checkpoint", str(folder / "checkpoint"), "--out", str(folder / "model")]) == 0
    return folder / "model"


@pytest.fixture(scope="session")
def mixture_engine(ray_cluster: None, exported_mixture: Path) -> Iterator[RolloutGroup]:
    """An engine of ``exported_mixture``, with routes and adapters."""
    config = RolloutConfig(
        model_path=str(exported_mixture),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        kv_cache_gib=0.25,
        return_routed_experts=True,
        max_adapters=2,
    )
    with GroupOfMixture(config) as group:
        yield group


@pytest.fixture(scope="session")
def one_rank(ray_cluster: None, tied_model: Path) -> Iterator[TrainGroup]:
    """A native rank, for tests that build models of their own, also of a third party's family, and do not end it."""
    native = NativeConfig(device="cpu")
    config = RuntimeConfig(plugins=("tests.support.gpt_neox",), hf_path=str(tied_model), backend_cfg=native)
    with TrainGroup(config) as group:
        yield group


@pytest.fixture(scope="session")
def served_tenants(one_rank: TrainGroup, tied_model: Path) -> Iterator[ServedTenants]:
    """Three LoRA tenants of one trainer that are pushed to two engines with three slots, none yet."""
    served = RolloutConfig(
        model_path=str(tied_model),
        num_engines=2,
        device="cpu",
        dtype="float32",
        max_model_len=192,
        kv_cache_gib=0.25,
        max_adapters=3,
        max_adapter_rank=32,
        max_restarts=0,
    )
    train = one_rank
    with AdapterGroupOfFaults(served) as rollout:
        base = train.build_model(trainable=False, name="base")
        # Small: a test takes as many steps as there is time for, and large logits round beyond the tolerance.
        optimizer = OptimizerConfig(lr=4e-3)
        tenants = {name: train.create_lora_adapter(base, each, optimizer, name=name) for name, each in CONFIGS.items()}
        syncs = {name: WeightSync(train, rollout, tenant) for name, tenant in tenants.items()}
        yield ServedTenants(train, rollout, base, tenants, syncs)


@pytest.fixture
def served(served_tenants: ServedTenants) -> ServedTenants:
    """As :meth:`ServedTenants.make_ready`."""
    served_tenants.make_ready()
    return served_tenants


@pytest.fixture(scope="session")
def deltanet_engines(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeltaNetEngines]:
    """Engines of models with a recurrent state, of which each is started once."""
    with ExitStack() as stack:
        yield DeltaNetEngines(tmp_path_factory.mktemp("deltanet"), stack)


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's task: random model, tokenizer and examples."""
    folder = tmp_path_factory.mktemp("demo") / "task"
    write_task(folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def warm_model(task: Path, ray_cluster: None) -> Path:
    """The demo's model after a short warm start, on no more demonstrations than that sees: all are read before it begins."""
    config = DemoConfig(warm_start_steps=WARM_STEPS)
    file = task / "demonstrations.jsonl"
    examples = config.warm_start_steps * SFTConfig.model_fields["batch_size"].default
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:examples]))
    return warm_start(config, task, task.parent)


@pytest.fixture(scope="session")
def demo_session(task: Path, warm_model: Path) -> Iterator[Session]:
    """One training rank and two engines for runs of the demo, one after the other."""
    with open_session(grpo.GRPOConfig(**demo_settings(DemoConfig(engines=2), task, warm_model, task.parent))) as session:
        yield session


@pytest.fixture(scope="session")
def learned(
    task: Path, warm_model: Path, demo_session: Session, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunResult, Path]:
    """A run of the demo's GRPO, ``LEARNED_STEPS`` long, and its folder."""
    config, folder = DemoConfig(steps=LEARNED_STEPS, engines=2), tmp_path_factory.mktemp("learned")
    return reinforce(config, task, warm_model, folder, demo_session), folder / "grpo"
