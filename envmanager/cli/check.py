"""``envmanager check``: try an environment in a worker process, and print the findings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from rich.console import Console
from rich.table import Table
from rich.text import Text

from envmanager.check.environment import Finding, check_environment

MARKS = {"ok": ("✓", "green"), "problem": ("✗", "red"), "note": ("note", "yellow")}


def check(env: str, *, n_steps: int, seed: int, timeout_s: float, console: Console) -> int:
    """Check the environment ``env`` and print the findings. Return 0 if no finding is a problem, else 1.

    ``timeout_s``: seconds that one call may take. In a terminal, a status line shows the call in progress.
    """
    with console.status("") if console.is_terminal else nullcontext() as status:

        def show(call: str) -> None:
            if status is not None:
                status.update(Text(f"{env}: {call} (at most {timeout_s:g} s)"))

        findings = check_environment(env, n_steps=n_steps, seed=seed, timeout_s=timeout_s, on_call=show)
    return show_findings(env, findings, console)


def show_findings(subject: str, findings: Sequence[Finding], console: Console) -> int:
    """Print the findings about ``subject`` and the number of problems. Return 0 if there is no problem, else 1."""
    for finding in findings:
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
    n_problems = sum(finding.outcome == "problem" for finding in findings)
    console.print(Text(f"\n{subject}: {_verdict(n_problems)}", style="bold"), soft_wrap=True)
    return 1 if n_problems else 0


def _verdict(n_problems: int) -> str:
    if not n_problems:
        return "no problems found."
    return "1 problem found." if n_problems == 1 else f"{n_problems} problems found."
