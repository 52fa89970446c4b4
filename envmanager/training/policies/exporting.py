"""Export of a greedy policy to a file that needs neither this library nor the environment: ONNX, TorchScript, Godot.

::

    SavedPolicy ── module ── traced ──▶ bytes ── run on recorded observations ──▶ equal actions? ──▶ file

The rule: a file is written only if the exported policy acts like the saved policy on the recorded observations.
"""

from __future__ import annotations

import copy
import io
import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from envmanager import __version__
from envmanager.data.specs import describe_spec
from envmanager.data.steps import ActionInfo, AgentSteps
from envmanager.data.trees import Tree, concat_rows, copy_tree, leaves, leaves_like, paths, take_rows
from envmanager.errors import EnvManagerError, UsageError
from envmanager.godot.options import DEFAULT_TICKS_PER_ACTION
from envmanager.importing import needed_by
from envmanager.observe.files import replacing
from envmanager.policy import Policy
from envmanager.registry import make_manager
from envmanager.training.algorithms.networks import to_tensor
from envmanager.training.policies.game_file import acting, to_game
from envmanager.training.policies.saved import SavedPolicy, SavedTraining, with_n_envs

with needed_by("envmanager.training", extra="torch"):
    import torch
    from torch import Tensor, nn

ONNX, TORCHSCRIPT, GODOT = "onnx", "torchscript", "godot"
SUFFIXES = {ONNX: ".onnx", TORCHSCRIPT: ".pt", GODOT: ".policy"}
"""File suffix of each format."""
OPSET = 17
OPSETS = range(11, 21)
"""Versions of the ONNX operator set that can be written."""
RTOL, ATOL = 1e-4, 1e-5
"""Relative and absolute tolerance for the exported policy's continuous actions. Discrete actions must be equal."""

Run = Callable[[list[np.ndarray]], list[np.ndarray]]
"""A function from the leaves of observations ``[n, …]`` to the leaves of actions ``[n, …]``."""


class ExportFailed(EnvManagerError):
    """Error raised when a policy cannot be exported, or acts differently after the export. No file is written."""


@attrs.frozen
class Exported:
    """An exported file, checked on ``n_checked`` observations. ``inputs`` and ``outputs`` map names to array types."""

    file: Path
    inputs: dict[str, str]
    outputs: dict[str, str]
    n_checked: int


def check_format(to: str, opset: int = OPSET) -> None:
    """Raise UsageError for an unknown format or opset, and MissingExtra if a library for the format is missing."""
    if to not in SUFFIXES:
        raise UsageError(f"a policy is exported to {', '.join(map(repr, SUFFIXES))}, not to {to!r}.")
    if opset not in OPSETS:
        raise UsageError(f"opset must be from {OPSETS[0]} to {OPSETS[-1]}, not {opset!r}.")
    if to == ONNX:
        with needed_by("export to ONNX", extra="export"):
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401


