// Training of word vectors by negative sampling on CPU. Compiled once per instruction-set tier.
//
// The words around the middle of a window are inputs, v; each predicts the middle word and, as false, the negatives,
// which the window's inputs share; these are the outputs, u:
//
//   s = v u,   e = rate (label - sigmoid(s)),   dv = sum of e u,   du = sum of e v                Mikolov et al. 2013
//
// Shared negatives make three small products of a window instead of many vectors' (Ji et al. 2016). All of them are of
// the vectors before the window; then row after row is added to, so that a word that stands twice gets both. A negative
// that is the middle word counts nothing.
//
// Rows that other workers write too come from far, so they are touched seldom. Two windows in a row have the same
// negatives. A word's vector, its row or the mean of its own and its n-grams' rows (Bojanowski et al. 2017), is copied
// when the first window sees the word, moves with its gradients, and its rows move as far when the last window is done.
//
// Tried and lost, in the speed that a second core gives on a Sapphire Rapids (gensim's corpus of 331339 words,
// vocabulary of 7978, 100 dimensions, window 5, 5 negatives: skip-gram and CBOW; here 1.75, and 1.45 to 1.65):
// - vectors in place, negatives for each window: 1.6 and 1.5; copies of the words in reach: 1.65 and 1.46;
// - both, and rows fetched 2 or 4 windows ahead: no more than one window ahead;
// - for each input negatives of its own out of a pool of 64 rows, copies too, of which a window replaces two: 2.1 and
//   1.8, but half of skip-gram's speed on one core, and the held-out loss is the same.
// - copies of the 64 to 1000 most frequent rows for each worker: on natural text, where two cores contend for them, 1.8
//   and 1.75 instead of 1.6 and 1.5, as one core is slower; the speed of two is the same.
// Four windows with the same negatives: a tenth faster, and fastText's held-out loss 0.4% higher; two cost nothing.
#include "sgns_loss/trainer.h"

#include "scratch.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

using A = float;
constexpr int kOutputs = 6;    // of a tile
constexpr int64_t kAlike = 2;  // windows with the same negatives

// SplitMix64. A sentence's numbers follow from its own number, whoever trains it: from a mixed one, as numbers in a row
// would be places in a row of one sequence.
class Random {
 public:
  Random(uint64_t seed, uint64_t sentence) : state_(mixed(seed + mixed(sentence))) {}
  uint64_t next() { return mixed(state_ += 0x9e3779b97f4a7c15u); }
  uint32_t number() { return static_cast<uint32_t>(next() >> 32); }
  // Below n.
  int64_t below(int64_t n) {
    return static_cast<int64_t>(static_cast<uint64_t>(number()) * static_cast<uint64_t>(n) >> 32);
  }

 private:
  static uint64_t mixed(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  uint64_t state_;
};

struct Memory {
  int32_t* words;       // of a sentence, after subsampling
  A** inputs;           // vectors of the words around the middle
  A* scores;            // (inputs, outputs), then e
  A* sums;              // lanes of the scores, a vector each
  A* grad_out;          // a vector for each output
  A* hidden;            // of CBOW, and its gradient
  A *vectors, *before;  // (slots, stride): of the words in reach, now and when they came
  A* parts;             // (slots): how far such a vector moves by a gradient
  int64_t bytes;
  Memory(const WordTraining& p, int64_t longest, void* memory) {
    Pieces pieces(memory);
    const int64_t most = 2 * p.window, outputs = 1 + p.negatives;
    words = pieces.take<int32_t>(longest);
    inputs = pieces.take<A*>(most);
    scores = pieces.take<A>(round_up<A>(most * outputs));
    sums = pieces.take<A>(round_up<A>(most * outputs) * W<A>);
    grad_out = pieces.take<A>(outputs * W<A>);
    hidden = pieces.take<A>(2 * p.stride);
    vectors = pieces.take<A>((most + 1) * p.stride);
    before = pieces.take<A>((most + 1) * p.stride);
    parts = pieces.take<A>(most + 1);
    bytes = pieces.bytes();
  }
};

// The lanes of I x O scores, whose sums they are: rows of inputs at `inputs`, of outputs at `outputs`.
template <int I, int O>
SK_INLINE void score_tile(const A* const* inputs, const A* const* outputs, int64_t stride, A* sums, int64_t row) {
  Vec<A> acc[I][O];
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) acc[i][o] = Vec<A>{};
  for (int64_t c = 0; c < stride; c += W<A>) {
    Vec<A> u[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) u[o] = load(outputs[o] + c);
#pragma GCC unroll 4
    for (int i = 0; i < I; ++i) {
      const Vec<A> v = load(inputs[i] + c);
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) acc[i][o] += v * u[o];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < I; ++i)
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) store(sums + (i * row + o) * W<A>, acc[i][o]);
}
template <int I>
SK_INLINE void score_rows(const A* const* inputs, const A* const* outputs, int64_t count, int64_t stride, A* sums) {
  int64_t o = 0;
  for (; o + kOutputs <= count; o += kOutputs)
    score_tile<I, kOutputs>(inputs, outputs + o, stride, sums + o * W<A>, count);
  switch (count - o) {
    case 5: score_tile<I, 5>(inputs, outputs + o, stride, sums + o * W<A>, count); break;
    case 4: score_tile<I, 4>(inputs, outputs + o, stride, sums + o * W<A>, count); break;
    case 3: score_tile<I, 3>(inputs, outputs + o, stride, sums + o * W<A>, count); break;
    case 2: score_tile<I, 2>(inputs, outputs + o, stride, sums + o * W<A>, count); break;
    case 1: score_tile<I, 1>(inputs, outputs + o, stride, sums + o * W<A>, count); break;
    default: break;
  }
}

