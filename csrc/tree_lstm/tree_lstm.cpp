// Tree-LSTMs on CPU, host side, and the schedule of a forest.
//
// A level is a turn of a team of workers (rnn/team.h), each with its own places of it, which it takes a block at a
// time: sums of the children's states, products, cells. Only the children must be done before; so must, backward, the
// parents.
#include "tree_lstm.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "products.h"
#include "rnn/problem.h"
#include "rnn/team.h"
#include "scratch.h"

namespace seqkern {
namespace {

// Places and edges of a block, at most (but a place has all of its edges in one). Another worker is worth so many
// multiply-adds of a level, on average.
constexpr int64_t kPlaces = 64, kEdges = 192;
constexpr double kGrainLevel = 1 << 17;

// ---- schedule -------------------------------------------------------------------------------------------------------

const int64_t* numbers(const Tensor& t) { return static_cast<const int64_t*>(t.const_data_ptr()); }
int64_t* numbers_to_write(Tensor& t) { return static_cast<int64_t*>(t.mutable_data_ptr()); }

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_schedule(const Tensor& parents, const MaybeTensor& slots) {
  const char* const op = "tree_schedule";
  check_dim(parents, 1, op, "parents");
  const int64_t count = parents.size(0);
  check_like(parents, {count}, ScalarType::Long, op, "parents");
  if (slots) check_like(*slots, {count}, ScalarType::Long, op, "slots");
  const Tensor above = as_contiguous(parents), given = slots ? as_contiguous(*slots) : parents;
  const int64_t* const parent = numbers(above);
  const int64_t* const slot = slots ? numbers(given) : nullptr;
  const auto size = static_cast<size_t>(count);
  std::vector<int64_t> starts(size + 1), children, height(size), left(size);
  for (int64_t n = 0; n < count; ++n) {
    SK_CHECK(parent[n] >= -1 && parent[n] < count && parent[n] != n, op, ": parents must be other nodes below ", count,
             ", or -1 of roots, got ", parent[n], " of node ", n);
    if (parent[n] >= 0) ++starts[static_cast<size_t>(parent[n]) + 1];
  }
  for (size_t n = 0; n < size; ++n) left[n] = starts[n + 1], starts[n + 1] += starts[n];
  children.resize(static_cast<size_t>(starts[size]));
  std::vector<int64_t> next(starts.begin(), starts.end() - 1);
  for (int64_t n = 0; n < count; ++n)
    if (parent[n] >= 0) children[static_cast<size_t>(next[static_cast<size_t>(parent[n])]++)] = n;
  if (slot)
    for (size_t n = 0; n < size; ++n)
      std::sort(children.begin() + starts[n], children.begin() + starts[n + 1],
                [&](int64_t a, int64_t b) { return slot[a] < slot[b] || (slot[a] == slot[b] && a < b); });
  // A node is ready when all of its children are: from the leaves up.
  std::vector<int64_t> ready;
  ready.reserve(size);
  for (int64_t n = 0; n < count; ++n)
    if (left[static_cast<size_t>(n)] == 0) ready.push_back(n);
  int64_t levels = 0;
  for (size_t at = 0; at < ready.size(); ++at) {
    const int64_t n = ready[at], up = parent[n], own = height[static_cast<size_t>(n)];
    levels = std::max(levels, own + 1);
    if (up < 0) continue;
    height[static_cast<size_t>(up)] = own + 1;  // nodes get ready in the order of their heights
    if (--left[static_cast<size_t>(up)] == 0) ready.push_back(up);
  }
  SK_CHECK(static_cast<int64_t>(ready.size()) == count, op, ": parents must not lead in circles, as those of ",
           count - static_cast<int64_t>(ready.size()), " nodes do");
  Tensor order = empty(above, {count}, ScalarType::Long), bounds = empty(above, {2, levels + 1}, ScalarType::Long);
  Tensor child_starts = empty(above, {count + 1}, ScalarType::Long);
  Tensor below = empty(above, {starts[size]}, ScalarType::Long),
         in_slot = empty(above, {starts[size]}, ScalarType::Long);
  int64_t *const at_level = numbers_to_write(bounds), *const placed = numbers_to_write(order);
  for (int64_t l = 0; l <= levels; ++l) at_level[l] = 0;
  for (const int64_t h : height) ++at_level[h + 1];
  for (int64_t l = 0; l < levels; ++l) at_level[l + 1] += at_level[l];
  std::vector<int64_t> free(at_level, at_level + levels);
  for (int64_t n = 0; n < count; ++n) placed[free[static_cast<size_t>(height[static_cast<size_t>(n)])]++] = n;
  int64_t edge = 0;
  for (int64_t p = 0; p < count; ++p) {
    numbers_to_write(child_starts)[p] = edge;
    const auto n = static_cast<size_t>(placed[p]);
    for (int64_t e = starts[n]; e < starts[n + 1]; ++e, ++edge) {
      const int64_t child = children[static_cast<size_t>(e)];
      numbers_to_write(below)[edge] = child;
      numbers_to_write(in_slot)[edge] = slot ? slot[child] : e - starts[n];
    }
  }
  numbers_to_write(child_starts)[count] = edge;
  for (int64_t l = 0; l <= levels; ++l) at_level[levels + 1 + l] = numbers(child_starts)[at_level[l]];
  return {order, bounds, child_starts, below, in_slot};
}

// ---- arguments ------------------------------------------------------------------------------------------------------

struct Schedule {
  const Tensor &order, &levels, &child_starts, &children, &slots;
};

class Arguments {
 public:
  Arguments(const char* name, const Tensor& like, int64_t nodes, int64_t units, const Tensor& w_hh, const Schedule& s,
            int64_t slots_of_node)
      : op(name), dtype(dtype_of(like, op, "x_gates")), type(like.scalar_type()), hidden(units), nary(slots_of_node) {
    SK_CHECK(nary >= 0 && nary < (int64_t{1} << 20), op, ": nary must be 0 (child-sum) or the number of slots, got ",
             nary);
    width = checked_product({3 + nary, hidden}, op);
    const int64_t inputs = checked_product({std::max<int64_t>(nary, 1), hidden}, op);
    const int64_t outputs = nary ? width : checked_product({4, hidden}, op);
    checked_product({nodes + 1, std::max(width, 4 * hidden) + 64, 8}, op);
    checked_product({outputs + 64, inputs + 64, 8}, op);
    check_dim(w_hh, 2, op, "w_hh");
    check_like(w_hh, {outputs, inputs}, type, op, "w_hh");
    weights = with_unit_last_stride(w_hh);
    read(s, nodes);
  }
  Arguments(const Arguments&) = delete;

