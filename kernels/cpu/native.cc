// The extension module: hands the XLA handlers to Python, which registers them (kernels/cpu/__init__.py). A name's
// suffix changes with the meaning of its operands or attributes, so that a stored executable never meets another one.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "handlers.h"

namespace nb = nanobind;

namespace inferax {
namespace {

using Types = ffi::Span<const int32_t>;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;

XLA_FFI_DEFINE_HANDLER_SYMBOL(kNorm, Norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<F32>()
                                  .Attr<int32_t>("has_bias")
                                  .Attr<float>("eps")
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("threads")
                                  .Attr<int32_t>("tier"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kLinear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Types>("types")
                                  .Attr<int32_t>("has")
                                  .Attr<float>("norm_eps")
                                  .Attr<float>("post_eps")
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("threads")
                                  .Attr<int32_t>("tier"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kGatedMlp, GatedMlp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Types>("types")
                                  .Attr<Types>("down_types")
                                  .Attr<int32_t>("has")
                                  .Attr<float>("norm_eps")
                                  .Attr<float>("post_eps")
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("activation")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("threads")
                                  .Attr<int32_t>("tier"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kEmbed, Embed,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<F32>()
                                  .Attr<Types>("types")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("threads")
                                  .Attr<int32_t>("tier"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kRotary, Rotary,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("original_length")
                                  .Attr<float>("attention_factor")
                                  .Attr<int64_t>("dynamic_dim")
                                  .Attr<float>("theta")
                                  .Attr<float>("factor")
                                  .Attr<int32_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kLogProbs, LogProbs,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<Types>("types")
                                  .Attr<int32_t>("has")
                                  .Attr<float>("norm_eps")
                                  .Attr<int32_t>("layer")
                                  .Attr<float>("softcap")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("tile")
                                  .Attr<int32_t>("threads")
                                  .Attr<int32_t>("tier"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kAttention, Attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .Ret<F32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("heads")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("width")
                                  .Attr<int32_t>("has")
                                  .Attr<float>("q_eps")
                                  .Attr<float>("k_eps")
                                  .Attr<int32_t>("layer")
                                  .Attr<int32_t>("interleaved")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap")
                                  .Attr<int64_t>("window")
                                  .Attr<int32_t>("threads")
                                  .Attr<int32_t>("tier"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kSample, Sample,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<std::string_view>("fields")
                                  .Attr<std::string_view>("stages")
                                  .Attr<int32_t>("threads")
                                  .Attr<int32_t>("tier"));

template <typename T>
nb::capsule Capsule(T* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace
}  // namespace inferax

NB_MODULE(_native, m) {
  m.def("registrations", [] {
    nb::dict handlers;
    handlers["inferax_norm_v1"] = inferax::Capsule(inferax::kNorm);
    handlers["inferax_linear_v2"] = inferax::Capsule(inferax::kLinear);
    handlers["inferax_gated_mlp_v2"] = inferax::Capsule(inferax::kGatedMlp);
    handlers["inferax_embed_v1"] = inferax::Capsule(inferax::kEmbed);
    handlers["inferax_rotary_v1"] = inferax::Capsule(inferax::kRotary);
    handlers["inferax_logprobs_v1"] = inferax::Capsule(inferax::kLogProbs);
    handlers["inferax_attention_v1"] = inferax::Capsule(inferax::kAttention);
    handlers["inferax_sample_v1"] = inferax::Capsule(inferax::kSample);
    return handlers;
  });
  m.def("tiers", inferax::TierNames);
}
