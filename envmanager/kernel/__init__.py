"""The code that all kinds of managers share: worker states, steps, resets, calls, replacement of failed workers."""
