// A CUDA runtime without a device: device memory is host memory, kernels do nothing, streams run at once.
//
// Every call that the host makes is counted. A wait is a call that returns only when the device has finished. Memory is
// reserved when it is allocated and exists when it is touched, so a tensor may be larger than the machine.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "mock.h"
#define EXPORT __attribute__((visibility("default")))
#define OK cudaSuccess
#define DEVICE_BYTES (80ul << 30)
#define PAGE (2ul << 20)
#define MOST_COPIED (4ul << 20) // larger copies carry nothing that the host reads

// -- counters --------------------------------------------------------------------------------------------------------

static atomic_long counts[num_counters];
static void (*on_wait)(const char *call);
static void (*on_violation)(const char *call);

void mock_add(enum counter which, long amount) { atomic_fetch_add(&counts[which], amount); }

void *mock_new(unsigned long bytes) { return calloc(1, bytes); }

EXPORT const char *mock_counter_names(void) {
#define QUOTED(name) #name " "
  return COUNTERS(QUOTED);
}

EXPORT void mock_read(long *into) {
  for (int i = 0; i < num_counters; i++) into[i] = counts[i];
}

EXPORT void mock_watch(void (*wait)(const char *), void (*violation)(const char *)) {
  on_wait = wait;
  on_violation = violation;
}

// -- capture: one at a time, of one stream, as torch does it ---------------------------------------------------------

static cudaStream_t captured;
static pthread_t capturing_thread;
static enum cudaStreamCaptureMode capture_mode;
static __thread enum cudaStreamCaptureMode interaction = cudaStreamCaptureModeGlobal; // relaxed: the thread knows better
static long before_capture;

static long num_kernels(void) { return counts[launches] + counts[gemms]; }

void mock_forbidden_in_capture(const char *call) {
  if (!captured || (capture_mode != cudaStreamCaptureModeGlobal && !pthread_equal(capturing_thread, pthread_self())))
    return;
  if (capture_mode == cudaStreamCaptureModeRelaxed || interaction == cudaStreamCaptureModeRelaxed) return;
  mock_add(capture_violations, 1);
  if (on_violation) on_violation(call);
}

static cudaError_t waited(const char *call) {
  mock_add(waits, 1);
  if (on_wait) on_wait(call);
  return OK;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  captured = stream;
  capture_mode = mode;
  capturing_thread = pthread_self();
  before_capture = num_kernels();
  return OK;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  long *kernels = mock_new(sizeof *kernels);
  *kernels = num_kernels() - before_capture;
  captured = NULL;
  *graph = (cudaGraph_t)kernels;
  return OK;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = captured && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return OK;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *num) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = 1;
  if (graph) *graph = NULL;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (num) *num = 0;
  return OK;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = interaction;
  interaction = *mode;
  *mode = before;
  return OK;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags) {
  *exec = (cudaGraphExec_t)graph;
  return OK;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num) {
  *num = *(long *)graph;
  return OK;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  mock_add(graph_launches, 1);
  mock_add(graph_kernels, *(long *)exec);
  return OK;
}

// -- kernels ---------------------------------------------------------------------------------------------------------

#define SLOTS (1u << 18)
static struct {
  const void *function;
  const char *name;
  atomic_long count;
} kernels[SLOTS];
static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned slot_of(const void *function) {
  pthread_mutex_lock(&kernels_lock);
  unsigned slot = (unsigned)(((uintptr_t)function >> 4) * 0x9E3779B97F4A7C15ul >> 46);
  while (kernels[slot].function && kernels[slot].function != function) slot = (slot + 1) % SLOTS;
  kernels[slot].function = function;
  pthread_mutex_unlock(&kernels_lock);
  return slot;
}

