"""``--serve`` of the commands, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from envmanager.cli.app import run_command_line
from envmanager.cli.plan import address_of
from envmanager.errors import ConfigError
from envmanager.testing.fault_checks import until

COMMAND = str(Path(sys.executable).with_name("envmanager"))
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TIMEOUT_S = 300


@contextmanager
def served(*arguments: str, **variables: str) -> Iterator[str]:
    """The address that a command prints. At the end the command is interrupted."""
    command = [COMMAND, *arguments, "--serve", "--plain"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            printed = ""
            for line in process.stdout:
                printed += line
                if line.startswith("watch it at "):
                    break
            assert "http://127.0.0.1:" in printed, printed
            yield line.split()[-1]
        finally:
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, rest


def data_of(url: str) -> Any:
    with urllib.request.urlopen(url.replace("/?", "/data?"), timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def test_a_run_is_served_with_its_own_counters():
    with served("run", "--env", "CartPole-v1", "--n-envs", "2", "--steps", "100000000") as url:
        until(lambda: data_of(url)["means"].get("default", {}).get("return", 0.0) > 5)
        assert data_of(url)["episodes"] > 0


def test_a_token_comes_from_the_environment():
    variables = {"ENVMANAGER_SERVE_TOKEN": "mine"}
    with served("run", "--env", "CartPole-v1", "--steps", "100000000", **variables) as url:
        assert url.endswith("?token=mine")
        assert data_of(url)["workers"]


def test_a_training_is_served_with_its_figures(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch")
    config = str(EXAMPLES / "ppo_cartpole.yaml")
    with served("train", config, "--steps", "100000000", "--dir", str(tmp_path / "run")) as url:
        until(lambda: bool(data_of(url)["figures"] and data_of(url)["means"]), within_s=TIMEOUT_S)
        data = data_of(url)
    assert data["figures"]["default"]["version"] >= 1
    assert data["episodes"] > 0
    assert data["means"]["default"]["return"] > 5


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8000", (8000, "127.0.0.1")),
        ("0.0.0.0:80", (80, "0.0.0.0")),
        ("[::1]:80", (80, "::1")),
        ("machine:0", (0, "machine")),
        (":80", (80, "127.0.0.1")),
        (None, None),
    ],
)
def test_an_address_is_a_port_or_a_host_and_a_port(text, address):
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["", "x", "host", "host:", "1.5", "999999", "-1"])
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="PORT"):
        address_of(text)


@pytest.mark.parametrize(
    "arguments", [["--serve"], ["--serve", "--plain"], ["--serve", "none.toml"], ["--serve", "0", "--plain"]]
)
def test_the_port_may_be_left_out(arguments, capsys):
    assert run_command_line(["run", "--env", "nothing:here", *arguments]) == 2

    shown = capsys.readouterr().err
    assert "serve" not in shown, shown
    assert "nothing" in shown or "none.toml" in shown


def test_a_port_that_cannot_be_taken_ends_the_command(capsys):
    command = ["run", "--env", "CartPole-v1", "--steps", "10", "--plain", "--serve", "99999"]
    assert run_command_line(command) == 2
    assert "99999" in capsys.readouterr().err
