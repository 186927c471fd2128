"""Files of a model directory other than weights."""

from pathlib import Path

from rl_backend.checkpoint.confined import require_inside_model

_SETTINGS = (
    *("generation_config.json", "tokenizer_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
_NAMES = frozenset(
    {
        *_SETTINGS,
        *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
        *("tokenizer.model", "tokenizer.model.v3", "tekken.json", "spiece.model", "sentencepiece.bpe.model", "bpe.codes"),
        *("source.spm", "target.spm", "normalizer.json"),
        *("chat_template.jinja", "chat_template.json"),
        *("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "NOTICE.txt", "NOTICE.md", "USE_POLICY.md"),
    }
)
TEMPLATES = "additional_chat_templates"
"""Folder of a model's named chat templates, beside the default one."""


def other_files(source: Path) -> dict[str, Path]:
    """Tokenizer, chat templates, generation and preprocessor settings, model card, licence: name below ``source`` -> file.

    Python files are among them where a configuration has an ``auto_map``, which names classes in them. Every other name,
    and everything but regular files, is left out: a file beside a model need not be part of it.

    Raises:
        CheckpointError: one of them, or ``config.json``, is a link out of ``source``. Links inside of the cache of
            huggingface_hub are followed.
    """
    configs = [require_inside_model(source, name) for name in ("config.json", *_SETTINGS) if (source / name).is_file()]
    has_code = any('"auto_map"' in config.read_text(encoding="utf-8", errors="replace") for config in configs)
    names = [
        entry.name
        for entry in source.iterdir()
        if entry.name in _NAMES or entry.suffix == ".tiktoken" or (has_code and entry.suffix == ".py")
    ]
    names += [f"{TEMPLATES}/{entry.name}" for entry in (source / TEMPLATES).glob("*.jinja")]
    return {name: require_inside_model(source, name) for name in sorted(names) if (source / name).is_file()}
