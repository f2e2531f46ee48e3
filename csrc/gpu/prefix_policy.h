// How prefix attention is laid out on a card without matrix instructions.
#pragma once

namespace paged_attn::gpu {

// Rows are (token, query head of the group) pairs, tokens outermost: a tile holds whatever group there is, and K and V are read
// once for all of it. 64 x 64 tiles with 4 x 4 results per thread need 8 loads from shared memory per 16 multiplications, and
// 37 KiB of the 48 that every card has.
constexpr int kTileRows = 64;
constexpr int kTileKeys = 64;
constexpr int kMicroTile = 4;
constexpr int kPrefixThreads = kTileRows / kMicroTile * (kTileKeys / kMicroTile);

// Dims of q and k in shared memory at once; also the length of a sum before it is added to another.
constexpr int kStageDims = 32;
// Dims of V in shared memory at once.
constexpr int kValueDims = 64;

// Rows of shared tiles are this long: whole 16-byte packets, and neighbouring rows in different banks.
constexpr int kTileStride = kTileKeys + 4;

// Output dims that a block keeps in registers, in chunks of kValueDims; a larger head size repeats the logits for each part.
constexpr int kMaxValueChunks = 4;

}  // namespace paged_attn::gpu
