"""Trainers, and the controller that plugs them into a manager. Needs PyTorch: ``pip install 'envmanager[torch]'``."""

from __future__ import annotations
