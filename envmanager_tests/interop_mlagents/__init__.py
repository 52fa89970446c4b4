"""The bridge to ML-Agents; run by `make test-mlagents`, which has a virtual environment with ML-Agents in it."""

SUITE = "mlagents"
