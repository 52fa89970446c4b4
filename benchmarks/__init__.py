"""``python -m benchmarks``: measures the managers of this library and other libraries on your machine.

::

    schedule ── Job ──▶ Launcher ── a line ──▶ zygote (one per library and interpreter: has imported the library)
       ▲                   ▲                      └── fork ──▶ a turn: one contender on one workload, measured
       │                   └──── Measured ◀──── lines ────────┘
    summary, targets ──▶ table, JSON, plots

The rule: absolute figures are not compared. Every ratio is taken within one round. In a round the bare environment runs
first and last and the contenders between in shuffled order, each alone on the machine and in its own process.

The modules that a zygote imports (``zygote``, ``measure``, ``contender``, ``peers``, ``envs``, and the tables) need
NumPy, Gymnasium and the measured library, but not attrs, because a peer's interpreter may lack it.
"""
