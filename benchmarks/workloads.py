"""The table of workloads: environment, numbers of environments, figure that counts, and default contenders.

The environments themselves are in :mod:`benchmarks.envs`.
"""

from __future__ import annotations

from dataclasses import dataclass

BARE = "bare"
PLACED = (
    *("ours-simple", "ours-simple-view", "ours-processes", "ours-processes-view"),
    *("ours-workers", "ours-workers-view"),
)
CHOSEN = ("ours-share", "ours-auto", "ours-auto-local")
PARTIAL = ("ours-any", "ours-half")
SYNCHRONOUS = (
    *("gymnasium-sync", "gymnasium-async", "sb3-dummy", "sb3-subproc"),
    *("tianshou-dummy", "tianshou-subproc", "tianshou-shmem", "pufferlib-serial"),
    *("pufferlib-processes", "pufferlib-workers", "torchrl-serial", "torchrl-parallel"),
)
RAY = ("ray-ours", "ray-ours-2", "ray-hand", "ray-hand-2", "rllib-actors", "rllib-actors-2")
RLLIB = ("rllib-sync", "rllib-async")
ASYNCHRONOUS = ("tianshou-shmem-any", "tianshou-shmem-half", "pufferlib-any", "pufferlib-half")
SEPARATE = ("gymnasium-async", "sb3-subproc", "tianshou-subproc", "tianshou-shmem", "pufferlib-processes")
"""Synchronous peers with one environment per process."""
GODOT_RL = ("godot_rl-default", "godot_rl-fixed", "godot_rl-fastest")
ENGINES = ("ours-engine", "ours-engines-2", "ours-engines-4")
ENVPOOL = ("envpool-sync", "envpool-async")


@dataclass(frozen=True)
class Workload:
    """One workload. ``sizes``: the default numbers of environments."""

    name: str
    about: str
    env: str
    sizes: tuple[int, ...]
    contenders: tuple[str, ...]
    shows: str = "rate"
    """Figure: ``"rate"`` (steps/s and ratios), ``"cores"`` (CPU use of the trainer), ``"start_s"`` (time to start)."""
    requires: tuple[str, ...] = ()
    """Required libraries besides Gymnasium."""
    bad_s: float = 0.0
    """Seconds of a step of environment 0, if its steps take longer than those of the others; else 0."""
    sleeps: bool = False
    """Whether steps only sleep, so that ``n`` environments can at best be ``n`` times as fast."""

    def limit(self, bare_rate: float, n_envs: int) -> float | None:
        """Return the maximum steps/s of ``n_envs`` environments, computed from the steps/s of one that is not bad."""
        if not self.sleeps:
            return None
        return (n_envs - 1) * bare_rate + 1 / self.bad_s if self.bad_s else n_envs * bare_rate


ALL = {
    workload.name: workload
    for workload in (
        Workload(
            "noop",
            "a trivial step: float32[4], Discrete(2), episodes of 200 steps",
            "noop",
            (8, 64),
            (*PLACED, *CHOSEN, "ours-step", *SYNCHRONOUS, *RLLIB, *RAY),
        ),
        Workload("cartpole", "CartPole-v1", "cartpole", (8, 32), (*PLACED, *CHOSEN, *SYNCHRONOUS, *RLLIB, *ENVPOOL)),
        Workload(
            "pong",
            "ALE/Pong-v5: no-op reset, frame skip 4 with max, gray 84x84, stack of 4",
            "pong",
            (8,),
            (
                *(*PLACED, *CHOSEN, *PARTIAL, "ours-turns"),
                *(*SYNCHRONOUS, *RLLIB, *RAY, "tianshou-shmem-half", "pufferlib-half", *ENVPOOL),
            ),
            requires=("ale_py", "cv2"),
        ),
        Workload(
            "bigobs",
            "an observation of uint8[524288] and a trivial step",
            "bigobs",
            (8, 32),
            (*PLACED, *CHOSEN, "gymnasium-sync-view", *SYNCHRONOUS),
        ),
        Workload(
            "straggler",
            "a step sleeps 1 ms, one of ten sleeps 10 ms",
            "straggler",
            (8, 32),
            (*PARTIAL, "ours-processes", "ours-auto", *SEPARATE, *ASYNCHRONOUS),
            sleeps=True,
        ),
        Workload(
            "badworker",
            "a step of environment 0 sleeps 50 ms, of the others 1 ms",
            "badworker",
            (8,),
            (*PARTIAL, "ours-processes", "ours-auto", *SEPARATE, *ASYNCHRONOUS),
            bad_s=0.05,
            sleeps=True,
        ),
        Workload(
            "waiting",
            "each step sleeps 50 ms: CPU use of the trainer while it waits",
            "waiting",
            (8,),
            ("ours-any", "ours-processes", *SEPARATE, "tianshou-shmem-any", "pufferlib-any"),
            shows="cores",
            sleeps=True,
        ),
        Workload(
            "start",
            "from an imported library to the first observations",
            "noop",
            (8,),
            ("ours-forkserver", "ours-spawn", *SEPARATE, "torchrl-parallel"),
            shows="start_s",
        ),
        Workload(
            "scaling",
            "Pong in more and more environments, for the figure of time per step",
            "pong",
            (1, 2, 4, 8, 16, 32),
            ("ours-simple", "ours-processes", "ours-workers", "ours-any"),
            requires=("ale_py", "cv2"),
        ),
        Workload(
            "sleepers",
            "each step sleeps 50 ms, in up to 256 workers, for the figure of the cost of a worker step",
            "waiting",
            (8, 16, 32, 64, 128, 256),
            ("ours-any",),
            shows="cores",
            sleeps=True,
        ),
        Workload(
            "godot",
            "rolling_ball in Godot 4, arenas per engine, 1 tick per action; bare: one engine, nothing decoded",
            "ball",
            (1, 8, 64),
            ("ours-codec", "ours-engine-frames", *ENGINES, *GODOT_RL),
        ),
        Workload("godot-4", "the same, 4 ticks per action", "ball4", (1, 8, 64), ENGINES),
        Workload(
            "godot-8",
            "the same, 8 ticks per action, godot_rl_agents' default",
            "ball8",
            (1, 8, 64),
            (*ENGINES, "godot_rl-default", "godot_rl-fastest"),
        ),
        Workload(
            "godot-uneven",
            "two engines, in one of which an action takes 8 ticks",
            "ball",
            (64,),
            ("ours-uneven-any", "ours-uneven-all"),
        ),
        Workload(
            "godot-start",
            "from an imported library to the first observations of all engines",
            "ball",
            (4,),
            ("ours-engine", "ours-engines-16"),
            shows="start_s",
        ),
    )
}
"""Workloads by name, in the order of their runs."""
