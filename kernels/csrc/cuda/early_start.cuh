// Kernels that start while the ones before them in the stream end (programmatic dependent launch, Hopper).
//
// Such a kernel calls `launch_next` and `wait_for_previous` in every block of threads before it reads or writes anything that
// another kernel of the stream does too. What it reads earlier, weights say, was complete before the first of a row of such
// kernels began: the one before may itself not have waited yet.
#pragma once

#include <cuda_runtime.h>

namespace qsync {

// Lets the next kernel of the stream start, as far as it asks to start early, once every block has come here or left.
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernels before this one in the stream have ended and what they wrote can be read.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the code and the card, of which `major` is the compute capability's, know early starts.
inline bool starts_early(int major) {
#if QSYNC_HAS_SM90A
  return major == 9;
#else
  return false;
#endif
}

inline cudaLaunchAttribute early_start() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// A launch that asks to start early where it can.
template <class... Parameters, class... Arguments>
cudaError_t launch_early(bool early, void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
                         cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute = early_start();
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments&&>(arguments)...);
}

}  // namespace qsync
