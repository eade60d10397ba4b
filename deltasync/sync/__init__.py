"""The public ends, WeightSender and WeightReceiver, and the rules of a sync.

Begin with sender.py and receiver.py, then protocol/round.py. module.py serves both ends.
"""