  // Calls turn(level, begin, end, scratch) for the places of each level, from the leaves up or down to them.
  template <class Turn>
  void for_levels(bool down, int64_t scratch_bytes, const Turn& turn) const {
    const double work = static_cast<double>(forest.nodes + forest.edges) * static_cast<double>(width + hidden) *
                        static_cast<double>(hidden) / static_cast<double>(std::max<int64_t>(forest.height, 1));
    const auto most = static_cast<int64_t>(work / kGrainLevel);
    const int64_t members = std::clamp<int64_t>(most, 1, torch::stable::get_num_threads());
    Team team(members);
    const Scratch scratch(scratch_bytes, worker_count(members));
    parallel_workers(members, [&](WorkQueue& queue, int64_t worker) {
      for (int64_t item; queue.take(item);)
        team.run(forest.height, item, [&](int64_t number, int64_t block) {
          const int64_t level = down ? forest.height - 1 - number : number;
          const int64_t first = forest.levels[level], count = forest.levels[level + 1] - first;
          const int64_t end = first + count * (block + 1) / members;
          for (int64_t begin = first + count * block / members; begin < end;) {
            int64_t last = begin + 1;
            while (last < end && last - begin < kPlaces &&
                   forest.child_starts[last + 1] - forest.child_starts[begin] <= kEdges)
              ++last;
            turn(level, begin, last, scratch.piece(worker));
            begin = last;
          }
        });
    });
  }
  int64_t inner() const { return forest.nodes - (forest.height ? forest.levels[1] : 0); }
  int64_t block_edges() const { return std::max(kEdges, most_children); }
  int64_t product_scratch() const {
    return std::max(products.multiply_scratch(dtype), products.multiply_scratch(wide));
  }
  Tensor result(const Tensor& like, std::initializer_list<int64_t> sizes, bool there = true) const {
    return there ? empty(like, sizes, type) : empty(like, {0}, type);
  }

