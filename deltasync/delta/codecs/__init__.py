"""How the changes of a row become few bytes, and come back from them bit for bit.

Begin with base.py. To add a codec, change section 4 of docs/wire-format.md and `wire.codecs`, write
a `RowCodec`, and enter it in registry.py and, by the name that users give, in coding.py and
cli/diff.py. It is done when tests/delta/test_row_codecs.py and tests/delta/test_coded_payload.py
pass with the codec in their CODECS.
"""
