"""How frames move between a sender and its receivers.

Begin with base.py, the contract; inprocess.py is the simplest transport. To add one, pass
deltasync.testing.transport.
"""
