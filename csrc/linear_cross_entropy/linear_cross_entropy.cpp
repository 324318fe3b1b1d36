// Cross-entropy of a linear layer's outputs, host side: checks, allocates, divides the work, registers the ops under
// the CPU key.
//
// Rows that are not ignored are taken in chunks, classes in tiles, and a tile of logits never leaves the cache between
// the product that makes it and those that use it:
//
//   tile    = W_tile X^T                      classes x rows: W is read in place, X is packed once a chunk
//   dW_tile += d(tile) X,  dX += d(tile)^T W_tile
//
// With gradients in the forward pass a chunk's logits wait, all its tiles, until the sums over all classes are known:
// three products a logit. The backward pass knows the sums and makes the logits again: four products, no chunk kept.
// dX is summed over fixed groups of tiles, a group by one thread, and the groups are added in order: the bits are the
// same on any number of threads.
//
// Few classes make no tiles that are worth a product. There the rows are divided instead: a block of rows has all its
// logits, its losses and dX by one thread, and dW is one product of all blocks, in order.
#include "linear_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "cross_entropy/losses.h"
#include "parallel.h"
#include "products.h"
#include "tensor.h"

namespace seqkern {
namespace {

// NOTES.md has what other sizes gave.
constexpr int64_t kTileClasses = 256;
// Rows of a chunk where classes are many: as many as the hidden states are deep, within limits.
constexpr int64_t kLeastChunkRows = 384, kMostChunkRows = 512;
// Groups of tiles that add up dX apart.
constexpr int64_t kGroups = 16;
// Numbers of a chunk's logits.
constexpr int64_t kChunkLogits = 16 << 20;
// Up to so many classes the rows are divided, into blocks of so many numbers and rows; of a chunk's logits, and of its
// rows, there are so many numbers.
constexpr int64_t kFewClasses = 2048;
constexpr int64_t kBlockLogits = 1 << 18, kLeastBlockRows = 64, kMostBlockRows = 384;
constexpr int64_t kFewClassesNumbers = 2 << 20;
// Where dW has so few numbers, groups of blocks have sums of their own.
constexpr int64_t kSummedApart = 1 << 17;

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }
int64_t up(int64_t size, int64_t block) { return blocks(size, block) * block; }

// What is wanted, and where it goes; weight's and bias's in the accumulation type.
struct Gradients {
  bool input, weight, bias;
  Tensor of_input, of_weight, of_bias;
  bool any() const { return input || weight || bias; }
};

template <class A>
class CrossEntropy {
 public:
  CrossEntropy(const char* op, const Tensor& input, const Tensor& weight, const Tensor& target,
               const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight, const LossOptions& options)
      : dtype_(dtype_of(input, op, "input")),
        acc_(sizeof(A) == 8 ? Dtype::f64 : Dtype::f32),
        products_(product_kernels_for(dtype_)),
        kernels_(linear_cross_entropy_kernels()),
        rows_(input.size(0)),
        depth_(input.size(1)),
        classes_(weight.size(0)),
        input_(input),
        weight_(weight),
        targets_(static_cast<const int64_t*>(target.const_data_ptr())),
        class_weight_(data_or_null<A>(class_weight)),
        bias_(data_or_null<A>(bias)),
        losses_(options, classes_, class_weight_) {
    tile_ = std::clamp<int64_t>(up(blocks(classes_, kGroups), 16), 16, kTileClasses);
    tiles_ = blocks(classes_, tile_);
    groups_ = std::min(tiles_, kGroups);
    checked_product({rows_, std::max(depth_, int64_t{1}), 8}, op);
    checked_product({classes_, std::max(depth_, int64_t{1}), 8}, op);
    for (int64_t row = 0; row < rows_; ++row)
      if (losses_.counts(targets_, row, op)) valid_.push_back(row);
    for (int64_t row : valid_) target_weight_ += losses_.weight_of(targets_[row]);
    by_rows_ = classes_ <= kFewClasses;
    if (by_rows_) tile_ = classes_, tiles_ = groups_ = 1;
    tile_weights_.resize(tiles_);
    for (int64_t c = 0; c < classes_; ++c) tile_weights_[c / tile_] += static_cast<A>(losses_.weight_of(c));
  }

  double target_weight() const { return target_weight_; }

