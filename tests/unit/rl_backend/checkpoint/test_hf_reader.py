"""Reading Hugging Face directories: refusals before anything is loaded, and bounded memory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl_backend.checkpoint.hf_reader import WEIGHTS_INDEX, HFReader, StoredTensor, read_hf_config
from rl_backend.checkpoint.hf_weights import load_weights
from rl_backend.contracts import CheckpointError, RuntimeConfig
from rl_backend.model import QWEN3, BuildSettings
from rl_backend.runtime import check_weights

NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def model_dir(untied_model: Path, tmp_path: Path) -> Path:
    """A copy to break, in several files with an index."""
    return shutil.copytree(untied_model, tmp_path / "model")


def load(path: Path) -> dict[str, nn.Parameter]:
    """Loads into parameters that hold a value no weight has, and checks that a refusal left them alone."""
    architecture = QWEN3.parse_config(read_hf_config(path))
    model = QWEN3.build(architecture, BuildSettings(QWEN3.options_type(), "log_probs", 16))
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        nn.init.constant_(parameter, 777.0)
    try:
        load_weights(path, parameters, QWEN3.weight_names(architecture, "log_probs"))
    except CheckpointError:
        assert all(bool((parameter == 777.0).all()) for parameter in parameters.values())
        raise
    return parameters


def merge_files(path: Path) -> dict[str, torch.Tensor]:
    """Replaces the sharded files by what is returned, still to be written."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
        file.unlink()
    (path / WEIGHTS_INDEX).unlink()
    return tensors


def test_the_fixture_has_several_files_and_an_index(model_dir: Path) -> None:
    assert len(list(model_dir.glob("*.safetensors"))) > 1 and (model_dir / WEIGHTS_INDEX).is_file()


def test_infos_and_rows_are_those_of_the_files(model_dir: Path) -> None:
    reader = HFReader(model_dir)
    tensors = merge_files(shutil.copytree(model_dir, model_dir.parent / "merged"))
    assert reader.config["model_type"] == "qwen3"
    assert reader.infos == {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    assert torch.equal(reader.read(NAME, (slice(5, 9),)), tensors[NAME][5:9])
    assert torch.equal(reader.read(NAME, (slice(2, 4), slice(1, 7))), tensors[NAME][2:4, 1:7])
    assert torch.equal(reader.read(NAME), tensors[NAME])


@pytest.mark.parametrize("files", [["model.safetensors"], ["a.safetensors", "b.safetensors"]])
def test_one_file_and_several_without_an_index_load_the_same(model_dir: Path, files: list[str]) -> None:
    expected = load(model_dir)
    tensors = merge_files(model_dir)
    names = sorted(tensors)
    for index, file in enumerate(files):
        save_file({name: tensors[name] for name in names[index :: len(files)]}, model_dir / file)
    for name, parameter in load(model_dir).items():
        assert torch.equal(parameter, expected[name])


def test_stored_bfloat16_is_converted_to_the_parameters_dtype(model_dir: Path) -> None:
    tensors = {name: value.bfloat16() for name, value in merge_files(model_dir).items()}
    save_file(tensors, model_dir / "model.safetensors")
    parameters = load(model_dir)
    assert parameters["layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert torch.equal(parameters["layers.0.mlp.up_proj.weight"], tensors[NAME].float())


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"Qwen/Qwen3-0.6B/config\.json cannot be read .*No such file.*download it first"
    ):
        HFReader("Qwen/Qwen3-0.6B")


def test_a_directory_without_config_is_refused(model_dir: Path) -> None:
    (model_dir / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read .*No such file"):
        HFReader(model_dir)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS_INDEX])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "holds a list; expected a JSON object"),
        ('[{"weight_map": {}}]', "holds a list; expected a JSON object"),
        ('"a"', "holds a str; expected a JSON object"),
        ("1", "holds a int; expected a JSON object"),
        ("null", "holds a NoneType; expected a JSON object"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused(model_dir: Path, name: str, text: str, problem: str) -> None:
    (model_dir / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} {problem}"):
        HFReader(model_dir)


def test_a_directory_without_safetensors_is_refused(model_dir: Path) -> None:
    merge_files(model_dir)
    (model_dir / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors file"):
        load(model_dir)


def test_a_missing_weight_file_is_refused_by_name(model_dir: Path) -> None:
    file = min(model_dir.glob("*.safetensors"))
    file.unlink()
    with pytest.raises(CheckpointError, match=file.name):
        load(model_dir)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_weight_file_is_refused_by_name(model_dir: Path, keep: int) -> None:
    file = max(model_dir.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=rf"{file.name} is truncated or corrupt"):
        load(model_dir)


def test_an_index_that_places_a_tensor_in_a_file_without_it_is_refused(model_dir: Path) -> None:
    index = json.loads((model_dir / WEIGHTS_INDEX).read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][NAME])
    index["weight_map"][NAME] = other
    (model_dir / WEIGHTS_INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"{NAME}' is in {other}, which does not have it"):
        load(model_dir)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {"a": "../elsewhere.safetensors"}}', "oops"])