  const char* op;
  Dtype dtype;
  ScalarType type;
  int64_t hidden, nary, width = 0, most_children = 0;
  const Dtype wide = dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  const ScalarType acc = acc_type(dtype);
  const int64_t size = size_of(dtype), wide_size = size_of(wide);
  const TreeLstmKernels& kernels = tree_lstm_kernels();
  const ProductKernels& products = product_kernels_for(dtype);
  Forest forest{};
  MaybeTensor weights;

 private:
  void read(const Schedule& s, int64_t nodes) {
    check_dim(s.children, 1, op, "children");
    check_dim(s.levels, 2, op, "levels");
    const int64_t edges = s.children.size(0), height = s.levels.size(1) - 1;
    SK_CHECK(height >= 0, op, ": levels must not be empty");
    const auto kept = [&](const Tensor& t, int64_t count, const char* argument) {
      if (t.dim() == 2) check_like(t, {2, count}, ScalarType::Long, op, argument);
      else check_like(t, {count}, ScalarType::Long, op, argument);
      kept_.push_back(as_contiguous(t));
      return numbers(kept_.back());
    };
    kept_.reserve(5);
    forest = {nodes,
              edges,
              height,
              kept(s.order, nodes, "order"),
              kept(s.levels, height + 1, "levels"),
              kept(s.child_starts, nodes + 1, "child_starts"),
              kept(s.children, edges, "children"),
              kept(s.slots, edges, "slots")};
    // Nothing below reads or writes by an index that is not checked here.
    const Forest& f = forest;
    std::vector<int64_t> place(static_cast<size_t>(nodes), -1);
    for (int64_t p = 0; p < nodes; ++p) {
      SK_CHECK(f.order[p] >= 0 && f.order[p] < nodes && place[static_cast<size_t>(f.order[p])] < 0, op,
               ": order must be a permutation of the ", nodes, " nodes, got ", f.order[p], " at place ", p);
      place[static_cast<size_t>(f.order[p])] = p;
    }
    SK_CHECK(f.levels[0] == 0 && f.levels[height] == nodes && f.child_starts[0] == 0 && f.child_starts[nodes] == edges,
             op, ": levels must go from 0 to ", nodes, " and child_starts from 0 to ", edges);
    std::vector<bool> taken(static_cast<size_t>(nodes));
    for (int64_t l = 0; l < height; ++l) {
      SK_CHECK(f.levels[l] < f.levels[l + 1] && f.levels[l + 1] <= nodes, op, ": levels must increase, got ",
               f.levels[l], " and then ", f.levels[l + 1]);
      for (int64_t p = f.levels[l]; p < f.levels[l + 1]; ++p) {
        const int64_t first = f.child_starts[p], last = f.child_starts[p + 1];
        SK_CHECK(first <= last && last <= edges && (first < last) == (l > 0), op,
                 ": child_starts must not decrease, and only leaves have no child, got ", first, " and then ", last,
                 " at place ", p);
        most_children = std::max(most_children, last - first);
        for (int64_t e = first; e < last; ++e) {
          const int64_t child = f.children[e];
          SK_CHECK(child >= 0 && child < nodes && place[static_cast<size_t>(child)] < f.levels[l] &&
                       !taken[static_cast<size_t>(child)],
                   op, ": children must be nodes of lower levels, each of one parent, got ", child);
          taken[static_cast<size_t>(child)] = true;
          SK_CHECK(!nary || (f.slots[e] >= 0 && f.slots[e] < nary && (e == first || f.slots[e - 1] < f.slots[e])), op,
                   ": slots of a node must increase, from 0 to ", nary - 1, ", got ", f.slots[e], " of child ", child);
        }
      }
    }
  }

  std::vector<Tensor> kept_;
};

// A packed right operand of products.
class Right {
 public:
  Right(const Arguments& a, Matrix b) : of_(a), depth_(b.depth), columns_(b.columns) {
    b.dtype = a.dtype;
    if (columns_) packed_.emplace(pack(a.products, b));
  }
  // C = A B, or added to C; the caller gives rows of A and C.
  void multiply(Product p, void* scratch) const {
    p.columns = columns_, p.depth = depth_, p.packed_b = packed_ ? packed_->data() : nullptr;
    if (p.rows == 0 || p.columns == 0) return;
    const int64_t items = of_.products.cut(p, 1);
    for (int64_t item = 0; item < items; ++item) of_.products.multiply(p, item, scratch);
  }

