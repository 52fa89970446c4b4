"""Episodes as their beginnings and their actions: kept when a worker fails, and told as tasks."""
