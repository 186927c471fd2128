"""What holds on GPUs and a CPU can show: checksums, transports, broken devices, and tests that need missing packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.sync import gpu_transports
from actors.sync.push import choose_transport, make_transport
from actors.sync.staged_transports import PushPlan
from actors.train.outcome import breaks_process_group
from rl_backend.cli import gpu_check
from rl_backend.contracts import ConfigError
from rl_backend.runtime.bridge.config import BridgeConfig
from rl_backend.weights.inspection import CHECKSUM_BYTES, device_checksum
from tests.support.bridge_runs import open_bridge
from tests.support.clusters import ROOT
from tests.support.largest_result import LargestResult
from tests.support.models import write_tiny


@pytest.mark.parametrize("size", [3 * CHECKSUM_BYTES, 3 * CHECKSUM_BYTES // 4 + 1])
def test_a_checksum_takes_a_bounded_amount_of_memory(size: int) -> None:
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[:: 2**20] = 3
    with LargestResult() as largest:
        checksum = device_checksum(tensor)
    assert 0 < largest.nbytes <= CHECKSUM_BYTES
    assert checksum == 3 * len(range(0, size, 2**20))


@pytest.mark.parametrize("offset", range(5))
def test_a_checksum_is_the_same_wherever_in_a_buffer_the_tensor_begins(offset: int) -> None:
    data = torch.randint(0, 256, (400,), dtype=torch.uint8)
    buffer = torch.zeros(420, dtype=torch.uint8)
    buffer[offset : offset + 400] = data
    assert device_checksum(buffer[offset : offset + 400]) == device_checksum(data)


BROKEN = {
    torch.AcceleratorError("CUDA error: device-side assert triggered"): True,
    torch.AcceleratorError("HIP error: an illegal memory access was encountered"): True,
    RuntimeError("CUDA error: an illegal memory access was encountered"): True,
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error"): True,
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"): True,
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"): False,
    RuntimeError("shape mismatch"): False,
    ValueError("CUDA error: in the words of somebody else"): False,
}


@pytest.mark.shows("actors: a CUDA error, after which a process is of no use, ends the group as a lost peer does")
@pytest.mark.parametrize("error", BROKEN, ids=str)
def test_an_error_that_stays_breaks_the_group(error: Exception) -> None:
    assert breaks_process_group(error) is BROKEN[error]


def plan(*devices: str) -> PushPlan:
    return PushPlan("key", None, "float32", None, 0, (), "a", "host", devices)


def engines(*devices: tuple[str, ...], node_id: str = "a") -> Any:
    infos = {
        number: SimpleNamespace(node_id=node_id, host="host", device="cuda", device_ids=ids, name=f"engine {number}")
        for number, ids in enumerate(devices)
    }
    return SimpleNamespace(infos=infos, engines=tuple(infos), config=SimpleNamespace(py_executable=None))


@pytest.mark.parametrize(
    ("ranks", "served", "node", "expected"),
    [
        (("0", "1"), [("0",), ("1",)], "a", "cuda_ipc"),
        (("0", "1"), [("2",), ("3",)], "a", "nccl"),
        (("0", "1"), [("1",), ("2",)], "a", "nccl"),  # rank 1 is no member of the transfer group
        (("0", "1"), [("0",), ("2",)], "a", "shared_memory"),
        (("0", "1"), [("0",), ("2",)], "b", "gloo"),
        (("0",), [("2", "3"), ("3", "4")], "a", "shared_memory"),
    ],
)
def test_nccl_is_chosen_only_where_each_member_has_a_gpu_of_its_own(
    ranks: tuple[str, ...], served: Any, node: str, expected: str
) -> None:
    assert choose_transport(plan(*ranks), engines(*served, node_id=node)).name == expected


def test_nccl_with_two_members_on_one_gpu_is_refused_by_name() -> None:
    for served, members in (
        ([("5",), ("0",)], "rank 0 of the training group and engine 1 share the GPU 0"),
        ([("5",), ("5",)], "engine 0 and engine 1 share the GPU 5"),
    ):
        assert members in make_transport("nccl").problem(plan("0", "1"), engines(*served))
    assert not make_transport("nccl").problem(plan("0", "1"), engines(("1",), ("2",)))


def test_a_push_is_sent_when_what_trains_has_been_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: order.append("computed"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    source: Any = SimpleNamespace(plan=None, checksums={"a": torch.tensor(3)})
    engine = SimpleNamespace(send_weights=lambda: order.append("sent"))
    context: Any = SimpleNamespace(state={"key": gpu_transports.Stream(engine, source)})
    assert gpu_transports.send_stream(context, plan("0")) == {"a": 3}
    assert order == ["computed", "sent"]


def test_an_overlap_that_nobody_sets_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp_comm_overlap'\]=True: .*initialize_ub"):
        BridgeConfig(override_transformer_config={"tp_comm_overlap": True})


VARIABLE = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron finds the kernel of Transformer Engine that this machine does not have."""
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb_thd", lambda *_, **__: None)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_models_of_transformer_engine_have_its_kernels_unless_the_user_says_otherwise(tmp_path: Path, name: str) -> None:
    from rl_backend.runtime.bridge.model import loading, provider

    path = write_tiny(name, tmp_path)
    for given in ({}, {"apply_rope_fusion": False}):
        with open_bridge(path, override_transformer_config=given) as runtime:
            groups, config, bridge = runtime.engine.groups, runtime.config, loading.open_bridge(str(path))
            made = provider.make_provider(bridge, config, groups, "log_probs", transformer_engine=True)
            assert (made.apply_rope_fusion, made.bias_activation_fusion) == (not given, True)
            local = provider.make_provider(
                loading.open_bridge(str(path)), config, groups, "log_probs", transformer_engine=False
            )
            assert not local.apply_rope_fusion and not local.bias_activation_fusion


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize(("given", "refused"), [(None, False), ("0", False), ("1", True)])
def test_deterministic_mode_sets_what_transformer_engine_reads(
    tied_model: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, refused: bool
) -> None:
    from rl_backend.runtime.bridge.model import loading, provider

    monkeypatch.setenv(VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(VARIABLE)
    options = {"override_transformer_config": {"deterministic_mode": True}}
    with open_bridge(tied_model, **options) as runtime:
        groups, config = runtime.engine.groups, runtime.config
        bridge = loading.open_bridge(str(tied_model))
        if refused:
            with pytest.raises(ConfigError, match=f"deterministic_mode'.*{VARIABLE}=1"):
                provider.make_provider(bridge, config, groups, "log_probs", transformer_engine=True)
        else:
            provider.make_provider(bridge, config, groups, "log_probs", transformer_engine=True)
            assert os.environ[VARIABLE] == "0"


BLOCK = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {names!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def collected(names: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """What gpu-check would run on a machine without these packages."""
    (folder / "sitecustomize.py").write_text(BLOCK.format(names=names))
    command = gpu_check._command([ROOT / "tests" / "gpu"], "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.shows("gpu-check: whichever package is missing, the tests that do not need it run")
def test_gpu_tests_are_collected_without_any_optional_package(tmp_path: Path) -> None:
    result = collected(gpu_check.OPTIONAL, tmp_path)
    assert result.returncode == 0, result.stdout
    assert "error" not in result.stdout
    assert "test_training_on_cuda.py::" in result.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", gpu_check.OPTIONAL)
def test_gpu_tests_are_collected_without_an_optional_package(tmp_path: Path, name: str) -> None:
    result = collected((name,), tmp_path)
    assert result.returncode == 0, result.stdout
    assert ("test_train_group_on_cuda.py::" in result.stdout) == (name != "ray")


def test_a_test_file_that_cannot_be_collected_leaves_the_others_to_run(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_broken.py").write_text("import there_is_no_such_package\n")
    (folder / "test_whole.py").write_text(
        "import pytest\n\n\n@pytest.mark.gpu\ndef test_whole() -> None:\n    assert True\n"
    )
    status, outcomes = gpu_check.run_stages(folder, ["-p", "no:cacheprovider"])
    assert status == 1
    assert sorted(each["outcome"] for each in outcomes) == ["error", "passed"]
