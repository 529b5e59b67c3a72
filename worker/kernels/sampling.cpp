// One token per row: temperature, min-p, top-k, top-p, and a race that seed and position decide.
//
// A token's *distance* is (best logit - its logit) / temperature: 0 for the best one, never
// negative. Its weight, exp(-distance), is its probability but for a factor. Every filter is a
// limit on the distance. The race: token n finishes at the time E[n] / weight[n], E being
// independent exponential numbers, and the first one is chosen; it is each token with just its
// probability.
//
// E[n] = -log(1 - v[n]), and v[n] in (0, 1) is a number of Philox4x32-10 (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", 2011), keyed by the seed: of the block that the position and
// n decide. So the choice depends on nothing but the row.
//
// worker/sampling/draw.py does the same in torch and is the specification.

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "scratch.h"
#include "team.h"
#include "vec.h"

namespace antiphon {
namespace {

constexpr int BLOCKS = 16, WORDS = 4;       // one after the other, of WORDS words each
constexpr int64_t GROUP = BLOCKS * WORDS;   // tokens: word w of block b is number 16 w + b
constexpr float COLDEST = 1e-30f;           // any two logits that differ are far apart
constexpr float LOG2_E = 1.4426950408889634f;
constexpr double LONGEST = 22.88;           // no v is below 2^-33 > exp(-LONGEST)
static_assert(BLOCKS % LANES == 0);

typedef uint64_t Longs __attribute__((vector_size(8 * LANES), may_alias));

// The upper halves of the products.
inline Words multiply_high(Words a, uint32_t b) {
#ifdef ANTIPHON_AVX512
  const __m512i factor = _mm512_set1_epi64(b);
  const __m512i even = _mm512_mul_epu32((__m512i)a, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), factor);
  return (Words)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#else
  return __builtin_convertvector((__builtin_convertvector(a, Longs) * b) >> 32, Words);
#endif
}

inline bool any(Ints truth) {
#ifdef ANTIPHON_AVX512
  return _mm512_test_epi32_mask((__m512i)truth, (__m512i)truth) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < LANES; ++i) all |= truth[i];
  return all != 0;
#endif
}

struct Philox {
  uint64_t seed, position;

  // The words of tokens GROUP * group and on.
  void group(int64_t group, uint32_t* out) const {
    for (int first = 0; first < BLOCKS; first += LANES) {
      Words lane;
      for (int i = 0; i < LANES; ++i) lane[i] = i;
      Words c[WORDS] = {splat_word(uint32_t(group * BLOCKS + first)) + lane,
                        splat_word(uint32_t(position)), splat_word(uint32_t(position >> 32)), {}};
      uint32_t keys[2] = {uint32_t(seed), uint32_t(seed >> 32)};
      for (int round = 0; round < 10; ++round) {
        const Words high0 = multiply_high(c[0], 0xd2511f53u), low0 = c[0] * 0xd2511f53u;
        const Words high2 = multiply_high(c[2], 0xcd9e8d57u), low2 = c[2] * 0xcd9e8d57u;
        c[0] = high2 ^ c[1] ^ splat_word(keys[0]);
        c[1] = low2;
        c[2] = high0 ^ c[3] ^ splat_word(keys[1]);
        c[3] = low0;
        keys[0] += 0x9e3779b9u;
        keys[1] += 0xbb67ae85u;
      }
      for (int w = 0; w < WORDS; ++w) store_words(out + w * BLOCKS + first, c[w]);
    }
  }
};

double number_of(uint32_t word) { return (word + 0.5) * 0x1p-32; }

// log of a token's time.
double log_time(uint32_t word, float distance) {
  return std::log(-std::log1p(-number_of(word))) + distance;
}

// distance[0 .. n), and infinity up to a whole group.
void measure(const float* logits, int64_t n, float best, float temperature, float* distance) {
  int64_t c = 0;
  for (; c + LANES <= n; c += LANES)
    store(distance + c, (splat(best) - load(logits + c)) / splat(temperature));
  for (; c < n; ++c) distance[c] = (best - logits[c]) / temperature;
  for (; c % GROUP; ++c) distance[c] = INF;
}

