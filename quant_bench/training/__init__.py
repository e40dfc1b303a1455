"""Matched training: tiers, what they read, and checkpoints of an arm and seed that differ in nothing else."""
