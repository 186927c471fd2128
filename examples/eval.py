"""An evaluation alone: a Hugging Face model answers held-out prompts in vLLM, and a reward function scores the answers.

    rl-backend eval --model runs/grpo/model --eval-dataset held_out.jsonl --reward my_reward.py:compute_score \
        --samples-per-prompt 8 --temperature 0.7 --pass-at 1,4

Every option is a field of ``EvalConfig``, or of the configurations in it. One response of each prompt is greedy, unless
``--temperature`` says otherwise. ``--eval-dataset`` may be given several times, or as a mapping of names to sets with their
options. ``--out FOLDER`` keeps the numbers and every answer. With ``RAY_ADDRESS`` set it runs on that cluster, else on
this machine. The file stands alone: copy it to begin an evaluation of your own.
"""

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from actors.run import EvalConfig, evaluate, run_command


def main(config: EvalConfig) -> None:
    results = evaluate(config)
    for name, result in results.items():
        print(f"{name}: {result.describe()}")
        for estimate, (mean, error) in result.estimates.items():
            print(
                f"  {estimate:10}{mean:8.4f}" + ("" if error is None else f"  ± {error:.4f} (standard error over prompts)")
            )
    if config.out is not None:
        print(f"written: {config.out}/evaluation.json, and every answer to {config.out}/held_out.jsonl")


if __name__ == "__main__":
    run_command(main, EvalConfig, "Answers held-out prompts with a Hugging Face model, and scores the answers.")
