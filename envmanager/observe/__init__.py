"""How a training can be watched: events, counters, times, traces. Nothing here changes what a manager does."""