 private:
  const Arguments& of_;
  int64_t depth_, columns_;
  std::optional<PackedMatrix> packed_;
};

const char* row_of(const Tensor& t, int64_t row) {
  return static_cast<const char*>(t.const_data_ptr()) + row * t.stride(0) * t.element_size();
}
void* address(const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); }

// ---- forward --------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tree_lstm_fwd(const Tensor& x_gates, const Tensor& w_hh,
                                                                 const Tensor& order, const Tensor& levels,
                                                                 const Tensor& child_starts, const Tensor& children,
                                                                 const Tensor& slots, int64_t nary, int64_t leaves) {
  const char* const op = "tree_lstm_fwd";
  check_dim(x_gates, 2, op, "x_gates");
  const int64_t N = x_gates.size(0), H = x_gates.size(1) / 4;
  const Arguments a(op, x_gates, N, H, w_hh, {order, levels, child_starts, children, slots}, nary);
  SK_CHECK(leaves == N - a.inner(), op, ": leaves must be ", N - a.inner(), ", as levels say, got ", leaves);
  check_like(x_gates, {N, 4 * H}, a.type, op, "x_gates");
  const Tensor x = as_contiguous(x_gates);
  Tensor h = a.result(x, {N, H}), c = a.result(x, {N, H}), sums = a.result(x, {a.inner(), H}, !nary);
  Tensor cells = a.type == a.acc ? c : empty(x, {N, H}, a.acc), gates = empty(x, {N, 4 * H}, a.acc);
  // f of a root has no edge
  if (N > 0 && H > 0) std::memset(address(gates), 0, static_cast<size_t>(N * 4 * H * a.wide_size));
  const Forest& f = a.forest;
  const TreeLstmForward p{.dtype = a.dtype,
                          .hidden = H,
                          .nary = nary,
                          .forest = f,
                          .x_gates = x.const_data_ptr(),
                          .h = address(h),
                          .c = address(c),
                          .cells = address(cells),
                          .gates = address(gates)};
  const Tensor& w = *a.weights;
  const int64_t ld = w.stride(0);
  const auto rows = [&](int64_t first, int64_t count) {
    return Right(a, {.data = row_of(w, first), .k_stride = 1, .n_stride = ld, .depth = H, .columns = count});
  };
  std::vector<Right> right;
  if (nary) {
    for (int64_t slot = 0; slot < nary; ++slot)
      right.emplace_back(
          a,
          Matrix{
              .data = row_of(w, 0) + slot * H * a.size, .k_stride = 1, .n_stride = ld, .depth = H, .columns = a.width});
  } else {
    right.push_back(rows(0, H)), right.push_back(rows(H, H)), right.push_back(rows(2 * H, 2 * H));
  }
  struct Memory {
    void *products, *forget, *scratch;
  };
  const auto pieces_of = [&](Pieces& pieces) -> Memory {
    return {pieces.take<char>(kPlaces * a.width * a.wide_size),
            pieces.take<char>(nary ? 0 : a.block_edges() * H * a.wide_size), pieces.take<char>(a.product_scratch())};
  };
  Pieces sizes(nullptr);
  pieces_of(sizes);
  a.for_levels(false, sizes.bytes(), [&](int64_t level, int64_t begin, int64_t end, void* memory) {
    if (level == 0) return a.kernels.forward(p, begin, end, nullptr, nullptr);
    Pieces pieces(memory);
    const Memory m = pieces_of(pieces);
    const int64_t count = end - begin, first = f.child_starts[begin], edges = f.child_starts[end] - first;
    std::vector<const void*> from(static_cast<size_t>(edges));
    if (nary) {
      std::memset(m.products, 0, static_cast<size_t>(count * a.width * a.wide_size));
      std::vector<void*> to(static_cast<size_t>(edges));
      for (int64_t slot = 0; slot < nary; ++slot) {
        size_t found = 0;
        for (int64_t place = begin; place < end; ++place)
          for (int64_t e = f.child_starts[place]; e < f.child_starts[place + 1]; ++e)
            if (f.slots[e] == slot) {
              from[found] = row_of(h, f.children[e]);
              to[found++] = static_cast<char*>(m.products) + (place - begin) * a.width * a.wide_size;
            }
        Product product{.rows = static_cast<int64_t>(found),
                        .columns = 0,
                        .depth = 0,
                        .a_type = a.dtype,
                        .packed_b = nullptr,
                        .c_type = a.wide};
        product.a_rows = from.data(), product.c_rows = to.data(), product.accumulate = true;
        right[static_cast<size_t>(slot)].multiply(product, m.scratch);
      }
      return a.kernels.forward(p, begin, end, m.products, nullptr);
    }
    void* const sum = const_cast<char*>(row_of(sums, begin - leaves));
    a.kernels.sum_children(p, begin, end, sum);
    Product product{.rows = count, .columns = 0, .depth = 0, .a_type = a.dtype, .packed_b = nullptr, .c_type = a.wide};
    product.a = sum, product.a_row_stride = H, product.c = m.products, product.c_stride = a.width;
    right[0].multiply(product, m.scratch);
    product.c = static_cast<char*>(m.products) + H * a.wide_size;
    right[2].multiply(product, m.scratch);
    for (int64_t e = 0; e < edges; ++e) from[static_cast<size_t>(e)] = row_of(h, f.children[first + e]);
    Product of_edges{.rows = edges, .columns = 0, .depth = 0, .a_type = a.dtype, .packed_b = nullptr, .c_type = a.wide};
    of_edges.a_rows = from.data(), of_edges.c = m.forget, of_edges.c_stride = H;
    right[1].multiply(of_edges, m.scratch);
    a.kernels.forward(p, begin, end, m.products, m.forget);
  });
  if (a.type == a.acc) cells = empty(x, {0}, a.acc);  // c is that
  return {h, c, sums, cells, gates};
}

