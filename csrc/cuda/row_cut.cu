#include "cuda/row_cut.cuh"

namespace dmtp::cuda {
namespace {

constexpr int kThreads = 512;  // at most: not measured
constexpr int kBins = 256;     // one digit of a key
constexpr int kBits = 8;
constexpr int kCopies = 8;  // of a bin: lanes of a warp meet in one another's way less often
constexpr int64_t kTile = kLanes * kEntries;

// Sums of 64 bits in two words, whose additions the hardware has; they are the same in any order.
struct Bins {
  uint32_t low[kBins * kCopies], high[kBins * kCopies];
};

struct Sums {
  uint64_t of[kBins];
};

// The bin in which a prefix ends, what it needs of it, and what the bin and all bins hold.
struct Chosen {
  uint64_t bin, target, inside;
};

struct Counts {
  int64_t of[kThreads / kLanes];
  int64_t last;
};

struct Room {
  Bests& bests;
  Bins& bins;
  Sums& sums;
  Chosen& chosen;
  Counts& counts;
};

__device__ void add(Bins& bins, int bin, uint64_t amount) {
  const int at = bin * kCopies + lane_index() % kCopies;
  const auto low = static_cast<uint32_t>(amount), high = static_cast<uint32_t>(amount >> 32);
  const uint32_t before = atomicAdd(&bins.low[at], low);
  const uint32_t carry = before + low < before;
  if (high + carry != 0) {
    atomicAdd(&bins.high[at], high + carry);
  }
}

// One warp: the highest bin that with those above it reaches the target; a `share` of all bins sets the target first.
__device__ void choose(const Sums& sums, uint64_t target, double share, bool of_share, Chosen& chosen) {
  constexpr int kEach = kBins / kLanes;
  const int lane = lane_index();
  uint64_t own = 0;
  for (int i = 0; i < kEach; ++i) {
    own += sums.of[lane * kEach + i];
  }
  uint64_t reach = own;
  for (int step = 1; step < kLanes; step *= 2) {
    const uint64_t others = __shfl_down_sync(kAllLanes, static_cast<unsigned long long>(reach), step);
    reach += lane + step < kLanes ? others : 0;
  }
  if (of_share) {
    const auto total = static_cast<int64_t>(__shfl_sync(kAllLanes, static_cast<unsigned long long>(reach), 0));
    target = static_cast<uint64_t>(within(static_cast<int64_t>(ceil(share * static_cast<double>(total))), 1, total));
  }
  uint64_t above = reach - own;
  if (above >= target || reach < target) {
    return;
  }
  int bin = lane * kEach + kEach - 1;
  while (bin > lane * kEach && above + sums.of[bin] < target) {
    above += sums.of[bin--];
  }
  chosen = {static_cast<uint64_t>(bin), target - above, sums.of[bin]};
}

class Row {
 public:
  __device__ Row(const CutRows& args, int64_t request, int64_t row, double temperature)
      : dtype_(args.logits.dtype),
        row_(static_cast<const char*>(args.logits.data) +
             (request * args.logits.stride[0] + row * args.logits.stride[1]) * size_of(args.logits.dtype)),
        n_(args.num_valid),
        unit_(args.unit),
        temperature_(temperature) {}

  __device__ double find_top(Bests& room) {
    Best best = nobody();
    double x[kEntries];
    for (int64_t first = threadIdx.x * kEntries; first < n_; first += blockDim.x * kEntries) {
      load_logits(dtype_, row_, first, n_, x);
      for (int i = 0; i < kEntries; ++i) {
        best.score = x[i] > best.score ? x[i] : best.score;
      }
    }
    bool unused = false;
    top_ = block_best(best, unused, room).score;
    return top_;
  }

  // The last entry of the least prefix of what `cut` keeps that has `target` entries, or a `share` of the mass.
  __device__ Cut least_prefix(const Cut& cut, bool by_mass, uint64_t target, double share, const Room& room) const {
    const int bits = key_bits(dtype_);
    // all lower bits of a narrow dtype's keys follow from those above
    const int least = dtype_ == DType::bf16 ? 16 : dtype_ == DType::f16 ? 8 : 0;
    uint64_t prefix = 0;
    for (int shift = bits - kBits; shift >= least; shift -= kBits) {
      for (int i = static_cast<int>(threadIdx.x); i < kBins * kCopies; i += static_cast<int>(blockDim.x)) {
        room.bins.low[i] = room.bins.high[i] = 0;
      }
      __syncthreads();
      each_entry(threadIdx.x * kEntries, blockDim.x * kEntries, n_, [&](uint64_t key, double x, int64_t id) {
        // a shift by all bits is none
        if ((key >> shift) >> kBits == prefix && (key > cut.key || (key == cut.key && id <= cut.id))) {
          add(room.bins, static_cast<int>((key >> shift) & (kBins - 1)), by_mass ? mass_of(x) : 1);
        }
      });
      __syncthreads();
      for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += static_cast<int>(blockDim.x)) {
        uint64_t sum = 0;
        for (int i = bin * kCopies; i < (bin + 1) * kCopies; ++i) {
          sum += static_cast<uint64_t>(room.bins.high[i]) << 32 | room.bins.low[i];
        }
        room.sums.of[bin] = sum;
      }
      __syncthreads();
      if (warp_index() == 0) {
        choose(room.sums, target, share, by_mass && shift == bits - kBits, room.chosen);
      }
      __syncthreads();
      prefix = prefix << kBits | room.chosen.bin;
      target = room.chosen.target;
    }
    const uint64_t low = (uint64_t{1} << least) - 1;
    const uint64_t key = prefix << least | (prefix >> (bits - least - 1) != 0 ? 0 : low);
    // equal entries have equal masses
    const uint64_t each = by_mass ? mass_of(of_key(dtype_, key)) : 1;
    auto needed = static_cast<uint64_t>(Divisor(static_cast<double>(each)).under(static_cast<double>(target)));
    // few enough that the quotient is off by less than one
    needed += needed * each < target;
    if (room.chosen.inside == needed * each) {
      return {key, key == cut.key ? cut.id : kEveryId};
    }
    return {key, nth_equal(key, static_cast<int64_t>(needed), room.counts)};
  }

