"""What a Hugging Face directory says when the model in it is a critic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LABEL = "LABEL_0"
_TASK = re.compile(r"(?<=\w)For[A-Z]\w*$|(?<=\w)(LMHead)?Model$")


def critic_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a critic that starts from the model of ``hf_config``.

    transformers' ``AutoModelForTokenClassification`` reads it: one label, and, as in training, no dropout before the head.
    """
    config = {name: value for name, value in hf_config.items() if name not in ("num_labels", "problem_type")}
    architectures = [_TASK.sub("", name) + "ForTokenClassification" for name in hf_config.get("architectures") or ()]
    if architectures:
        config["architectures"] = architectures
    return {**config, "id2label": {"0": _LABEL}, "label2id": {_LABEL: 0}, "classifier_dropout": 0.0}
