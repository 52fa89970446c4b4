"""Trainers of this library (PPO, DQN, SAC) and what they share. All but states and stores of steps need PyTorch."""
