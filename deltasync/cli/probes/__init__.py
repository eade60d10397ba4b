"""What `deltasync doctor` tries on a machine, in separate processes.

Begin with checks.py, then trial.py.
"""