def test_a_broken_index_is_refused(model_dir: Path, content: str) -> None:
    (model_dir / WEIGHTS_INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load(model_dir)


def test_a_missing_tensor_is_refused_by_name(model_dir: Path) -> None:
    tensors = merge_files(model_dir)
    del tensors[NAME]
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"it has no tensor {NAME}"):
        load(model_dir)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(model_dir: Path) -> None:
    tensors = merge_files(model_dir)
    tensors[NAME] = tensors[NAME][:100].clone()
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{NAME} of shape \(100, 64\), not \(128, 64\)"):
        load(model_dir)


def test_a_tensor_without_a_parameter_is_refused_by_name(model_dir: Path) -> None:
    tensors = merge_files(model_dir)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the model has no parameter for .*q_proj\.bias"):
        load(model_dir)


def test_quantised_weights_are_refused(model_dir: Path) -> None:
    tensors = merge_files(model_dir)
    tensors[NAME] = tensors[NAME].to(torch.float8_e4m3fn)
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{NAME} of dtype F8_E4M3"):
        load(model_dir)


def test_one_tensor_in_two_files_without_an_index_is_refused(model_dir: Path) -> None:
    (model_dir / WEIGHTS_INDEX).unlink()
    first = min(model_dir.glob("*.safetensors"))
    shutil.copy(first, model_dir / "again.safetensors")
    with pytest.raises(CheckpointError, match=r"is in both again\.safetensors and"):
        load(model_dir)


@pytest.mark.shows("model: trainers and engines read the same files; a directory with two versions of a tensor is refused")
def test_an_older_copy_of_a_tensor_in_another_file_of_the_index_is_refused(model_dir: Path) -> None:
    weight_map = json.loads((model_dir / WEIGHTS_INDEX).read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map[NAME])
    save_file({**load_file(model_dir / other), NAME: torch.zeros(128, 64)}, model_dir / other)
    files = "|".join(sorted({other, weight_map[NAME]}))
    with pytest.raises(CheckpointError, match=rf"{NAME}' is in both ({files}) and ({files}) .*; remove the file"):
        load(model_dir)


def test_a_tensor_that_the_index_does_not_name_is_read_as_transformers_reads_it(model_dir: Path) -> None:
    expected = load(model_dir)
    index = json.loads((model_dir / WEIGHTS_INDEX).read_text())
    del index["weight_map"][NAME]
    (model_dir / WEIGHTS_INDEX).write_text(json.dumps(index))
    assert torch.equal(load(model_dir)["layers.0.mlp.up_proj.weight"], expected["layers.0.mlp.up_proj.weight"])
    first = min(model_dir.glob("*.safetensors"))
    save_file({**load_file(first), "model.layers.7.mlp.up_proj.weight": torch.zeros(128, 64)}, first)
    with pytest.raises(CheckpointError, match=r"the model has no parameter for .*layers\.7\.mlp\.up_proj\.weight"):
        load(model_dir)


