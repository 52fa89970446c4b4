"""Choice of how many workers host the environments, and where, by a probe of the environment."""
