"""What transports share besides payloads: sockets, greetings, signatures, limits for strangers.

Begin with connection.py, then newcomers.py and tcp.py; the ends are in ../sockets.py.
"""
