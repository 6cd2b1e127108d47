// NCCL without peers: a collective counts its bytes and leaves this rank's part where the result belongs.
//
// Every output argument is set. `ncclCommGetAsyncError` above all: torch reads it until it is not "in progress", so a
// stub that only returns success leaves torch waiting at shutdown.
#define __CUDA_FP16_H__ // these are C++, and nothing here needs them
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#define __CUDA_FP8_TYPES_EXIST__
#include <nccl.h>
#include <stdlib.h>
#include <string.h>
#include "mock.h"
#define OK ncclSuccess

struct ncclComm {
  int size, rank;
};

static size_t width_of(ncclDataType_t type) {
  switch (type) {
  case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
  case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
  case ncclFloat16: case ncclBfloat16: return 2;
  default: return 1;
  }
}

// size: bytes that stay on this rank
static ncclResult_t moved(const void *from, void *to, size_t size, size_t travelling) {
  mock_add(collectives, 1);
  mock_add(collective_bytes, travelling);
  if (from && to && from != to && size <= 4ul << 20) memmove(to, from, size);
  return OK;
}

static ncclResult_t made(ncclComm_t *comm, int size, int rank) {
  *comm = mock_new(sizeof **comm);
  (*comm)->size = size, (*comm)->rank = rank;
  return OK;
}

ncclResult_t ncclGetVersion(int *version) { *version = NCCL_VERSION_CODE; return OK; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { memset(id, 1, sizeof *id); return OK; }
const char *ncclGetErrorString(ncclResult_t result) { return "mock"; }
const char *ncclGetLastError(ncclComm_t comm) { return "mock"; }
ncclResult_t ncclMemAlloc(void **pointer, size_t size) { *pointer = mock_new(size); return OK; }
ncclResult_t ncclMemFree(void *pointer) { free(pointer); return OK; }

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) { return made(comm, size, rank); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config) {
  return made(comm, size, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int num, ncclUniqueId *ids,
                                      ncclConfig_t *config) {
  return made(comm, size, rank);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *part, ncclConfig_t *config) {
  return made(part, comm->size, comm->rank);
}
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int num, ncclComm_t *part, ncclConfig_t *config, int flags) {
  return made(part, comm->size - num, comm->rank);
}
ncclResult_t ncclCommInitAll(ncclComm_t *comms, int num, const int *devices) {
  for (int i = 0; i < num; i++) made(comms + i, num, i);
  return OK;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) { *error = OK; return OK; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { *count = comm->size; return OK; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { *rank = comm->rank; return OK; }
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *memory, size_t size, void **handle) {
  *handle = memory;
  return OK;
}
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t which, uint64_t *value) { *value = 0; return OK; }
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *memory, size_t size, ncclWindow_t *window, int flags) {
  *window = (ncclWindow_t)memory;
  return OK;
}
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                                      ncclComm_t comm) {
  *op = ncclSum;
  return OK;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
  return moved(from, to, count * width_of(type), count * width_of(type));
}
ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return moved(from, to, count * width_of(type), count * width_of(type));
}
ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
  return moved(from, to, count * width_of(type), count * width_of(type));
}
ncclResult_t ncclBcast(void *memory, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return moved(NULL, memory, 0, count * width_of(type));
}
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  size_t size = count * width_of(type);
  return moved(from, (char *)to + comm->rank * size, size, comm->size * size);
}
ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  size_t size = count * width_of(type);
  return moved((const char *)from + comm->rank * size, to, size, comm->size * size);
}
ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return moved(from, to, count * width_of(type), comm->size * count * width_of(type));
}
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return moved(from, NULL, 0, count * width_of(type));
}
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return moved(NULL, to, 0, count * width_of(type));
}
