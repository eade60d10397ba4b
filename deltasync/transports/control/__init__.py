"""What transports share besides payloads: sockets, greetings, signatures, limits for strangers.

Begin with connection.py, then endpoints.py, newcomers.py and tcp.py.
"""