// One vector of channels of both gradients: dv of `inputs` rows (rows of e, `count` apart) is added by add(i, dv); du
// to grad_out. O outputs from o on, the first of them (First) or more.
template <int O, class Add>
SK_INLINE void grad_tile(const A* const* inputs, int64_t rows, const A* const* outputs, const A* e, int64_t count,
                         int64_t c, A* grad_out, const Add& add) {
  Vec<A> u[O], du[O];
#pragma GCC unroll 8
  for (int o = 0; o < O; ++o) u[o] = load(outputs[o] + c), du[o] = Vec<A>{};
  for (int64_t i = 0; i < rows; ++i) {
    const Vec<A> v = load(inputs[i] + c);
    Vec<A> dv{};
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) {
      const Vec<A> weight = broadcast<A>(e[i * count + o]);
      dv += weight * u[o];
      du[o] += weight * v;
    }
    add(i, dv);
  }
#pragma GCC unroll 8
  for (int o = 0; o < O; ++o) store(grad_out + o * W<A>, du[o]);
}

class Trainer {
 public:
  Trainer(const WordTraining& p, int64_t longest, void* scratch, WordLoss& loss)
      : p_(p), m_(p, longest, scratch), loss_(loss), outputs_count_(1 + p.negatives) {}

  void sentence(int64_t number) {
    Random random(p_.seed, static_cast<uint64_t>(number));
    const int64_t begin = p_.starts[number], end = p_.starts[number + 1];
    const int64_t first = p_.starts[p_.first], all = p_.starts[p_.last] - first;
    rate_ = p_.rate + (p_.last_rate - p_.rate) *
                          static_cast<A>(static_cast<double>(begin - first) / static_cast<double>(all > 0 ? all : 1));
    count_ = 0;
    for (int64_t t = begin; t < end; ++t) {
      const int32_t word = p_.tokens[t];
      if (!p_.keep || random.number() <= p_.keep[word]) m_.words[count_++] = word;
    }
    loss_.tokens += count_;
    if (count_ < 2) return;
    draw(random, 0, now_);
    int64_t entered = 0;
    for (int64_t middle = 0; middle < count_; ++middle) {
      const Window window = now_;
      if (middle + 1 < count_) draw(random, middle + 1, now_);  // whose rows come while this window is computed
      const int64_t coming = middle + p_.window + 2;
      if (coming < count_ && !p_.row_starts) prefetch(p_.w_in + m_.words[coming] * p_.stride);
      for (; entered < count_ && entered <= middle + p_.window; ++entered) enter(entered);
      train(window, middle);
      if (middle >= p_.window) leave(middle - p_.window);
    }
    for (int64_t at = count_ > p_.window ? count_ - p_.window : 0; at < count_; ++at) leave(at);
  }

 private:
  struct Window {
    int64_t size;
    int32_t outputs[1 + kMostNegatives];
  };

