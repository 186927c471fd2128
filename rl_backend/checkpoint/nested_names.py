"""Text models in whose directories tensors are called as in the larger model that they were taken out of.

transformers' ``AutoModelForCausalLM`` takes the language model out of a released Qwen3.5, and saves it so: ``config.json``
is that of the text model alone, the names are nested. transformers and vLLM load it as they load the text model's own names.
"""

_MODEL_TYPES = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_NESTED, _OWN = "model.language_model.", "model."


def own_name(model_type: object, name: str) -> str:
    """The name that a stored tensor has in the text model; ``name`` itself where it is that, or of another model.

    Args:
        model_type: of ``config.json``.
    """
    if model_type in _MODEL_TYPES and name.startswith(_NESTED):
        return _OWN + name.removeprefix(_NESTED)
    return name
