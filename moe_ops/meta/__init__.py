"""Fake kernels, one file per op: each checks the arguments and allocates the outputs, without computing.

The same functions serve Python kernels (Triton, NPU), which call them to check and allocate, so that shapes, dtypes,
strides and error texts exist once.
"""
