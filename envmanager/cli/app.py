"""The Typer app of the command line, and the options of the commands ``run``, ``check`` and ``train``.

Other modules, such as ``plan.py`` and ``run.py``, check the parsed options and execute the commands.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import attrs
import typer
from rich.console import Console

from envmanager import __version__
from envmanager.cli.check import check
from envmanager.cli.config_files import (
    FORMS,
    LONGEST_NUMBER,
    RUN_TABLES,
    TABLES_OF,
    TRAINING_TABLES,
    is_game,
    is_record,
    load_config,
    options_of,
    override,
    places_in,
    run_folder_of,
)
from envmanager.cli.display import RunDisplay
from envmanager.cli.godot import app as godot_app
from envmanager.cli.loading import loading
from envmanager.cli.output import PlainOutput, output_for, show
from envmanager.cli.plan import Plan, address_of, check_out
from envmanager.cli.run import EXIT_NOT_WRITTEN, EndOfInput, exit_code_of, run
from envmanager.cli.trained import (
    OptionsOption,
    PlainOption,
    UntilEofOption,
    VerboseOption,
    evaluate_command,
    export_command,
    play_command,
)
from envmanager.errors import EnvManagerError, UsageError
from envmanager.godot.declared import Declaration, declared
from envmanager.godot.games import protocol_of
from envmanager.system.machine import advice

app = typer.Typer(
    name="envmanager",
    help="Run many reinforcement-learning environments side by side.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(godot_app, name="godot")

EnvOption = Annotated[
    str | None,
    typer.Option(
        "--env",  # which Typer 0.27.0 would write like the metavar
        metavar="ENV",
        help="A Gymnasium id, module:id, or module:callable that makes one.",
        show_default="that of CONFIG",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.NAME=VALUE",
        help="Set any option of the config: --set manager.n_envs=16. The value is YAML. May be repeated; the config is "
        "unchanged if unset.",
    ),
]


@attrs.frozen(kw_only=True)
class Flags:
    """The flags that ``run`` and ``train`` share. The decorator ``with_flags`` adds them to the flags of a command."""

    env: EnvOption = None
    manager: str | None = typer.Option(
        None, metavar="KIND", help="auto, subprocess, simple, …", show_default="subprocess"
    )
    n_envs: str | None = typer.Option(None, metavar="N|auto", help="Number of environments.", show_default="1")
    n_workers: str | None = typer.Option(
        None,
        "--n-workers",
        "--workers",
        metavar="N|auto",
        help="Number of workers.",
        show_default="one per environment",
    )
    wait: str | None = typer.Option(
        None, metavar="any|all|K", help="Number of workers to wait for in each step.", show_default="any"
    )
    restarts: int | None = typer.Option(
        None,
        metavar="N",
        help="How many restarts a worker that dies or hangs gets within a minute; 0: none.",
        show_default="3",
    )
    keep_episodes: bool = typer.Option(
        False,
        "--keep-episodes",
        help="Begin the episodes of a worker that was replaced again, and repeat their actions, so that they go on.",
    )
    assignments: SetOption = None
    serve: str | None = typer.Option(
        None,
        "--serve",
        metavar="[[HOST:]PORT]",
        help="Serve a page that shows the run, and metrics for Prometheus, on 127.0.0.1 and a free port unless named. "
        "Nothing is served if unset.",
    )
    record: Path | None = typer.Option(  # noqa: RUF009
        None,
        metavar="FILE.emrec",
        help="Record the run, to replay it or to read it as data.",
        show_default="no recording",
    )
    trace: Path | None = typer.Option(  # noqa: RUF009
        None,
        metavar="FILE.json",
        help="Write a trace for ui.perfetto.dev: where the time goes.",
        show_default="no trace",
    )
    out: Path | None = typer.Option(  # noqa: RUF009
        None, metavar="FILE.json", help="Write the result to this file too."
    )
    plain: PlainOption = False
    verbose: VerboseOption = False

    def applied_to(self, tables: dict[str, dict[str, Any]], **more: Any) -> dict[str, dict[str, Any]]:
        """Return ``tables`` with ``--set``, then these flags and ``more`` options of the table manager applied."""
        tables = override(tables, self.assignments or ())
        own: dict[str, Any] = {
            "env": self.env,
            "kind": self.manager,
            "n_envs": _number_or_text(self.n_envs),
            "n_workers": _number_or_text(self.n_workers),
            "wait": self.wait,
            "record": None if self.record is None else str(self.record),
            "trace": None if self.trace is None else str(self.trace),
        }
        others = tables["manager"].get("restarts")
        flags = {"max_restarts": self.restarts, "keep_episodes": self.keep_episodes or None}
        given = {name: value for name, value in flags.items() if value is not None}
        if given and isinstance(others, Mapping | int | None):  # other code refuses anything else
            before = others if isinstance(others, Mapping) else {} if others is None else {"max_restarts": others}
            own["restarts"] = {**before, **given}
        return {**tables, "manager": _with(tables["manager"], {**own, **more})}


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` as a function for Typer, with the options of ``Flags`` in place of its parameter ``flags``."""
    types, keyword = get_type_hints(Flags, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(each.name, keyword, default=each.default, annotation=types[each.name])
        for each in attrs.fields(Flags)
    ]

    def with_own(**given: Any) -> None:
        command(flags=Flags(**{each.name: given.pop(each.name) for each in shared}), **given)

    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [each for parameter in own for each in (shared if parameter.name == "flags" else [parameter])]
    with_own.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_own.__doc__ = command.__doc__
    return with_own


