"""``envmanager export``: write a policy of a training to a file for other programs."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from envmanager.cli.evaluate import Remarks, leave_cores
from envmanager.cli.plan import check_out
from envmanager.cli.run import EXIT_DONE, Notices, Stopped, StopSignals
from envmanager.cli.wrapping import print_pairs
from envmanager.training.exporting import ONNX, SUFFIXES, check_format, export_policy, record
from envmanager.training.saved import SavedTraining

N_CHECKED = 300
"""Number of observations recorded for the check."""


@attrs.frozen(kw_only=True)
class ExportPlan:
    """One export. ``out``: NAME.onnx or NAME.pt in the current directory if None, where NAME is the training's."""

    directory: Path
    checkpoint: str
    to: str
    opset: int
    behavior: str | None = None
    out: Path | None = None
    env: str | None = None


def run_export(plan: ExportPlan) -> int:
    """Export and return the exit code: 128 + the signal's number when a signal ended it."""
    check_format(plan.to, plan.opset)
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime would report its use
    leave_cores()
    training = SavedTraining.open(plan.directory, plan.checkpoint)
    policy = training.policy(plan.behavior)
    out = plan.out
    if out is None:
        of_one = f"-{policy.behavior}" if len(training.behaviors) > 1 else ""
        out = Path(f"{training.name}{of_one}{SUFFIXES[plan.to]}")
    check_out(out)
    with Notices(Remarks()), StopSignals():
        try:
            observations = record(training, policy.behavior, n=N_CHECKED, env=plan.env)
            exported = export_policy(policy, out, to=plan.to, observations=observations, opset=plan.opset)
        except Stopped as stopped:
            return stopped.exit_code
    lines = [("checkpoint", f"{training.path}, behavior {policy.behavior!r}")]
    lines += [("input", f"{name}  {told}") for name, told in exported.inputs.items()]
    lines += [("output", f"{name}  {told}") for name, told in exported.outputs.items()]
    lines.append(("checked", f"same actions on {exported.n_checked:,} observations"))
    lines.append(("written", f"{out}, opset {plan.opset}" if plan.to == ONNX else str(out)))
    print_pairs(lines)
    return EXIT_DONE