static cudaError_t launched(const void *function, void **args) {
  unsigned slot = slot_of(function);
  atomic_fetch_add(&kernels[slot].count, 1);
  mock_add(launches, 1);
  // CUB's sum, by which torch finds out how many elements of a mask are true, and so how much memory it allocates: 0
  if (args && kernels[slot].name && strstr(kernels[slot].name, "DeviceReduceSingleTileKernel"))
    memset(*(void **)args[1], 0, sizeof(long));
  return OK;
}

EXPORT void mock_write_kernels(const char *path) {
  FILE *file = fopen(path, "w");
  for (unsigned i = 0; i < SLOTS; i++)
    if (kernels[i].count) fprintf(file, "%ld\t%s\n", kernels[i].count, kernels[i].name ? kernels[i].name : "?");
  fclose(file);
}

EXPORT void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *tid,
                                   uint3 *bid, dim3 *block, dim3 *grid, int *warp) {
  kernels[slot_of(host)].name = name;
}
EXPORT void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[2];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle) {}
EXPORT void __cudaUnregisterFatBinary(void **handle) {}
EXPORT void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t size, int constant,
                              int global) {}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return OK;
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                                      cudaStream_t stream) {
  return launched(kernel, args);
}
EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **args, size_t shared,
                                    cudaStream_t stream) {
  return launched(function, args);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **args) {
  return launched(function, args);
}
EXPORT void mock_launch_named(const char *name) { launched(name, NULL); } // a kernel of the driver API

static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} configuration;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
  configuration.grid = grid, configuration.block = block;
  configuration.shared = shared, configuration.stream = stream;
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid, *block = configuration.block;
  *shared = configuration.shared, *(void **)stream = configuration.stream;
  return OK;
}

// -- memory ----------------------------------------------------------------------------------------------------------

// Ranges that the runtime knows: device memory, pinned host memory, and memory of another process.
struct range {
  char *start;
  size_t size, mapped;
  void *base;
  enum cudaMemoryType type;
  int file; // of the memory, for another process to map; -1 if it is private
  int is_opened;
};
#define RANGES 65536
static struct range ranges[RANGES];
static int num_ranges;
static size_t device_bytes;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static void add_range(struct range range) {
  pthread_mutex_lock(&ranges_lock);
  int i = 0;
  while (i < num_ranges && ranges[i].start) i++;
  if (i == RANGES) abort();
  if (i == num_ranges) num_ranges++;
  ranges[i] = range;
  if (range.type == cudaMemoryTypeDevice && !range.is_opened) device_bytes += range.size;
  pthread_mutex_unlock(&ranges_lock);
}

static struct range range_of(const void *pointer) { // of size 0: unknown to the runtime, as pageable memory is
  struct range found = {0};
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges && !found.size; i++)
    if (ranges[i].start <= (char *)pointer && (char *)pointer < ranges[i].start + ranges[i].size) found = ranges[i];
  pthread_mutex_unlock(&ranges_lock);
  return found;
}

static struct range take_range(const void *pointer) {
  struct range found = {0};
  pthread_mutex_lock(&ranges_lock);
  for (int i = 0; i < num_ranges && !found.size; i++)
    if (ranges[i].start == (char *)pointer) found = ranges[i], ranges[i].start = NULL, ranges[i].size = 0;
  if (found.type == cudaMemoryTypeDevice && !found.is_opened) device_bytes -= found.size;
  pthread_mutex_unlock(&ranges_lock);
  return found;
}

static cudaError_t reserve(void **pointer, size_t size, int file, int is_opened) {
  int flags = MAP_NORESERVE | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  size_t slack = file < 0 ? PAGE : 0;
  char *base = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, flags, file, 0);
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  *pointer = file < 0 ? (void *)(((uintptr_t)base + PAGE - 1) & ~(PAGE - 1)) : base;
  add_range((struct range){*pointer, size, size + slack, base, cudaMemoryTypeDevice, file, is_opened});
  return OK;
}

