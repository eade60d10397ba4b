"""Models of real size on GPUs: deltasync against what else one would do.

Everything here also runs on a CPU at toy size, to be tested; its times then mean nothing.
"""
