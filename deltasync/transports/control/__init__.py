"""What transports share besides payloads: sockets, greetings, signatures, limits for strangers.

Begin with connection.py, then endpoints.py and tcp.py.
"""
