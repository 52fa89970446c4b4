"""Recordings of runs: what workers sent and when the trainer got it, to be replayed or read as data.

::

    manager ── Recorder ──▶ run.emrec ──▶ ReplayEnvManager      the same run again, without environments
                                     ├──▶ order=…               the same order again, with environments
                                     └──▶ episodes(), table()   data
"""
