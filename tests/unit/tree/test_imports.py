"""What importing a part of the product imports with it, found in one process that begins with nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from tests.support.claims import ROOT
from tests.support.small_models import WRITERS


class Stage(NamedTuple):
    """Attributes:
    code: run after that of the stages before.
    without: packages that have not been imported then.
    value: an expression.
    """

    code: str
    without: frozenset[str]
    value: str = "None"


HEAVY = frozenset({"megatron", "ray", "transformers", "verl", "vllm"})
MIXTURE = "{'model': 'qwen3_moe', 'model_cfg': {'router_aux_loss_coef': 0.5}}"
FLAGS = "['--model', 'm', '--dataset', 'd', '--reward', 'r']"
STAGES = {
    "the package and its command": Stage("import rl_backend, rl_backend.cli.main", HEAVY | {"torch", "pydantic"}),
    "actors": Stage("import actors", HEAVY | {"torch"}),
    "a configuration": Stage(
        "from rl_backend import RuntimeConfig",
        HEAVY,
        f"type(RuntimeConfig(hf_path='x', backend_cfg={MIXTURE}).backend_cfg.model_cfg).__name__",
    ),
    "every public name": Stage("from rl_backend import *", HEAVY),
    "the adapter of verl": Stage("import adapters.verl", HEAVY),
    "flags of a run": Stage(
        f"from actors.run import parse_config; from examples.grpo import GRPOConfig; parse_config(GRPOConfig, '', {FLAGS})",
        frozenset({"megatron", "tensorboard", "transformers", "vllm"}),
    ),
    "a group without Ray": Stage(
        """
from actors import Loss, TrainGroup
from rl_backend.contracts import ConfigError
try:
    TrainGroup(RuntimeConfig(hf_path="unused"))
except ConfigError as error:
    refused = str(error)
""",
        frozenset({"vllm"}),
        "refused",
    ),
    "model families": Stage("from rl_backend.model import MODEL_FAMILIES", frozenset({"vllm"}), "list(MODEL_FAMILIES)"),
}
PROGRAM = """
import json, sys
found = {}
for name, (code, value) in json.loads(sys.argv[1]).items():
    exec(code)
    found[name] = sorted({module.partition(".")[0] for module in sys.modules}), eval(value)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Stage -> packages that are imported after it, and its value."""
    stages = json.dumps({name: (stage.code, stage.value) for name, stage in STAGES.items()})
    run = subprocess.run([sys.executable, "-c", PROGRAM, stages], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_imported_is_light(found: dict[str, Any], stage: str) -> None:
    assert STAGES[stage].without & set(found[stage][0]) == set()


def test_built_in_model_families_are_known_to_a_process_that_has_imported_no_model(found: dict[str, Any]) -> None:
    assert found["a configuration"][1] == "DecoderOptions"


def test_a_group_without_ray_says_to_initialise_it(found: dict[str, Any]) -> None:
    assert "call ray.init(...) first" in found["a group without Ray"][1]


def test_tests_write_a_small_model_of_every_family(found: dict[str, Any]) -> None:
    # In a process of its own: other test files add families when they are imported.
    families = set(found["model families"][1])
    assert "llama" in families and families <= WRITERS.keys()
