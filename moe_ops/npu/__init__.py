"""PrivateUse1 kernels for Ascend NPUs: compositions of torch_npu operators, one file per op (docs/npu.md).

Nothing here imports torch_npu: the kernels run on tensors that only exist where the application has imported it. They
never read a value on the host, so every one of them can be captured into an NPUGraph.
"""

import copyreg
from typing import Any

import torch


def _operator(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _reduce_operator(op: torch._ops.OpOverload) -> tuple[Any, ...]:
    return _operator, (str(op),)


# npugraph_ex pickles what it compiles, and the graph of an op with an ordered effect (cpu_moe_submit, cpu_moe_sync) has
# that op as an argument. torch cannot pickle an op; by its name it can.
copyreg.pickle(torch._ops.OpOverload, _reduce_operator)
