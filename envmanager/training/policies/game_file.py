"""Policy files for Godot games, whose addon evaluates the networks in them (``policy.gd``).

::

    greedy module ── dense() ──▶ {"format", "version", "sha256"}     ── acting ──▶ actions
                                 {sizes, normalization, layers}

A file has two lines of JSON. The first has the SHA-256 of the second. Arrays are base64 of float32, little endian.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec
from envmanager.data.trees import leaves, paths
from envmanager.errors import UsageError
from envmanager.importing import needed_by
from envmanager.training.algorithms.actions import bounds_of
from envmanager.training.algorithms.networks import Convolutions, OneHot, Scale, Unseen

with needed_by("envmanager.training", extra="torch"):
    from torch import nn

FORMAT, VERSION = "envmanager.policy", 1
_INSTEAD = (
    "Export it to ONNX (--to onnx), which a game in C# can run with the package Microsoft.ML.OnnxRuntime, or let it "
    "play from Python (envmanager godot watch, load_policy)."
)
_NO_VECTORS = {
    Convolutions: "a picture, which needs convolutions",
    OneHot: "a bounded whole number, which becomes one-hot",
    Unseen: "an action mask",
}
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "relu": lambda values: np.maximum(values, 0.0),
    "linear": lambda values: values,
}


def to_game(behavior: str, spec: BehaviorSpec, module: nn.Module, facts: Mapping[str, Any]) -> bytes:
    """Return the content of a policy file. ``facts`` are further entries of its second line.

    Raises UsageError for a policy that the addon cannot evaluate.
    """

    def unsuitable(why: str) -> UsageError:
        return UsageError(f"the policy of {behavior!r} cannot be evaluated in a game: {why}. {_INSTEAD}")

    if not hasattr(module, "dense"):
        raise unsuitable(f"{type(module).__name__} has no method dense(), which returns its encoder and dense layers")
    encoder, layers = module.dense()
    parts = zip(paths(spec.observation, "obs"), encoder.parts, strict=True)
    others = [f"{path} is {_NO_VECTORS[type(part)]}" for path, part in parts if type(part) in _NO_VECTORS]
    if others:
        raise unsuitable(", ".join(others))
    actions: list[ArraySpec] = leaves(spec.action)
    if [leaf.dtype.kind for leaf in actions] not in (["f"], ["i"], ["f", "i"]) or not all(map(_is_of_a_game, actions)):
        raise unsuitable(
            f"it acts by {spec.action}, but an agent of a game acts by numbers from -1 to 1, by choices from 0 on, or "
            "by both in this order"
        )
    scales: list[Scale] = [part.scale for part in encoder.parts if part.scale is not None]
    body = {
        **facts,
        "observation_sizes": [part.n_features for part in encoder.parts],
        "continuous_size": sum(int(np.prod(leaf.shape)) for leaf in actions if leaf.dtype.kind == "f"),
        "discrete_choices": [
            int(high) + 1 for leaf in actions if leaf.dtype.kind == "i" for high in bounds_of(leaf)[1].ravel()
        ],
        "normalization": None
        if not scales
        else {
            "mean": _text([scale.mean.numpy() for scale in scales]),
            "deviation": _text([scale.deviation().numpy() for scale in scales]),
            "most": Scale.MOST,
        },
        "layers": [
            {
                "inputs": layer.weights.shape[1],
                "outputs": layer.weights.shape[0],
                "activation": layer.activation,
                "weights": _text([layer.weights.ravel()]),
                "biases": _text([layer.biases]),
            }
            for layer in layers
        ],
    }
    second = json.dumps(body)
    first = json.dumps({"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(second.encode()).hexdigest()})
    return f"{first}\n{second}\n".encode()


def acting(written: bytes, spec: BehaviorSpec) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """Return a function that acts by the policy file ``written``, from leaves ``[n, …]`` to leaves ``[n, …]``."""
    body = json.loads(written.splitlines()[1])
    normalization, n, choices = body["normalization"], body["continuous_size"], body["discrete_choices"]

    def act(obs: list[np.ndarray]) -> list[np.ndarray]:
        values = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in obs], axis=1, dtype=np.float32)
        if normalization is not None:
            values = (values - _array(normalization["mean"])) / _array(normalization["deviation"])
            values = np.clip(values, -normalization["most"], normalization["most"])
        for layer in body["layers"]:
            weights = _array(layer["weights"]).reshape(layer["outputs"], layer["inputs"])
            values = _ACTIVATIONS[layer["activation"]](values @ weights.T + _array(layer["biases"]))
        logits = np.split(values[:, n:], np.cumsum(choices)[:-1], axis=1)
        acted = [] if n == 0 else [np.clip(values[:, :n], -1.0, 1.0)]
        acted += [np.stack([part.argmax(1) for part in logits], axis=1)] if choices else []
        actions = zip(acted, leaves(spec.action), strict=True)
        return [part.reshape(-1, *leaf.shape).astype(leaf.dtype) for part, leaf in actions]

    return act


def _is_of_a_game(leaf: ArraySpec) -> bool:
    low, high = bounds_of(leaf)
    return bool((low == -1).all() and (high == 1).all()) if leaf.dtype.kind == "f" else bool((low == 0).all())


def _text(arrays: list[np.ndarray]) -> str:
    return base64.b64encode(np.concatenate(arrays).astype("<f4").tobytes()).decode()


def _array(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")
