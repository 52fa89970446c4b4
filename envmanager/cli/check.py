"""``envmanager check``: try an environment in a worker process, and print the findings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envmanager.adapters.recipes import with_recipe
from envmanager.check.environment import Finding, check_environment
from envmanager.errors import ConfigError
from envmanager.registry import ManagerOptions

MARKS = {"ok": ("✓", "green"), "problem": ("✗", "red"), "note": ("note", "yellow")}


def check(options: ManagerOptions, *, n_steps: int, seed: int, timeout_s: float | None, console: Console) -> int:
    """Check the environment of ``options`` and print each finding when it is known. Return 0 without a problem, else 1.

    ``timeout_s``: see check_environment. In a terminal, a status line shows the call in progress. Raises ConfigError
    for a kind of manager that makes its environments itself.
    """
    env = options.env_name
    if options.kind in ("godot", "replay"):
        advice = f" Use: envmanager godot check {env}" if options.kind == "godot" else ""
        raise ConfigError(f"What is checked is an environment, and kind: {options.kind} makes none.{advice}")
    with console.status("") if console.is_terminal else nullcontext() as status:

        def show(call: str) -> None:
            if status is not None:
                status.update(Text(f"{env}: {call}"))

        findings = check_environment(
            with_recipe(options.env, options),
            n_steps=n_steps,
            seed=seed,
            timeout_s=timeout_s,
            on_call=show,
            on_finding=partial(show_finding, console),
            options=options,
        )
    return show_verdict(env, findings, console)


def show_finding(console: Console, finding: Finding) -> None:
    """Print a finding, with its advice and evidence."""
    mark, style = MARKS[finding.outcome]
    text = Text.assemble(finding.text, (f" {finding.advice}" if finding.advice else "", "dim"))
    if console.is_terminal:  # a grid wraps the text inside its column
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(f"{mark:<4}", style), Text(f"{finding.question:<10}", "bold"), text)
        console.print(row)
    else:
        start = Text.assemble((f"{mark:<4} ", style), (f"{finding.question:<10} ", "bold"))
        console.print(start + text, soft_wrap=True)
    for line in ["The end of its output:", *finding.evidence.splitlines()] if finding.evidence else []:
        console.print(Text(f"     {line}", "dim"), soft_wrap=True)


def show_verdict(subject: str, findings: Sequence[Finding], console: Console) -> int:
    """Print the number of problems among the findings about ``subject``. Return 0 if there is no problem, else 1."""
    n_problems = sum(finding.outcome == "problem" for finding in findings)
    found = "no problems" if not n_problems else "1 problem" if n_problems == 1 else f"{n_problems} problems"
    console.print(Text(f"\n{subject}: {found} found.", style="bold"), soft_wrap=True)
    return 1 if n_problems else 0
