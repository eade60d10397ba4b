"""Functions that touch every element: `host` has them for host memory, `reference` for any device.

The kernels of `tiles` go over a whole model in one launch; `delta.device` calls them.
"""
