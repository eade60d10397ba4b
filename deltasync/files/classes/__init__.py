"""The codec `class`, which only stores and patch files use: the fewest bytes, in host memory."""
