"""The single driver: pools and worker groups on Ray, the trainer, evaluation, tracking, checkpoints, the command line."""
