"""How an example divides a cluster, and what the job submission refuses before it connects."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray
import requests

from actors.cluster import placement
from actors.cluster.placement import ClusterShare, cores_each, share_cluster
from examples import ray_job as submission
from examples.ray_job import JobServerError, SubmitConfig, check_command, connect, read_token
from rl_backend.contracts import ConfigError
from rl_backend.options.command_line import parse_config

HERE = "here"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A cluster's nodes, to be filled in; this process is on node ``HERE``, which has four cores."""
    found: list[dict[str, Any]] = []

    class Context:
        def get_node_id(self) -> str:
            return HERE

    monkeypatch.setattr(placement, "living_nodes", lambda: found)
    monkeypatch.setattr(placement, "usable_cores", lambda: 4)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": sum(node["Resources"].get("GPU", 0) for node in found)})
    return found


def node(cpus: int, gpus: int = 0, name: str = "elsewhere") -> dict[str, Any]:
    return {"NodeID": name, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


@pytest.mark.parametrize(
    ("ranks", "engines", "take_turns", "expected"),
    [(1, 1, True, (4, 4)), (2, 1, True, (2, 4)), (2, 4, True, (2, 1)), (8, 1, True, (1, 4)), (1, 1, False, (2, 2))],
)
def test_on_one_machine_ranks_share_its_cores_and_so_do_engines(
    nodes: list[dict[str, Any]], ranks: int, engines: int, take_turns: bool, expected: tuple[int, int]
) -> None:
    nodes.append(node(max(4, ranks) + max(4, engines), name=HERE))
    assert share_cluster(ranks, engines, take_turns=take_turns) == ClusterShare(*expected, 0)


@pytest.mark.parametrize(
    ("cpus", "ranks", "engines", "cores"),
    [
        ([0, 2, 2], 1, 1, 2),
        ([0, 2, 2], 2, 1, 1),
        ([16], 1, 1, 8),
        ([8, 2], 1, 1, 4),
        ([7, 7], 3, 1, 3),
    ],
)
def test_on_a_cluster_each_process_has_as_many_cpus_of_its_own_as_fit(
    nodes: list[dict[str, Any]], cpus: list[int], ranks: int, engines: int, cores: int
) -> None:
    nodes.extend(node(count) for count in cpus)
    assert share_cluster(ranks, engines) == ClusterShare(cores, cores, 0)


def test_a_machine_whose_cpus_ray_counts_once_is_divided_over_both_kinds(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node(4, name=HERE))
    assert share_cluster(1, 1) == ClusterShare(2, 2, 0)


def test_only_nodes_with_gpus_count_where_each_process_takes_one(nodes: list[dict[str, Any]]) -> None:
    nodes.extend([node(64), node(16, gpus=2), node(16, gpus=2)])
    assert share_cluster(2, 2) == ClusterShare(8, 8, 1)


def test_a_cluster_that_is_too_small_is_refused_with_what_it_has(nodes: list[dict[str, Any]]) -> None:
    nodes.extend([node(0), node(1), node(1)])
    with pytest.raises(ConfigError, match=r"2 ranks and 1 engines .* 3 together; the cluster's nodes have \[1, 1\] CPUs"):
        share_cluster(2, 1)


def test_cores_of_this_machine_are_at_least_one_each() -> None:
    assert cores_each(10_000) == 1
    assert cores_each(1) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "nothing to run"),
        (["--model", "x"], "nothing to run"),
        (["examples.grpo", "--model", "x"], "examples.grpo needs --run-dir"),
        (["examples.grpo", "--run-dir", "runs/1"], "--run-dir='runs/1': must be absolute"),
        (["my.script", "--run-dir=runs/1"], "--run-dir='runs/1': must be absolute"),
        (["my.script", "--run_dir", "runs/1"], "--run-dir='runs/1': must be absolute"),
    ],
)
def test_commands_whose_results_would_be_lost_are_refused(command: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_command(command)


def test_commands_that_a_job_can_have_are_accepted() -> None:
    check_command(["examples.ppo", "--run-dir", "/shared/run"])
    check_command(["examples.ppo", "--run_dir=/shared/run"])
    check_command(["my.script", "--steps", "3"])


def test_the_run_folder_may_stand_in_the_file_of_an_examples_options(tmp_path: Path) -> None:
    for name, saved in (("run", {"run_dir": "/shared/run"}), ("recipe", {}), ("here", {"run_dir": "runs/1"})):
        (tmp_path / f"{name}.json").write_text(json.dumps(saved))
    check_command(["examples.grpo", "--config", "run.json"], str(tmp_path))
    check_command(["examples.grpo", f"--config={tmp_path}/run.json"])
    check_command(["examples.grpo", "--config", "here.json", "--run-dir", "/shared/run"], str(tmp_path))
    with pytest.raises(ConfigError, match="--run-dir='runs/1': must be absolute"):
        check_command(["examples.grpo", "--config", "here.json"], str(tmp_path))
    for name in ("recipe.json", "only_on_the_head.json"):
        with pytest.raises(ConfigError, match=f"needs --run-dir.*no run_dir was found here in --config {name}, so give it"):
            check_command(["examples.grpo", "--config", name], str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "A=1,B"}, 'environment="A=1,B": value error, dictionary update sequence element #1'),
        ({"environment": "=1"}, "environment.*: string should match pattern"),
        ({"environment": '{"A=B": "1"}'}, "environment.*: string should match pattern"),
        ({"environment": '{"A": "1"'}, "environment=.*: value error, Expecting"),
        ({"environment": '{"A": 1}'}, "environment.A=1: input should be a valid string"),
    ],
)
def test_submission_settings_that_cannot_work_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SubmitConfig(**settings)