  // Loss of each row, largest logit and sum of exp(logit - largest); 0, 0 and 1 of ignored rows. Gradients for
  // `upstream`, the same for all rows.
  void forward(A* losses, A* max, A* sum, double upstream, Gradients& gradients) {
    std::fill(losses, losses + rows_, A(0));
    std::fill(max, max + rows_, A(0));
    std::fill(sum, sum + rows_, A(1));
    begin(gradients);
    const bool keep = gradients.any();
    const auto numbers = [&](int64_t i, int64_t r, const RowArrays& at) {
      const int64_t row = valid_[i];
      losses[row] =
          losses_.loss(targets_[row], at.max[r], at.sum[r], smooths() ? at.weighted[r] : A(0), at.hit_logits[r]);
      max[row] = at.max[r], sum[row] = at.sum[r];
      coefficients(i, r, at, upstream, 0);
    };
    chunks(keep, gradients, [&](const Chunk& chunk, const RowArrays& at) {
      for (int64_t r = 0; r < chunk.rows; ++r) numbers(chunk.first + r, r, at);
    });
  }

  // Gradients for the upstream gradients of each row's loss and log-sum-exp.
  void backward(const A* grad_loss, const A* grad_lse, const A* max, const A* sum, Gradients& gradients) {
    begin(gradients);
    known_max_ = max, known_sum_ = sum;
    chunks(false, gradients, [&](const Chunk& chunk, const RowArrays& at) {
      for (int64_t r = 0; r < chunk.rows; ++r) {
        const int64_t row = valid_[chunk.first + r];
        at.max[r] = max[row], at.sum[r] = sum[row];
        coefficients(chunk.first + r, r, at, grad_loss ? static_cast<double>(grad_loss[row]) : 0,
                     grad_lse ? static_cast<double>(grad_lse[row]) : 0);
      }
    });
  }

 private:
  struct Chunk {
    int64_t first, rows;  // of valid_
  };
  // (rows) each, whole vectors.
  struct RowArrays {
    A *max, *sum, *weighted, *hit_logits, *p_scale, *hit, *spread;
  };

  bool smooths() const { return losses_.smooths(); }

  void coefficients(int64_t i, int64_t r, const RowArrays& at, double of_loss, double of_lse) const {
    const auto k = losses_.coefficients(targets_[valid_[i]], at.max[r], at.sum[r], of_loss, of_lse);
    at.p_scale[r] = k.p_scale, at.hit[r] = k.hit, at.spread[r] = k.spread;
  }

  void begin(Gradients& g) {
    if (g.bias) std::fill_n(static_cast<A*>(g.of_bias.mutable_data_ptr()), classes_, A(0));
    if (g.weight && valid_.empty())
      std::memset(g.of_weight.mutable_data_ptr(), 0, classes_ * depth_ * static_cast<int64_t>(sizeof(A)));
    if (g.input && static_cast<int64_t>(valid_.size()) < rows_)
      std::memset(g.of_input.mutable_data_ptr(), 0,
                  rows_ * depth_ * size_of(dtype_of(g.of_input, "linear_cross_entropy", "grad_input")));
  }

  // Calls known(chunk, arrays) once a chunk's sums are known; it sets the coefficients.
  template <class Known>
  void chunks(bool keep, Gradients& gradients, const Known& known) {
    const int64_t count = static_cast<int64_t>(valid_.size());
    if (count == 0 || classes_ == 0) return;
    if (by_rows_) return blocks_of_rows(gradients, known);
    const int64_t usual = std::clamp(up(depth_, 64), kLeastChunkRows, kMostChunkRows);
    int64_t most = std::clamp<int64_t>(kTileClasses * usual / tile_, usual, 4096);
    if (keep) most = std::min(most, std::max<int64_t>(96, kChunkLogits / classes_ / 64 * 64));
    const int64_t size = std::min(most, up(blocks(count, blocks(count, most)), 64));
    for (int64_t first = 0; first < count; first += size)
      run({first, std::min(size, count - first)}, keep, gradients, known);
  }

  // The chunk's rows of the input, as a matrix.
  const void* gather(const Chunk& chunk, void* copy, int64_t& stride) const {
    const char* data = static_cast<const char*>(input_.const_data_ptr());
    const int64_t bytes = size_of(dtype_);
    stride = input_.stride(0);
    const char* first = data + valid_[chunk.first] * stride * bytes;
    if (valid_[chunk.first + chunk.rows - 1] - valid_[chunk.first] == chunk.rows - 1) return first;
    char* out = static_cast<char*>(copy);
    for (int64_t r = 0; r < chunk.rows; ++r)
      std::memcpy(out + r * depth_ * bytes, data + valid_[chunk.first + r] * stride * bytes, depth_ * bytes);
    stride = depth_;
    return out;
  }