EXPORT cudaError_t cudaMalloc(void **pointer, size_t size) {
  mock_forbidden_in_capture(__func__);
  mock_add(mallocs, 1);
  if (device_bytes + size > DEVICE_BYTES) return cudaErrorMemoryAllocation;
  int file = getenv("MOCK_GPU_SHARED") ? (int)syscall(SYS_memfd_create, "mock-gpu", 0) : -1;
  if (file >= 0 && ftruncate(file, size)) return cudaErrorMemoryAllocation;
  return reserve(pointer, size, file, 0);
}

EXPORT cudaError_t cudaFree(void *pointer) {
  struct range range = take_range(pointer);
  if (range.size) munmap(range.base, range.mapped);
  if (range.size && range.file >= 0) close(range.file);
  return OK;
}

EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = DEVICE_BYTES;
  *available = DEVICE_BYTES - device_bytes;
  return OK;
}

EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
  mock_forbidden_in_capture(__func__);
  mock_add(host_allocs, 1);
  *pointer = aligned_alloc(4096, (size + 4095) & ~4095ul);
  add_range((struct range){*pointer, size, 0, NULL, cudaMemoryTypeHost, -1, 0});
  return OK;
}

EXPORT cudaError_t cudaFreeHost(void *pointer) {
  take_range(pointer);
  free(pointer);
  return OK;
}

EXPORT cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
  mock_forbidden_in_capture(__func__);
  mock_add(host_allocs, 1);
  add_range((struct range){pointer, size, 0, NULL, cudaMemoryTypeHost, -1, 0});
  return OK;
}

EXPORT cudaError_t cudaHostUnregister(void *pointer) {
  take_range(pointer);
  return OK;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = range_of(pointer).type;
  attributes->devicePointer = attributes->hostPointer = (void *)pointer;
  return OK;
}

struct ipc_handle {
  int process, file;
  size_t size;
};

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
  struct range range = range_of(pointer);
  if (range.file < 0 || range.start != (char *)pointer) return cudaErrorInvalidValue;
  memset(handle, 0, sizeof *handle);
  *(struct ipc_handle *)handle = (struct ipc_handle){getpid(), range.file, range.size};
  return OK;
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  struct ipc_handle given = *(struct ipc_handle *)&handle;
  if (given.process == getpid()) return cudaErrorDeviceUninitialized; // as CUDA refuses it
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", given.process, given.file);
  FILE *file = fopen(path, "r+");
  if (!file) return cudaErrorMapBufferObjectFailed;
  return reserve(pointer, given.size, dup(fileno(file)), 1);
}

EXPORT cudaError_t cudaIpcCloseMemHandle(void *pointer) { return cudaFree(pointer); }

// -- copies ----------------------------------------------------------------------------------------------------------

static int is_on_device(const void *pointer) { return range_of(pointer).type == cudaMemoryTypeDevice; }

static void copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, const char *call, int is_async) {
  if (kind == cudaMemcpyDefault)
    kind = is_on_device(to) ? is_on_device(from) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice
                            : cudaMemcpyDeviceToHost;
  int is_from_host = kind == cudaMemcpyHostToDevice, is_to_host = kind == cudaMemcpyDeviceToHost;
  const void *host = is_from_host ? from : is_to_host ? to : NULL;
  if (!is_async || (host && range_of(host).type != cudaMemoryTypeHost)) mock_forbidden_in_capture(call);
  mock_add(is_from_host ? h2d : is_to_host ? d2h : d2d, 1);
  mock_add(is_from_host ? h2d_bytes : is_to_host ? d2h_bytes : d2d_bytes, size);
  if (size <= MOST_COPIED) memmove(to, from, size);
}

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  copy(to, from, size, kind, __func__, 0);
  return waited(__func__);
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  copy(to, from, size, kind, __func__, 1);
  return OK;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                       cudaStream_t stream) {
  copy(to, from, size, cudaMemcpyDeviceToDevice, __func__, 1);
  return OK;
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  for (size_t i = 0; i < height; i++)
    copy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width, kind, __func__, 1);
  return OK;
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                                      enum cudaMemcpyKind kind) {
  return OK;
}
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  mock_add(memsets, 1);
  if (size <= MOST_COPIED) memset(to, value, size);
  return OK;
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

