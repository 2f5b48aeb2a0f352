// libacl_op_compiler.so: what libtorch_npu.so binds beside the runtime, that is profiling, dumps and the legacy aclop
// path. The legacy path fails loudly: an operator that is missing from libopapi.so must not pass with zeros.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define IGNORED(name) \
  EXPORT long name(void) { return 0; }
#define REFUSED(name)                                                                     \
  EXPORT int name(void) {                                                                 \
    fprintf(stderr, "[cann_sim] legacy call %s: the operator is not simulated\n", #name); \
    return 207000;                                                                        \
  }

IGNORED(MsprofGetHashId)
IGNORED(MsprofRegisterCallback)
IGNORED(MsprofReportAdditionalInfo)
IGNORED(MsprofReportApi)
IGNORED(MsprofReportCompactInfo)
IGNORED(MsprofSysCycleTime)
IGNORED(aclCreateDataBuffer)
IGNORED(aclCreateTensorDesc)
IGNORED(aclDestroyDataBuffer)
IGNORED(aclDestroyTensorDesc)
IGNORED(aclGetTensorDescDimV2)
IGNORED(aclGetTensorDescFormat)
IGNORED(aclGetTensorDescNumDims)
IGNORED(aclGetTensorDescType)
IGNORED(aclSetTensorDescName)
IGNORED(aclSetTensorFormat)
IGNORED(aclSetTensorPlaceMent)
IGNORED(aclSetTensorShape)
IGNORED(aclmdlFinalizeDump)
IGNORED(aclmdlInitDump)
IGNORED(aclmdlSetDump)
IGNORED(aclopCreateAttr)
IGNORED(aclopDestroyAttr)
IGNORED(aclopSetAttrBool)
IGNORED(aclopSetAttrDataType)
IGNORED(aclopSetAttrFloat)
IGNORED(aclopSetAttrInt)
IGNORED(aclopSetAttrListBool)
IGNORED(aclopSetAttrListFloat)
IGNORED(aclopSetAttrListInt)
IGNORED(aclopSetAttrListListInt)
IGNORED(aclopSetAttrString)
IGNORED(aclSetCompileopt)
REFUSED(aclopCompileAndExecute)
REFUSED(aclopCompileAndExecuteV2)
REFUSED(rtDevBinaryRegister)
REFUSED(rtFunctionRegister)
REFUSED(rtGetC2cCtrlAddr)
REFUSED(rtKernelLaunch)

// "disable" is what hardware from 910B1 on answers to the question for jit_compile; it selects the aclnn operators.
EXPORT size_t aclGetCompileoptSize(int option) {
  (void)option;
  return 64;
}
EXPORT int aclGetCompileopt(int option, char* value, size_t bytes) {
  (void)option;
  memset(value, 0, bytes);
  strcpy(value, "disable");
  return 0;
}

enum { kOptions = 64 };
static int64_t system_options[kOptions];
EXPORT int aclrtGetSysParamOpt(int option, int64_t* value) {
  *value = option >= 0 && option < kOptions ? system_options[option] : 0;
  return 0;
}
EXPORT int aclrtSetSysParamOpt(int option, int64_t value) {
  if (option >= 0 && option < kOptions) system_options[option] = value;
  return 0;
}
EXPORT int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
