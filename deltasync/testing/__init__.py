"""Contracts that ship as tests: subclass one to test your own transport or target.

Begin with transport.py or target.py.
"""