  template <class Known>
  void run(const Chunk& chunk, bool keep, Gradients& gradients, const Known& known) {
    const int64_t R = chunk.rows, ld = products_.row_stride(acc_, R);
    Scratch copy(R * depth_ * size_of(dtype_));
    int64_t x_stride;
    const void* x = gather(chunk, copy.data(), x_stride);
    const PackedMatrix x_columns = pack(
        products_, {.dtype = dtype_, .data = x, .k_stride = 1, .n_stride = x_stride, .depth = depth_, .columns = R});
    const PackedMatrix x_rows =
        gradients.weight
            ? pack(products_,
                   {.dtype = dtype_, .data = x, .k_stride = x_stride, .n_stride = 1, .depth = R, .columns = depth_})
            : PackedMatrix();

    // Rows' arrays; max, sum and weighted for each tile, of which the first one's become the rows'.
    const int64_t sets = known_max_ ? 1 : tiles_;
    const Scratch arrays((5 + 3 * sets) * ld * static_cast<int64_t>(sizeof(A)));
    A* const base = static_cast<A*>(arrays.data());
    const RowArrays at{base + 5 * ld, base + (5 + sets) * ld, base + (5 + 2 * sets) * ld, base, base + ld,
                       base + 2 * ld, base + 3 * ld};
    std::vector<int64_t> targets(R);
    for (int64_t r = 0; r < R; ++r) targets[r] = targets_[valid_[chunk.first + r]];

    const int64_t tile_size = tile_ * ld;
    const Scratch logits(tile_size * static_cast<int64_t>(sizeof(A)) * (keep ? tiles_ : worker_count(tiles_)));
    const int64_t scratch_bytes = products_.multiply_scratch(dtype_);
    const auto tile_at = [&](int64_t index) {
      return LogitTile{.dtype = acc_,
                       .classes = std::min(tile_, classes_ - index * tile_),
                       .rows = R,
                       .logits = nullptr,
                       .stride = ld,
                       .bias = bias_ ? bias_ + index * tile_ : nullptr,
                       .class_weight = class_weight_ ? class_weight_ + index * tile_ : nullptr,
                       .softcap = losses_.options.softcap,
                       .targets = targets.data(),
                       .first_class = index * tile_};
    };
    const auto fill = [&](const LogitTile& tile, void* scratch) {
      product({.rows = tile.classes,
               .columns = R,
               .depth = depth_,
               .a_type = dtype_,
               .a = static_cast<const char*>(weight_.const_data_ptr()) +
                    tile.first_class * weight_.stride(0) * size_of(dtype_),
               .a_row_stride = weight_.stride(0),
               .packed_b = x_columns.data(),
               .c_type = acc_,
               .c = tile.logits,
               .c_stride = ld},
              scratch);
    };
    const auto sums_at = [&](int64_t set) {
      return TileSums{.max = at.max + set * ld,
                      .sum = at.sum + set * ld,
                      .weighted = smooths() ? at.weighted + set * ld : nullptr,
                      .hit_logits = at.hit_logits};
    };
    if (!known_max_) {
      const Scratch scratch(scratch_bytes, worker_count(tiles_));
      parallel_workers(tiles_, [&](WorkQueue& queue, int64_t worker) {
        for (int64_t index; queue.take(index);) {
          LogitTile tile = tile_at(index);
          tile.logits = static_cast<A*>(logits.data()) + (keep ? index : worker) * tile_size;
          fill(tile, scratch.piece(worker));
          kernels_.sums(tile, sums_at(index));
        }
      });
      kernels_.combine({.dtype = acc_,
                        .tiles = tiles_,
                        .rows = R,
                        .stride = ld,
                        .max = at.max,
                        .sum = at.sum,
                        .weighted = smooths() ? at.weighted : nullptr,
                        .tile_weights = tile_weights_.data()});
    }
    known(chunk, at);
    if (!gradients.any()) return;

    // Group by group.
    // Of the two operands of dX, W and the tile, the one with fewer columns is packed.
    const bool across = depth_ > R;  // dX^T += W_tile^T d(tile)
    const int64_t ldp = across ? ld : products_.row_stride(acc_, depth_), part = (across ? depth_ : R) * ldp;
    const Scratch parts(gradients.input ? groups_ * part * static_cast<int64_t>(sizeof(A)) : 0);
    const auto panels_of = [&](int64_t index) {
      const LogitTile tile = tile_at(index);
      if (across) return Matrix{.dtype = acc_, .k_stride = ld, .n_stride = 1, .depth = tile.classes, .columns = R};
      return Matrix{.dtype = dtype_,
                    .data = static_cast<const char*>(weight_.const_data_ptr()) +
                            tile.first_class * weight_.stride(0) * size_of(dtype_),
                    .k_stride = weight_.stride(0),
                    .n_stride = 1,
                    .depth = tile.classes,
                    .columns = depth_};
    };
    const int64_t panel_bytes = gradients.input ? up(products_.packed_bytes(panels_of(0)), 64) : 0;
    const int64_t multiply_bytes = up(std::max(scratch_bytes, products_.multiply_scratch(acc_)), 64);
    const Scratch scratch(multiply_bytes + panel_bytes, worker_count(groups_));
    parallel_workers(groups_, [&](WorkQueue& queue, int64_t worker) {
      char* const own = static_cast<char*>(scratch.piece(worker));
      void* const panels = own + multiply_bytes;
      for (int64_t group; queue.take(group);) {
        const int64_t begin = group * tiles_ / groups_, end = (group + 1) * tiles_ / groups_;
        for (int64_t index = begin; index < end; ++index) {
          LogitTile tile = tile_at(index);
          tile.logits = static_cast<A*>(logits.data()) + (keep ? index : worker) * tile_size;
          if (!keep) {
            fill(tile, own);
            kernels_.sums(tile, {nullptr, nullptr, nullptr, at.hit_logits});
          }
          kernels_.gradient(tile, {.max = at.max,
                                   .p_scale = at.p_scale,
                                   .hit = at.hit,
                                   .spread = smooths() ? at.spread : nullptr,
                                   .hit_logits = at.hit_logits,
                                   .bias_sums = gradients.bias ? static_cast<A*>(gradients.of_bias.mutable_data_ptr()) +
                                                                     tile.first_class
                                                               : nullptr});
          if (gradients.weight)
            product({.rows = tile.classes,
                     .columns = depth_,
                     .depth = R,
                     .a_type = acc_,
                     .a = tile.logits,
                     .a_row_stride = ld,
                     .packed_b = x_rows.data(),
                     .c_type = acc_,
                     .c = static_cast<A*>(gradients.of_weight.mutable_data_ptr()) + tile.first_class * depth_,
                     .c_stride = depth_,
                     .accumulate = chunk.first > 0},
                    own);
          if (!gradients.input) continue;
          Matrix b = panels_of(index);
          if (across) b.data = tile.logits;
          for (int64_t item = 0; item < products_.pack_items(b); ++item) products_.pack(b, panels, item);
          A* const sum = static_cast<A*>(parts.data()) + group * part;
          if (across)
            product({.rows = depth_,
                     .columns = R,
                     .depth = tile.classes,
                     .a_type = dtype_,
                     .a = static_cast<const char*>(weight_.const_data_ptr()) +
                          tile.first_class * weight_.stride(0) * size_of(dtype_),
                     .a_row_stride = 1,
                     .a_k_stride = weight_.stride(0),
                     .packed_b = panels,
                     .c_type = acc_,
                     .c = sum,
                     .c_stride = ldp,
                     .accumulate = index > begin},
                    own);
          else
            product({.rows = R,
                     .columns = depth_,
                     .depth = tile.classes,
                     .a_type = acc_,
                     .a = tile.logits,
                     .a_row_stride = 1,
                     .a_k_stride = ld,
                     .packed_b = panels,
                     .c_type = acc_,
                     .c = sum,
                     .c_stride = ldp,
                     .accumulate = index > begin},
                    own);
        }
      }
    });
    if (!gradients.input || depth_ == 0) return;
    const Dtype out = dtype_of(gradients.of_input, "linear_cross_entropy", "grad_input");
    std::vector<void*> rows(R);
    for (int64_t r = 0; r < R; ++r)
      rows[r] =
          static_cast<char*>(gradients.of_input.mutable_data_ptr()) + valid_[chunk.first + r] * depth_ * size_of(out);
    const Scratch turned(across ? R * depth_ * static_cast<int64_t>(sizeof(A)) : 0);
    if (across)
      for_ranges(depth_, R, 0, [&](int64_t begin, int64_t end, void*) {
        kernels_.add(acc_, parts.data(), groups_, part, begin * ldp, end * ldp);
      });
    for_ranges(R, depth_, 0, [&](int64_t begin, int64_t end, void*) {
      if (across) kernels_.transpose(acc_, parts.data(), ldp, depth_, turned.data(), begin, end);
      else kernels_.add(acc_, parts.data(), groups_, part, begin * ldp, end * ldp);
      products_.scatter({.source_type = acc_,
                         .source = across ? turned.data() : parts.data(),
                         .source_stride = across ? depth_ : ldp,
                         .dtype = out,
                         .count = R,
                         .columns = depth_,
                         .rows = rows.data()},
                        begin, end);
    });
  }

