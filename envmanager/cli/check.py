"""``envmanager check``: what was found about an environment, one line each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from envmanager.testing.environment_check import Finding, check_environment

MARKS = {"ok": ("✓", "green"), "problem": ("✗", "red"), "note": ("note", "yellow")}


def check(env: str, *, n_steps: int, seed: int, console: Console) -> int:
    """Print the findings on ``env``; 0 when none of them is a problem, else 1."""
    return show_findings(env, check_environment(env, n_steps=n_steps, seed=seed), console)


def show_findings(subject: str, findings: Sequence[Finding], console: Console) -> int:
    """Print what was found on ``subject``; 0 when none of it is a problem, else 1."""
    for finding in findings:
        console.print(_line(finding), soft_wrap=True)
    n_problems = sum(finding.outcome == "problem" for finding in findings)
    console.print(Text(f"\n{subject}: {_verdict(n_problems)}", style="bold"), soft_wrap=True)
    return 1 if n_problems else 0


def _line(finding: Finding) -> Text:
    mark, style = MARKS[finding.outcome]
    line = Text.assemble((f"{mark:<4} ", style), (f"{finding.question:<10} ", "bold"), finding.text)
    if finding.advice:
        line.append(f" {finding.advice}", style="dim")
    return line


def _verdict(n_problems: int) -> str:
    if not n_problems:
        return "no problems found."
    return "1 problem found." if n_problems == 1 else f"{n_problems} problems found."
