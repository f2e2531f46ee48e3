// Which partitions a block attends to, one after another.
//   v1: whole rows, a row being (sequence, KV head, block of heads), from the block's own on, in strides of the grid.
//   v2: the block's even share of all partitions of the call, in order of sequence, row, partition; what there is to share is
//   found
//       on the device, from the lengths, by one warp of every block.
#pragma once

#include "core/even_share.h"
#include "gpu/block_scan.h"
#include "gpu/decode_launch.h"

namespace paged_attn::gpu {

class DecodeWalk {
 public:
  static constexpr int kFlags = 3;  // shared integers: partitions of the call, the first sequence, the partitions before it

  // Every thread of the block calls; `flags` is shared memory.
  PA_DEVICE DecodeWalk(const DecodeLaunch& launch, int32_t* flags) : launch_(launch) {
    if (!launch.split) {
      item_ = platform::block_index() - platform::num_blocks();
      return;
    }
    const int64_t rows = launch.num_rows();
    const int lane = platform::thread_index();
    if (lane < platform::kWarpLanes) {
      const auto count = [&](int64_t sequence) { return int32_t(partitions_of(launch.params, sequence).count()); };
      const int32_t total = warp_total(launch.params.num_seqs, lane, count);
      const Range share = even_share(total * rows, platform::num_blocks(), platform::block_index());
      Found found{0, 0};
      if (share.begin < share.end) found = warp_find(launch.params.num_seqs, int32_t(share.begin / rows), lane, count);
      if (lane == 0) {
        flags[0] = total;
        flags[1] = found.index;
        flags[2] = found.before;
      }
    }
    platform::block_barrier();
    const Range share = even_share(flags[0] * rows, platform::num_blocks(), platform::block_index());
    left_ = share.end - share.begin;
    sequence_ = flags[1];
    offset_ = share.begin - flags[2] * rows - 1;
    if (left_ > 0) partitions_ = partitions_of(launch.params, sequence_);
  }

  // Moves on; false at the end. The same in every thread of the block.
  PA_DEVICE bool next() { return launch_.split ? next_of_share() : next_of_rows(); }

  PA_DEVICE int64_t sequence() const { return sequence_; }
  PA_DEVICE int64_t kv_head() const { return row_ / launch_.head_blocks; }
  PA_DEVICE int64_t head_block() const { return row_ % launch_.head_blocks; }
  PA_DEVICE const Partitions& partitions() const { return partitions_; }
  PA_DEVICE int64_t partition() const { return partition_; }
  PA_DEVICE bool begins_row() const { return begins_row_; }
  // v1 meets every row, those without a partition too; v2's reduction does.
  PA_DEVICE bool is_empty() const { return partitions_.count() == 0; }
  PA_DEVICE bool ends_row() const { return partition_ + 1 >= partitions_.end; }

 private:
  PA_DEVICE bool next_of_rows() {
    begins_row_ = row_ < 0 || ends_row();
    if (!begins_row_) {
      ++partition_;
      return true;
    }
    item_ += platform::num_blocks();
    if (item_ >= launch_.params.num_seqs * launch_.num_rows()) return false;
    sequence_ = item_ / launch_.num_rows();
    row_ = item_ % launch_.num_rows();
    partitions_ = partitions_of(launch_.params, sequence_);
    partition_ = partitions_.first;
    return true;
  }

  PA_DEVICE bool next_of_share() {
    if (left_-- <= 0) return false;
    const int64_t rows = launch_.num_rows();
    const int64_t sequence_before = sequence_, row_before = row_;
    ++offset_;
    while (offset_ >= partitions_.count() * rows) {
      offset_ -= partitions_.count() * rows;
      partitions_ = partitions_of(launch_.params, ++sequence_);
    }
    row_ = offset_ / partitions_.count();
    partition_ = partitions_.first + offset_ % partitions_.count();
    begins_row_ = sequence_ != sequence_before || row_ != row_before;
    return true;
  }

  const DecodeLaunch& launch_;
  int64_t item_ = 0;    // v1: the row's number in the call
  int64_t left_ = 0;    // v2: partitions of the share
  int64_t offset_ = 0;  // v2: of the partition in its sequence
  int64_t sequence_ = 0;
  int64_t row_ = -1;
  int64_t partition_ = 0;
  Partitions partitions_{};
  bool begins_row_ = false;
};

}  // namespace paged_attn::gpu