# From Click, or from the copy of Click inside newer versions of Typer.
_ClickException: Any = typer.BadParameter.__mro__[2]


def run_command_line(arguments: Sequence[str], commands: typer.Typer = app) -> int:
    """Run the command in ``arguments`` and return its exit code. Print usage errors and EnvManagerErrors to stderr."""
    # Make modules in the current directory importable, as `python -m` does.
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        if "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show ✓ shows ?
    exit_code: Any = 0
    try:
        exit_code = commands(_with_values(arguments), standalone_mode=False)
    except SystemExit as exit:
        exit_code = exit.code
    except _ClickException as error:
        exit_code = error.exit_code
        if type(error).__name__ == "NoArgsIsHelpError":  # a command group was called without a command
            error.show()
        else:
            _show_error(_in_one_line(error, arguments))
    except EnvManagerError as error:
        _show_error(str(error))
        exit_code = exit_code_of(error)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and advice(error):
            _show_error(advice(error))
            exit_code = 2
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            _show_error(f"{error.filename or 'what the command prints'} cannot be written: {error.strerror}.")
            exit_code = EXIT_NOT_WRITTEN
        else:
            raise
    return exit_code if isinstance(exit_code, int) else int(bool(exit_code))


_OPTIONAL = {"--serve": (r"(\S+:)?\d+", "0"), "--resume": ("auto", "yes")}
"""Pattern of the values of options that may have none, and the value that stands for none."""