  void draw(Random& random, int64_t middle, Window& window) const {
    window.size = p_.shrink ? 1 + random.below(p_.window) : p_.window;
    window.outputs[0] = m_.words[middle];
    for (int64_t k = 1; middle % kAlike == 0 && k < outputs_count_; ++k) {
      const uint64_t drawn = random.next();
      const int64_t column = static_cast<int64_t>((drawn & 0xffffffffu) * static_cast<uint64_t>(p_.words) >> 32);
      window.outputs[k] = (drawn >> 32) < p_.threshold[column] ? static_cast<int32_t>(column) : p_.alias[column];
    }
    for (int64_t k = 0; k < outputs_count_; ++k) prefetch(p_.w_out + window.outputs[k] * p_.stride);
  }
  void prefetch(const A* row) const {
    for (int64_t c = 0; c < p_.stride; c += 16) __builtin_prefetch(row + c, 1);
  }

  // ---- the words in reach -----------------------------------------------------------------------------------------

  int64_t slot(int64_t at) const { return at % (2 * p_.window + 1); }
  // Calls body(row) for the rows of the word at `at`; returns how many they are.
  template <class Body>
  SK_INLINE int64_t for_rows(int64_t at, const Body& body) const {
    const int64_t word = m_.words[at];
    if (!p_.row_starts) {
      body(p_.w_in + word * p_.stride);
      return 1;
    }
    const int64_t first = p_.row_starts[word], last = p_.row_starts[word + 1];
    for (int64_t r = first; r < last; ++r) body(p_.w_in + p_.rows[r] * p_.stride);
    return last - first;
  }
  void enter(int64_t at) {
    A *const vector = m_.vectors + slot(at) * p_.stride, *const before = m_.before + slot(at) * p_.stride;
    A part = 1;
    for (int64_t c = 0; c < p_.stride; c += W<A>) {
      Vec<A> sum{};
      const int64_t rows = for_rows(at, [&](const A* row) SK_INLINED { sum += load(row + c); });
      part = A(1) / static_cast<A>(rows);
      store(vector + c, sum * part), store(before + c, sum * part);
    }
    m_.parts[slot(at)] = p_.parity ? A(1) : part;
  }
  void leave(int64_t at) {
    const A *const vector = m_.vectors + slot(at) * p_.stride, *const before = m_.before + slot(at) * p_.stride;
    for_rows(at, [&](A* row) SK_INLINED {
      for (int64_t c = 0; c < p_.stride; c += W<A>)
        store(row + c, load(row + c) + (load(vector + c) - load(before + c)));
    });
  }

  // ---- a window ---------------------------------------------------------------------------------------------------

  void train(const Window& window, int64_t middle) {
    const int64_t low = middle > window.size ? middle - window.size : 0;
    const int64_t high = middle + window.size + 1 < count_ ? middle + window.size + 1 : count_;
    int64_t around = 0;
    for (int64_t at = low; at < high; ++at)
      if (at != middle) parts_[around] = m_.parts[slot(at)], m_.inputs[around++] = m_.vectors + slot(at) * p_.stride;
    if (around == 0) return;
    for (int64_t k = 0; k < outputs_count_; ++k) outputs_[k] = p_.w_out + window.outputs[k] * p_.stride;
    const int64_t inputs = p_.cbow ? 1 : around;
    if (p_.cbow) mean_of_window(around);
    const A* const* rows = p_.cbow ? &hidden_ : m_.inputs;
    scores_of(rows, inputs);
    errors_of(window, inputs);
    loss_.pairs += inputs;
    gradients_of(rows, inputs, around);
  }

  void mean_of_window(int64_t around) {
    const A share = A(1) / static_cast<A>(around);
    for (int64_t c = 0; c < p_.stride; c += W<A>) {
      Vec<A> sum{};
      for (int64_t i = 0; i < around; ++i) sum += load(m_.inputs[i] + c);
      store(m_.hidden + c, sum * share);
    }
    hidden_ = m_.hidden;
  }

