"""The back end of one GPU: each step goes over all parameters of a model at once.

The Triton kernels see a model as *chunks* (see `delta.digests`): arrays of addresses, positions and
lengths, a few thousand of them, that numpy computes on the host. Neither the number of launches nor
the Python run for a sync grows with the number of parameters. Begin with `backend`.
"""
