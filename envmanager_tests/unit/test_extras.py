"""Modules that need a library which is not installed say what to install, whoever imports them."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import envmanager
from envmanager import SimpleEnvManager
from envmanager.adapters.names import find_environment, import_all
from envmanager.cli.plan import Plan
from envmanager.errors import EnvManagerError, EnvRaised, ImportFailed, MissingExtra, UsageError
from envmanager.importing import needed_by

ROOT = Path(envmanager.__file__).parent
BARE = """
import importlib, importlib.abc, json, sys

CORE = {"numpy", "attr", "attrs", "cattr", "cattrs", "cloudpickle", "typing_extensions", "exceptiongroup", "envmanager"}

class OnlyTheCore(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in CORE and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, OnlyTheCore())
"""
EVERY = """
said = {}
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except Exception as error:
        said[module] = type(error).__name__, isinstance(error, ImportError), str(error)
print(json.dumps(said))
"""


def in_a_bare_interpreter(code, *arguments):
    """What ``code`` prints where no library is installed but those that this one always needs."""
    done = subprocess.run([sys.executable, "-c", BARE + code, *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_below(*packages):
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return [".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for path in paths]


def test_every_module_imports_or_says_what_to_install():
    modules = modules_below("training", "interop", "adapters")
    said = json.loads(in_a_bare_interpreter(EVERY, *modules, "envmanager.observe.tensorboard", "envmanager.testing"))

    assert {kind for kind, _, _ in said.values()} == {"MissingExtra"}, said
    assert all(is_import_error and "pip install " in text for _, is_import_error, text in said.values()), said
    assert "pip install 'envmanager[torch]'" in said["envmanager.training.algorithms.ppo"][2]
    assert said.keys() >= {"envmanager.training.runs.checkpoints", "envmanager.interop.sb3"}


def test_what_needs_no_library_imports_without():
    loop = [path.stem for path in (ROOT / "training").glob("*.py") if path.stem != "learner_process"]
    modules = [*loop, "algorithms.states", "algorithms.store", "runs.figures", "runs.metrics", "runs.writers"]
    said = in_a_bare_interpreter(EVERY, *[f"envmanager.training.{module}" for module in modules])

    assert json.loads(said) == {}


def test_the_command_line_imports_with_the_libraries_of_its_extra_alone():
    of_the_extra = {"typer", "click", "rich", "yaml", "tomli", "shellingham", "pygments", "markdown_it", "mdurl"}
    code = f"CORE |= {of_the_extra | {'annotated_doc'}}" + EVERY

    assert json.loads(in_a_bare_interpreter(code, "envmanager.cli.app")) == {}


def test_contracts_without_pytest_say_what_to_install():
    code = """
import envmanager.testing
try:
    envmanager.testing.ManagerContract
except ImportError as error:
    print(error)
