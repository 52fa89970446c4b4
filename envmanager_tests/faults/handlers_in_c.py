"""Programs in which C code has a handler for Ctrl-C, as robot middleware and applications that embed Python have."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

from envmanager_tests.faults.scripts import announce

_libc = ctypes.CDLL(None)
_libc.signal.restype = ctypes.c_void_p
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_hits: list[int] = []
_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_hits.append)


def install() -> Any:
    """Have C call ``_handler``; what it called before."""
    return _libc.signal(signal.SIGINT, ctypes.cast(_handler, ctypes.c_void_p))


def hits_of_one_interrupt() -> int:
    before = len(_hits)
    os.kill(os.getpid(), signal.SIGINT)
    return len(_hits) - before


def manager_of(kind: str) -> Any:
    from envmanager import RandomPolicy, SimpleEnvManager, SubprocessEnvManager
    from envmanager.testing import FakeEnvironment

    make = SimpleEnvManager if kind == "simple" else SubprocessEnvManager
    manager = make(FakeEnvironment, 2)
    manager.set_policy("default", RandomPolicy(manager.behavior_specs["default"]))
    return manager


def use(manager: Any) -> None:
    manager.reset()
    for _ in range(3):
        manager.step("all")
    manager.get_attr("closed")


def installed_before_the_import(kind: str) -> None:
    install()
    with manager_of(kind) as manager:
        use(manager)
        announce("hits", hits_of_one_interrupt())
    announce("hits", hits_of_one_interrupt())


def installed_between_two_calls(kind: str) -> None:
    with manager_of(kind) as manager:
        use(manager)
        install()
        use(manager)
        announce("hits", hits_of_one_interrupt())
    announce("hits", hits_of_one_interrupt())


def installed_in_a_policy(kind: str) -> None:
    with manager_of(kind) as manager:
        policy = manager._policy_steps.policies["default"]

        class Installs:
            def get_action(self, steps: Any) -> Any:
                install()
                return policy.get_action(steps)

        manager.set_policy("default", Installs())
        use(manager)
        announce("hits", hits_of_one_interrupt())
    announce("hits", hits_of_one_interrupt())


def installed_by_another_thread_in_the_middle_of_a_call(kind: str) -> None:
    """And taken away again later: then a Ctrl-C is Python's as before."""
    with manager_of(kind) as manager:
        manager.reset()
        manager.step("all")
        before: list[Any] = []
        answers = manager.step_queue
        really_take = answers.take

        def take() -> Any:
            if not before:
                thread = threading.Thread(target=lambda: before.append(install()))
                thread.start()
                thread.join()
            return really_take()

        answers.take = take
        manager.step("all")
        announce("hits", hits_of_one_interrupt())
        announce("hits", hits_of_one_interrupt())
        _libc.signal(signal.SIGINT, before[0])
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            announce("interrupted")


def embedded(kind: str) -> None:
    """What has loaded Python had a handler before: Python knows of none."""
    del os.environ["LD_PRELOAD"]  # which makes this process such an application, and not those that it starts
    announce("known", signal.getsignal(signal.SIGINT))
    manager = manager_of(kind)
    use(manager)
    announce("known", signal.getsignal(signal.SIGINT))
    os.kill(os.getpid(), signal.SIGINT)
    announce("alive")
    del manager  # not closed: its end comes with the program's


def default_action(kind: str) -> None:
    """Nobody wants KeyboardInterrupt here."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with manager_of(kind) as manager:
        use(manager)
        announce("ready")
        os.kill(os.getpid(), signal.SIGINT)
