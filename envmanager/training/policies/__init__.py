"""Policies of saved training runs: loaded, played, exported, and watched while their training goes on."""
