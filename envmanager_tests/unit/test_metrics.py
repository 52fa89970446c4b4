"""Writers of metrics: what a config may say of them, and what each leaves."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from envmanager import importing
from envmanager.errors import MissingExtra, UsageError
from envmanager.training.runs import metrics, writers
from envmanager.training.runs.metrics import Metrics, open_writers, parse
from envmanager.training.runs.writers import RunFacts

SUITE = "training"

CONFIG = {"manager": {"env": "CartPole-v1"}, "trainers": {"default": {"kind": "ppo"}}}


def facts(directory: Path, *, resumed_at: int | None = None) -> RunFacts:
    return RunFacts(directory, "0123456789abcdef", CONFIG, resumed_at)


# What a config says.


def test_a_name_or_a_table_of_options_names_a_writer():
    assert parse(["csv", {"wandb": {"project": "x"}}, {"tensorboard": None}]) == (
        Metrics("csv"),
        Metrics("wandb", {"project": "x"}),
        Metrics("tensorboard"),
    )
    assert parse(parse(["csv"])) == (Metrics("csv"),)
    assert [one.to_json() for one in parse(["csv", {"wandb": {"project": "x"}}])] == [
        "csv",
        {"wandb": {"project": "x"}},
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("csv", r"should be a list such as \[tensorboard, csv"),
        (3, "should be a list"),
        ({"csv": {}}, "should be a list"),
        (["cvs"], r"names 'cvs', which is not known; did you mean csv\? Known: csv, mlflow, tensorboard, wandb"),
        ([3], "int 3 is in it"),
        ([{3: {}}], "names 3, which is not known"),
        ([{"csv": "x"}], "metrics.csv should be a mapping of its options"),
        (["csv", {"csv": {}}], "names 'csv' twice"),
    ],
    ids=str,
)
def test_anything_else_is_a_usage_error(given: Any, words: str):
    with pytest.raises(UsageError, match=words):
        parse(given)


def test_an_option_that_a_writer_has_not_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match=r"no option metrics\.mlflow\.experimnt; did you mean experiment\?"):
        metrics._check_options(Metrics("mlflow", {"experimnt": "x"}), writers.MlflowMetrics)
    with pytest.raises(UsageError, match=r"no option metrics\.csv\.file\. It has none"):
        metrics.require(parse([{"csv": {"file": "x"}}]))


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_library_that_is_missing_is_named_with_its_command(kind: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("tensorboardX", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(MissingExtra, match=rf"metrics: {kind} needs .* pip install 'envmanager\[{kind}\]'"):
        metrics.require(parse([kind]))


class Remembering:
    made: list[Any] = []

    def __init__(self, facts: RunFacts, *, colour: str = "grey") -> None:
        self.facts, self.colour, self.closed = facts, colour, False
        Remembering.made.append(self)

    def add_scalars(self, scalars, step):
        self.last = dict(scalars), step

    def close(self):
        self.closed = True


class Broken:
    def __init__(self, facts: RunFacts) -> None:
        raise RuntimeError("no connection")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other packages that bring writers."""
    there = [
        EntryPoint(name, f"{__name__}:{cls.__name__}", metrics.ENTRY_POINT_GROUP)
        for name, cls in (("remembering", Remembering), ("broken", Broken))
    ]

    def found(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == metrics.ENTRY_POINT_GROUP
        return [each for each in there if name in (None, each.name)]

    monkeypatch.setattr(importing, "entry_points", found)
    yield
    Remembering.made.clear()


@pytest.mark.usefixtures("packages")
def test_another_package_adds_a_writer_by_an_entry_point(tmp_path: Path):
    chosen = parse([{"remembering": {"colour": "red"}}])
    metrics.require(chosen)
    writer = open_writers(chosen, facts(tmp_path))["remembering"]
    writer.add_scalars({"return/mean": 2.0}, 30)

    assert isinstance(writer, Remembering)
    assert (writer.colour, writer.facts, writer.last) == ("red", facts(tmp_path), ({"return/mean": 2.0}, 30))
    with pytest.raises(UsageError, match=r"no option metrics\.remembering\.color; did you mean colour"):
        metrics.require(parse([{"remembering": {"color": "red"}}]))
    assert "remembering" in metrics.known_kinds()


@pytest.mark.usefixtures("packages")
def test_when_one_cannot_be_opened_the_others_are_closed(tmp_path: Path):
    with pytest.raises(UsageError, match="metrics of broken cannot be opened: RuntimeError: no connection"):
        open_writers(parse(["remembering", "broken"]), facts(tmp_path))

    assert [writer.closed for writer in Remembering.made] == [True]


# CSV.


def rows_of(directory: Path) -> list[list[str]]:
    with (directory / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def written(directory: Path, *scalars: tuple[dict[str, float], int], resumed_at: int | None = None) -> None:
    (writer,) = open_writers(parse(["csv"]), facts(directory, resumed_at=resumed_at)).values()
    for named, step in scalars:
        writer.add_scalars(named, step)
    writer.close()


def test_a_table_has_a_line_per_value(tmp_path: Path):
    written(tmp_path / "run", ({"a/loss": 0.5, "b, with a comma": 1e-9}, 100), ({"a/loss": float("nan")}, 200))

    assert rows_of(tmp_path / "run") == [
        ["steps", "name", "value"],
        ["100", "a/loss", "0.5"],
        ["100", "b, with a comma", "1e-09"],
        ["200", "a/loss", "nan"],
    ]


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path):
    (writer,) = open_writers(parse(["csv"]), facts(tmp_path)).values()
    writer.add_scalars({"loss": 1.0}, 1)

    assert len(rows_of(tmp_path)) == 2
    writer.close()


def test_a_training_that_goes_on_keeps_what_came_before_its_checkpoint(tmp_path: Path):
    written(tmp_path, ({"loss": 1.0}, 100), ({"loss": 2.0}, 200))
    written(tmp_path, ({"loss": 3.0}, 180), resumed_at=150)

    assert [row[::2] for row in rows_of(tmp_path)[1:]] == [["100", "1"], ["180", "3"]]


@pytest.mark.parametrize("steps", ["", "x", "-1", "²", "9" * 5000], ids=["none", "text", "negative", "²", "digits"])
def test_a_row_of_which_the_steps_are_no_number_is_left_out(tmp_path: Path, steps: str):
    written(tmp_path, ({"loss": 1.0}, 100))
    with (tmp_path / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write(f"{steps},loss,2\r\n")
    written(tmp_path, resumed_at=150)

    assert rows_of(tmp_path)[1:] == [["100", "loss", "1"]]


def test_a_training_that_begins_anew_begins_a_new_table(tmp_path: Path):
    written(tmp_path, ({"loss": 1.0}, 100))
    written(tmp_path)

    assert rows_of(tmp_path) == [["steps", "name", "value"]]


def test_a_table_with_other_columns_is_not_replaced_when_a_training_goes_on(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text("steps,metric\n")

    with pytest.raises(UsageError, match="Restore it, or delete it"):
        written(tmp_path, resumed_at=150)
    assert (tmp_path / "metrics.csv").read_text() == "steps,metric\n"


# TensorBoard.


def events_in(path: Path) -> Iterator[Any]:
    from tensorboardX.proto.event_pb2 import Event

    data = path.read_bytes()
    while data:  # a record: length, its checksum, the event, its checksum
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def scalars_in(path: Path) -> dict[str, tuple[float, int]]:
    return {value.tag: (value.simple_value, event.step) for event in events_in(path) for value in event.summary.value}


@pytest.mark.parametrize("directory", [None, "elsewhere"])
def test_tensorboards_scalars_are_in_the_folder_of_the_run_or_where_it_is_said(tmp_path: Path, directory: str | None):
    pytest.importorskip("tensorboardX")
    options = {} if directory is None else {"directory": str(tmp_path / directory)}
    (writer,) = open_writers(parse([{"tensorboard": options}]), facts(tmp_path / "run")).values()
    writer.add_scalars({"a/loss": 0.5, "return/mean": 2.0}, 100)
    writer.close()

    (path,) = (tmp_path / (directory or "run/tensorboard")).iterdir()
    assert scalars_in(path) == {"a/loss": (0.5, 100), "return/mean": (2.0, 100)}


def test_tensorboard_is_told_to_hide_what_was_written_after_the_checkpoint(tmp_path: Path):
    pytest.importorskip("tensorboardX")
    for resumed_at in (None, 150):
        (writer,) = open_writers(parse(["tensorboard"]), facts(tmp_path, resumed_at=resumed_at)).values()
        writer.add_scalars({"loss": 1.0}, 200)
        writer.close()

    events = [list(events_in(path)) for path in (tmp_path / "tensorboard").iterdir()]
    starts = [[each.step for each in own if each.HasField("session_log")] for own in events]
    assert sorted(starts) == [[], [151]]


# The services.

USE_WANDB = """
import json, sys
from pathlib import Path
from envmanager.training.runs.metrics import open_writers, parse
from envmanager.training.runs.writers import RunFacts

directory = Path(sys.argv[1])
facts = RunFacts(directory, "0123456789abcdef", {"manager": {"env": "CartPole-v1"}})
(writer,) = open_writers(parse([{"wandb": {"project": "x", "mode": "offline"}}]), facts).values()
writer.add_scalars({"a/loss": 0.5}, 100)
writer.add_scalars({"b/loss": 0.25}, 200)
writer.add_scalars({"a/loss": 0.125}, 150)  # which is late
run = writer._run
print(json.dumps([run.id, run.project, run.name, run.config["manager"]]))
writer.close()
"""
READ_WANDB = """
import json, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2

def records(data):  # a log as LevelDB has it, after a header of 7 bytes: blocks of 32 KiB of parts of records
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, the last part of one
            yield record
            record = b""

rows = []
(path,) = Path(sys.argv[1], "wandb").glob("offline-run-*/run-*.wandb")
for data in records(path.read_bytes()):
    found = wandb_internal_pb2.Record()
    found.ParseFromString(data)
    if found.WhichOneof("record_type") == "history":
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in found.history.item}
        rows.append({name: value for name, value in items.items() if not name.startswith("_")})
print(json.dumps(rows))
"""


USE_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
from pathlib import Path
from envmanager.training.runs.metrics import open_writers, parse
from envmanager.training.runs.writers import RunFacts

directory, uri = Path(sys.argv[1]), sys.argv[2]
config = {"manager": {"env": "CartPole-v1"}, "trainers": {"default": {"kind": "ppo"}}}
for resumed_at, loss, step in ((None, 0.5, 100), (100, 0.25, 200)):
    facts = RunFacts(directory, "0123456789abcdef", config, resumed_at)
    (writer,) = open_writers(parse([{"mlflow": {"tracking_uri": uri, "experiment": "x"}}]), facts).values()
    writer.add_scalars({"Agent?team=0/loss": loss}, step)
    writer.close()
client = MlflowClient(uri)
(run,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
history = client.get_metric_history(run.info.run_id, "Agent_team_0/loss")
told = sorted([each.step, each.value] for each in history)
print(json.dumps([told, run.info.status, run.info.run_name, run.data.params]))
"""


def last_line(code: str, *arguments: str, cwd: Path) -> Any:
    """What ``code`` prints last, in a process of its own: both leave threads, files or a service until its end."""
    environ = {**os.environ, "WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_wandb_offline_has_the_scalars_and_the_config(tmp_path: Path):
    pytest.importorskip("wandb")

    told = last_line(USE_WANDB, str(tmp_path / "run"), cwd=tmp_path)
    rows = last_line(READ_WANDB, str(tmp_path / "run"), cwd=tmp_path)

    assert told == ["0123456789abcdef", "x", "run", {"env": "CartPole-v1"}]
    assert rows == [
        {"a/loss": 0.5, "steps": 100},
        {"b/loss": 0.25, "steps": 200},
        {"a/loss": 0.125, "steps": 150},
    ]


@pytest.mark.parametrize("scheme", ["sqlite", "file"])
def test_mlflow_keeps_the_scalars_without_a_server_and_goes_on_with_its_run(tmp_path: Path, scheme: str):
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/ml.db" if scheme == "sqlite" else (tmp_path / "store").as_uri()

    assert last_line(USE_MLFLOW, str(tmp_path / "run"), uri, cwd=tmp_path) == [
        [[100, 0.5], [200, 0.25]],
        "FINISHED",
        "run",
        {"manager.env": "CartPole-v1", "trainers.default.kind": "ppo"},
    ]


def test_nothing_of_the_services_is_imported_before_it_is_chosen():
    code = "import sys, envmanager.training.runs.metrics as m; m.parse(['wandb', 'mlflow', 'csv']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"wandb", "mlflow", "tensorboardX"} & set(loaded)