  // Where dW is summed: over all blocks of a chunk, or over each of `count` groups of them apart.
  struct WeightSums {
    void* data;
    int64_t count;
  };

  // Few classes: blocks of rows, each by one thread.
  template <class Known>
  void blocks_of_rows(Gradients& gradients, const Known& known) {
    const int64_t count = static_cast<int64_t>(valid_.size());
    const int64_t most = std::clamp(kBlockLogits / classes_ / 64 * 64, kLeastBlockRows, kMostBlockRows);
    const int64_t block = std::min({most, std::max(kLeastBlockRows, up(blocks(count, kGroups), 64)), up(count, 16)});
    // Rows of a chunk. X is packed in whole panels: 64 rows a row at least.
    const int64_t rows = up(std::max(block, kFewClassesNumbers / std::max({classes_, depth_, int64_t{64}})), block);
    const PackedMatrix weight = gradients.input ? pack(products_, rows_of_weight()) : PackedMatrix();
    const int64_t size = classes_ * depth_;
    const int64_t sums = size <= kSummedApart ? std::min(kGroups, blocks(std::min(rows, count), block)) : 1;
    const Scratch parts(gradients.weight && sums > 1 ? sums * size * static_cast<int64_t>(sizeof(A)) : 0);
    const WeightSums weight_sums{sums > 1 ? parts.data() : gradients.of_weight.mutable_data_ptr(), sums};
    for (int64_t first = 0; first < count; first += rows)
      run_by_rows({first, std::min(rows, count - first)}, block, weight, weight_sums, gradients, known);
    if (!gradients.weight || sums == 1) return;
    for_ranges(classes_, depth_, 0, [&](int64_t begin, int64_t end, void*) {
      kernels_.add(acc_, parts.data(), sums, size, begin * depth_, end * depth_);
    });
    std::memcpy(gradients.of_weight.mutable_data_ptr(), parts.data(), size * static_cast<int64_t>(sizeof(A)));
  }

