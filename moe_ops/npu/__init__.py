"""PrivateUse1 kernels for Ascend NPUs: compositions of torch_npu operators, one file per op (docs/npu.md).

Nothing here imports torch_npu: the kernels run on tensors that only exist where the application has imported it. They
never read a value on the host, so every one of them can be captured into an NPUGraph.
"""
