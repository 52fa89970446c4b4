"""Choice of the number and place of workers, by a probe of the environment."""