// ---- backward -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor, Tensor> tree_lstm_bwd(const MaybeTensor& grad_h, const MaybeTensor& grad_c,
                                                 const Tensor& w_hh, const Tensor& order, const Tensor& levels,
                                                 const Tensor& child_starts, const Tensor& children,
                                                 const Tensor& slots, const Tensor& cells, const Tensor& gates,
                                                 int64_t nary, int64_t leaves) {
  const char* const op = "tree_lstm_bwd";
  check_dim(cells, 2, op, "cells");
  const int64_t N = cells.size(0), H = cells.size(1);
  const Arguments a(op, w_hh, N, H, w_hh, {order, levels, child_starts, children, slots}, nary);
  SK_CHECK(leaves == N - a.inner(), op, ": leaves must be ", N - a.inner(), ", as levels say, got ", leaves);
  check_like(cells, {N, H}, a.acc, op, "cells");
  check_like(gates, {N, 4 * H}, a.acc, op, "gates");
  const Tensor kept_cells = as_contiguous(cells), kept_gates = as_contiguous(gates);
  const auto wide = [&](const MaybeTensor& t, const char* argument) {
    if (t) {
      check_like(*t, {N, H}, a.type, op, argument);
      return as_type_copy(*t, a.acc);
    }
    Tensor zeros = empty(kept_cells, {N, H}, a.acc);
    if (N > 0 && H > 0) std::memset(address(zeros), 0, static_cast<size_t>(N * H * a.wide_size));
    return zeros;
  };
  const Tensor of_h = wide(grad_h, "grad_h"), of_c = wide(grad_c, "grad_c");
  Tensor grad_x = a.result(kept_cells, {N, 4 * H}), grad_edge = a.result(kept_cells, {N, H}, !nary);
  Tensor grad_inner = a.result(kept_cells, {a.inner(), a.width});
  if (!nary && N > 0 && H > 0) std::memset(address(grad_edge), 0, static_cast<size_t>(N * H * a.size));
  const Forest& f = a.forest;
  const TreeLstmBackward p{.dtype = a.dtype,
                           .hidden = H,
                           .nary = nary,
                           .forest = f,
                           .cells = kept_cells.const_data_ptr(),
                           .gates = kept_gates.const_data_ptr(),
                           .grad_h = address(of_h),
                           .grad_c = address(of_c),
                           .grad_x = address(grad_x),
                           .grad_edge = address(grad_edge)};
  const Tensor& w = *a.weights;
  const int64_t ld = w.stride(0);
  std::vector<Right> right;
  std::vector<const void*> of_sums(static_cast<size_t>(a.width));  // the rows of i, g and o
  if (nary) {
    for (int64_t slot = 0; slot < nary; ++slot)
      right.emplace_back(
          a,
          Matrix{
              .data = row_of(w, 0) + slot * H * a.size, .k_stride = ld, .n_stride = 1, .depth = a.width, .columns = H});
  } else {
    for (int64_t k = 0; k < a.width; ++k) of_sums[static_cast<size_t>(k)] = row_of(w, k < H ? k : k + H);
    right.emplace_back(a, Matrix{.depth = a.width, .columns = H, .rows = of_sums.data()});
    right.emplace_back(a, Matrix{.data = row_of(w, H), .k_stride = ld, .n_stride = 1, .depth = H, .columns = H});
  }
  struct Memory {
    void *products, *forget, *sums, *edges, *scratch;
  };
  const auto pieces_of = [&](Pieces& pieces) -> Memory {
    const int64_t edges = nary ? 0 : a.block_edges();
    return {pieces.take<char>(kPlaces * a.width * a.wide_size), pieces.take<char>(edges * H * a.wide_size),
            pieces.take<char>(nary ? 0 : kPlaces * H * a.wide_size), pieces.take<char>(edges * H * a.wide_size),
            pieces.take<char>(a.product_scratch())};
  };
  Pieces sizes(nullptr);
  pieces_of(sizes);
  a.for_levels(true, sizes.bytes(), [&](int64_t level, int64_t begin, int64_t end, void* memory) {
    if (level == 0) return a.kernels.backward(p, begin, end, nullptr, nullptr);
    Pieces pieces(memory);
    const Memory m = pieces_of(pieces);
    const int64_t count = end - begin, edges = f.child_starts[end] - f.child_starts[begin];
    a.kernels.backward(p, begin, end, m.products, m.forget);
    std::vector<void*> rows(static_cast<size_t>(std::max(count, edges)));
    for (int64_t r = 0; r < count; ++r)
      rows[static_cast<size_t>(r)] = const_cast<char*>(row_of(grad_inner, begin - leaves + r));
    a.products.scatter({.source_type = a.wide,
                        .source = m.products,
                        .source_stride = a.width,
                        .dtype = a.dtype,
                        .count = count,
                        .columns = a.width,
                        .rows = rows.data()},
                       0, count);
    Product product{.rows = count, .columns = 0, .depth = 0, .a_type = a.wide, .packed_b = nullptr, .c_type = a.wide};
    if (nary) {
      std::vector<const void*> from(static_cast<size_t>(edges));
      for (int64_t slot = 0; slot < nary; ++slot) {
        size_t found = 0;
        for (int64_t place = begin; place < end; ++place)
          for (int64_t e = f.child_starts[place]; e < f.child_starts[place + 1]; ++e)
            if (f.slots[e] == slot) {
              from[found] = static_cast<char*>(m.products) + (place - begin) * a.width * a.wide_size;
              rows[found++] = const_cast<char*>(row_of(of_h, f.children[e]));
            }
        product.rows = static_cast<int64_t>(found);
        product.a_rows = from.data(), product.c_rows = rows.data(), product.accumulate = true;
        right[static_cast<size_t>(slot)].multiply(product, m.scratch);
      }
      return;
    }
    product.a = m.products, product.a_row_stride = a.width, product.c = m.sums, product.c_stride = H;
    right[0].multiply(product, m.scratch);
    product.rows = edges, product.a = m.forget, product.a_row_stride = H, product.c = m.edges;
    right[1].multiply(product, m.scratch);
    a.kernels.add_children(p, begin, end, m.sums, m.edges);
  });
  return {grad_x, grad_inner, grad_edge};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("tree_schedule", TORCH_BOX(&tree_schedule));
  m.impl("tree_lstm_fwd", TORCH_BOX(&tree_lstm_fwd));
  m.impl("tree_lstm_bwd", TORCH_BOX(&tree_lstm_bwd));
}

}  // namespace seqkern
