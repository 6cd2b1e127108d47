// Counters of the mock GPU. Python reads them by their names, in this order.
#pragma once
#define COUNTERS(X)                                                                                                  \
  X(launches) X(gemms) X(graph_launches) X(graph_kernels) X(waits) X(h2d) X(d2h) X(d2d) X(h2d_bytes) X(d2h_bytes)    \
  X(d2d_bytes) X(memsets) X(mallocs) X(host_allocs) X(collectives) X(collective_bytes) X(capture_violations)
#define NAME(name) name,
enum counter { COUNTERS(NAME) num_counters };
void mock_add(enum counter which, long amount);
void mock_forbidden_in_capture(const char *call);
void *mock_new(unsigned long bytes); // zeroed memory for an opaque handle, which is never freed
