"""Data that trainer and environments exchange: steps, actions, and the specs of both."""
