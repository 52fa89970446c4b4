"""Code that all kinds of managers share: states of workers, waiting, delivery, replacement, resets, calls."""
