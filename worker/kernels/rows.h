// What is done to single rows, by the kernels between the products and by the products themselves.
#pragma once

#include "vec.h"

namespace antiphon {

// The first `count` of LANES elements as floats, the rest 0; and back.
template <class T>
Floats widen_some(const typename T::Element* p, int64_t count) {
  if (count >= LANES) return T::widen(p);
  float some[LANES] = {};
  for (int64_t i = 0; i < count; ++i) some[i] = T::widen_one(p[i]);
  return load(some);
}
template <class T>
void narrow_some(typename T::Element* p, Floats x, int64_t count) {
  if (count >= LANES) return T::narrow(p, x);
  for (int64_t i = 0; i < count; ++i) p[i] = T::narrow_one(x[i]);
}

// out = x / rms(x) * weight; `out` may be `x`.
template <class T>
void normalise(const typename T::Element* x, const typename T::Element* weight, float eps,
               int64_t n, typename T::Element* out) {
  Floats squares = {};
  for (int64_t c = 0; c < n; c += LANES) {
    const Floats part = widen_some<T>(x + c, n - c);
    squares += part * part;
  }
  const Floats factor = splat(1.f / __builtin_sqrtf(sum_lanes(squares) / n + eps));
  for (int64_t c = 0; c < n; c += LANES)
    narrow_some<T>(
        out + c, widen_some<T>(x + c, n - c) * factor * widen_some<T>(weight + c, n - c), n - c);
}

}  // namespace antiphon
