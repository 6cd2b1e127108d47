// libcuda.so.1: the driver calls that torch and Triton make.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void *context = (void *)8, *object = (void *)16;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *num) {
  const char *given = getenv("MOCK_GPU_DEVICES");
  *num = given ? atoi(given) : 1;
  return 0;
}
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { // 75 and 76: the compute capability; 97: shared memory
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 232448 : 1;
  return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { *flags = 0, *is_active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **into, int device) { *into = context; return 0; }
int cuCtxGetCurrent(void **into) { *into = context; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "mock"; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = object; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = strdup(name); return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; } // threads of a block
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *num, void *function, int block, size_t shared) { *num = 2; return 0; }

static int launched(void *function) {
  void (*count)(const char *) = (void (*)(const char *))dlsym(RTLD_DEFAULT, "mock_launch_named");
  if (count) count(function);
  return 0;
}
int cuLaunchKernel(void *function) { return launched(function); }
int cuLaunchKernelEx(const void *config, void *function) { return launched(function); }
int cuLaunchCooperativeKernel(void *function) { return launched(function); }

#define NOTHING(name) int name() { return 0; }
NOTHING(cuCtxSetCurrent) NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxPopCurrent_v2) NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetLimit) NOTHING(cuFuncLoad) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuGetProcAddress_v2) NOTHING(cuKernelGetFunction) NOTHING(cuLibraryLoadData) NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2) NOTHING(cuModuleLoad) NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload) NOTHING(cuPointerGetAttribute) NOTHING(cuStreamGetCaptureInfo)
NOTHING(cuTensorMapEncodeTiled)
