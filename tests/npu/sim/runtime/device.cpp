// What torch_npu asks about the device and the CANN version, and calls that the simulation accepts or refuses.
#include <unistd.h>

#include <atomic>

#include "common.h"

using namespace cann_sim;

ACL_API aclError aclInit(const char*) {
  static std::atomic<bool> done{false};
  return done.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS;
}
ACL_API aclError aclFinalize() { return ACL_SUCCESS; }

ACL_API const char* aclrtGetSocName() { return setting("CANN_SIM_SOC", "Ascend910B3"); }

ACL_API aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, setting("CANN_SIM_CANN", "9.1.0"));
  return ACL_SUCCESS;
}
ACL_API aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  *version = {};
  std::strcpy(version->version, setting("CANN_SIM_CANN", "9.1.0"));
  return ACL_SUCCESS;
}

namespace {

constexpr int kCubeCores = 24;
constexpr int kVectorCores = 48;
uint32_t cores(aclrtDevResLimitType type) { return type == ACL_RT_DEV_RES_CUBE_CORE ? kCubeCores : kVectorCores; }

}  // namespace

ACL_API aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  const bool cube = attribute == ACL_DEV_ATTR_CUBE_CORE_NUM || attribute == ACL_DEV_ATTR_AICORE_CORE_NUM;
  *value = cube ? kCubeCores : kVectorCores;
  return ACL_SUCCESS;
}
ACL_API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = kCubeCores;
  return ACL_SUCCESS;
}
ACL_API aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
  *value = 1;
  return ACL_SUCCESS;
}
ACL_API aclError aclGetCannAttributeList(const aclCannAttr** list, size_t* count) {
  static const aclCannAttr attributes[] = {ACL_CANN_ATTR_INF_NAN};
  *list = attributes;
  *count = 1;
  return ACL_SUCCESS;
}

// Core limits per device, stream and thread (npugraph_ex asks for them).
ACL_API aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
  *value = cores(type);
  return ACL_SUCCESS;
}
ACL_API aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
  *value = cores(type);
  return ACL_SUCCESS;
}
ACL_API aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t* value) {
  *value = cores(type);
  return ACL_SUCCESS;
}
ACL_API aclError aclrtSetDeviceResLimit(int32_t, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
ACL_API aclError aclrtResetDeviceResLimit(int32_t) { return ACL_SUCCESS; }
ACL_API aclError aclrtSetStreamResLimit(aclrtStream, aclrtDevResLimitType, uint32_t) { return ACL_SUCCESS; }
ACL_API aclError aclrtResetStreamResLimit(aclrtStream) { return ACL_SUCCESS; }
ACL_API aclError aclrtUseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }
ACL_API aclError aclrtUnuseStreamResInCurrentThread(aclrtStream) { return ACL_SUCCESS; }

// Settings without an effect here.
ACL_API aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
ACL_API aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
ACL_API aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t* actual) {
  *actual = timeout;
  return ACL_SUCCESS;
}
ACL_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
ACL_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
ACL_API aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
ACL_API aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}
ACL_API aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
ACL_API aclError aclrtDeviceGetBareTgid(int32_t* id) {
  *id = getpid();
  return ACL_SUCCESS;
}
ACL_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 0;
  return ACL_SUCCESS;
}

// Present because libtorch_npu.so binds them; using one is an error that says so.
#define NOT_SIMULATED(name, parameters) \
  ACL_API aclError name parameters { return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s is not simulated", #name); }
NOT_SIMULATED(aclrtDeviceEnablePeerAccess, (int32_t, uint32_t))
NOT_SIMULATED(aclrtReserveMemAddress, (void**, size_t, size_t, void*, uint64_t))
NOT_SIMULATED(aclrtReleaseMemAddress, (void*))
NOT_SIMULATED(aclrtMallocPhysical, (aclrtDrvMemHandle*, size_t, const aclrtPhysicalMemProp*, uint64_t))
NOT_SIMULATED(aclrtFreePhysical, (aclrtDrvMemHandle))
NOT_SIMULATED(aclrtMapMem, (void*, size_t, size_t, aclrtDrvMemHandle, uint64_t))
NOT_SIMULATED(aclrtUnmapMem, (void*))
NOT_SIMULATED(aclrtMemExportToShareableHandle, (aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*))
NOT_SIMULATED(aclrtMemImportFromShareableHandle, (uint64_t, int32_t, aclrtDrvMemHandle*))
NOT_SIMULATED(aclrtMemSetPidToShareableHandle, (uint64_t, int32_t*, size_t))
NOT_SIMULATED(aclrtBinaryLoadFromData, (const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*))
NOT_SIMULATED(aclrtBinaryGetFunction, (const aclrtBinHandle, const char*, aclrtFuncHandle*))
NOT_SIMULATED(aclrtGetFunctionAddr, (aclrtFuncHandle, void**, void**))
