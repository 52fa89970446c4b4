"""Fakes for tests: a worker without a process, an environment with scripted steps, and one that echoes its actions.

The fakes have the methods that a manager needs, so that tests can use them in place of the real classes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from envmanager.data.specs import ArraySpec, BehaviorSpec, BehaviorSpecs
from envmanager.data.steps import STEPPING, AgentSteps, CommandName, EnvironmentResponse, StartReport, Steps
from envmanager.data.trees import Tree
from envmanager.environment import EnvContext, Environment
from envmanager.hosts.hosting import COMMANDS, failed, make_group, take_not_begun


class FakeWorker:
    """A worker without a process. ``send`` runs its environment in the caller's thread.

    To replace real workers::

        responses = queue.Queue()
        mocker.patch.object(SubprocessEnvManager, "create_worker",
                            side_effect=lambda worker_id, _, factory: FakeWorker(worker_id, responses, factory))
        manager = SubprocessEnvManager(FakeEnvironment, n_envs=3)
        manager.step_queue = responses

    ``sent`` lists all commands as ``(name, payload)``. While ``hold`` is true, responses to steps are held back until
    ``release()``.
    """

    process = None
    connection = None

    def __init__(self, worker_id: int, step_queue: Any, env_factory: Any = None) -> None:
        self.worker_id = worker_id
        self.hold = False
        self.sent: list[tuple[str, Any]] = []
        self._step_queue = step_queue
        self._group = make_group(FakeEnvironment if env_factory is None else env_factory, worker_id)
        self.report: StartReport = COMMANDS[CommandName.START](self._group, None)
        self._responses: list[EnvironmentResponse] = []
        self._held_back: list[EnvironmentResponse] = []

    def send(self, name: str, payload: Any = None) -> None:
        """Execute a command. Queue the response to a step unless ``hold`` is set. Keep other responses for ``recv``."""
        command = CommandName(name)
        self.sent.append((str(command), payload))
        if command is CommandName.BEGIN and self._group.on_demand is not None:
            self._group.on_demand.add(payload)
            return
        response = self._respond(command, payload)
        if command not in STEPPING:
            self._responses.append(response)
        elif self.hold:
            self._held_back.append(response)
        else:
            self._step_queue.put(response)

    def recv(self) -> EnvironmentResponse:
        """Remove and return the oldest response to a command other than a step."""
        return self._responses.pop(0)

    def release(self) -> None:
        """Put the responses that were held back into the step queue, oldest first."""
        while self._held_back:
            self._step_queue.put(self._held_back.pop(0))

    def fail(self, error: Exception) -> None:
        """Put ``error`` into the step queue as a failure of this worker."""
        self._step_queue.put(EnvironmentResponse(CommandName.FAILED, self.worker_id, error))

    def _respond(self, command: CommandName, payload: Any) -> EnvironmentResponse:
        name = CommandName.STEP if command is CommandName.STEP_ROWS else command
        try:
            result = COMMANDS[command](self._group, payload)
            not_begun = take_not_begun(self._group, self.worker_id)
            return EnvironmentResponse(name, self.worker_id, result, not_begun=not_begun)
        except Exception as error:
            env_ids, group = self._group.env_ids, self._group
            return failed(error, command, worker_id=self.worker_id, env_ids=env_ids, group=group)


@attrs.frozen
class Step:
    """A script entry of FakeEnvironment. The step returns ``reward``, ``terminated`` and ``truncated``."""

    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


class Fault:
    """Base class of faults. Subclasses override ``strike`` to fail before a call, or ``spoil`` to change the result."""

    def strike(self) -> None:
        """Cause the failure before the environment executes the call. By default, do nothing."""

    def spoil(self, steps: AgentSteps, earlier: AgentSteps | None) -> Any:
        """Return a replacement for ``steps``, the call's result. ``earlier`` is the previous replacement, or None."""
        return steps


@attrs.frozen
class Sleep(Fault):
    """A fault that sleeps for ``seconds``. In a script, the same step then continues with the next entry."""

    seconds: float

    def strike(self) -> None:
        time.sleep(self.seconds)


@attrs.frozen
class Raise(Fault):
    """A fault that raises ``error``."""

    error: BaseException

    def strike(self) -> None:
        raise self.error


@attrs.frozen
class Die(Fault):
    """A fault that ends the process, with ``signal_number`` if set, else by calling ``os._exit(exit_code)``."""

    exit_code: int = 0
    signal_number: int | None = None

    def strike(self) -> None:
        if self.signal_number is None:
            os._exit(self.exit_code)
        if self.signal_number != getattr(signal, "SIGKILL", None):
            signal.signal(self.signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), self.signal_number)


