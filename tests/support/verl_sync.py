"""vLLM in this process, updated as verl updates it. Run as a program, with a model directory, it prints what it found.

``update_fails`` says whether vLLM refuses verl's update without ``keep_linear_weights``; the others are mean gaps between
vLLM's log-probs and the trainer's, in nats: ``synced`` as verl runs it, ``experts_packed_once`` without
``pack_experts_again``. With ``lora`` behind the directory: gaps to the model with an adapter, ``with_adapter`` after each of
its updates, and without it, ``base``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.support.rollout import ReferenceTrainer

PROMPTS = [[5, 6, 7, 8], list(range(10, 40))]


def start_engine(model: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="float32",
        load_format="dummy",
        enforce_eager=True,
        max_model_len=64,
        max_num_batched_tokens=64,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=2**26,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
        **options,
    )


def update(engine: Any, weights: Iterator[tuple[str, Tensor]], **facts: Any) -> None:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    handle = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
    # Of one MiB, so that a model comes in several buckets.
    sender = BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    # It waits for ever when the other side fails.
    thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(weights)), daemon=True)
    thread.start()
    engine.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True, **facts})
    thread.join()
    engine.reset_prefix_cache()


def gap_after_update(engine: Any, trainer: ReferenceTrainer) -> float:
    trainer.advance(0.5)
    update(engine, trainer.named_weights())
    return gap(engine, trainer)


def gap(engine: Any, trainer: ReferenceTrainer, **request: Any) -> float:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    results = engine.generate(prompts, SamplingParams(max_tokens=8, logprobs=0), use_tqdm=False, **request)
    samples: list[Any] = []
    for result in results:
        output = result.outputs[0]
        log_probs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
        samples.append(
            SimpleNamespace(
                prompt_ids=list(result.prompt_token_ids), response_ids=list(output.token_ids), log_probs=log_probs
            )
        )
    return trainer.mean_gap(samples)


def prepare() -> None:
    os.environ["VERL_REPLICA_RANK"] = "0"
    os.environ["VERL_RAY_JOB_ID"] = uuid.uuid4().hex
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


def lora_gaps(model: Path) -> dict[str, list[float]]:
    """Gaps with two adapters, one after the other, as verl's workers send them beside a base that comes once."""
    prepare()

    import torch
    from vllm.lora.request import LoRARequest

    from adapters.verl.options.lora import LoRASettings, TargetModules
    from rl_backend.contracts.lora import LoRAConfig, peft_name

    config = LoRAConfig(rank=4, alpha=8.0)
    facts = {"peft_config": LoRASettings(config, TargetModules("", "megatron"), ("", ""), False, None).for_rollout()}
    trainer = ReferenceTrainer(model)
    engine = start_engine(model, enable_lora=True, max_loras=1, max_lora_rank=8)
    trainer.advance(0.5)
    base = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    update(engine, iter(base.items()), **facts, base_sync_done=False)
    request = LoRARequest("123", 123, "simon_lora_path")
    found: dict[str, list[float]] = {"base": [gap(engine, trainer)], "with_adapter": []}
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        factors: dict[str, Tensor] = {}
        for name, parameter in trainer.model.named_parameters():
            module = name.removesuffix(".weight")
            if module.endswith("_proj"):
                a = torch.randn(config.rank, parameter.shape[1], generator=generator) / parameter.shape[1] ** 0.5
                b = 0.1 * torch.randn(parameter.shape[0], config.rank, generator=generator)
                factors |= {peft_name(module, is_a=True): a, peft_name(module, is_a=False): b}
                parameter.data = base[name] + config.scale * b @ a
        update(engine, iter(factors.items()), **facts, base_sync_done=True)
        found["with_adapter"].append(gap(engine, trainer, lora_request=request))
        found["base"].append(gap(engine, trainer))
    return found


def main(model: Path) -> dict[str, Any]:
    prepare()
    trainer = ReferenceTrainer(model)
    engine = start_engine(model)
    found: dict[str, Any] = {"synced": [gap_after_update(engine, trainer) for _ in range(2)]}

    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    UnquantizedFusedMoEMethod.process_weights_after_loading = (
        UnquantizedFusedMoEMethod.process_weights_after_loading.__wrapped__
    )
    found["experts_packed_once"] = gap_after_update(engine, trainer)
    utils.dispatch_cpu_unquantized_gemm = utils.dispatch_cpu_unquantized_gemm.__wrapped__
    engine = start_engine(model)
    try:
        update(engine, trainer.named_weights())
    except Exception as error:  # noqa: BLE001 whatever vLLM makes of it
        found["update_fails"] = repr(error)
    return found


if __name__ == "__main__":
    run = lora_gaps if "lora" in sys.argv[2:] else main
    sys.stdout.write(json.dumps(run(Path(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    # A sender may still wait for an answer.
    os._exit(0)
