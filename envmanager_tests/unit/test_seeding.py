"""Seeds: each its own, and the same again."""

from hypothesis import given
from hypothesis import strategies as st

from envmanager.data.seeding import derive_seed, derive_seeds

seeds = st.integers(0, 2**63)


def test_neighbouring_seeds_envs_and_generations_share_no_seed():
    drawn = [derive_seed(seed, env_id, g) for seed in range(10) for env_id in range(100) for g in range(3)]

    assert len(set(drawn)) == len(drawn)


@given(seeds, st.integers(0, 10_000), st.integers(0, 100))
def test_a_seed_is_one_that_every_library_accepts(seed, env_id, generation):
    assert 0 <= derive_seed(seed, env_id, generation) < 2**31


@given(seeds, st.lists(st.integers(0, 1000), min_size=2, max_size=5, unique=True))
def test_an_environment_s_seed_does_not_depend_on_who_hosts_it(seed, env_ids):
    together = derive_seeds(seed, env_ids)

    assert together == [derive_seeds(seed, [env_id])[0] for env_id in env_ids]
    assert len(set(together)) == len(env_ids)


def test_the_seed_of_an_environment_is_fixed_for_ever():
    assert [derive_seed(0, 0), derive_seed(1, 0), derive_seed(0, 1), derive_seed(0, 0, 1)] == [
        2044266242,
        1511999270,
        1976665982,
        1790637272,
    ]


def test_no_seed_asks_for_no_seeding():
    assert derive_seeds(None, [3, 4]) == [None, None]


def test_a_list_of_seeds_is_passed_on_by_env_id():
    assert derive_seeds([10, 11, 12, 13], [1, 3], generation=5) == [11, 13]
