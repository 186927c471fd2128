"""Several users at once: each trains a LoRA adapter of its own over one frozen model, from a thread of this process.

    rl-backend tenants --model DIR --dataset train.jsonl --reward my_reward.py:compute_score --lora.rank 16 \\
        --users '{"ann": {}, "bob": {"dataset": "other.jsonl", "lora.rank": 4, "lr": 1e-3}}'

Every option applies to each user, unless the user's own entry in ``users`` says otherwise: data, reward, rank, learning
rate, number of steps. All share training ranks, engines and the model, which is held once, with all options of these. After
each step of a user its adapter alone goes to the engines, which serve on. Each user has a run folder, ``run_dir/<user>``;
``run_dir/report.html`` shows all users. With ``--resume auto`` each continues from its last checkpoint.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import Annotated, Any, ClassVar, Self

from actors.run import announce

announce(__name__)  # the first line, before imports that take seconds

from pydantic import Field, StringConstraints, model_validator

from actors import RLRun, Session, open_session, preflight
from actors.run import (
    Follows,
    OptionSet,
    PolicyLoss,
    RLConfig,
    RunFinishedError,
    RunResult,
    StopRequest,
    overlaid,
    require_one_session,
    run_command,
    to_sequences,
    update_metrics,
    update_parts,
    warn,
    with_advantages,
    with_outputs,
    write_report,
)
from rl_backend.contracts import ConfigError, RLBackendError

type UserName = Annotated[str, StringConstraints(pattern=r"^\w[\w.-]*$")]

USER = RLConfig.option_set | OptionSet(preset={"run_dir": "runs/tenants", "lora.rank": 16, "lora.push": "adapter"})


def check_user[C: RLConfig](self: C) -> C:
    wrong: list[tuple[str, Any, str]] = []
    if not self.pushes_adapters:
        wrong.append(("lora.push", self.lora.push, "users share engines; push adapters, of a rank above 0"))
    if self.trace:
        wrong.append(("trace", True, "records one run, and all users' actors are the same; leave it out"))
    if self.sampling.n < 2:
        wrong.append(("samples_per_prompt", self.sampling.n, "the loop compares at least 2 responses"))
    ConfigError.refuse_all([(f"{type(self).__name__}.{option}", *rest) for option, *rest in wrong])
    return self


class UserConfig(RLConfig):
    option_set: ClassVar[OptionSet] = USER
    loss: PolicyLoss = Field(default=PolicyLoss(), description="what a policy minimises")
    _check_user = model_validator(mode="after")(check_user)


class TenantsConfig(RLConfig):
    """Options of all users, and their own."""

    option_set: ClassVar[OptionSet] = USER | OptionSet(
        follows={
            "rollout.max_adapters": Follows(lambda config: len(config.users)),
            "rollout.max_adapter_rank": Follows(lambda config: max(user.lora.rank for user in config.runs().values())),
            "rollout.load_tokenizer": Follows(lambda config: any(user.stops_at_strings for user in config.runs().values())),
        },
        groups={"users": ("users",)},
        example=f"""{USER.example} --users '{{"ann": {{}}, "bob": {{"lora.rank": 4, "lr": 1e-3}}}}'""",
    )
    loss: PolicyLoss = Field(default=PolicyLoss(), description="what a policy minimises")
    users: dict[UserName, dict[str, Any]] = Field(
        min_length=1, description="name -> options in which that user differs, by their names or places"
    )
    _check_user = model_validator(mode="after")(check_user)

    @model_validator(mode="after")
    def _check_users(self) -> Self:
        require_one_session(self, self.runs())
        return self

    @property
    def saves(self) -> bool:
        return any(own.get("save_every", self.save_every) for own in self.users.values())

    def runs(self) -> dict[str, UserConfig]:
        shared = self.model_dump(mode="json", exclude={"users"})
        return {name: self._one(name, shared, own) for name, own in self.users.items()}

    def _one(self, name: str, shared: Mapping[str, Any], own: Mapping[str, Any]) -> UserConfig:
        try:
            if "run_dir" in own:
                raise ConfigError.of("UserConfig.run_dir", own["run_dir"], f"is run_dir/{name}; leave it out")
            return overlaid(UserConfig, shared, {**own, "run_dir": f"{self.run_dir}/{name}"})
        except ConfigError as error:
            raise ConfigError(f"user {name!r}: {error}") from None


def train(config: TenantsConfig, session: Session | None = None) -> dict[str, RunResult]:
    """Trains every user's adapter and leaves it in ``run_dir/<user>/model``; a user that has finished is passed over.

    Args:
        session: open training groups and engines; None opens them.

    Raises:
        RunFinishedError: nothing is left to do for any user.
        What ends the run of a user, after the others have finished; of several, the first, with notes of the others.
    """
    users = {name: user for name, user in config.runs().items() if has_steps_left(name, user)}
    if not users:
        raise RunFinishedError(f"all users' runs in {config.run_dir} have finished; raise steps, or a user's, to continue")
    stop = StopRequest()
    with (
        open_session(config) if session is None else nullcontext(session) as opened,
        stop.on_signals("every user's run ends when its step is done"),
        ThreadPoolExecutor(len(users), thread_name_prefix="user") as threads,
    ):
        runs = {threads.submit(train_user, name, user, opened, stop): name for name, user in users.items()}
        try:
            for run in as_completed(runs):
                if isinstance(error := run.exception(), Exception):  # told at once: the others may train for hours
                    warn(f"this user's run has ended: {error}", f"{runs[run]:12}")
        except BaseException:
            stop.ask("Ctrl-C")  # the second one: every user still ends with its step
            raise
    write_report(config.run_dir)
    if errors := {name: error for run, name in runs.items() if (error := run.exception()) is not None}:
        first, *others = errors.values()
        for name, error in errors.items():
            first.add_note(f"this ended the run of user {name!r}" + (f": {error}" if error in others else ""))
        raise first
    return {name: run.result() for run, name in runs.items()}


def has_steps_left(name: str, user: UserConfig) -> bool:
    # Asked of all users first, so that what refuses one is raised before anything starts for any.
    try:
        preflight(user)
    except RunFinishedError:
        return False
    except RLBackendError as error:
        error.add_note(f"this refuses the run of user {name!r}")
        raise
    return True


def train_user(name: str, config: UserConfig, session: Session, stop: StopRequest) -> RunResult:
    """GRPO for one user: what it does is not seen by any other."""
    run = RLRun(config, session, label=f"{name:12}", stop=stop)
    options = {"entropy_coef": config.entropy_coef, "on_policy": config.on_policy, **config.importance_options()}
    loss, meta = config.loss.function(config.sampling.max_new_tokens, **options), config.meta()
    with run:
        policy = run.build_model("policy", router_replay=config.router_replay)
        run.begin("GRPO", {"policy": policy})
        for _ in run.steps():
            batch = run.collect()
            sequences = to_sequences(batch.samples, routes=config.router_replay == "R3")
            if not config.on_policy:  # else a step's only update has them itself
                old = policy.outputs({"old_log_probs": "log_probs"}, sequences, meta, before_updates=True)
                sequences = with_outputs(sequences, old)
                run.lap("old_log_probs")
            sequences = with_advantages(sequences, batch.rewards, "grpo", config.sampling.n)
            parts = update_parts(sequences, config.sampling.n, config.updates_per_step, config.data_parallel_size)
            updates = [policy.update(part, loss, meta) for part in parts]
            run.lap("train")
            run.push()
            run.end_step(batch.metrics | update_metrics(updates))
        run.save_model(policy)
        return run.finish()


def table(config: TenantsConfig, results: Mapping[str, RunResult]) -> str:
    lines = [f"{'user':12}{'rank':>6}{'lr':>9}{'steps':>7}{'reward before':>15}{'after':>8}{'log-prob gap':>14}"]
    for name, result in results.items():
        user = config.runs()[name]
        before, after = (
            "-" if value is None else f"{value:.3f}"
            for value in (result.held_out_reward_before, result.held_out_reward_after)
        )
        rate = user.train.backend_cfg.optimizer.lr
        lines.append(
            f"{name:12}{user.lora.rank:6}{rate:9.1e}{user.steps:7}{before:>15}{after:>8}{result.max_log_prob_gap:14.1e}"
        )
    return "\n".join(lines)


def main(config: TenantsConfig) -> None:
    print(table(config, train(config)))
    print(f"run folders: {config.run_dir}/<user> (report.html, the adapter in peft's format in model)")


if __name__ == "__main__":
    run_command(main, TenantsConfig, "Several users, each with a LoRA adapter of its own over one frozen model.")
