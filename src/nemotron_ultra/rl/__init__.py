"""Reinforcement learning and distillation: environments, rollouts, advantages, replay, teachers, publishing."""
