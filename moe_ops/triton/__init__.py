"""CUDA kernels in Triton, one file per op, and the Python side of the native ones that do a part of an op.

A file named like an op holds its kernel. Files with an underscore are shared. Nothing here is imported before the
first call on a CUDA tensor, so that the package imports without Triton. Where the native library is missing, or
refuses a shape, Triton does the part as well; tests/triton runs these kernels in Triton's interpreter.

Configurations are few and fixed (no autotuning), sizes and strides are never specialised: a process compiles each
kernel once per dtype, alignment and top-k, whatever the batch.
"""
