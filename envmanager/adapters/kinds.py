"""Several kinds of environments in one manager: a list of EnvRecipes, each with a behavior and a number.

::

    [EnvRecipe("CartPole-v1", n=6, behavior="cart"),       envs 0 to 5: workers of the kind "cart"
     EnvRecipe("Acrobot-v1", n=2, behavior="acro")]   ──▶  envs 6 and 7: workers of the kind "acro"

The rule: a worker has environments of one kind. So its rows, its shared memory and its restarts are those of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from envmanager.adapters.names import GymnasiumId
from envmanager.adapters.recipes import EnvRecipe, Prepared
from envmanager.data.env_rows import split_by_kind
from envmanager.errors import UsageError


def count_kinds(env_factory: Any) -> int | None:
    """Return the number of environments of all kinds, or None if ``env_factory`` names no kinds."""
    given = _listed(env_factory)
    if not any(isinstance(each, EnvRecipe) and each.behavior is not None for each in given):
        return None
    return sum(each.n if isinstance(each, EnvRecipe) else 1 for each in given)


@attrs.frozen
class Kinds:
    """The kinds of environments of a manager, in the order of their environments."""

    recipes: Sequence[EnvRecipe]

    @classmethod
    def of(cls, env_factory: Any, options: Any) -> Kinds | None:
        """Return the kinds that ``env_factory`` names, or None. Raises UsageError for options that do not fit them."""
        n_envs, given = count_kinds(env_factory), _listed(env_factory)
        if n_envs is None:
            return None
        names = [each.behavior if isinstance(each, EnvRecipe) else None for each in given]
        for place, name in enumerate(names):
            if name is None or name in names[:place]:
                why = "names no kind" if name is None else f"has the behavior {name!r} of another one"
                raise UsageError(f"env_factory[{place}] {why}: make each an EnvRecipe(…, n=…, behavior=…) of its own.")
        if options.n_envs != n_envs:
            told = " + ".join(str(each.n) for each in given)
            raise UsageError(f"n_envs={options.n_envs}, but the kinds have n = {told} environments: leave n_envs out.")
        if options.n_workers == "auto" or getattr(options, "local_envs", 0):
            raise UsageError(
                'n_workers="auto" and local_envs are chosen for environments that are alike, by a probe of the first '
                "one: with several kinds, give the number of workers, or leave both out."
            )
        return cls(given)

    @property
    def factories(self) -> list[Any]:
        """A recipe for each environment."""
        alone = [(attrs.evolve(each, n=1, behavior=None), each.n) for each in self.recipes]
        return [recipe for recipe, n in alone for _ in range(n)]

    def blocks(self, n_workers: int) -> tuple[list[range], list[str]]:
        """Return the env_ids and the kind of each of ``n_workers`` workers. Raises UsageError if they are too few."""
        if n_workers < len(self.recipes):
            raise UsageError(
                f"n_workers={n_workers} is less than the {len(self.recipes)} kinds of environments, and a worker has "
                "environments of one kind: take as many, or leave n_workers out."
            )
        split = split_by_kind([each.n for each in self.recipes], n_workers)
        names = [str(each.behavior) for each, blocks in zip(self.recipes, split, strict=True) for _ in blocks]
        return [block for blocks in split for block in blocks], names


def _listed(env_factory: Any) -> Sequence[Any]:
    return env_factory if isinstance(env_factory, list | tuple) else [env_factory]


def written_as_kinds(factories: Sequence[Any]) -> str:
    """Return the list of EnvRecipes to write for ``factories``, one of each environment; "" if all are equal."""
    written, seen, names = [], list[Any](), set[str]()
    for place, factory in enumerate(factories):
        if factory in seen:
            continue
        seen.append(factory)
        how, behavior = f"EnvRecipe(env_factory[{place}]", f"kind{len(seen)}"
        if isinstance(factory, GymnasiumId):
            how, behavior = f"EnvRecipe({factory.env_id!r}", factory.env_id.rpartition("/")[2].lower()
        elif isinstance(factory, Prepared):
            how = f"attrs.evolve(env_factory[{place}]"
        behavior = f"{behavior}-{len(seen)}" if behavior in names else behavior
        names.add(behavior)
        written.append(f"{how}, n={list(factories).count(factory)}, behavior={behavior!r})")
    return f"[{', '.join(written)}]" if len(written) > 1 else ""
