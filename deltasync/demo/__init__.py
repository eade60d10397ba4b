"""The program behind `deltasync demo`: GRPO, with rollouts in a second process.

Begin with trainer.py and rollout.py.
"""