"""
    assert in_a_bare_interpreter(code).strip().endswith("pip install pytest")


def test_a_library_of_another_that_is_missing_is_named():
    with (
        pytest.raises(
            MissingExtra, match=r"a thing .*needs no_such_library.*pip install 'envmanager\[thing\]'"
        ) as caught,
        needed_by("a thing", extra="thing"),
    ):
        import no_such_library  # noqa: F401

    assert (caught.value.library, caught.value.name) == ("no_such_library", "no_such_library")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("spelled", ["reasoning_gym", "reasoning-gym"])
def test_an_extra_is_named_as_the_metadata_names_it(spelled):
    error = MissingExtra("a thing", library="reasoning_gym", extra=spelled)

    assert str(error).endswith("pip install 'envmanager[reasoning-gym]'")


def test_pages_and_extras_name_extras_as_the_metadata_names_them():
    provided = set(metadata.metadata("envmanager").get_all("Provides-Extra"))
    required = " ".join(metadata.requires("envmanager"))
    pages = [path.read_text() for path in (ROOT.parent / "README.md", *(ROOT.parent / "docs").rglob("*.md"))]
    table = re.findall(r"^\| (`[^|]*) \|", pages[0].split("| extra | brings |")[1].split("\n\n")[0], re.MULTILINE)
    named = re.findall(r"(?:envmanager|'\.)\[([\w.,-]+)\]", "\n".join([required, *pages]))
    names = {name.strip("` ") for names in (*table, *named) for name in names.split(",")}

    assert "dm-env" in names
    assert names <= provided


def test_a_missing_extra_is_both_an_import_error_and_one_of_ours():
    assert issubclass(MissingExtra, ModuleNotFoundError)
    assert issubclass(MissingExtra, EnvManagerError)


BROKEN = "raise ImportError('libGL.so.1: cannot open shared object file')"


@pytest.mark.parametrize(
    ("text", "raised"),
    [
        (BROKEN, "ImportError: libGL.so.1: cannot open"),
        ("x = 1\nraise ValueError('numpy.dtype size changed')", "ValueError: numpy.dtype size changed"),
        ("import gymnasium.no_such_part", "ModuleNotFoundError: No module named 'gymnasium.no_such_part'"),
        ("from math import no_such_part", "ImportError: cannot import name 'no_such_part'"),
    ],
)
def test_a_library_that_is_installed_and_broken_is_no_missing_one(write_module, text, raised):
    write_module("broken_library", text)

    with pytest.raises(ImportFailed, match=f"^Atari needs .*, which is installed, but .*{raised}") as caught:  # noqa: SIM117
        with needed_by("Atari", extra="atari"):
            import broken_library  # noqa: F401

    assert not isinstance(caught.value, MissingExtra)
    assert f"broken_library.py, line {1 + text.count(chr(10))}: " in str(caught.value)


BROKEN_LIBRARIES = """
import sys
from pathlib import Path
for name in ("gymnasium", "ale_py", "envpool", "yaml", "tensorboardX", "stable_baselines3", "torch", "typer", "wandb"):
    Path(f"{name}.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
sys.path.insert(0, "")
import envmanager.adapters.names, envmanager.cli, envmanager.cli.config_files, envmanager.interop
from envmanager.observe import tensorboard
from envmanager.training.runs import metrics
uses = {
    "gymnasium": lambda: envmanager.adapters.names.find_environment("CartPole-v1"),
    "envpool": lambda: envmanager.adapters.names.find_vector("envpool:Pong-v5"),
    "yaml": lambda: envmanager.cli.config_files.parse("1", "YAML", "--set"),
    "tensorboardX": lambda: tensorboard.make_writer("there"),
    "wandb": lambda: metrics.require(metrics.parse(["wandb"])),
    "stable_baselines3": lambda: envmanager.interop.as_sb3_vec_env(None),
    "torch": lambda: __import__("envmanager.training.algorithms.ppo"),
}
for library, use in uses.items():
    try:
        use()
    except envmanager.ImportFailed as error:
        assert type(error) is envmanager.ImportFailed and error.library == library, (library, error)
        assert f"{library}.py, line 1: ImportError: libGL.so.1" in str(error), error
    else:
        raise AssertionError(library)
sys.exit(envmanager.cli.main())
"""


def test_every_library_that_is_broken_is_told_from_a_missing_one(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_LIBRARIES], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )

    assert done.returncode == 1, done.stderr
    assert "typer, which is installed, but its import failed in" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_of_the_users_that_does_not_load_is_no_library(write_module):
    write_module("my_game", "raise ImportError('no licence here')")

    with pytest.raises(UsageError, match="env 'my_game:make' cannot be imported: ImportError: no licence here"):
        find_environment("my_game:make")


def test_a_mistake_of_our_own_is_no_missing_extra():
    with pytest.raises(ModuleNotFoundError) as caught, needed_by("a thing", extra="thing"):
        import envmanager.no_such_module  # noqa: F401

    assert not isinstance(caught.value, MissingExtra)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_library", r" \(my_game.py, line 1\) needs no_such_library, .*: pip install no_such_library$"),
        ("x = 1\nimport no_such_library.parts", r" \(my_game.py, line 2\) needs no_such_library, "),
    ],
)
@pytest.mark.parametrize("where", ["env 'my_game:make'", "imports: 'my_game'", "policy 'my_game:make'"])
def test_a_library_that_a_module_of_the_users_needs_is_named_with_the_line(write_module, where, text, told):
    write_module("my_game", text)

    with pytest.raises(MissingExtra, match=f"^{where}{told}"):
        import_as(where)


def import_as(where):
    if where.startswith("imports"):
        import_all(["my_game"])
    elif where.startswith("policy"):
        Plan.parse({"env": "CartPole-v1"}, {"policy": "my_game:make"})
    else:
        find_environment("my_game:make")


@pytest.mark.parametrize("text", ["import gymnasium.no_such_part", "from gymnasium import no_such_part"])
@pytest.mark.parametrize("where", ["env 'my_game:make'", "imports: 'my_game'", "policy 'my_game:make'"])
def test_a_part_that_a_library_does_not_have_is_no_library_to_install(write_module, where, text):
    write_module("my_game", text)

    with pytest.raises(ImportFailed, match=f"^{where} needs gymnasium, which .*my_game.py, line 1: .*no_such_part"):
        import_as(where)


def imports_a_library():
    importlib.import_module("no_such_library")


def says_what_to_install():
    try:
        imports_a_library()
    except ImportError as error:
        raise RuntimeError("Physics is missing: pip install physics") from error


def test_a_library_that_only_the_maker_of_an_environment_needs_is_one_line():
    with pytest.raises(MissingExtra, match=r"^env 0 \(test_extras.py, line \d+\) needs no_such_library, .*$"):
        SimpleEnvManager(imports_a_library, 1)


def test_an_error_that_says_what_to_install_has_no_traceback():
    with pytest.raises(EnvRaised) as caught:
        SimpleEnvManager(says_what_to_install, 1)

    assert str(caught.value).strip() == (
        "the environment in worker 0 (env 0) raised RuntimeError at start: Physics is missing: pip install physics"
    )
