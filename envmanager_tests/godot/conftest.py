"""Engines and games for the tests: each game is copied once, with the addon, and played by many engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envmanager.godot.games import copy_demo, demos, install_addon
from envmanager_tests.godot.displays import VirtualDisplay
from envmanager_tests.godot.driver import MISSING, Engine, find_engine

GAMES = Path(__file__).parent / "games"


@pytest.fixture(params=[4, 3], ids=["godot4", "godot3"])
def major(request: pytest.FixtureRequest) -> int:
    version: int = request.param
    if find_engine(version) is None:
        pytest.skip(MISSING[version])
    return version


@pytest.fixture
def program(major: int) -> str:
    found = find_engine(major)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """The name of a virtual display, such as ``":1"``."""
    with VirtualDisplay() as name:
        yield name


@pytest.fixture(scope="session")
def project_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """A function: the folder with the game of a name ("games": those of these tests) for a major version."""
    there: dict[tuple[str, int], Path] = {}

    def find(name: str, version: int) -> Path:
        if (name, version) not in there:
            to = tmp_path_factory.mktemp(f"{name}{version}")
            if name in demos():
                copy_demo(name, version, to)
            else:
                _copy_games(version, to)
            there[name, version] = to
        return there[name, version]

    return find


@pytest.fixture
def engine(
    major: int, program: str, project_of: Callable[[str, int], Path], tmp_path: Path
) -> Iterator[Callable[..., Engine]]:
    """A function that starts an engine of this major version with a game; all are ended after the test."""
    started: list[Engine] = []

    def start(game: str, **options: object) -> Engine:
        one = Engine(program, project_of(game, major), tmp_path / f"home{len(started)}", **options)  # type: ignore[arg-type]
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()


def _copy_games(version: int, to: Path) -> None:
    for file in (GAMES / str(version)).iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    install_addon(to)
