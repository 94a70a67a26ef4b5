// What fill.cu needs of CUDA, for a C++ compiler.
#pragma once
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct Dim3 { unsigned x, y, z; };
static Dim3 gridDim, blockDim, blockIdx, threadIdx;
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __builtin_assume(condition)
template <class T> static inline T __ldg(const T* address) { return *address; }
#include FILL_CU
static void run(unsigned blocks, const u64* arguments) {
  gridDim.x = blocks;
  blockDim.x = 256;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 256; ++threadIdx.x)
      fill((const Segment*)arguments[0], (const Chunk*)arguments[1], (const Group*)arguments[2],
           arguments[3], (const Step*)arguments[4]);
}
