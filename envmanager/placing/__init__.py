"""How many workers, and where: what a probe measures, and what is chosen by it."""
