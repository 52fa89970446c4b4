"""What travels between trainer and environments: steps, actions, their specs, and the rows they are held in."""
