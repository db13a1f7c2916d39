"""Reinforcement learning for language and vision-language agents."""