def _with_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a value after each option that may have none, as Typer knows no optional values."""
    completed = []
    optional = {} if arguments[:1] == ["evaluate"] else _OPTIONAL  # whose --resume has a value
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        pattern, value = optional.get(word, ("", ""))
        completed.append(f"{word}={value}" if value and not re.fullmatch(pattern, following) else word)
    return completed


def _show_error(text: str) -> None:
    show(Console(stderr=True), f"Error: {text}".rstrip(), style="red")


def _in_one_line(error: Any, arguments: Sequence[str]) -> str:
    """Return a Click error as one line of text, with the option's invalid value, which Click's own text leaves out."""
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
            if word == option or word.startswith(f"{option}="):
                value = following if word == option else word[len(option) + 1 :]
                return f"{option} {error.message.removeprefix('Input ').partition(',')[0]}, not {value!r}."
    text = " ".join(error.format_message().split()).rstrip(".")
    text += "" if text.endswith("?") else "."
    if getattr(error, "ctx", None) is None:
        return text
    name = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
    places = places_in(TABLES_OF.get(error.ctx.info_name, ()))
    if name in places:
        text = f"There is no {error.option_name}, but --set {places[name]}=VALUE."
    return f"{text} See: {error.ctx.command_path} --help"


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"envmanager {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("run")
@with_flags
def run_command(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A TOML or YAML file with the tables manager and run.")
    ] = None,
    *,
    flags: Flags,
    local_envs: Annotated[
        str | None,
        typer.Option(metavar="N|auto", help="Number of environments that this process steps itself.", show_default="0"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of environment steps.", show_default="10000")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed gives the same episodes.", show_default="not seeded")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:CALLABLE", help="Makes a policy of a behavior's name and spec; random actions if unset."
        ),
    ] = None,
    options: OptionsOption = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="With --manager auto or --workers auto, show what was measured and compared."),
    ] = False,
    start_method: Annotated[
        str | None,
        typer.Option(
            metavar="forkserver|spawn", help="How worker processes are started.", show_default="the faster one here"
        ),
    ] = None,
) -> None:
    """Run environments and show their speed and their returns.

    A flag overrides --set, and --set overrides CONFIG.
    The exit code is 0 when all steps were taken, 1 after an error, 2 after a
    usage error, 3 when a file cannot be written, 130 after Ctrl-C and 143 after
    SIGTERM.
    """
    tables = flags.applied_to(
        load_config(config) if config is not None else {"manager": {}, "run": {}},
        local_envs=_number_or_text(local_envs),
        start_method=start_method,
    )
    given = {"steps": steps, "seed": seed, "policy": policy, "options": options_of(options)}
    plan = Plan.parse(tables["manager"], _with(tables["run"], given), out=flags.out, serve=flags.serve, explain=explain)
    raise typer.Exit(run(plan, RunDisplay(output_for(plain=flags.plain)), verbose=flags.verbose))


@app.command("check")
def check_command(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="A config of `run` or `train`, whose table manager is used."),
    ] = None,
    *,
    env: EnvOption = None,
    assignments: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of environment steps to try.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="The seed to try.")] = 0,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="SECONDS",
            help="How long one call may take. If unset, 10 times the longest of its kind so far, from 5 to 60 s, and "
            "timeouts.start_s (120 s) to make the environment.",
        ),
    ] = None,
) -> None:
    """Try one environment in a worker process and report the problems found.

    It is made as CONFIG and --set say, with its arguments and wrappers.
    The exit code is 0 without problems (notes do not count), otherwise 1, or 2 after a usage error.
    """
    tables = {"manager": {}} if config is None else load_config(config, (*RUN_TABLES, *TRAINING_TABLES[1:]))
    tables = override(tables, assignments or ())
    options = Plan.parse(_with(tables["manager"], {"env": env}), {}).manager
    console = Console(highlight=False)
    raise typer.Exit(check(options, n_steps=steps, seed=seed, timeout_s=timeout, console=console))


@app.command("train")
@with_flags
def train_command(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|GAME",
            help="A YAML, TOML or JSON file with the tables manager, training, trainers; or a Godot game whose scene "
            "declares its training: a folder, a .pck, or demo:NAME.",
        ),
    ],
    *,
    flags: Flags,
    steps: Annotated[int | None, typer.Option(help="Number of agent steps.", show_default="100000")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the environments and the trainers.", show_default="0")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="The folder of the training; runs/NAME OF CONFIG or GAME if unset."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[auto]",
            help="Continue from the last checkpoint; with auto begin if there is none.",
            show_default="",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start over; an earlier training run in DIR is renamed to DIR.1.")
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|TIME", help="Agent steps, or time such as 10m, between checkpoints; if unset only the last."
        ),
    ] = None,
    board: Annotated[
        str | None, typer.Option("--tensorboard", metavar="DIR", help="Write scalars for TensorBoard to this folder.")
    ] = None,
    until_eof: UntilEofOption = False,
) -> None:
    """Train policies, write checkpoints, and evaluate the policies at the end.

    A flag overrides --set, --set overrides CONFIG, and CONFIG overrides what the
    scene of a Godot game declares.
    The exit code is 0 when all steps were taken, 1 after an error, 2 after a
    usage error, such as a DIR that already holds a training run, 3 when a file cannot
    be written (the last checkpoint remains). After Ctrl-C (130) or SIGTERM (143)
    a checkpoint is written at once, with the steps in flight.
    """
    end = EndOfInput() if until_eof else None
    tables, declaration = _training_tables(config, flags)
    every = _number_or_text(checkpoint_every)
    metrics = _with_tensorboard(tables["training"].get("metrics"), board)
    tables["training"] = _with(
        tables["training"], {"steps": steps, "seed": seed, "metrics": metrics, "checkpoint_every": every}
    )
    check_out(flags.out, ".json")
    with loading():
        train = importlib.import_module("envmanager.cli.train")  # PyTorch takes a second to import
    located: Any = contextlib.nullcontext if declaration is None else functools.partial(declaration.located, tables)
    with located():
        goes_on = "auto" if resume == "auto" else resume is not None
        plan = train.TrainingPlan.parse(tables, directory or run_folder_of(config), resume=goes_on, force=force)
        train.check_tables(plan.trainers)
    if any((parent / "project.godot").is_file() for parent in plan.directory.resolve().parents):
        with contextlib.suppress(OSError):  # the training says that it cannot write there
            plan.directory.mkdir(parents=True, exist_ok=True)
            (plan.directory / ".gdignore").touch()  # so that the project's editor does not import the tables of the run
    display = train.TrainDisplay(output_for(plain=flags.plain), serve=address_of(flags.serve))
    raise typer.Exit(train.train(plan, display, out=flags.out, verbose=flags.verbose, end=end, located=located))


def _training_tables(config: Path, flags: Flags) -> tuple[dict[str, dict[str, Any]], Declaration | None]:
    """Return the tables of a config or a game with ``flags``, over what the scene of a Godot game declares, if any."""
    if is_game(config):
        tables = {"manager": {"kind": "godot", "env": str(config)}, "training": {}, "trainers": {}}
    else:
        tables = load_config(config, TRAINING_TABLES)
    of_manager = [each for each in flags.assignments or () if each.startswith("manager.")]
    manager = attrs.evolve(flags, assignments=of_manager).applied_to(tables)["manager"]
    env, engine = manager.get("env"), manager.get("engine") or {}
    if (
        manager.get("kind") != "godot"
        or not isinstance(env, str)
        or is_record(config)
        or not isinstance(engine, Mapping)
        or engine.get("attach") is not None
        or (not is_game(config) and protocol_of(env) == "godot_rl")
    ):
        return flags.applied_to(tables), None
    declaration = declared(env, engine)
    return flags.applied_to(declaration.under(tables)), declaration


@app.command("serve-env")
def serve_env_command(
    env: Annotated[
        str,
        typer.Argument(
            metavar="ENV|CONFIG",
            help="A Gymnasium id, module:id, or module:callable that makes one; a config of `run` or `train`, whose "
            "table manager is used; or a Godot game: a folder, a .pck, or demo:NAME.",
        ),
    ],
    *,
    port: Annotated[str, typer.Option(metavar="[HOST:]PORT", help="Where to listen; 0 is a free port.")] = "8000",
    sessions: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of sessions at once.", show_default="1")
    ] = None,
    n_workers: Annotated[
        str | None,
        typer.Option(
            "--workers", metavar="N|auto", help="Number of workers, which share the sessions.", show_default="one each"
        ),
    ] = None,
    manager: Annotated[
        str | None, typer.Option(metavar="KIND", help="subprocess, asyncio, simple, …", show_default="subprocess")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            help="A host name under which clients reach it. May be repeated.",
            show_default="those of this machine",
        ),
    ] = None,
    assignments: SetOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Serve environments by OpenEnv's protocol: a supervised one for each session.

    Requests from this machine alone are answered, unless HOST says otherwise; then they need the token of the printed
    address. The variable ENVMANAGER_SERVE_TOKEN sets it.
    The exit code is 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, 2 after a usage error.
    """
    path = Path(env)
    if path.suffix.lower() in FORMS:
        table = load_config(path, (*RUN_TABLES, *TRAINING_TABLES[1:]))["manager"]
    else:
        table = {"env": env, "kind": "godot"} if is_game(path) else {"env": env}
    table = override({"manager": table}, assignments or ())["manager"]
    table = _with(table, {"n_envs": sessions, "n_workers": _number_or_text(n_workers), "kind": manager})
    with loading():
        served = importlib.import_module("envmanager.cli.served")
    raise typer.Exit(served.serve_until_stopped(table, port, names or (), verbose=verbose))


