"""Frames and buffers between one sender and its receivers; knows no names, dtypes or versions."""