// -- streams and events ----------------------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) { // of another stream it is allowed during a capture
  if (stream == captured) mock_forbidden_in_capture(__func__);
  return waited(__func__);
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
  mock_forbidden_in_capture(__func__);
  return waited(__func__);
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  mock_forbidden_in_capture(__func__);
  return waited(__func__);
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) { return OK; }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  mock_forbidden_in_capture(__func__);
  return OK;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = mock_new(64);
  return OK;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return cudaStreamCreate(stream);
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return OK;
}
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = mock_new(64);
  return OK;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  free(event);
  return OK;
}
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
  memset(handle, 0, sizeof *handle);
  return OK;
}
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
  return cudaEventCreate(event);
}
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  *milliseconds = 1;
  return OK;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  function(data);
  return OK;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned flags) {
  callback(stream, OK, data);
  return OK;
}

// -- the device ------------------------------------------------------------------------------------------------------

static __thread int device;
EXPORT cudaError_t cudaGetDeviceCount(int *num) {
  const char *given = getenv("MOCK_GPU_DEVICES");
  *num = given ? atoi(given) : 1;
  return OK;
}
EXPORT cudaError_t cudaGetDevice(int *index) {
  *index = device;
  return OK;
}
EXPORT cudaError_t cudaSetDevice(int index) {
  device = index;
  return OK;
}
EXPORT cudaError_t cudaGetLastError(void) { return OK; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return OK; }
EXPORT const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the mock GPU";
}
EXPORT const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorMock"; }
EXPORT cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return OK;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0, *greatest = -5;
  return OK;
}
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int index) {
  snprintf(text, size, "0000:%02d:00.0", index);
  return OK;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) {
  *can = 0;
  return OK;
}
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *of, int index) { // an H100's
  memset(of, 0, sizeof *of);
  strcpy(of->name, "NVIDIA H100 80GB HBM3 (mock)");
  of->uuid.bytes[0] = index + 1;
  of->totalGlobalMem = DEVICE_BYTES;
  of->major = 9, of->minor = 0, of->multiProcessorCount = 132, of->warpSize = 32;
  of->maxThreadsPerBlock = 1024, of->maxThreadsPerMultiProcessor = 2048;
  of->sharedMemPerBlock = 49152, of->sharedMemPerBlockOptin = 232448, of->sharedMemPerMultiprocessor = 233472;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024, of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647, of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->l2CacheSize = 50 << 20, of->memoryBusWidth = 5120, of->textureAlignment = 512;
  of->concurrentKernels = of->unifiedAddressing = of->cooperativeLaunch = of->canMapHostMemory = 1;
  return OK;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index) {
  struct cudaDeviceProp of;
  cudaGetDeviceProperties(&of, index);
  switch (attribute) {
  case cudaDevAttrMultiProcessorCount: *value = of.multiProcessorCount; break;
  case cudaDevAttrComputeCapabilityMajor: *value = of.major; break;
  case cudaDevAttrComputeCapabilityMinor: *value = of.minor; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = of.sharedMemPerBlockOptin; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *value = of.sharedMemPerBlock; break;
  case cudaDevAttrMaxThreadsPerBlock: *value = of.maxThreadsPerBlock; break;
  case cudaDevAttrMaxGridDimX: *value = of.maxGridSize[0]; break;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ: *value = of.maxGridSize[1]; break;
  default: *value = 1;
  }
  return OK;
}
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *function) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024, of->numRegs = 64, of->ptxVersion = of->binaryVersion = 90;
  return OK;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *num, const void *function, int block,
                                                                          size_t shared, unsigned flags) {
  *num = 2;
  return OK;
}
