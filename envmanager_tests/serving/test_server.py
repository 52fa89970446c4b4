"""The server of a manager, asked by HTTP: what it answers, whom it answers, and that it ends with the manager."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from envmanager import RestartPolicy, SimpleEnvManager, SubprocessEnvManager
from envmanager.errors import EnvRaised, ManagerClosed, UsageError, WorkerError
from envmanager.observe.episodes import Episodes
from envmanager.serving.server import Server
from envmanager.testing import FakeEnvironment, Raise, Sleep, Step, faulty
from envmanager.testing.fault_checks import until
from envmanager_tests.serving.asking import TIMEOUT_S, brief, data_of, get, refusal, start


@pytest.fixture
def manager() -> Iterator[SimpleEnvManager]:
    with SimpleEnvManager(brief, n_envs=2) as manager:
        yield manager


def test_the_address_has_the_token_and_leads_to_the_page(manager):
    server = start(manager)

    with urllib.request.urlopen(server.url, timeout=TIMEOUT_S) as answer:
        page = answer.read().decode()
    assert urlsplit(server.url).hostname == "127.0.0.1"
    assert "<canvas" in page
    assert "NONCE" not in page
    page = page.replace("/*! https://github.com/leeoniya/uPlot", "")  # where the plots are from
    assert "http://" not in page.replace(server.url, "")
    assert "https://" not in page  # it works without internet


def test_all_is_refused_without_the_token_or_with_another(manager):
    server = start(manager)

    for path in ("/", "/data", "/metrics", "/nothing"):
        for token in ("", "wrong", server.token + "x", server.token[:-1], "é"):
            assert refusal(server, path, token=token) == 401
        assert refusal(server, f"{path}?token=wrong", token="") == 401
    assert refusal(server, "/nothing") == 404


def test_a_token_can_be_chosen_and_is_in_no_text(manager):
    server = start(manager, token="a&b=c/ü".replace("ü", "u"))

    assert get(server, token="a&b=c/u")[0] == 200
    with urllib.request.urlopen(server.url, timeout=TIMEOUT_S) as answer:
        assert answer.status == 200
    assert server.token not in repr(server)
    for bad in ("", "ü"):
        with pytest.raises(UsageError, match="token"):
            manager.serve(token=bad)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "localhost.evil"]
)
def test_a_name_that_is_not_this_machines_is_refused(manager, host):
    assert refusal(start(manager), Host=host) == 403


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80", "192.0.2.7:8000", "LOCALHOST"])
def test_addresses_and_names_of_this_machine_are_answered(manager, host):
    assert get(start(manager), Host=host)[0] == 200


def test_it_only_reads(manager):
    server = start(manager)

    for method in ("POST", "PUT", "DELETE"):
        url = f"http://127.0.0.1:{server.port}/data"
        request = urllib.request.Request(
            url, data=b"", headers={"Authorization": f"Bearer {server.token}"}, method=method
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=TIMEOUT_S)
        caught.value.close()
        assert caught.value.code == 501


def test_the_page_may_load_nothing_from_elsewhere(manager):
    _, headers, page = get(start(manager), "/")

    policy = headers["Content-Security-Policy"]
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    assert policy.startswith("default-src 'none'")
    assert page.count(f'nonce="{nonce}"') == 3
    assert headers["Referrer-Policy"] == "no-referrer"


def test_data_have_steps_episodes_and_what_the_workers_do(manager):
    server = start(manager)
    for _ in range(30):
        manager.step()
    until(lambda: data_of(server)["env_steps"] == 60)
    until(lambda: data_of(server)["means"] != {})

    data = data_of(server)
    assert data["episodes"] == manager.episodes.count > 0
    assert data["means"]["default"]["return"] == pytest.approx(manager.episodes.mean_of_recent())
    assert [worker["envs"] for worker in data["workers"]] == [[0, 1]]
    assert data["tasks"] is None


def test_spans_cover_the_time_of_a_worker_without_gaps():
    slow = [Sleep(0.05), Step()]
    with SubprocessEnvManager(lambda context: FakeEnvironment(slow), n_envs=2, wait="all") as manager:
        server = start(manager)
        spans: list[Any] = []
        after = 0
        while sum(worker == 0 for worker, *_ in spans) < 3:
            manager.step()
            data = data_of(server, after)
            spans += data["spans"]
            after = data["number"]

    for worker_id in (0, 1):
        own = [span[1:] for span in spans if span[0] == worker_id]
        assert own
        for (_, ended, *_), (began, *_) in pairwise(own):
            assert began == ended
        for began, ended, *parts in own:
            assert ended - began == pytest.approx(sum(parts), abs=3)
            assert min(parts) >= 0
        assert all(step + core_wait >= 48 for _, _, step, _, _, core_wait, _ in own[1:])  # the first has the reset


def test_a_death_is_shown_with_its_text_and_the_run_goes_on():
    with SubprocessEnvManager(FakeEnvironment, n_envs=2, restarts=RestartPolicy(backoff_s=0)) as manager:
        server = start(manager)
        os.kill(manager.stats().workers[1].pid, signal.SIGKILL)
        until(lambda: manager.step() is not None and len(data_of(server)["events"]) == 2)

        events = data_of(server)["events"]
        assert [(event["kind"], event["worker"]) for event in events] == [("Died", 1), ("Restarted", 1)]
        assert all("SIGKILL" in event["text"] for event in events)
        assert data_of(server)["restarts"] == 1
        until(lambda: manager.step() is not None and data_of(server)["episodes_lost"] == 1)


class SlowReset(FakeEnvironment):
    def reset(self, **given: Any) -> Any:
        time.sleep(0.3)
        return super().reset(**given)


def test_resets_and_restarts_have_parts_of_their_own():
    with SubprocessEnvManager(lambda _: SlowReset(), n_envs=1, restarts=RestartPolicy(backoff_s=0)) as manager:
        server = start(manager)
        until(lambda: sum(span[4] for span in data_of(server)["spans"]) >= 300)
        assert sum(span[7] for span in data_of(server)["spans"]) == 0
        os.kill(manager.stats().workers[0].pid, signal.SIGKILL)
        until(lambda: manager.step() is not None and any(span[7] > 0 for span in data_of(server)["spans"]))
        until(lambda: sum(span[4] for span in data_of(server)["spans"]) >= 600)


def test_tasks_are_counted():
    with SimpleEnvManager("CartPole-v1", n_envs=2) as manager:
        server = start(manager)
        manager.reset(tasks=range(7))
        assert data_of(server)["tasks"] == {"done": 0, "lost": 0, "running": 2, "total": 7}
        while not manager.tasks.done:
            manager.step()

        assert data_of(server)["tasks"] == {"done": 7, "lost": 0, "running": 0, "total": 7}
        manager.reset(tasks=iter([1, 2]))
        assert data_of(server)["tasks"]["total"] is None


def test_counters_of_a_trainer_and_its_figures_take_the_place_of_the_managers(manager):
    own = Episodes()
    server = start(manager, episodes=own)
    own.count = 12
    server.figures["default"] = {"loss": np.float32(0.5), "entropy": float("nan")}

    data = data_of(server)
    assert data["episodes"] == 12
    assert data["figures"] == {"default": {"loss": 0.5, "entropy": None}}
    for _ in range(9):
        manager.step()
    assert manager.episodes.count == 0  # nothing was counted twice


def test_only_what_is_new_is_sent_again(manager):
    server = start(manager)
    for _ in range(10):
        manager.step()
    until(lambda: data_of(server)["spans"] != [])

    number = data_of(server)["number"]
    assert data_of(server, number + 1000)["spans"] == []
    for odd in ("x", "-1", "9" * 50):
        assert get(server, f"/data?after={odd}")[0] == 200


def test_the_history_covers_the_run_in_few_points(manager):
    watch = start(manager).watch
    for second in range(3000):
        watch.sample(time.perf_counter_ns() + second * 10**9)

    seconds = [point[0] for point in watch.data(0)["history"]]
    assert len(seconds) < 400
    assert seconds[0] < 3
    assert seconds[-1] > 2900
    assert seconds == sorted(seconds)


def test_the_server_ends_with_the_manager(manager):
    server = start(manager)
    idle = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)  # as a browser opens in advance
    with idle:
        get(server)
        manager.close()
        assert idle.recv(1) == b""
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        get(server)
    with pytest.raises(ManagerClosed):
        manager.serve()
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # the port is free


def test_a_server_can_be_closed_alone_and_several_times(manager):
    first, second = start(manager), manager.serve()
    first.close()
    first.close()

    assert get(second)[0] == 200
    assert manager.step()


def test_a_manager_that_is_collected_ends_its_server():
    manager = SimpleEnvManager(FakeEnvironment)
    server = manager.serve()
    del manager
    gc.collect()

    with pytest.raises((urllib.error.URLError, ConnectionError)):
        get(server)


class Failing(FakeEnvironment):
    def step(self, actions):
        raise ValueError("no step")


def test_a_manager_that_has_raised_an_error_is_collected_too():
    manager = SimpleEnvManager(Failing)
    server = start(manager)
    with pytest.raises(EnvRaised):
        manager.step()
    server.watch.sample(time.perf_counter_ns())
    gone = weakref.ref(manager)
    del manager
    gc.collect()

    assert gone() is None
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        get(server)


def test_figures_that_are_no_numbers_are_left_out(manager):
    server = start(manager)
    server.figures["default"] = {"loss": 0.5, "kind": "text", "none": None, "many": np.ones(2), "huge": 10**400}
    server.figures["other"] = 7

    assert data_of(server)["figures"] == {"default": {"loss": 0.5}}
    assert get(server, "/metrics")[0] == 200


@pytest.mark.parametrize("given", [{"host": None}, {"token": 5}, {"token": ""}, {"port": "8000"}])
def test_addresses_and_tokens_of_a_wrong_kind_are_usage_errors(manager, given):
    with pytest.raises(UsageError):
        manager.serve(**given)


def test_a_taken_port_is_a_usage_error(manager):
    server = start(manager)

    for port, host in ((server.port, "127.0.0.1"), (70_000, "127.0.0.1"), (0, "192.0.2.1"), (-1, "127.0.0.1")):
        with pytest.raises(UsageError, match="cannot listen"):
            manager.serve(port, host)
    assert get(server)[0] == 200


def test_an_error_in_a_handler_is_told_and_the_server_goes_on(manager, monkeypatch):
    server = start(manager)
    monkeypatch.setattr(server.watch, "data", lambda after: 1 / 0)
    assert refusal(server) == 500
    monkeypatch.undo()

    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as rude:
        rude.sendall(b"\x00\xff rubbish\r\n\r\n")
        rude.recv(1000)
    assert get(server)[0] == 200


def test_a_sample_that_fails_ends_nothing(manager, monkeypatch):
    server = start(manager)
    failed = threading.Event()

    def fail(*_: Any) -> None:
        failed.set()
        raise RuntimeError("no sample")

    monkeypatch.setattr(server.watch, "sample", fail)
    assert failed.wait(TIMEOUT_S)
    assert get(server)[0] == 200


def test_connections_beyond_a_number_are_closed(manager):
    server = start(manager)
    held = []
    try:
        for _ in range(60):
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S))
        assert held[-1].recv(1) == b""
    finally:
        for each in held:
            each.close()
    until(lambda: _answers(server))
    assert manager.step()


def test_connections_that_send_a_byte_now_and_then_do_not_keep_the_owner_out(manager):
    server = start(manager)
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) for _ in range(40)]
    try:
        for each in slow:
            with contextlib.suppress(OSError):  # closed by the server
                each.sendall(b"G")
        assert get(server)[0] == 200
    finally:
        for each in slow:
            each.close()


def test_a_request_has_a_limit_of_time_in_all(manager, monkeypatch):
    monkeypatch.setattr("envmanager.serving.server._LONGEST_S", 0.5)
    server = start(manager)
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as slow:
        until(lambda: _is_closed(slow))
    assert get(server)[0] == 200


def _is_closed(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"G")
        connection.settimeout(0.1)
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def _step_fails(manager: SubprocessEnvManager) -> bool:
    try:
        manager.step()
    except WorkerError:
        return True
    return False


def _answers(server: Server) -> bool:
    try:
        return bool(get(server)[0] == 200)
    except OSError:
        return False


def test_steps_and_requests_go_on_beside_each_other_until_the_manager_is_closed():
    errors: list[BaseException] = []

    def ask(path: str) -> None:
        while not over.is_set():
            try:
                get(server, path)
            except (OSError, HTTPException):
                if not closed.is_set():
                    raise

    def guarded(path: str) -> None:
        try:
            ask(path)
        except BaseException as error:
            errors.append(error)

    over, closed = threading.Event(), threading.Event()
    with SubprocessEnvManager(FakeEnvironment, n_envs=3) as manager:
        server = start(manager)
        threads = [threading.Thread(target=guarded, args=[path]) for path in ("/", "/data", "/data")]
        for thread in threads:
            thread.start()
        for number in range(600):
            manager.step()
            if number % 200 == 0:
                manager.reset()
        closed.set()
        manager.close()
        over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
    assert errors == []


def test_a_worker_that_is_given_up_is_shown_as_failed():
    with SubprocessEnvManager(faulty(Raise(ValueError("broken")), after=3, only_env=1), n_envs=2) as manager:
        server = start(manager)
        until(lambda: _step_fails(manager))
        assert data_of(server)["workers"][1]["state"] == "failed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_neither_keeps_the_port_nor_ends_the_server(manager):
    server = start(manager)
    told, tell = os.pipe()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        server.close()
        os.write(tell, b".")
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    try:
        os.read(told, 1)
        assert get(server)[0] == 200
        manager.close()
        with socket.create_server(("127.0.0.1", server.port)):
            pass
    finally:
        for fd in (told, tell, hold, release):
            os.close(fd)
        os.waitpid(child, 0)


def test_nothing_is_imported_for_it_until_it_is_asked_for():
    code = (
        "import sys; from envmanager import SimpleEnvManager; from envmanager.testing import FakeEnvironment\n"
        "with SimpleEnvManager(FakeEnvironment) as manager: print('http.server' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.split() == ["False"]


def test_the_page_is_part_of_the_package():
    import envmanager.serving

    folder = Path(envmanager.serving.__file__).parent
    assert {path.name for path in folder.glob("page.*")} == {"page.html", "page.css", "page.js"}
