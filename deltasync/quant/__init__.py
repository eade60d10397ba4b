"""Served forms: what an engine serves of a matrix, computed from the trainer's weights.

`form` says what a form is, and each form is a module. `served` makes a source of served tensors out
of a trainer's; begin to read there.
"""
