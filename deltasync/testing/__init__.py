"""Contracts that ship as tests: subclass one to test your own transport, codec or target.

Begin with transport.py, codec.py or target.py.
"""
