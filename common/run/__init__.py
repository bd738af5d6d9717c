"""The machinery around a Trainer: command line, logs, checkpoints, evaluation, devices, seeds."""
