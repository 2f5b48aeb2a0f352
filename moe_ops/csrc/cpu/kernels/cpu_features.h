// What this processor and its operating system let a process execute.
#pragma once

namespace moe_ops {

bool cpu_has_avx2();      // AVX2, FMA, F16C
bool cpu_has_avx512();    // AVX-512 F, BW, DQ, VL, CD, VNNI, VBMI
bool cpu_has_amx_bf16();  // and cpu_has_avx512(); asks the kernel for the tile registers
bool cpu_has_neon_dotprod();

}  // namespace moe_ops