def test_files_that_no_index_names_and_those_beside_one_file_are_not_read(model_dir: Path) -> None:
    expected = load(model_dir)
    stale = {
        name: torch.zeros_like(tensor)
        for file in model_dir.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    for name in ("consolidated.safetensors", "model-00001-of-00009.safetensors"):
        save_file(stale, model_dir / name)
    for _ in range(2):
        for name, parameter in load(model_dir).items():
            assert torch.equal(parameter, expected[name])
        tensors = {name: value for file in HFReader(model_dir).files for name, value in load_file(file).items()}
        (model_dir / WEIGHTS_INDEX).unlink(missing_ok=True)
        save_file(tensors, model_dir / "model.safetensors")


@pytest.mark.shows("model: trainers and engines read the same files; a directory with two versions of a tensor is refused")
def test_one_file_beside_an_index_of_others_is_refused(model_dir: Path) -> None:
    index = json.loads((model_dir / WEIGHTS_INDEX).read_text())
    tensors = {name: value for file in HFReader(model_dir).files for name, value in load_file(file).items()}
    save_file(tensors, model_dir / "model.safetensors")
    for placed in (index["weight_map"], {**index["weight_map"], NAME: "model.safetensors"}):
        (model_dir / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": placed}))
        with pytest.raises(
            CheckpointError, match=r"has both model\.safetensors, which .*index\.json of other files, .*out of date"
        ):
            load(model_dir)
    (model_dir / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert HFReader(model_dir).infos.keys() == tensors.keys()


def test_weights_that_transformers_would_look_for_in_another_file_are_refused(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    for named in ("other.safetensors", "model.safetensors"):
        (model_dir / "config.json").write_text(json.dumps({**config, "transformers_weights": named}))
        with pytest.raises(CheckpointError, match=rf"has transformers_weights='{named}', and model-.*is read"):
            load(model_dir)
    (model_dir / "config.json").write_text(json.dumps({**config, "transformers_weights": WEIGHTS_INDEX}))
    load(model_dir)


def test_a_stored_copy_of_a_tied_head_is_ignored(tied_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tied_model, tmp_path / "model")
    tensors = merge_files(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    assert "lm_head.weight" not in load(path)


def test_a_head_that_is_not_what_it_is_tied_to_is_refused(tied_model: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tied_model, tmp_path / "model")
    tensors = merge_files(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][3, 5] += 1.0
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a lm_head\.weight that differs from its embeddings"):
        load(path)
    config = json.loads((path / "config.json").read_text())
    for tied in (True, None, False):
        (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
        for backend in ("native", "bridge"):
            runtime = RuntimeConfig(backend=backend, hf_path=str(path))
            if tied:
                with pytest.raises(CheckpointError, match=r"a lm_head\.weight that differs"):
                    check_weights(runtime)
            else:
                check_weights(runtime)
            check_weights(runtime, "values")


_MEASURE = """
import json, sys, threading
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from rl_backend.checkpoint.hf_weights import load_weights

path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# One process stands for one rank of `world`: loading communicates with nobody.
dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(8)))
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
model.to_empty(device="cpu")

def resident():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem"))

names = {f"{index}.weight": f"{index}.weight" for index in range(8)}
# Touch what the load itself imports and allocates once.
torch.empty(1024, 1024).fill_(1.0).sum()
before, peak, done = resident(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, resident())

thread = threading.Thread(target=watch); thread.start()
load_weights(path, dict(model.named_parameters()), names)
done.set(); thread.join()
# Before the sums, whose temporaries are not the load's.
used = max(peak, resident()) - before
sums = [p.to_local().double().sum().item() for p in model.parameters()]
print(json.dumps({"peak": used, "sums": sums}))
"""


@pytest.mark.shows("model: a rank reads only what it keeps; host memory at most its shard and the largest tensor")
def test_loading_takes_at_most_the_shard_and_the_largest_tensor(tmp_path: Path) -> None:
    tensor_bytes, count, world = 2048 * 1024 * 4, 8, 4
    (tmp_path / "config.json").write_text("{}")
    tensors = {f"{index}.weight": torch.randn(2048, 1024) for index in range(count)}
    save_file(tensors, tmp_path / "model.safetensors")
    shard_bytes = count * tensor_bytes // world
    rank = world - 1
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), str(rank), str(world)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    own_sums = [value.chunk(world)[rank].double().sum().item() for value in tensors.values()]
    assert measured["sums"] == pytest.approx(own_sums, rel=1e-9), "the rank did not read its own rows"
    slack = 4 * 2**20
    assert shard_bytes <= measured["peak"] + slack
    assert measured["peak"] <= shard_bytes + tensor_bytes + slack


def test_a_config_that_is_nested_beyond_reading_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": ' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        read_hf_config(tmp_path)


@pytest.mark.shows("checkpoint: experts that Qwen publishes in one tensor are read as those of single experts")
def test_packed_experts_are_read_one_by_one(tmp_path: Path) -> None:
    for moe_type, block in (
        ("qwen3_5_moe", "model.language_model.layers.0.mlp.experts"),
        ("other", "model.layers.0.mlp.experts"),
    ):
        path = tmp_path / moe_type
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"model_type": moe_type}))
        gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
        kept = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 8, 5)}
        save_file({f"{block}.gate_up_proj": gate_up, f"{block}.down_proj": down, **kept}, path / "model.safetensors")
        reader = HFReader(path)
        if moe_type == "other":
            assert set(reader.infos) == {f"{block}.gate_up_proj", f"{block}.down_proj", *kept}
            continue
        names = {f"{block}.{expert}.{name}_proj.weight" for expert in range(3) for name in ("gate", "up", "down")}
        assert set(reader.infos) == names | set(kept)
        assert reader.infos[f"{block}.2.up_proj.weight"] == StoredTensor((4, 5), torch.float32)
        for expert in range(3):
            assert torch.equal(reader.read(f"{block}.{expert}.gate_proj.weight"), gate_up[expert, :4])
            assert torch.equal(
                reader.read(f"{block}.{expert}.up_proj.weight", (slice(1, 3), slice(2, 5))), gate_up[expert, 5:7, 2:]
            )
            assert torch.equal(reader.read(f"{block}.{expert}.down_proj.weight", (slice(0, 5),)), down[expert])


def test_a_text_model_is_read_under_its_own_names(tmp_path: Path) -> None:
    block = "model.language_model.layers.0"
    tensors = {f"{block}.norm.weight": torch.randn(4), f"{block}.mlp.experts.down_proj": torch.randn(3, 5, 4)}
    save_file({**tensors, "lm_head.weight": torch.randn(2, 4)}, tmp_path / "model.safetensors")
    for model_type, own in (("qwen3_5_moe_text", "model.layers.0"), ("qwen3_5_moe", block)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        reader = HFReader(tmp_path)
        experts = {f"{own}.mlp.experts.{expert}.down_proj.weight" for expert in range(3)}
        assert set(reader.infos) == {f"{own}.norm.weight", "lm_head.weight", *experts}
        assert torch.equal(reader.read(f"{own}.norm.weight", (slice(1, 3),)), tensors[f"{block}.norm.weight"][1:3])
        down = tensors[f"{block}.mlp.experts.down_proj"]
        assert torch.equal(reader.read(f"{own}.mlp.experts.2.down_proj.weight", (slice(1, 2),)), down[2, 1:2])
