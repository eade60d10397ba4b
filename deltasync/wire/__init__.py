"""The bytes: frames, messages, patch tables, digests. Nothing here imports torch.

Begin with frame.py and messages.py; docs/wire-format.md is normative.
"""
