"""The single driver: pools and worker groups on Ray, trainer, evaluation, tracking, checkpoints, the command line."""
