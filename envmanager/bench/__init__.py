"""``envmanager bench``: the managers of this library measured beside their peers, on the machine of whoever asks.

::

    schedule ── Job ──▶ Launcher ── a line ──▶ zygote (one per library and interpreter: has imported the library)
       ▲                   ▲                      └── fork ──▶ a turn: one contender on one workload, measured
       │                   └──── Measured ◀──── lines ────────┘
    summary, targets ──▶ table, JSON, plots

The rule: absolute figures are not compared. Every ratio is taken within one round, in which the bare environment runs
first and last and the contenders between in shuffled order, each alone on the machine in a process of its own.

What runs in a zygote (``zygote``, ``measure``, ``contender``, ``peers``, ``envs``, and the tables) needs NumPy,
Gymnasium and the library under measurement, but not attrs: a peer's interpreter need not have what this library needs.
"""
