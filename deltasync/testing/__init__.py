"""The contract of transports, which ships as tests: subclass it to test your own.

Begin with transport.py.
"""
