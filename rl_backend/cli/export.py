"""``rl-backend export``: a Hugging Face directory out of a training checkpoint."""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from actors.folder.checkpoints import CHECKPOINTS, LATEST, RUN_FILE, RunCheckpoints, read_run_checkpoint
from rl_backend.checkpoint.hf_export import TrainingWeights, export_checkpoint, source_of
from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.checkpoint.hf_writer import DEFAULT_SHARD_BYTES
from rl_backend.checkpoint.kept_weights import STALE, describe_kept
from rl_backend.checkpoint.manifest import MANIFEST_NAME
from rl_backend.checkpoint.quantisation import mxfp4_infos
from rl_backend.cli.command import exit_on_sigterm
from rl_backend.contracts import CheckpointError, stores_mxfp4, weight_blocks
from rl_backend.lab.text import count
from rl_backend.options.parser import CommandError

EXAMPLE = "runs/grpo/checkpoints/latest"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MXFP4 = "mxfp4"
"""Of the experts of gpt-oss; the other weights are bfloat16 then."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit status: 0 the directory is complete, 2 nothing was written. Every file of the checkpoint is verified first. "
        "In memory are the largest tensor and a piece of it. docs/checkpoints.md says more."
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="of one model, or a step-... directory of a run")
    add("--name", metavar="MODEL", help="which model of a run's checkpoint, for example policy")
    add("--out", type=Path, required=True, metavar="DIR", help="the new directory; must not exist")
    add(
        "--dtype",
        choices=(*DTYPES, MXFP4),
        help="of the weights (default: the param_dtype of the run; float32 loses nothing; mxfp4: experts of gpt-oss as they "
        "are published, the rest bfloat16)",
    )
    add("--shard-size", type=int, default=DEFAULT_SHARD_BYTES, metavar="BYTES", help="of the largest file (default 5 GiB)")
    add(
        "--source",
        type=Path,
        metavar="HF_DIR",
        help="of configuration, tokenizer and weights that are not trained (default: where the run began from)",
    )
    add("--json", action="store_true", help="print what was written as JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    began = time.monotonic()
    weights = TrainingWeights(_model_directory(arguments.checkpoint, arguments.name))
    # Before gigabytes are verified.
    if out.exists() or out.resolve().is_relative_to(weights.path.resolve()):
        raise CommandError(f"--out {out}: exists already, or is inside of the checkpoint; choose a new directory elsewhere")
    source = source_of(weights, arguments.source)
    dtype = arguments.dtype or _run_dtype(weights)
    mxfp4, plain = dtype == MXFP4, DTYPES.get(dtype, torch.bfloat16)
    infos = weights.infos(plain)
    written = mxfp4_infos(infos) if mxfp4 else infos
    manifest = weights.manifest
    if not arguments.json:
        print(
            f"{weights.path}: {manifest.model_type}{', a critic' if manifest.head == 'values' else ''}, weight version "
            f"{manifest.weight_version}, written by the {manifest.runtime_config.get('backend')} runtime on "
            f"{count(manifest.world_size, 'rank')}\nconfiguration and tokenizer from {source}",
            flush=True,
        )
        config = read_hf_config(source)
        if weight_blocks(config) is not None or (stores_mxfp4(config) and not mxfp4):
            kind = "MXFP4" if stores_mxfp4(config) else "FP8"
            print(
                f"weights are in {kind} there; here they are {dtype}, and config.json has no quantization_config", flush=True
            )
        if manifest.kept:
            print(f"also from there, as they are: {describe_kept(manifest.kept)}; {STALE}", flush=True)
    progress = partial(
        tqdm, unit="B", unit_scale=True, unit_divisor=1024, mininterval=5, file=sys.stdout, disable=arguments.json
    )
    stored = sum(facts.num_bytes for facts in manifest.files.values())
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {out}: {out.parent} cannot be made: {error}") from None
    with exit_on_sigterm():
        with progress(desc=f"verifying {len(manifest.files)} files", total=stored) as bar:
            weights.verify(bar.update)
        with progress(desc=f"writing {len(written)} tensors in {dtype}", total=sum(info.nbytes for info in infos)) as bar:
            export_checkpoint(
                weights,
                out,
                source,
                dtype=plain,
                mxfp4=mxfp4,
                max_shard_bytes=arguments.shard_size,
                progress=bar.update,
            )
    files = len(list(out.glob("*.safetensors")))
    if arguments.json:
        facts = {
            "checkpoint": str(weights.path),
            "out": str(out),
            "source": str(source),
            "model_type": manifest.model_type,
            "head": manifest.head,
            "weight_version": manifest.weight_version,
            "dtype": dtype,
            "tensors": len(written),
            "kept_tensors": len(manifest.kept),
            "bytes": sum(info.nbytes for info in written),
            "files": files,
            "seconds": round(time.monotonic() - began, 3),
        }
        print(json.dumps(facts, indent=1))
    else:
        print(f"{out}: {count(files, 'file')} of weights, in {time.monotonic() - began:.1f} s")
    return 0


def _model_directory(path: Path, name: str | None) -> Path:
    if not path.is_dir():
        problem = f"is not a directory; give a checkpoint, such as {EXAMPLE}"
    elif (path / "metrics.jsonl").is_file():
        problem = f"is the folder of a run; {_of_folder(path)}"
    elif (path / RUN_FILE).is_file():
        checkpoint = read_run_checkpoint(path)
        if name is not None or len(checkpoint.models) == 1:
            return checkpoint.model(name or checkpoint.models[0])
        problem = f"holds {', '.join(checkpoint.models)}; choose one with --name"
    elif steps := RunCheckpoints(path).steps():
        problem = f"holds the steps {', '.join(map(str, steps[-4:]))} of a run; give one, or {path / LATEST}"
    elif name is not None:
        problem = f"has no {RUN_FILE}; --name {name} is for a checkpoint of a run"
    else:
        return path
    raise CommandError(f"--checkpoint {path}: {problem}")


def _of_folder(run_dir: Path) -> str:
    checkpoints = run_dir / CHECKPOINTS
    if (checkpoints / LATEST).is_dir():
        return f"give its newest checkpoint, {checkpoints / LATEST}"
    if (run_dir / "model" / "config.json").is_file():
        return f"it has no checkpoints, but {run_dir / 'model'}, the trained model, is a Hugging Face directory already"
    return "it has no checkpoints; runs with --save-every N save some"


def _run_dtype(weights: TrainingWeights) -> str:
    settings = weights.manifest.runtime_config.get("backend_cfg", {})
    dtype = settings.get("param_dtype", "float32") if isinstance(settings, dict) else settings
    if not isinstance(dtype, str) or dtype not in DTYPES:
        field = "param_dtype" if isinstance(settings, dict) else "backend_cfg"
        raise CheckpointError(
            f"{weights.path / MANIFEST_NAME} has {field}={dtype!r:.80} in its runtime_config, which is not among "
            f"{', '.join(DTYPES)}; choose one with --dtype",
            path=str(weights.path),
            field=field,
        )
    return dtype
