"""The back end that works parameter by parameter, with torch and numpy, on any device.

Begin with backend.py; packing.py makes payloads at the sender, staging.py writes at the receiver.
small.py reads many small parameters at once.
"""
