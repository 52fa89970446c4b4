"""Data that the trainer and the environments exchange: steps, actions, and the specs of both."""