// Moves those of `from` to the front of `to` whose (distance <= cut) is `within`; how many they
// are. The arrays may be the same, and have room for a vector more than n.
int64_t keep(const float* distance, int64_t n, float cut, bool within, const float* from,
             float* to) {
  int64_t kept = 0;
#ifdef ANTIPHON_AVX512
  for (int64_t c = 0; c < n; c += LANES) {
    const __mmask16 there = n - c >= LANES ? 0xffff : (1u << (n - c)) - 1;
    const __mmask16 near =
        _mm512_cmp_ps_mask((__m512)load(distance + c), _mm512_set1_ps(cut), _CMP_LE_OQ);
    const __mmask16 wanted = (within ? near : ~near) & there;
    store(to + kept, (Floats)_mm512_maskz_compress_ps(wanted, (__m512)load(from + c)));
    kept += __builtin_popcount(wanted);
  }
#else
  for (int64_t c = 0; c < n; ++c) {
    const bool wanted = (distance[c] <= cut) == within;
    to[kept] = from[c];
    kept += wanted;
  }
#endif
  return kept;
}

// The weights of those within `cut`, added up in a fixed order.
float weigh(const float* distance, const float* weight, int64_t n, float cut) {
  constexpr int CHAINS = 4;  // of sums, which would wait for one another
  Floats sums[CHAINS] = {};
  int64_t c = 0;
  for (; c + CHAINS * LANES <= n; c += CHAINS * LANES)
    for (int i = 0; i < CHAINS; ++i) {
      const int64_t at = c + i * LANES;
      sums[i] += load(distance + at) <= splat(cut) ? load(weight + at) : Floats{};
    }
  float rest = 0;
  for (; c < n; ++c) rest += distance[c] <= cut ? weight[c] : 0.f;
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

// Some of a row's tokens; the arrays are used up.
struct Tokens {
  float *distance, *weight;
  int64_t count;

  void drop(float cut, bool within) {  // those within, or else those beyond
    keep(distance, count, cut, !within, weight, weight);
    count = keep(distance, count, cut, !within, distance, distance);
  }
};

// The least limit within which the weights reach `target`; `most` where they never do.
// Halves the range of the limit's bits, which rise as the numbers do, and drops what is decided.
float least_limit(Tokens tokens, double target, float most) {
  tokens.drop(most, false);
  uint32_t low = 0, high = as_bits(most);
  double inside = 0;  // weight of those known to be within
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    // The lower half of the bits is nearly all of the small numbers, and few tokens are there.
    if (high < as_bits(64.f)) middle = std::max(middle, as_bits(as_float(high) / 2));
    const float cut = as_float(middle);
    const float more = weigh(tokens.distance, tokens.weight, tokens.count, cut);
    const bool enough = inside + more >= target;
    if (enough) {
      high = middle;
    } else {
      low = middle + 1;
      inside += more;
    }
    tokens.drop(cut, !enough);
  }
  return as_float(high);
}

class Row {
 public:
  Row(const Draw& draw, float* memory, int64_t vocab)
      : draw_(draw), vocab_(vocab), distance_(memory), near_(memory + room(vocab)),
        weight_(memory + 2 * room(vocab)) {}

  static int64_t room(int64_t vocab) { return (vocab / GROUP + 2) * GROUP; }

  int64_t choose(const float* logits, float* limit) {
    int64_t best;
    argmax({logits, &best, vocab_, 1, vocab_, 1});
    *limit = 0;
    if (draw_.temperature <= 0 || !std::isfinite(logits[best])) return best;
    measure(logits, vocab_, logits[best], std::max(float(draw_.temperature), COLDEST), distance_);
    *limit = filter();
    return race(best, *limit);
  }