def export_policy(
    policy: SavedPolicy,
    file: str | Path,
    *,
    to: str,
    observations: Tree,
    opset: int = OPSET,
    ticks_per_action: int | None = None,
) -> Exported:
    """Export a policy to ``file``, provided that the exported policy acts like ``policy`` on ``observations``.

    ``to`` is ``"onnx"``, ``"torchscript"`` or ``"godot"``, ``observations`` is a tree of arrays ``[n, …]``, ``opset``
    is the version of the ONNX operator set, 11 to 20, and ``ticks_per_action`` tells a Godot game how long an action
    takes; None leaves that to the game. The file's inputs are the leaves of an observation in the order of the spec,
    named ``obs``, or ``obs_KEY`` for a leaf under a key. Its outputs are the leaves of an action, named ``action`` or
    ``action_KEY``. The first axis of each input and output is the batch, of any size.

    Raises UsageError for an unknown format or opset, a trainer without export, or a policy that a Godot game cannot
    evaluate, MissingExtra if a library is missing, ExportFailed if the export fails or changes the actions, and
    NotWritten if ``file`` cannot be written.
    """
    check_format(to, opset)
    spec = policy.spec
    inputs, outputs = leaf_names(spec.observation, "obs"), leaf_names(spec.action, "action")
    module = copy.deepcopy(policy.module()).cpu().requires_grad_(False)  # copied because the policy may be in use
    example = tuple(
        torch.from_numpy(_as_tensor_has_it(leaf[:2])) for leaf in leaves_like(spec.observation, observations)
    )
    try:
        if to == ONNX:
            written, run = _onnx(module, example, inputs, outputs, opset, _facts(policy))
        elif to == GODOT:
            facts = {**_facts(policy), "ticks_per_action": ticks_per_action or 0}
            written = to_game(policy.behavior, spec, module, facts)
            run = acting(written, spec)
        else:
            written, run = _torchscript(module, example)
    except EnvManagerError:
        raise
    except Exception as error:  # PyTorch raises many kinds of errors for a module that it cannot trace
        raise ExportFailed(f"the policy of {policy.behavior!r} cannot be exported to {to}: {error}") from error
    n_checked = _check(policy, run, observations, to)
    with replacing(Path(file)) as out:
        out.write(written)
    return Exported(Path(file), _described(inputs, spec.observation), _described(outputs, spec.action), n_checked)


def record(
    training: SavedTraining,
    behavior: str,
    *,
    n: int,
    env: str | None = None,
    reset_options: Mapping[str, Any] | None = None,
) -> Tree:
    """Play greedily in the training's environment, and return at least ``n`` observations of ``behavior``.

    ``env`` names another environment to play in. Raises UsageError if the environment has no agent of the behavior, or
    if the behavior acts too rarely.
    """
    options = training.manager_options(env=env)
    if options.engine is not None:
        options = attrs.evolve(options, engine={**options.engine, "attach": None})  # nobody plays it in the editor now
    few = with_n_envs(options, min(_MOST_ENVS, options.n_envs))
    with training.logged(few, "export") as own, make_manager(own) as manager:
        policies: dict[str, Policy] = dict(training.policies_for(manager.behavior_specs))
        if behavior not in policies:
            raise UsageError(f"there is no agent of {behavior!r} in {options.env}.")
        recorder = policies[behavior] = _Recorder(policies[behavior])
        for name, policy in policies.items():
            manager.set_policy(name, policy)
        manager.reset({"seed": 0, "options": training.reset_options(given=reset_options)})
        for _ in range(_MOST_STEPS * n):
            if recorder.n >= n:
                return concat_rows(recorder.seen)
            manager.step()
    raise UsageError(
        f"{behavior!r} acted {recorder.n} times in {_MOST_STEPS * n:,} steps: too rarely to check its policy."
    )


def ticks_per_action_of(training: SavedTraining) -> int | None:
    """Return the number of physics ticks of an action in the game of a training, or None if it is no Godot game."""
    options = training.plan.manager or {}
    engine = options.get("engine") or {}
    is_known = options.get("kind") == "godot" and engine.get("protocol") != "godot_rl"
    return engine.get("ticks_per_action") or DEFAULT_TICKS_PER_ACTION if is_known else None


_MOST_ENVS = 4
_MOST_STEPS = 100
"""Maximum number of steps per requested observation."""


class _Recorder:
    """A policy that records its observations and returns the actions of another policy."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seen: list[Tree] = []
        self.n = 0

    def get_action(self, steps: AgentSteps) -> ActionInfo:
        self.seen.append(copy_tree(steps.obs))
        self.n += len(steps)
        return self._policy.get_action(steps)


def leaf_names(spec: Tree, root: str) -> list[str]:
    """Return a unique name for each leaf of ``spec``, made of ``root`` and the leaf's keys, such as ``obs_camera``."""
    names: list[str] = []
    for path in paths(spec, root):
        name = re.sub(r"\W+", "_", path.replace("'", "")).strip("_")
        number = 2
        while name in names:  # {"a_b": …, "a": {"b": …}} gives one name twice
            name, number = f"{name}_{number}", number + 1
        names.append(name)
    return names


