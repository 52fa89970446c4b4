"""The file of episodes that a training run leaves."""

from __future__ import annotations

from pathlib import Path

import attrs

from envmanager.training.runs.figures import EPISODES, EpisodeEnd, EpisodeLog, read_episodes

ENDS = [EpisodeEnd(100, 1.5, "talker", 7, -3.25, 40), EpisodeEnd(220, 2.5, "walker", 1 << 32, 12.0, 60)]


def written(directory: Path, *ends: EpisodeEnd) -> Path:
    with EpisodeLog(directory) as log:
        for end in ends:
            log.episode_ended(end)
    return directory / EPISODES


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_episodes(written(tmp_path / "run", *ENDS)) == ENDS


def test_a_new_training_begins_a_new_file(tmp_path: Path) -> None:
    written(tmp_path, *ENDS)
    assert read_episodes(written(tmp_path)) == []


def test_a_resumed_training_keeps_the_episodes_before_its_checkpoint_and_the_time_they_took(tmp_path: Path) -> None:
    written(tmp_path, *ENDS)
    with EpisodeLog(tmp_path, resumed_at=150) as log:
        log.episode_ended(attrs.evolve(ENDS[1], seconds=1.0))
    assert read_episodes(tmp_path / EPISODES) == ENDS


def test_an_episode_that_ended_in_the_step_after_the_checkpoint_is_not_kept(tmp_path: Path) -> None:
    written(tmp_path, *ENDS)  # whose steps are those before the step in which they ended
    with EpisodeLog(tmp_path, resumed_at=ENDS[1].steps):
        pass
    assert read_episodes(tmp_path / EPISODES) == ENDS[:1]


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, *ENDS)
    path.write_text(path.read_text() + "300,4.0,wal")
    assert read_episodes(path) == ENDS


def test_where_nothing_was_written_there_are_no_episodes(tmp_path: Path) -> None:
    assert read_episodes(tmp_path / EPISODES) == []


def test_a_line_says_the_environment_and_the_length(tmp_path: Path) -> None:
    header, first, second = written(tmp_path, *ENDS).read_text().splitlines()
    assert header == "steps,seconds,behavior,env_id,agent_id,return,length"
    assert first == "100,1.500,talker,0,7,-3.25,40"
    assert second == "220,2.500,walker,1,4294967296,12,60"


def test_a_last_line_that_was_cut_before_its_length_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, *ENDS)
    whole = path.read_bytes()
    last = whole.rindex(b"220,")
    for n in range(last, whole.rindex(b",") + 2):
        path.write_bytes(whole[:n])
        assert read_episodes(path) == ENDS[:1]
