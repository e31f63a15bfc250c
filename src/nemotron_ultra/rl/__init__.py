"""Reinforcement learning and distillation: environments, rollouts, advantages, replay, teachers, weights."""
