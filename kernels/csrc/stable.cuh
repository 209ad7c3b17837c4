// What every unit needs to be an operator of torch: the stable C++ interface, the current stream, the device of a tensor.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

namespace qsync {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Makes the tensor's card the current one until the end of the scope.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& x) : guard_(x.get_device_index()) {}

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

// The stream that torch currently launches on, for the tensor's card.
inline cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// A new dense tensor on the card of another. Not by torch::stable::new_empty, which looks its operator up by name in
// every call: a product or quantizer allocates several tensors, and small ones are bound by the host.
inline Tensor empty_on(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  constexpr size_t kMostDims = 4;
  STD_TORCH_CHECK(sizes.size() <= kMostDims, "a new tensor of ", sizes.size(), " dimensions; at most ", kMostDims, " are made");
  int64_t strides[kMostDims];
  int64_t step = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = step;
    step *= sizes.begin()[dim] > 1 ? sizes.begin()[dim] : 1;
  }
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  const bool has_room = aoti_torch_empty_strided(int64_t(sizes.size()), sizes.begin(), strides, type,
                                                 aoti_torch_device_type_cuda(), like.get_device_index(), &made) == 0;
  // The interface says no more than that it failed. For lack of room, which Python knows by these words, because sizes and
  // type are right; unless an earlier kernel failed, whose error stays.
  if (!has_room) {
    STD_CUDA_CHECK(cudaGetLastError());
  }
  STD_TORCH_CHECK(has_room, "CUDA out of memory: no room for a result of ", step, " elements in a kernel of qsync_opt");
  return Tensor(made);
}

// The major part of it, of the tensor's card.
inline int compute_capability(const Tensor& x) {
  int major = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device_index()));
  return major;
}

inline int multiprocessors() {
  int device = 0, count = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace qsync