  Matrix rows_of_weight() const {
    return {.dtype = dtype_,
            .data = weight_.const_data_ptr(),
            .k_stride = weight_.stride(0),
            .n_stride = 1,
            .depth = classes_,
            .columns = depth_};
  }

  template <class Known>
  void run_by_rows(const Chunk& chunk, int64_t block, const PackedMatrix& weight, const WeightSums& weight_sums,
                   Gradients& gradients, const Known& known) {
    const int64_t count = blocks(chunk.rows, block), ld = products_.row_stride(acc_, block);
    const auto bytes_of = [](int64_t n) { return n * static_cast<int64_t>(sizeof(A)); };
    const auto part = [&](int64_t n) {
      return Chunk{chunk.first + n * block, std::min(block, chunk.rows - n * block)};
    };
    const auto columns_of = [&](const Chunk& b, const void* x, int64_t stride) {  // X^T
      return Matrix{.dtype = dtype_, .data = x, .k_stride = 1, .n_stride = stride, .depth = depth_, .columns = b.rows};
    };
    const auto rows_of = [&](const Chunk& b, const void* x, int64_t stride) {  // X
      return Matrix{.dtype = dtype_, .data = x, .k_stride = stride, .n_stride = 1, .depth = b.rows, .columns = depth_};
    };
    const Chunk whole = part(0);
    const int64_t columns_bytes = products_.packed_bytes(columns_of(whole, nullptr, depth_));
    const int64_t multiply_bytes = std::max(products_.multiply_scratch(dtype_), products_.multiply_scratch(acc_));
    const int64_t ldx = products_.row_stride(acc_, depth_);
    const Dtype input_type =
        gradients.input ? dtype_of(gradients.of_input, "linear_cross_entropy", "grad_input") : dtype_;

    // Of every block: logits, which become derivatives; X for dW; sums of the bias's gradient.
    const bool keep = gradients.weight;
    const Scratch logits(bytes_of(classes_ * ld), keep ? count : worker_count(count));
    const Scratch panels(keep ? products_.packed_bytes(rows_of(whole, nullptr, depth_)) : 0, count);
    const Scratch bias_sums(gradients.bias ? bytes_of(classes_) : 0, count);
    const Scratch own(piece_bytes(columns_bytes) + piece_bytes(multiply_bytes) + piece_bytes(bytes_of(8 * ld)) +
                          piece_bytes(bytes_of(block * ldx)) + piece_bytes(block * depth_ * size_of(dtype_)),
                      worker_count(count));

    parallel_workers(count, [&](WorkQueue& queue, int64_t worker) {
      Pieces pieces(own.piece(worker));
      void* const columns = pieces.take<char>(columns_bytes);
      void* const scratch = pieces.take<char>(multiply_bytes);
      A* const base = pieces.take<A>(8 * ld);
      A* const sum = pieces.take<A>(block * ldx);
      void* const copy = pieces.take<char>(block * depth_ * size_of(dtype_));
      const RowArrays at{base, base + ld, base + 2 * ld, base + 3 * ld, base + 4 * ld, base + 5 * ld, base + 6 * ld};
      std::vector<int64_t> targets(block);
      std::vector<void*> rows(block);
      for (int64_t n; queue.take(n);) {
        const Chunk b = part(n);
        int64_t stride;
        const void* x = gather(b, copy, stride);
        const Matrix of_columns = columns_of(b, x, stride), of_rows = rows_of(b, x, stride);
        for (int64_t item = 0; item < products_.pack_items(of_columns); ++item)
          products_.pack(of_columns, columns, item);
        if (keep)
          for (int64_t item = 0; item < products_.pack_items(of_rows); ++item)
            products_.pack(of_rows, panels.piece(n), item);
        for (int64_t r = 0; r < b.rows; ++r) targets[r] = targets_[valid_[b.first + r]];
        const LogitTile tile{.dtype = acc_,
                             .classes = classes_,
                             .rows = b.rows,
                             .logits = logits.piece(keep ? n : worker),
                             .stride = ld,
                             .bias = bias_,
                             .class_weight = class_weight_,
                             .softcap = losses_.options.softcap,
                             .targets = targets.data(),
                             .first_class = 0};
        product({.rows = classes_,
                 .columns = b.rows,
                 .depth = depth_,
                 .a_type = dtype_,
                 .a = weight_.const_data_ptr(),
                 .a_row_stride = weight_.stride(0),
                 .packed_b = columns,
                 .c_type = acc_,
                 .c = tile.logits,
                 .c_stride = ld},
                scratch);
        if (known_max_) {
          kernels_.sums(tile, {nullptr, nullptr, nullptr, at.hit_logits});
        } else {
          kernels_.sums(tile, {.max = at.max,
                               .sum = at.sum,
                               .weighted = smooths() ? at.weighted : nullptr,
                               .hit_logits = at.hit_logits});
          kernels_.combine({.dtype = acc_,
                            .tiles = 1,
                            .rows = b.rows,
                            .stride = ld,
                            .max = at.max,
                            .sum = at.sum,
                            .weighted = smooths() ? at.weighted : nullptr,
                            .tile_weights = tile_weights_.data()});
        }
        known(b, at);
        if (!gradients.any()) continue;
        if (gradients.bias) std::fill_n(static_cast<A*>(bias_sums.piece(n)), classes_, A(0));
        kernels_.gradient(tile, {.max = at.max,
                                 .p_scale = at.p_scale,
                                 .hit = at.hit,
                                 .spread = smooths() ? at.spread : nullptr,
                                 .hit_logits = at.hit_logits,
                                 .bias_sums = gradients.bias ? bias_sums.piece(n) : nullptr});
        if (!gradients.input || depth_ == 0) continue;
        for (int64_t r = 0; r < b.rows; ++r)
          rows[r] = static_cast<char*>(gradients.of_input.mutable_data_ptr()) +
                    valid_[b.first + r] * depth_ * size_of(input_type);
        Product to_rows{.rows = b.rows,
                        .columns = depth_,
                        .depth = classes_,
                        .a_type = acc_,
                        .a = tile.logits,
                        .a_row_stride = 1,
                        .a_k_stride = ld,
                        .packed_b = weight.data(),
                        .c_type = acc_};
        if (input_type == acc_) {
          to_rows.c_rows = rows.data();
          product(to_rows, scratch);
          continue;
        }
        to_rows.c = sum, to_rows.c_stride = ldx;
        product(to_rows, scratch);
        products_.scatter({.source_type = acc_,
                           .source = sum,
                           .source_stride = ldx,
                           .dtype = input_type,
                           .count = b.rows,
                           .columns = depth_,
                           .rows = rows.data()},
                          0, b.rows);
      }
    });

    if (gradients.bias)
      for (int64_t n = 0; n < count; ++n)
        for (int64_t c = 0; c < classes_; ++c)
          static_cast<A*>(gradients.of_bias.mutable_data_ptr())[c] += static_cast<const A*>(bias_sums.piece(n))[c];
    if (!keep) return;
    Product of_weight{.rows = classes_,
                      .columns = depth_,
                      .depth = block,
                      .a_type = acc_,
                      .a_row_stride = ld,
                      .c_type = acc_,
                      .c_stride = depth_};
    const int64_t items = products_.cut(of_weight, torch::stable::get_num_threads());
    const double work = static_cast<double>(classes_ * depth_) * static_cast<double>(chunk.rows);
    for_items(items * weight_sums.count, work, products_.multiply_scratch(acc_), [&](int64_t item, void* scratch) {
      const int64_t group = item / items;
      Product p = of_weight;
      p.c = static_cast<A*>(weight_sums.data) + group * classes_ * depth_;
      p.accumulate = chunk.first > 0;
      for (int64_t n = group * count / weight_sums.count; n < (group + 1) * count / weight_sums.count; ++n) {
        p.depth = part(n).rows;
        p.a = logits.piece(n);
        p.packed_b = panels.piece(n);
        products_.multiply(p, item % items, scratch);
        p.accumulate = true;
      }
    });
  }

