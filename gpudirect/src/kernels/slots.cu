// Moves rows between a stretch of the device's memory, where slots lie one behind the other, and slots anywhere: see device/slots.rs. Each warp
// takes a piece of a row after the other, sixteen bytes a thread where both sides allow.
typedef unsigned int u32;
typedef unsigned long long u64;
#define WARP 32
// Pieces of rows that one warp takes at a time.
#define PIECE 4096
struct Moved {
    u64 slots, ring, pool, ring_stride, pool_stride, ring_outer, pool_outer, ring_inner, pool_inner, bytes;
    u32 count, outer, inner, to_pool;
};
template <class WORD>
__device__ void move(char *to, const char *from, u64 bytes, u32 lane) {
    WORD *words = (WORD *)to;
    const WORD *sources = (const WORD *)from;
    u64 count = bytes / sizeof(WORD);
#pragma unroll 4
    for (u64 at = lane; at < count; at += WARP) words[at] = sources[at];
}
extern "C" __global__ void kvarts_slots(Moved moved) {
    u64 rows = (u64)moved.outer * moved.inner, pieces = (moved.bytes + PIECE - 1) / PIECE;
    u64 all = rows * pieces * moved.count, warps = gridDim.x * (u64)blockDim.x / WARP;
    u32 lane = threadIdx.x % WARP;
    for (u64 at = (blockIdx.x * (u64)blockDim.x + threadIdx.x) / WARP; at < all; at += warps) {
        u64 piece = at % pieces, row = at / pieces % rows, slot = at / pieces / rows;
        u64 outer = row / moved.inner, inner = row % moved.inner, begin = piece * PIECE;
        u64 bytes = moved.bytes - begin < PIECE ? moved.bytes - begin : PIECE;
        char *ring = (char *)moved.ring + slot * moved.ring_stride + outer * moved.ring_outer + inner * moved.ring_inner + begin;
        char *pool = (char *)moved.pool + ((const u32 *)moved.slots)[slot] * moved.pool_stride + outer * moved.pool_outer +
                     inner * moved.pool_inner + begin;
        char *to = moved.to_pool ? pool : ring;
        const char *from = moved.to_pool ? ring : pool;
        u64 skew = (u64)to | (u64)from | bytes;
        if ((skew & 15) == 0)
            move<uint4>(to, from, bytes, lane);
        else if ((skew & 3) == 0)
            move<u32>(to, from, bytes, lane);
        else
            move<char>(to, from, bytes, lane);
    }
}
