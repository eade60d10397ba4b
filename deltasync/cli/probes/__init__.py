"""What `deltasync doctor` and `deltasync bench` try on a machine, in separate processes.

Begin with checks.py, then trial.py.
"""
