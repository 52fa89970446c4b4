"""Environments on a Ray cluster. Needs Ray: ``pip install 'envmanager[ray]'``."""