def test_a_job_is_sent_its_folder_without_what_does_not_belong_there(tmp_path: Path) -> None:
    config = SubmitConfig(working_dir=str(tmp_path), exclude="data", plugins=str(tmp_path), environment="A=1,B=x=y")
    environment = config.runtime_env()
    assert environment["working_dir"] == str(tmp_path)
    assert {".git", ".venv", "runs", "data"} <= set(environment["excludes"])
    assert environment["py_modules"] == [str(tmp_path)]
    assert environment["env_vars"] == {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": "600", "A": "1", "B": "x=y"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {}),
        ("A=1,B=x=y,C=", {"A": "1", "B": "x=y", "C": ""}),
        ('{"NCCL_IB_HCA": "mlx5_0,mlx5_1", "A": "{x}"}', {"NCCL_IB_HCA": "mlx5_0,mlx5_1", "A": "{x}"}),
    ],
)
def test_variables_are_given_by_commas_or_as_a_json_object(given: str, expected: dict[str, str]) -> None:
    config = parse_config(SubmitConfig, "submit", ["--environment", given])
    assert config.runtime_env()["env_vars"] == {"PYTHONUNBUFFERED": "1", "RAY_JOB_STOP_WAIT_TIME_S": "600", **expected}
    assert SubmitConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("stage", ["logs", "status", "stop"])
def test_a_job_server_that_is_lost_is_an_error_that_names_the_job(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    class Server:
        """The job server's client, until ``stage``."""

        def submit_job(self, **_: Any) -> str:
            return "raysubmit_1"

        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "a line\n"
            if stage == "logs":
                raise aiohttp.ServerDisconnectedError
            if stage == "stop":
                raise KeyboardInterrupt

        def get_job_info(self, job: str) -> None:
            raise requests.ConnectionError("refused")

        def stop_job(self, job: str) -> None:
            raise RuntimeError("refused")

    monkeypatch.setattr(submission, "connect", lambda address: Server())
    with pytest.raises(JobServerError, match=r"lost the job server at http://head:1 while job raysubmit_1 ran \(\w+"):
        submission.submit(SubmitConfig(address="http://head:1"), ["my.script"])


@pytest.fixture
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("no_token")
def test_the_token_is_found_where_ray_looks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert read_token() is None
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE='token': no token was found"):
        read_token()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    assert read_token() == "from home"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    with pytest.raises(ConfigError, match=r"RAY_AUTH_TOKEN_PATH='.*named': the token cannot be read: .*No such file"):
        read_token()
    (tmp_path / "named").write_text("from file")
    assert read_token() == "from file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from variable")
    assert read_token() == "from variable"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert read_token() is None


@pytest.mark.usefixtures("no_token")
def test_an_address_that_ray_would_replace_or_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"SubmitConfig\.address=.*should match pattern '\^https"):
        SubmitConfig(address="10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS='10.0.0.1:6379': would replace --address http://10.0.0.1:8265"):
        connect("http://10.0.0.1:8265")


def test_gpus_of_one_machine_are_divided_beside_its_cores(nodes: list[dict[str, Any]]) -> None:
    nodes.append(node(8, gpus=2, name=HERE))
    assert share_cluster(1, 1) == ClusterShare(4, 4, 1)
    nodes[:] = [node(8, gpus=1, name=HERE)]
    assert share_cluster(1, 1) == ClusterShare(4, 4, 0.5)
    nodes[:] = [node(8, name=HERE)]
    assert share_cluster(2) == ClusterShare(2, 4, 0), "a run that samples nothing"


def test_one_gpu_of_a_node_elsewhere_holds_a_rank_and_an_engine(nodes: list[dict[str, Any]]) -> None:
    nodes.extend([node(6, gpus=1), node(64)])
    assert share_cluster(1, 1) == ClusterShare(3, 3, 0.5)


def test_this_machine_beside_others_is_divided_as_one_of_them(nodes: list[dict[str, Any]]) -> None:
    nodes.extend([node(8, name=HERE), node(8)])
    assert share_cluster(1, 1) == ClusterShare(8, 8, 0)
    nodes[:] = [node(8, name=HERE), node(0)]
    assert share_cluster(1, 1) == ClusterShare(4, 4, 0), "a head node without CPUs does not count"


@pytest.mark.parametrize("named", ["GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"])
def test_an_allocator_that_the_user_tunes_is_left_alone(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    kept = {"mmap_max=0", "arena_max=1", "trim_threshold=1099511627776"}
    (tunables,) = placement.memory_environment().values()
    assert set(tunables.split(":")) == {f"glibc.malloc.{each}" for each in kept}
    monkeypatch.setenv(named, "")
    assert placement.memory_environment() == {}
