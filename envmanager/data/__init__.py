"""Data exchanged between trainer and environments: steps, actions, and the specs of both."""