def _described(names: Sequence[str], spec: Tree) -> dict[str, str]:
    return {
        name: f"{_as_tensor_has_it(np.zeros(0, leaf.dtype)).dtype}[{', '.join(['batch', *map(str, leaf.shape)])}]"
        for name, leaf in zip(names, leaves(spec), strict=True)
    }


def _as_tensor_has_it(array: np.ndarray) -> np.ndarray:
    """Convert an array to the dtype that ``to_tensor`` would give it, such as int64 for uint16."""
    converted: np.ndarray = to_tensor(array, torch.device("cpu")).numpy()
    return converted


def _facts(policy: SavedPolicy) -> dict[str, str]:
    return {
        "envmanager": __version__,
        "behavior": policy.behavior,
        "n_steps": str(policy.n_steps),
        "observation": describe_spec(policy.spec.observation),
        "action": describe_spec(policy.spec.action),
    }


def _onnx(
    module: nn.Module,
    example: tuple[Tensor, ...],
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    facts: dict[str, str],
) -> tuple[bytes, Run]:
    """Trace ``module`` and return an ONNX file, with ``facts`` as its metadata, and what runs it."""
    import onnx
    import onnxruntime

    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # such as the exporter's deprecation; check_model finds errors
        torch.onnx.export(
            module,
            example,
            buffer,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={name: {0: "batch"} for name in (*inputs, *outputs)},
            opset_version=opset,
            dynamo=False,
        )
    model = onnx.load_from_string(buffer.getvalue())
    onnx.helper.set_model_props(model, facts)
    onnx.checker.check_model(model)
    written: bytes = model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(written, options, providers=["CPUExecutionProvider"])

    def run(obs: list[np.ndarray]) -> list[np.ndarray]:
        acted: list[np.ndarray] = session.run(list(outputs), dict(zip(inputs, obs, strict=True)))
        return acted

    return written, run


def _torchscript(module: nn.Module, example: tuple[Tensor, ...]) -> tuple[bytes, Run]:
    buffer = io.BytesIO()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(module, example, check_trace=False), buffer)
        buffer.seek(0)
        loaded: Any = torch.jit.load(buffer, map_location="cpu")

    def run(obs: list[np.ndarray]) -> list[np.ndarray]:
        with torch.no_grad():
            return [leaf.numpy() for leaf in loaded(*map(torch.from_numpy, obs))]

    return buffer.getvalue(), run


def _check(policy: SavedPolicy, run: Run, observations: Tree, to: str) -> int:
    """Raise ExportFailed if ``run`` fails or acts unlike ``policy``. Return the number of observations compared."""
    n = len(leaves(observations)[0])
    ends = [0, *(end for end in (1, 3, 10) if end < n), n]
    for start, end in itertools.pairwise(ends):
        batch = take_rows(observations, slice(start, end))
        try:
            acted = run([_as_tensor_has_it(leaf) for leaf in leaves_like(policy.spec.observation, batch)])
        except Exception as error:
            raise ExportFailed(
                f"the policy of {policy.behavior!r} as {to} does not take {end - start} observations at once: {error}"
            ) from error
        wanted = leaves_like(policy.spec.action, policy(batch))
        for path, got, own in zip(paths(policy.spec.action, "action"), acted, wanted, strict=True):
            if not _is_same(got, own):
                raise ExportFailed(
                    f"the policy of {policy.behavior!r} as {to} acts differently: {path} for the "
                    f"observations {start} to {end - 1} is {_some(got)}, and should be {_some(own)}. The trainer's "
                    "greedy_module() must compute what greedy_policy() does, and must not read the number of rows."
                )
    return n


def _is_same(got: np.ndarray, wanted: np.ndarray) -> bool:
    if got.shape != wanted.shape or got.dtype != _as_tensor_has_it(wanted[:0]).dtype:
        return False
    return np.allclose(got, wanted, rtol=RTOL, atol=ATOL) if wanted.dtype.kind == "f" else np.array_equal(got, wanted)


def _some(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)} {np.array2string(array.ravel()[:6], precision=5, separator=', ')}"
