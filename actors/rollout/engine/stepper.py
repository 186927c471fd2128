"""vLLM's engine, stepped by hand."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason

from actors.rollout.config import SamplingConfig
from actors.rollout.engine.in_process import lora_request
from actors.rollout.engine.step_loop import Completion
from actors.rollout.messages import Request


class VllmStepper:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        # vLLM makes ids of its own.
        self._ids: dict[int, str] = {}

    @property
    def room(self) -> int:
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    def add(self, key: int, request: Request) -> None:
        self._ids[key] = self._engine.add_request(
            str(key),
            tokens_input(list(request.prompt_ids)),
            sampling_params(request.sampling, request.seed),
            lora_request=lora_request(request.adapter),
        )

    def step(self) -> list[tuple[int, Completion]]:
        outputs = [output for output in self._engine.step() if output.finished]
        for output in outputs:
            del self._ids[int(output.request_id)]
        return [(int(output.request_id), _completion(output)) for output in outputs]

    def give_up(self, key: int) -> Completion:
        request = self._ids.pop(key)
        # Before the abort: vLLM itself returns nothing for a request that is aborted.
        output = self._engine.output_processor.request_states[request].make_request_output(
            [], None, FinishReason.ABORT, None
        )
        self._engine.abort_request([request], internal=True)
        return _completion(output)

    def sampled(self, key: int) -> int:
        return int(self._engine.output_processor.request_states[self._ids[key]].detokenizer.num_output_tokens())

    def forget(self) -> None:
        # Where vLLM has a step in flight, it drops the token and samples it again.
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._llm.collective_rpc("synchronize_device")


def sampling_params(sampling: SamplingConfig, seed: int | None) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0 if sampling.log_probs else None,
        flat_logprobs=sampling.log_probs,
        stop=list(sampling.stop_strings),
        detokenize=bool(sampling.stop_strings),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(output: Any) -> Completion:
    (completion,) = output.outputs
    return Completion(completion, output.num_cached_tokens or 0)
