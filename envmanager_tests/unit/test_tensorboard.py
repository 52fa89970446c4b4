"""Statistics as TensorBoard scalars."""

from __future__ import annotations

import sys

import pytest

from envmanager.errors import MissingExtra
from envmanager.observe import tensorboard
from envmanager.observe.stats import ManagerStats, WorkerStats

STATS = ManagerStats(
    tuple(WorkerStats(i, (i,), steps=10 + i, step_time_p99_s=0.25, idle_share=0.5) for i in range(2)),
    steps=21,
    wait_share=0.75,
)


class Writer:
    def __init__(self):
        self.written = {}

    def add_scalar(self, tag, value, step):
        self.written[tag] = value, step


def test_numbers_become_scalars():
    writer = Writer()
    tensorboard.write_stats(writer, STATS, 300)

    assert writer.written["envmanager/wait_share"] == (0.75, 300)
    assert writer.written["envmanager/steps/worker_1"] == (11.0, 300)
    assert writer.written["envmanager/step_time_p99_s/worker_0"] == (0.25, 300)
    assert len(writer.written) == len(tensorboard.scalars_of(STATS)) == 6 + 2 * 7


def test_of_each_worker_there_are_seven_charts_unless_every_one_is_wanted():
    writer = Writer()
    tensorboard.write_stats(writer, STATS, 300, every=True)

    assert len(writer.written) == 6 + 2 * 11
    assert writer.written["envmanager/step_time_p50_s/worker_0"] == (0.0, 300)


def test_the_scalars_may_go_under_another_name():
    writer = Writer()
    tensorboard.write_stats(writer, STATS, 1, prefix="evaluation")

    assert {tag.partition("/")[0] for tag in writer.written} == {"evaluation"}


def test_without_the_library_the_command_that_installs_it_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)

    with pytest.raises(MissingExtra, match=r"pip install 'envmanager\[tensorboard\]'"):
        tensorboard.make_writer(str(tmp_path))


def test_what_is_written_can_be_read_back(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401  (the format read here is the one it writes)

    writer = tensorboard.make_writer(str(tmp_path))
    tensorboard.write_stats(writer, STATS, 7)
    writer.close()

    found = {}
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    while data:  # a record: length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        found |= {value.tag: (value.simple_value, event.step) for value in event.summary.value}
        data = data[16 + length :]
    assert found == {f"envmanager/{tag}": (value, 7) for tag, value in tensorboard.scalars_of(STATS).items()}


def test_two_writers_in_the_same_second_have_a_file_each(tmp_path):
    pytest.importorskip("tensorboardX")
    for _ in range(2):
        tensorboard.make_writer(str(tmp_path)).close()

    assert len(list(tmp_path.iterdir())) == 2
