"""A handler for Ctrl-C that Python did not install is never replaced."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from envmanager_tests.faults import handlers_in_c
from envmanager_tests.faults.scripts import program

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left"), pytest.mark.untraced]
every_kind = pytest.mark.parametrize("kind", ["simple", "subprocess"])

EMBEDDING = """
#include <signal.h>
#include <unistd.h>
static void say(int number) { write(1, "handled\\n", 8); }
__attribute__((constructor)) static void install(void) {
    struct sigaction action = {0};
    action.sa_handler = say;
    sigaction(SIGINT, &action, 0);
}
"""


@every_kind
@pytest.mark.parametrize(
    "how",
    [
        handlers_in_c.installed_before_the_import,
        handlers_in_c.installed_between_two_calls,
        handlers_in_c.installed_in_a_policy,
    ],
)
def test_a_handler_in_c_is_called_during_and_after_a_managers_life(how: Any, kind: str) -> None:
    with program(how, kind) as trainer:
        assert trainer.announced("hits", 2) == [["1"], ["1"]]
        assert (trainer.ended(), trainer.errors()) == (0, "")


@every_kind
def test_a_handler_in_c_that_comes_in_the_middle_of_a_call_stays_and_may_go_again(kind: str) -> None:
    with program(handlers_in_c.installed_by_another_thread_in_the_middle_of_a_call, kind) as trainer:
        assert trainer.announced("hits", 2) == [["1"], ["1"]]
        assert trainer.announced("interrupted") == [[]]
        assert (trainer.ended(), trainer.errors()) == (0, "")


@every_kind
def test_an_application_that_embeds_python_keeps_its_handler(kind: str, tmp_path: Path) -> None:
    (tmp_path / "embedding.c").write_text(EMBEDDING)
    library = tmp_path / "embedding.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "embedding.c"], check=True)
    with program(handlers_in_c.embedded, kind, LD_PRELOAD=str(library)) as trainer:
        assert trainer.announced("known", 2) == [["None"], ["None"]]
        assert trainer.announced("handled") == [[]]
        assert trainer.announced("alive") == [[]]
        assert (trainer.ended(), trainer.errors()) == (0, "")


@every_kind
def test_without_a_handler_an_interrupt_ends_the_program_as_usual(kind: str) -> None:
    with program(handlers_in_c.default_action, kind) as trainer:
        assert trainer.announced("ready") == [[]]
        assert (trainer.ended(), trainer.errors()) == (-signal.SIGINT, "")