 private:
  // The largest distance that min-p, top-k and top-p leave, one after the other.
  float filter() {
    float limit = draw_.min_p > 0 ? std::max(0.f, float(-std::log(draw_.min_p))) : INF;
    if (draw_.top_k > 0 && draw_.top_k < vocab_) {
      Tokens tokens = within(limit);
      std::fill(weight_, weight_ + tokens.count, 1.f);  // fp32 counts to 2^24
      limit = least_limit(tokens, double(draw_.top_k), limit);
    }
    if (draw_.top_p < 1) {
      Tokens tokens = within(limit);
      for (int64_t c = 0; c < tokens.count; c += LANES)
        store(weight_ + c, exp2(load(near_ + c) * splat(-LOG2_E)));
      const double total = weigh(near_, weight_, tokens.count, limit);
      // Tokens that weigh less than an equal share of what may be left out may all be left out;
      // half of it, for the roundings.
      const double share = (1 - draw_.top_p) * total / tokens.count / 2;
      const float most = std::min(limit, std::max(0.f, float(-std::log(share))));
      limit = least_limit(tokens, draw_.top_p * total, most);
    }
    return limit;
  }

  Tokens within(float limit) {
    return {near_, weight_, keep(distance_, vocab_, limit, true, distance_, near_)};
  }

  // Who finishes first. Exact times take two logarithms each, so three bounds on a token's time,
  // each below it, leave out those who cannot break the record so far, from cheap to dear:
  //   by its distance alone    log time = log E + distance >= distance - LONGEST       (here)
  //   by its number alone      time = E / weight >= E >= v, as no weight is above 1    (early)
  //   by both                  time = E / weight >= v / weight = v exp(distance)       (finish)
  // E = -log(1 - v) >= v. A bound that errs by rounding must err downwards: hence a LONGEST above
  // log(2^33), and the factor 1.0001.
  int64_t race(int64_t best, float limit) const {
    const Philox philox{uint64_t(draw_.seed), uint64_t(draw_.position)};
    uint32_t words[GROUP];
    philox.group(best / GROUP, words);
    int64_t first = best;
    double record = log_time(words[best % GROUP], 0);
    for (int64_t base = 0; base < vocab_; base += GROUP) {
      // Who is farther away cannot win: distance - LONGEST is beyond the record.
      const float reach = std::min(limit, float(record + LONGEST));
      Ints near = {};
      for (int64_t c = base; c < base + GROUP; c += LANES)
        near |= load(distance_ + c) <= splat(reach);
      if (!any(near)) continue;
      philox.group(base / GROUP, words);
      if (early(words, splat(float(std::exp(record))))) finish(base, words, reach, &first, &record);
    }
    return first;
  }

  // Whether any of a group could finish by `time` if it weighed 1.
  static bool early(const uint32_t* words, Floats time) {
    Ints hope = {};
    for (int64_t c = 0; c < GROUP; c += LANES) hope |= number(words + c) <= time * 1.0001f;
    return any(hope);
  }

  static Floats number(const uint32_t* words) {
    return __builtin_convertvector(load_words(words), Floats) * 0x1p-32f;
  }

  // Lets a group run: exact times for those whose number is small enough for their distance.
  void finish(int64_t base, const uint32_t* words, float reach, int64_t* first,
              double* record) const {
    for (int64_t c = 0; c < GROUP; c += LANES) {
      const Floats distance = load(distance_ + base + c);
      const Floats latest = exp2((splat(float(*record)) - distance) * LOG2_E) * 1.0001f;
      const Ints hope = (distance <= splat(reach)) & (number(words + c) <= latest);
      if (!any(hope)) continue;
      for (int i = 0; i < LANES; ++i) {
        if (!hope[i]) continue;
        const double time = log_time(words[c + i], distance[i]);
        if (time >= *record) continue;
        *record = time;
        *first = base + c + i;
      }
    }
  }

  const Draw& draw_;
  int64_t vocab_;
  float *distance_, *near_, *weight_;
};

}  // namespace

void sample(const Sample& call) {
  parallel_for(call.threads, call.rows, [&](int64_t i) {
    static thread_local Scratch<float> scratch;
    Row row(call.draws[i], scratch.reserve(3 * Row::room(call.vocab)), call.vocab);
    call.tokens[i] = row.choose(call.logits + i * call.stride, call.limits + i);
  });
}

}  // namespace antiphon
