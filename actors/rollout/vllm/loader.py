"""Loading of the weights that an engine starts with: from the files that the trainer reads."""

from __future__ import annotations

from vllm.model_executor.model_loader import DefaultModelLoader

from rl_backend.checkpoint.hf_reader import HFReader

LOAD_FORMAT = "rl_backend"
"""Name under which vLLM finds :class:`ReaderFilesLoader`."""


class ReaderFilesLoader(DefaultModelLoader):
    """vLLM's loader of the files that :class:`HFReader` reads.

    vLLM alone reads every ``*.safetensors`` file of a directory without an index, also those beside ``model.safetensors``,
    and nothing but ``consolidated*.safetensors`` where there is one.
    """

    def _prepare_weights(self, model_name_or_path: str, *_: object, **__: object) -> tuple[str, list[str], bool]:
        return model_name_or_path, [str(file) for file in HFReader(model_name_or_path).files], True
