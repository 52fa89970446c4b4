"""What users pass as env_factory, and what becomes of it."""

import functools
import sys

import pytest

from envmanager.adapters.factories import call_factory, factories_for, resolve
from envmanager.adapters.names import Importable
from envmanager.environment import EnvContext
from envmanager.errors import MissingExtra, UsageError

CONTEXT = EnvContext(env_id=3, worker_id=1, slot=8, seed=5)


class Plain:
    """An environment class whose constructor has only options."""

    def __init__(self, size=4, *, color="red"):
        self.size = size

    def reset(self):
        return self.size


class Farm:
    Barn = Plain


class Informed:
    def __init__(self, context: "EnvContext"):
        self.context = context


def informed(context: EnvContext, size=2):
    return context


def optional_context(context: EnvContext | None = None):
    return context


def annotated_default(context: EnvContext = None):
    return context


def required(anything):
    return anything


def two_required(context, other):
    return context


def keyword_only(*, size=3):
    return size


def anything_goes(*args, **kwargs):
    return (args, kwargs)


def test_a_class_with_options_only_is_called_with_nothing():
    assert call_factory(Plain, CONTEXT).size == 4


@pytest.mark.parametrize("factory", [informed, annotated_default, required, lambda context: context])
def test_a_factory_with_one_required_or_an_annotated_parameter_gets_the_context(factory):
    assert call_factory(factory, CONTEXT) is CONTEXT


def test_a_class_that_wants_the_context_gets_it():
    assert call_factory(Informed, CONTEXT).context is CONTEXT


def test_a_bound_argument_is_not_asked_for_again():
    assert call_factory(functools.partial(two_required, other=1), CONTEXT) is CONTEXT
    assert call_factory(functools.partial(required, 7), CONTEXT) == 7


def test_other_callables_are_called_with_nothing():
    assert call_factory(keyword_only, CONTEXT) == 3
    assert call_factory(anything_goes, CONTEXT) == ((), {})
    assert call_factory(dict, CONTEXT) == {}


def test_a_factory_that_returns_nothing_is_named():
    with pytest.raises(UsageError, match=r"optional_context returned None for env 3; is a `return` missing"):
        call_factory(optional_context, CONTEXT)


def test_one_factory_serves_all_environments():
    assert factories_for(Plain, 3) == [Plain] * 3


def test_a_list_has_one_factory_per_environment():
    plain, cartpole = factories_for([Plain, "CartPole-v1"], 2)
    assert (plain, cartpole.env_id) == (Plain, "CartPole-v1")
    with pytest.raises(UsageError, match="a list of 1 factories for n_envs=2"):
        factories_for([Plain], 2)


def test_a_gymnasium_id_makes_its_environment():
    env = call_factory(resolve("CartPole-v1"), CONTEXT)

    assert env.spec.id == "CartPole-v1"
    env.close()


def test_an_atari_id_needs_no_import_by_the_user():
    assert resolve("ALE/Pong-v5").spec.id == "ALE/Pong-v5"


def test_a_name_in_a_module_travels_as_a_name():
    factory = resolve(f"{__name__}:Plain")

    assert factory == Importable(__name__, "Plain")
    assert call_factory(factory, CONTEXT).size == 4


def test_a_name_inside_a_class_is_found_too():
    assert call_factory(resolve(f"{__name__}:Farm.Barn"), CONTEXT).size == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NoSuchEnv-v0", "Gymnasium knows no environment 'NoSuchEnv-v0'"),
        ("CartPole-v99", "CartPole"),
        ("no_such_module:Env", "cannot be found: No module named 'no_such_module'"),
        ("math:no_such_name", "cannot be found"),
        (":Env", "names no module: write 'module:callable'"),
        ("..module:Env", "names no module"),
        ("games/robot.py", r"names a file\. Write the module and what makes one: robot:NAME"),
        ("robot.py:make", r"names a file\. Write the module and what makes one: robot:make"),
        ("math:", "'math:'"),
        ("math:pi", "is float 3.14.*not a callable"),
        ("no_such_module:CartPole-v1", "no_such_module"),
    ],
)
def test_a_text_that_leads_nowhere_is_refused_with_its_reason(text, message):
    with pytest.raises(UsageError, match=message):
        resolve(text)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (None, "there is no environment"),
        (3, "must be callable"),
        (Plain(), "an environment. Pass a function that makes one"),
    ],
)
def test_what_makes_no_environment_is_refused(factory, message):
    with pytest.raises(UsageError, match=message):
        resolve(factory)


@pytest.mark.parametrize(
    ("env_id", "library", "extra"), [("CartPole-v1", "gymnasium", "gymnasium"), ("ALE/Pong-v5", "ale_py", "atari")]
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, env_id, library, extra):
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(MissingExtra, match=r"pip install 'envmanager\[") as caught:
        resolve(env_id)
    assert caught.value.library == library
    assert caught.value.extra == extra
