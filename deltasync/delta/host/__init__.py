"""The back end of hosts: torch and numpy work on one parameter after another, on any devices.

Begin with `backend`. A sender's changes become payloads in `plans`; a receiver writes by `staging`.
"""
