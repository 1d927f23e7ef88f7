// The native CPU kernels, as XLA FFI handlers. Python registers them (kernels/cpu/__init__.py); nothing runs at import.
#include <nanobind/nanobind.h>

#include <cmath>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace {

// Each row is summed from left to right in one accumulator chain of 8 lanes, so a row's result depends on it alone.
ffi::Error RmsNorm(ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> weight, ffi::ResultBuffer<ffi::F32> y, float eps) {
  const int64_t width = x.dimensions().back();
  if (static_cast<int64_t>(weight.element_count()) != width) {
    return ffi::Error::InvalidArgument("rms_norm: weight and row widths differ");
  }
  const int64_t rows = width == 0 ? 0 : static_cast<int64_t>(x.element_count()) / width;
  const float* w = weight.typed_data();
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = x.typed_data() + r * width;
    float* out = y->typed_data() + r * width;
    float lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
      for (int j = 0; j < 8; ++j) lanes[j] += in[i + j] * in[i + j];
    }
    float sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    for (; i < width; ++i) sum += in[i] * in[i];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
    for (int64_t k = 0; k < width; ++k) out[k] = in[k] * scale * w[k];
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRmsNorm, RmsNorm,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("eps"));

template <typename T>
nb::capsule Capsule(T* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("registrations", [] {
    nb::dict handlers;
    handlers["inferax_rms_norm_v1"] = Capsule(kRmsNorm);
    return handlers;
  });
}
