"""Ctrl-C and SIGTERM raise once, and never while closing."""

from __future__ import annotations

import os
import signal

import pytest

from envmanager.cli import run
from envmanager.cli.display import RunDisplay
from envmanager.cli.output import PlainOutput
from envmanager.cli.plan import Plan
from envmanager.cli.run import Stopped, StopSignals
from envmanager.registry import ManagerOptions
from envmanager.simple_env_manager import SimpleEnvManager


def send(signum):
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_raises_and_ends_the_command_with_the_exit_code_it_means(signum, exit_code):
    with pytest.raises(SystemExit) as caught, StopSignals():
        send(signum)

    assert caught.value.code == exit_code


def test_later_signals_are_dropped():
    with StopSignals():
        with pytest.raises(Stopped):
            send(signal.SIGINT)
        send(signal.SIGINT)
        send(signal.SIGTERM)


def test_held_signals_are_dropped():
    with StopSignals() as signals:
        signals.hold()
        send(signal.SIGINT)


def test_what_signals_did_before_is_restored():
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]

    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before[0]

    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_while_a_finished_run_closes_does_not_cut_closing_short(monkeypatch, capsys):
    closed = []

    class Interrupted(SimpleEnvManager):
        def close(self):
            send(signal.SIGINT)
            super().close()
            closed.append(True)

    monkeypatch.setattr(run, "make_manager", lambda options: Interrupted(options.env))

    exit_code = run.run(Plan(ManagerOptions(env="CartPole-v1"), steps=10), RunDisplay(PlainOutput()))

    assert (exit_code, closed) == (0, [True])
    assert "all steps taken" in capsys.readouterr().out