  void scores_of(const A* const* rows, int64_t inputs) {
    constexpr int I = SK_VEC_BYTES == 64 ? 3 : 1;
    const int64_t count = outputs_count_;
    int64_t i = 0;
    for (; i + I <= inputs; i += I) score_rows<I>(rows + i, outputs_, count, p_.stride, m_.sums + i * count * W<A>);
    for (; i < inputs; ++i) score_rows<1>(rows + i, outputs_, count, p_.stride, m_.sums + i * count * W<A>);
    const int64_t all = inputs * count;
    for (int64_t first = 0; first < all; first += W<A>) {
      Vec<A> square[W<A>];
      for (int n = 0; n < W<A>; ++n) square[n] = first + n < all ? load(m_.sums + (first + n) * W<A>) : Vec<A>{};
      transpose_square<A>(square);
      for (int step = W<A> / 2; step > 0; step /= 2)
        for (int n = 0; n < step; ++n) square[n] += square[n + step];
      store(m_.scores + first, square[0]);
    }
  }

  // e in the place of the scores.
  void errors_of(const Window& window, int64_t inputs) {
    const int64_t count = outputs_count_, all = inputs * count;
    if (p_.wants_loss)
      for (int64_t i = 0; i < inputs; ++i)
        for (int64_t k = 0; k < count; ++k)
          if (k == 0 || window.outputs[k] != window.outputs[0]) {
            const A s = k == 0 ? -m_.scores[i * count] : m_.scores[i * count + k];  // log(1 + exp(s))
            loss_.sum += static_cast<double>((s > 0 ? s : A(0)) + __builtin_log1pf(__builtin_expf(s > 0 ? -s : s)));
          }
    for (int64_t n = 0; n < all; n += W<A>) {
      const Vec<A> s = load(m_.scores + n);
      Vec<A> error = sigmoid<A>(s) * -rate_;
      if (p_.parity) error = s > A(6) ? broadcast<A>(-rate_) : s < A(-6) ? Vec<A>{} : error;
      store(m_.scores + n, error);
    }
    for (int64_t i = 0; i < inputs; ++i) m_.scores[i * count] += rate_;
    for (int64_t k = 1; k < count; ++k)
      if (window.outputs[k] == window.outputs[0])
        for (int64_t i = 0; i < inputs; ++i) m_.scores[i * count + k] = 0;
  }

  void gradients_of(const A* const* rows, int64_t inputs, int64_t around) {
    const int64_t count = outputs_count_;
    const A share = p_.parity ? A(1) : A(1) / static_cast<A>(around);
    for (int64_t c = 0; c < p_.stride; c += W<A>) {
      Vec<A> dv[kMostWindow * 2];
      int64_t o = 0;
      bool first = true;
      const auto tile = [&](auto size) SK_INLINED {
        grad_tile<decltype(size)::value>(rows, inputs, outputs_ + o, m_.scores + o, count, c, m_.grad_out + o * W<A>,
                                         [&](int64_t i, Vec<A> d) SK_INLINED { dv[i] = first ? d : dv[i] + d; });
        first = false;
      };
      for (; o + kOutputs <= count; o += kOutputs) tile(Size<kOutputs>{});
      switch (count - o) {
        case 5: tile(Size<5>{}); break;
        case 4: tile(Size<4>{}); break;
        case 3: tile(Size<3>{}); break;
        case 2: tile(Size<2>{}); break;
        case 1: tile(Size<1>{}); break;
        default: break;
      }
      for (int64_t i = 0; i < around; ++i) {
        A* const vector = m_.inputs[i] + c;
        store(vector, load(vector) + (p_.cbow ? dv[0] * share : dv[i]) * parts_[i]);
      }
      for (int64_t k = 0; k < count; ++k) {
        A* const row = outputs_[k] + c;
        store(row, load(row) + load(m_.grad_out + k * W<A>));
      }
    }
  }

  template <int N>
  struct Size {
    static constexpr int value = N;
  };

  const WordTraining& p_;
  const Memory m_;
  WordLoss& loss_;
  const int64_t outputs_count_;
  int64_t count_ = 0;
  A rate_ = 0;
  Window now_{};
  const A* hidden_ = nullptr;
  A parts_[2 * kMostWindow];
  A* outputs_[1 + kMostNegatives];
};

int64_t scratch(const WordTraining& p, int64_t longest) { return Memory(p, longest, nullptr).bytes; }
void train(const WordTraining& p, int64_t begin, int64_t end, int64_t longest, void* memory, WordLoss& loss) {
  Trainer trainer(p, longest, memory, loss);
  for (int64_t sentence = begin; sentence < end; ++sentence) trainer.sentence(sentence);
}

}  // namespace

const TrainerKernels trainer_kernels = {scratch, train};

}  // namespace SK_TIER
}  // namespace seqkern
