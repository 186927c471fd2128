"""vLLM in this process, updated as verl updates it. Run as a program, with a model directory, it prints what it found.

``update_fails`` says whether vLLM refuses verl's update without ``keep_linear_weights``; the others are mean gaps between
vLLM's log-probs and the trainer's, in nats: ``synced`` as verl runs it, ``experts_packed_once`` without
``pack_experts_again``.
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


def start_engine(model: Path) -> Any:
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
    )


def update(engine: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    handle = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
    # Of one MiB, so that a model comes in several buckets.
    sender = BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
    # It waits for ever when the other side fails.
    thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(weights)), daemon=True)
    thread.start()
    engine.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    thread.join()
    engine.reset_prefix_cache()


def gap_after_update(engine: Any, trainer: ReferenceTrainer) -> float:
    from vllm import SamplingParams

    trainer.advance(0.5)
    update(engine, trainer.named_weights())
    results = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(max_tokens=8, logprobs=0), use_tqdm=False
    )
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


def main(model: Path) -> dict[str, Any]:
    os.environ["VERL_REPLICA_RANK"] = "0"
    os.environ["VERL_RAY_JOB_ID"] = uuid.uuid4().hex
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
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
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
    sys.stdout.flush()
    # A sender may still wait for an answer.
    os._exit(0)