class FakeEnvironment(Environment):
    """A single-agent environment whose steps repeat ``script``. By default rewards are 0 and episodes never end.

    An observation is ``float32[3]``: number of the episode, number of the step in the episode, last action. Actions are
    ``int64[]``.
    """

    SPEC = BehaviorSpec(ArraySpec((3,), np.float32), ArraySpec((), np.int64))

    def __init__(self, script: Sequence[Step | Fault] = (Step(),)) -> None:
        self._script = list(script)
        self._position = 0
        self._episode = -1
        self._n_steps = 0
        self.seeds: list[int | None] = []
        self.closed = False

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {"default": self.SPEC}

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        self.seeds.append(seeds[0])
        self._begin_episode()
        return self._steps(self._obs(0), Step())

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        action = int(actions["default"][0])
        entry = self._next_step()
        self._n_steps += 1
        last = self._obs(action)
        if not (entry.terminated or entry.truncated):
            return self._steps(last, entry)
        self._begin_episode()
        return self._steps(self._obs(0), entry, final_obs=last)

    def close(self) -> None:
        self.closed = True

    def _begin_episode(self) -> None:
        self._episode += 1
        self._n_steps = 0

    def _next_step(self) -> Step:
        while True:
            entry = self._script[self._position % len(self._script)]
            self._position += 1
            if isinstance(entry, Step):
                return entry
            entry.strike()

    def _obs(self, action: int) -> np.ndarray:
        return np.array([[self._episode, self._n_steps, action]], np.float32)

    def _steps(self, obs: np.ndarray, entry: Step, final_obs: np.ndarray | None = None) -> Steps:
        return {
            "default": AgentSteps(
                np.zeros(1, np.int64),
                obs,
                np.array([entry.reward], np.float32),
                np.array([entry.terminated]),
                np.array([entry.truncated]),
                final_obs,
            )
        }


NAMED: dict[str, Fault] = {"exits": Die(0), "raises": Raise(ValueError("gear 7 broke"))}
"""Faults by name, for reset options that are JSON."""


class EchoEnvironment(Environment):
    """An environment whose steps reveal a mix-up of environments, agents, steps or actions.

    An observation is ``int64[5]``: env_id, agent, steps since the reset, last action, episode. The reward is the action
    modulo 1000. Episodes of different environments differ in length. The reset option ``task`` is the number of the
    episode, and ``fault`` is a Fault, or the name of one, that strikes in its second step.
    """

    SPEC = BehaviorSpec(ArraySpec((5,), np.int64), ArraySpec((), np.int64))
    can_rest = True

    def __init__(
        self, context: EnvContext, *, n_agents: int = 1, episode_length: int = 7, sleep_s: float = 0.0
    ) -> None:
        self._env_id = context.env_id
        self._n_agents = n_agents
        self._episode_length = episode_length + context.env_id  # so that episodes end at different times
        self._sleep_s = sleep_s
        self._episode = -1
        self._n_steps = 0
        self._in_episode = 0
        self.label = f"env {context.env_id}"

    @property
    def behavior_specs(self) -> BehaviorSpecs:
        return {"default": self.SPEC}

    @property
    def max_agents(self) -> Mapping[str, int]:
        return {"default": self._n_agents}

    def reset(self, *, seeds: Sequence[int | None], options: Mapping[str, Any] | None) -> Steps:
        options = options or {}
        self._episode = options.get("task", self._episode + 1)
        self._fault: Fault | None = NAMED.get(str(options.get("fault")), options.get("fault"))
        self._in_episode = self._n_steps = 0
        no_action = np.zeros(self._n_agents, np.int64)
        return self._steps(self._obs(no_action), no_action, False, None)

    def step(self, actions: Mapping[str, Tree]) -> Steps:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        action = actions["default"]
        self._n_steps += 1
        self._in_episode += 1
        if self._fault is not None and self._in_episode == 2:
            self._fault.strike()
        obs = self._obs(action)
        if self._in_episode < self._episode_length:
            return self._steps(obs, action, False, None)
        if self.rests:
            steps = self._steps(obs, action, True, obs)
            return {"default": attrs.evolve(steps["default"], acting=np.zeros(self._n_agents, np.bool_))}
        self._episode += 1
        self._in_episode = 0
        return self._steps(self._obs(action), action, True, obs)

    def close(self) -> None:
        pass

    def who(self, question: str) -> str:
        """Return ``question`` and the env_id, for tests of ``call``."""
        return f"{question}: env {self._env_id}"

    def render(self) -> str:
        """Return a string instead of an image, for tests of ``render``."""
        return f"picture of env {self._env_id}"

    def _obs(self, action: np.ndarray) -> np.ndarray:
        obs = np.empty((self._n_agents, 5), np.int64)
        obs[:, 0], obs[:, 1], obs[:, 2] = self._env_id, np.arange(self._n_agents), self._n_steps
        obs[:, 3], obs[:, 4] = action, self._episode
        return obs

    def _steps(self, obs: np.ndarray, action: np.ndarray, ended: bool, final_obs: np.ndarray | None) -> Steps:
        n = self._n_agents
        return {
            "default": AgentSteps(
                np.arange(n, dtype=np.int64),
                obs,
                (action % 1000).astype(np.float32),
                np.full(n, ended),
                np.zeros(n, np.bool_),
                final_obs,
            )
        }
