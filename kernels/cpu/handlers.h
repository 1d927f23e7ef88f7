// The XLA handlers. Operands come in the order that ops/cpu.py gives them; see there for the attributes.
#pragma once

#include <string_view>

#include "handler.h"

namespace inferax {

ffi::Error Norm(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> y, int32_t has_bias,
                float eps, int32_t layer, int32_t threads, int32_t tier);

ffi::Error Linear(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  ffi::Span<const int32_t> types, int32_t has, float norm_eps, float post_eps, int32_t layer,
                  int32_t activation, float scale, int32_t threads, int32_t tier);

ffi::Error GatedMlp(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Span<const int32_t> types, ffi::Span<const int32_t> down_types, int32_t has, float norm_eps,
                    float post_eps, int32_t layer, int32_t activation, float scale, int32_t threads, int32_t tier);

ffi::Error Embed(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> y,
                 ffi::Span<const int32_t> types, float scale, int32_t threads, int32_t tier);

ffi::Error Rotary(ffi::ThreadPool pool, ffi::Buffer<ffi::S32> positions, ffi::Buffer<ffi::S32> lengths,
                  ffi::Buffer<ffi::F32> frequencies, ffi::ResultBuffer<ffi::F32> cos, ffi::ResultBuffer<ffi::F32> sin,
                  int64_t original_length, float attention_factor, int64_t dynamic_dim, float theta, float factor,
                  int32_t threads);

ffi::Error LogProbs(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                    ffi::Span<const int32_t> types, int32_t has, float norm_eps, int32_t layer, float softcap,
                    float scale, int64_t tile, int32_t threads, int32_t tier);

ffi::Error Attention(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::ResultBuffer<ffi::F32> out,
                     ffi::Result<ffi::AnyBuffer> new_cache, ffi::ResultBuffer<ffi::F32> queries,
                     ffi::ResultBuffer<ffi::F32> partial, int64_t heads, int64_t kv_heads, int64_t width, int32_t has,
                     float q_eps, float k_eps, int32_t layer, int32_t interleaved, float scale, float softcap,
                     int64_t window, int32_t threads, int32_t tier);

ffi::Error Sample(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, std::string_view fields,
                  std::string_view stages, int32_t threads, int32_t tier);

}  // namespace inferax