  void product(Product p, void* scratch) const {
    const int64_t items = products_.cut(p, 0);
    for (int64_t item = 0; item < items; ++item) products_.multiply(p, item, scratch);
  }

  const Dtype dtype_, acc_;
  const ProductKernels& products_;
  const LinearCrossEntropyKernels& kernels_;
  const int64_t rows_, depth_, classes_;
  const Tensor input_, weight_;
  const int64_t* const targets_;
  const A *const class_weight_, *const bias_;
  const RowLosses<A> losses_;
  int64_t tile_, tiles_, groups_;
  bool by_rows_;  // few classes
  std::vector<int64_t> valid_;
  std::vector<A> tile_weights_;
  double target_weight_ = 0;
  const A *known_max_ = nullptr, *known_sum_ = nullptr;
};

struct Checked {
  Tensor input, weight, target;
  std::optional<Tensor> bias, class_weight;
};

Checked check(const char* op, const Tensor& input, const Tensor& weight, const Tensor& target,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& class_weight) {
  const Dtype dtype = dtype_of(input, op, "input");
  check_cpu(input, op, "input");
  check_cpu(weight, op, "weight");
  check_cpu(target, op, "target");
  check_dim(input, 2, op, "input");
  check_dim(weight, 2, op, "weight");
  check_dim(target, 1, op, "target");
  check_type(weight, input.scalar_type(), op, "weight");
  check_type(target, ScalarType::Long, op, "target");
  check_size(weight, 1, input.size(1), op, "weight");
  check_size(target, 0, input.size(0), op, "target");
  Checked checked{with_unit_last_stride(input), with_unit_last_stride(weight), as_contiguous(target), {}, {}};
  for (int i = 0; i < 2; ++i) {
    const std::optional<Tensor>& t = i == 0 ? bias : class_weight;
    const char* name = i == 0 ? "bias" : "class_weight";
    if (!t) continue;
    check_cpu(*t, op, name);
    check_dim(*t, 1, op, name);
    check_size(*t, 0, weight.size(0), op, name);
    check_type(*t, acc_type(dtype), op, name);
    (i == 0 ? checked.bias : checked.class_weight) = as_contiguous(*t);
  }
  return checked;
}

// Tensors of no elements where nothing is wanted.
Gradients gradients_of(const Checked& c, ScalarType input_type, ScalarType acc, bool input, bool weight, bool bias) {
  using Sizes = std::vector<int64_t>;
  const int64_t rows = c.input.size(0), depth = c.input.size(1), classes = c.weight.size(0);
  return {input,
          weight,
          bias,
          empty(c.input, input ? Sizes{rows, depth} : Sizes{0}, input_type),
          empty(c.input, weight ? Sizes{classes, depth} : Sizes{0}, acc),
          empty(c.input, bias ? Sizes{classes} : Sizes{0}, acc)};
}

template <class F>
void by_acc(const Tensor& input, const F& f) {
  if (input.scalar_type() == ScalarType::Double) f(double{});
  else f(float{});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> linear_cross_entropy_fwd(
    const Tensor& input, const Tensor& weight, const Tensor& target, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& class_weight, int64_t ignore_index, double label_smoothing, double z_loss,
    double softcap, int64_t reduction, bool need_input, bool need_weight, bool need_bias) {
  const char* op = "linear_cross_entropy_fwd";
  SK_CHECK(kNone <= reduction && reduction <= kSum, op, ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ",
           reduction);
  SK_CHECK(reduction != kNone || !(need_input || need_weight || need_bias), op,
           ": without a reduction the gradients come from linear_cross_entropy_bwd");
  const Checked c = check(op, input, weight, target, bias, class_weight);
  const ScalarType acc = acc_type(dtype_of(input, op, "input"));
  const int64_t rows = input.size(0);
  Tensor losses = empty(input, {rows}, acc), max = empty(input, {rows}, acc), sum = empty(input, {rows}, acc);
  Gradients gradients = gradients_of(c, acc, acc, need_input, need_weight, need_bias);
  Tensor loss = losses;
  by_acc(input, [&](auto number) {
    using A = decltype(number);
    CrossEntropy<A> call(op, c.input, c.weight, c.target, c.bias, c.class_weight,
                         {ignore_index, label_smoothing, z_loss, softcap});
    A* const of_rows = static_cast<A*>(losses.mutable_data_ptr());
    const double total = call.target_weight();
    call.forward(of_rows, static_cast<A*>(max.mutable_data_ptr()), static_cast<A*>(sum.mutable_data_ptr()),
                 reduction == kMean ? 1 / total : 1, gradients);
    if (reduction == kNone) return;
    double all = 0;
    for (int64_t row = 0; row < rows; ++row) all += static_cast<double>(of_rows[row]);
    loss = empty(input, std::initializer_list<int64_t>{}, acc);
    *static_cast<A*>(loss.mutable_data_ptr()) = static_cast<A>(reduction == kMean ? all / total : all);
  });
  return {loss, max, sum, gradients.of_input, gradients.of_weight, gradients.of_bias};
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_bwd(
    const std::optional<Tensor>& grad_loss, const std::optional<Tensor>& grad_lse, const Tensor& input,
    const Tensor& weight, const Tensor& target, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& class_weight, const Tensor& max, const Tensor& sum, int64_t ignore_index,
    double label_smoothing, double z_loss, double softcap, bool need_input, bool need_weight, bool need_bias) {
  const char* op = "linear_cross_entropy_bwd";
  const Checked c = check(op, input, weight, target, bias, class_weight);
  const ScalarType acc = acc_type(dtype_of(input, op, "input"));
  const auto of_rows = [&](const Tensor& t, const char* name) {
    check_cpu(t, op, name);
    check_dim(t, 1, op, name);
    check_size(t, 0, input.size(0), op, name);
    check_type(t, acc, op, name);
    return as_contiguous(t);
  };
  std::optional<Tensor> of_loss, of_lse;
  if (grad_loss) of_loss = of_rows(*grad_loss, "grad_loss");
  if (grad_lse) of_lse = of_rows(*grad_lse, "grad_lse");
  const Tensor tops = of_rows(max, "max"), sums = of_rows(sum, "sum");
  Gradients gradients = gradients_of(c, input.scalar_type(), acc, need_input, need_weight, need_bias);
  by_acc(input, [&](auto number) {
    using A = decltype(number);
    CrossEntropy<A> call(op, c.input, c.weight, c.target, c.bias, c.class_weight,
                         {ignore_index, label_smoothing, z_loss, softcap});
    call.backward(data_or_null<A>(of_loss), data_or_null<A>(of_lse), static_cast<const A*>(tops.const_data_ptr()),
                  static_cast<const A*>(sums.const_data_ptr()), gradients);
  });
  return {gradients.of_input, gradients.of_weight, gradients.of_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("linear_cross_entropy_fwd", TORCH_BOX(&linear_cross_entropy_fwd));
  m.impl("linear_cross_entropy_bwd", TORCH_BOX(&linear_cross_entropy_bwd));
}

}  // namespace seqkern
