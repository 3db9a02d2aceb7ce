#include <algorithm>
#include <cstring>
#include <set>

#include "fiber_state.h"

namespace dmtp::host {
namespace {

std::string without;             // the barriers that are switched off
std::set<std::string> barriers;  // that ran
std::string words;

Fiber* warp_of(const Fiber& t, size_t& lanes) {
  const size_t first = static_cast<size_t>(t.id) / kWarp * kWarp;
  lanes = std::min<size_t>(kWarp, t.home->threads.size() - first);
  return t.home->threads.data() + first;
}

void wake(Fiber& t) {
  t.state = State::ready;
  ready.push_back(&t);
}

void wake_all(Block& block) {
  for (Fiber& t : block.threads) {
    if (t.state == State::waiting) {
      wake(t);
    }
  }
}

void release_block(Block& block) {
  if (block.at_barrier > 0 && block.at_barrier + block.done == block.threads.size()) {
    block.at_barrier = 0;
    wake_all(block);
  }
}

void release_cluster(Cluster& cluster) {
  if (cluster.at_barrier > 0 && cluster.at_barrier + cluster.done() == cluster.threads()) {
    cluster.at_barrier = 0;
    for (const auto& block : cluster.blocks) {
      wake_all(*block);
    }
  }
}

bool is_of_lanes(Together kind) {
  return kind != Together::block_barrier && kind != Together::cluster_barrier;
}

// Lets a waiting lane and those it waits for go on, once all have come.
void release_lanes(Fiber& t) {
  size_t lanes;
  Fiber* warp = warp_of(t, lanes);
  for (size_t i = 0; i < lanes; ++i) {
    const Fiber& other = warp[i];
    const bool comes = t.mask >> i & 1, left = other.state == State::done;
    if (comes && !left && (other.state != State::waiting || other.kind != t.kind || other.mask != t.mask)) {
      return;
    }
    if (t.kind == Together::join && (left || other.all != t.all)) {
      return;
    }
  }
  if (t.kind == Together::join) {
    void* brought[kWarp];
    for (size_t i = 0; i < lanes; ++i) {
      brought[i] = reinterpret_cast<void*>(warp[i].value);
    }
    t.all(brought);
  }
  uint32_t votes = 0;
  for (size_t i = 0; i < lanes; ++i) {
    votes |= (t.mask >> i & 1) && warp[i].state == State::waiting && warp[i].value != 0 ? 1u << i : 0;
  }
  for (size_t i = 0; i < lanes; ++i) {
    Fiber& one = warp[i];
    if (!(t.mask >> i & 1) || one.state == State::done) {
      continue;
    }
    if (t.kind == Together::shuffle) {
      // what a lane gives that takes no part is not defined
      const bool given = static_cast<size_t>(one.from) < lanes && (t.mask >> one.from & 1);
      one.result = given && warp[one.from].state != State::done ? warp[one.from].value : 0x7ff8dead7ff8dead;
    } else if (t.kind == Together::ballot) {
      one.result = votes;
    } else if (t.kind == Together::match) {
      one.result = 0;
      for (size_t j = 0; j < lanes; ++j) {
        one.result |= (t.mask >> j & 1) && warp[j].value == one.value ? uint64_t{1} << j : 0;
      }
    }
  }
  for (size_t i = 0; i < lanes; ++i) {
    if ((t.mask >> i & 1) && warp[i].state == State::waiting) {
      wake(warp[i]);
    }
  }
}

void wait() {
  Fiber& t = self();
  t.state = State::waiting;
  to_scheduler();
}

void land(const Copy& copy) {
  std::memcpy(copy.to, copy.from, static_cast<size_t>(copy.bytes));
  std::memset(static_cast<char*>(copy.to) + copy.bytes, 0, static_cast<size_t>(16 - copy.bytes));
}

}  // namespace

bool skipped(Site site) {
  const std::string name = name_of(site);
  barriers.insert(name);
  if (name != without) {
    return false;
  }
  if (draw() & 1) {
    to_scheduler();
  }
  return true;
}

void release(Fiber& t) {
  if (t.state == State::waiting && is_of_lanes(t.kind)) {
    return release_lanes(t);
  }
  Block& block = *t.home;
  if (t.state == State::done) {
    ++block.done;
    size_t lanes;
    Fiber* warp = warp_of(t, lanes);
    for (size_t i = 0; i < lanes; ++i) {
      if (warp[i].state == State::waiting && is_of_lanes(warp[i].kind)) {
        release_lanes(warp[i]);
      }
    }
  } else {
    ++(t.kind == Together::block_barrier ? block.at_barrier : block.cluster->at_barrier);
  }
  release_block(block);
  release_cluster(*block.cluster);
}

void block_barrier(Site site) {
  if (skipped(site)) {
    return;
  }
  Fiber& t = self();
  t.kind = Together::block_barrier;
  t.site = site;
  wait();
}

void cluster_barrier(Site site) {
  if (skipped(site)) {
    return;
  }
  Fiber& t = self();
  t.kind = Together::cluster_barrier;
  t.site = site;
  wait();
}

void warp_barrier(Site site, uint32_t mask) {
  if (skipped(site)) {
    return;
  }
  Fiber& t = self();
  t.site = site;
  t.kind = Together::warp_barrier;
  t.mask = mask;
  wait();
}

uint64_t together(Together kind, uint32_t mask, uint64_t value, int from) {
  Fiber& t = self();
  if (!(mask >> (t.id % kWarp) & 1)) {
    fail(where(t) + ": not in its own mask");
  }
  t.kind = kind;
  t.site = {kind == Together::shuffle ? "shuffle" : kind == Together::ballot ? "ballot" : "match", 0};
  t.mask = mask;
  t.value = value;
  t.from = from;
  wait();
  return t.result;
}

void join(void (*all)(void* const* lanes), void* mine) {
  Fiber& t = self();
  size_t lanes;
  warp_of(t, lanes);
  if (lanes != kWarp) {
    fail(where(t) + ": a join of less than a whole warp");
  }
  t.kind = Together::join;
  t.site = {"join", 0};
  t.mask = 0xffffffff;
  t.all = all;
  t.value = reinterpret_cast<uint64_t>(mine);
  wait();
}

void copy_async(void* to, const void* from, int bytes) {
  aligned(to, 16);
  aligned(from, 16);
  in_shared(to, 16);
  if (bytes > 0) {
    record(from, static_cast<size_t>(bytes), false);
  }
  const Copy copy{to, from, bytes, self().group};
  if ((draw() & 3) == 0) {
    land(copy);
  } else {
    self().copies.push_back(copy);
  }
}

void commit_copies() {
  ++self().group;
}

void wait_copies(Site site, int groups) {
  if (skipped(site)) {
    return;
  }
  Fiber& t = self();
  std::erase_if(t.copies, [&](const Copy& copy) {
    const bool due = copy.group < t.group - groups;
    if (due) {
      land(copy);
    }
    return due;
  });
}

void pause() {
  to_scheduler();
}

void before_atomic() {
  if ((draw() & 3) == 0) {
    to_scheduler();
  }
}

}  // namespace dmtp::host

void dmtp_host_without(const char* site) {
  dmtp::host::without = site == nullptr ? "" : site;
}

const char* dmtp_host_barriers() {
  dmtp::host::words.clear();
  for (const std::string& name : dmtp::host::barriers) {
    dmtp::host::words += name + " ";
  }
  dmtp::host::barriers.clear();
  return dmtp::host::words.c_str();
}