 private:
  __device__ uint64_t mass_of(double x) const {
    return static_cast<uint64_t>(exp_of(log_weight(x, top_, temperature_)) * unit_ + 0.5);
  }

  template <class Use>
  __device__ void each_entry(int64_t first, int64_t step, int64_t end, Use use) const {
    double x[kEntries];
    for (; first < end; first += step) {
      load_logits(dtype_, row_, first, end, x);
#pragma unroll
      for (int i = 0; i < kEntries; ++i) {
        if (first + i < end) {
          use(key_of(dtype_, x[i]), x[i], first + i);
        }
      }
    }
  }

  // The id of the n-th entry with this key, counted from 1: warps take ranges of the row one behind the other.
  __device__ int64_t nth_equal(uint64_t key, int64_t nth, Counts& room) const {
    const int64_t tiles = (n_ + kTile - 1) / kTile, warps = warps_of_block();
    const int64_t range = place_of(tiles + warps - 1, warps).row * kTile, start = range * warp_index();
    const int64_t end = least(n_, start + range), own = lane_index() * kEntries;
    int count = 0;
    each_entry(start + own, kTile, end, [&](uint64_t other, double, int64_t) { count += other == key; });
    for (int step = kLanes / 2; step > 0; step /= 2) {
      count += __shfl_xor_sync(kAllLanes, count, step);
    }
    if (lane_index() == 0) {
      room.of[warp_index()] = count;
    }
    __syncthreads();
    int64_t before = 0;
    for (int warp = 0; warp < warp_index(); ++warp) {
      before += room.of[warp];
    }
    if (before < nth && nth <= before + count) {
      for (int64_t tile = start; tile < end; tile += kTile) {
        int here = 0;
        each_entry(tile + own, kTile, least(end, tile + kTile),
                   [&](uint64_t other, double, int64_t) { here += other == key; });
        int reach = here;
        for (int step = 1; step < kLanes; step *= 2) {
          const int others = __shfl_up_sync(kAllLanes, reach, step);
          reach += lane_index() >= step ? others : 0;
        }
        int64_t seen = before + reach - here;
        each_entry(tile + own, kTile, least(end, tile + kTile), [&](uint64_t other, double, int64_t id) {
          seen += other == key;
          if (other == key && seen == nth) {
            room.last = id;
          }
        });
        before += __shfl_sync(kAllLanes, reach, kLanes - 1);
      }
    }
    __syncthreads();
    return room.last;
  }

  const DType dtype_;
  const void* const row_;
  const int64_t n_;
  const double unit_;
  const Divisor temperature_;
  double top_ = 0;
};

// One row's cut; rows that no filter touches, or that are not sampled, keep all.
__global__ void __launch_bounds__(kThreads) sample_cut_kernel(const CutRows args) {
  DMTP_SHARED(Bests, bests);
  DMTP_SHARED(Bins, bins);
  DMTP_SHARED(Sums, sums);
  DMTP_SHARED(Chosen, chosen);
  DMTP_SHARED(Counts, counts);
  const Room room{bests, bins, sums, chosen, counts};
  const Place place = place_of(blockIdx.x, args.rows);
  const int64_t request = place.row, n = args.num_valid;
  const double temperature =
      load_as<double>(args.temperature.dtype, args.temperature.data, request * args.temperature.stride[0]);
  const int64_t top_k = given(args.top_k) ? index_of(args.top_k, request) : 0;
  const double top_p =
      given(args.top_p) ? load_as<double>(args.top_p.dtype, args.top_p.data, request * args.top_p.stride[0]) : 1.0;
  const bool by_count = top_k > 0 && top_k < n, by_mass = top_p < 1;
  Cut cut{0, kEveryId};
  if (temperature > 0 && temperature < kInfinity && (by_count || by_mass)) {
    Row row(args, request, place.at, temperature);
    const double top = row.find_top(bests);
    // rows without a finite top are decided without a draw
    if (top > -kInfinity && top < kInfinity) {
      if (by_count) {
        cut = row.least_prefix(cut, false, static_cast<uint64_t>(top_k), 1.0, room);
      }
      if (by_mass) {
        cut = row.least_prefix(cut, true, 0, top_p > 0 ? top_p : 0.0, room);
      }
    }
  }
  if (threadIdx.x == 0) {
    args.cuts[blockIdx.x] = cut;
  }
}

}  // namespace

const char* row_cuts(CutRows args, int64_t batch, void* stream) {
  int bits = 62;
  for (int64_t ids = args.num_valid - 1; ids > 0; ids /= 2) {
    --bits;
  }
  args.unit = static_cast<double>(int64_t{1} << (bits < 52 ? bits : 52));
  return launch(sample_cut_kernel, batch * args.rows, threads_for(args.num_valid, kThreads), stream, args);
}

}  // namespace dmtp::cuda
