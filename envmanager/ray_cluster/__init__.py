"""Environments on a Ray cluster. Needs Ray: ``pip install 'envmanager[ray]'``."""

from __future__ import annotations