app.command("evaluate")(evaluate_command)
app.command("play")(play_command)
app.command("export")(export_command)


@app.command("replay")
def replay_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording.")],
    step: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="Show what happened around this step of a worker.", show_default="a summary"
        ),
    ] = None,
    worker: Annotated[
        int | None, typer.Option(min=0, metavar="ID", help="The worker whose step it is.", show_default="0")
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Show objects of classes too, whose pickles can run any code of the file."),
    ] = False,
    env: Annotated[
        int | None, typer.Option(min=0, metavar="ID", help="The environment that --live makes.", show_default="0")
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Make the environment, lead it to the step, compare, and go on as recorded."),
    ] = False,
    render: Annotated[bool, typer.Option("--render", help="Show the environment in a window.")] = False,
    debugger: Annotated[bool, typer.Option("--debugger", help="Stop in the debugger before the step.")] = False,
) -> None:
    """Show what a recording holds: steps, episodes, what was lost, and what happened around a step.

    The exit code is 0, 1 for a file that is no recording or is damaged, and if an environment is not where it was, or 2
    if there is no such file or step.
    """
    if not live:
        if render or debugger or env is not None:
            raise UsageError("--env, --render and --debugger are for --live.")
        with loading():
            recorded = importlib.import_module("envmanager.cli.recorded")
        recorded.show_recording(file, PlainOutput(), worker, step, trust=trust)
        return
    if step is None or worker is not None:
        raise UsageError("--live needs --step, the number of a step of the worker that --env was in, and no --worker.")
    with loading():
        alive = importlib.import_module("envmanager.cli.live")
    if not alive.show_live(file, PlainOutput(), env or 0, step, trust=trust, render=render, debugger=debugger):
        raise typer.Exit(1)


def _number_or_text(given: str | None) -> int | str | None:
    """Convert a string of digits to an int. Return None and other strings unchanged; other code checks the result."""
    return int(given) if given is not None and given.isdecimal() and len(given) < LONGEST_NUMBER else given


def _with(table: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``table`` updated with the ``flags`` that are not None."""
    return {**table, **{name: value for name, value in flags.items() if value is not None}}


def _with_tensorboard(metrics: Any, directory: str | None) -> Any:
    """Return the option ``metrics`` with ``directory`` as the only TensorBoard folder, if ``directory`` is given."""
    if directory is None or not isinstance(metrics, list | None):
        return metrics
    named = [(each if isinstance(each, Mapping) else [each], each) for each in metrics or []]
    others = [each for names, each in named if "tensorboard" not in names]
    return [*others, {"tensorboard": {"directory": directory}}]
