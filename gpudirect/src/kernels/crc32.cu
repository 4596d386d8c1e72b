// The digest of the store on the device; see crc.rs, whose twin this follows line for line.
typedef unsigned int u32;
typedef unsigned long long u64;
#define THREADS 256
// 32 * THREADS is 2 to the power of that.
#define STRIDE 13
// The same of 32 threads.
#define STRIDE_OF_WARP 10
#define POLYNOMIAL 0xedb88320u
// x to the power of 2^n.
__constant__ u32 POWERS[64] = {
    0x40000000u, 0x20000000u, 0x08000000u, 0x00800000u, 0x00008000u, 0xedb88320u, 0xb1e6b092u, 0xa06a2517u,
    0xed627daeu, 0x88d14467u, 0xd7bbfe6au, 0xec447f11u, 0x8e7ea170u, 0x6427800eu, 0x4d47bae0u, 0x09fe548fu,
    0x83852d0fu, 0x30362f1au, 0x7b5a9cc3u, 0x31fec169u, 0x9fec022au, 0x6c8dedc4u, 0x15d6874du, 0x5fde7a4eu,
    0xbad90e37u, 0x2e4e5eefu, 0x4eaba214u, 0xa8a472c0u, 0x429a969eu, 0x148d302au, 0xc40ba6d0u, 0xc4e22c3cu,
    0x40000000u, 0x20000000u, 0x08000000u, 0x00800000u, 0x00008000u, 0xedb88320u, 0xb1e6b092u, 0xa06a2517u,
    0xed627daeu, 0x88d14467u, 0xd7bbfe6au, 0xec447f11u, 0x8e7ea170u, 0x6427800eu, 0x4d47bae0u, 0x09fe548fu,
    0x83852d0fu, 0x30362f1au, 0x7b5a9cc3u, 0x31fec169u, 0x9fec022au, 0x6c8dedc4u, 0x15d6874du, 0x5fde7a4eu,
    0xbad90e37u, 0x2e4e5eefu, 0x4eaba214u, 0xa8a472c0u, 0x429a969eu, 0x148d302au, 0xc40ba6d0u, 0xc4e22c3cu};

__device__ u32 next(u32 b) { return (b & 1u) ? (b >> 1) ^ POLYNOMIAL : b >> 1; }
__device__ u32 multiply(u32 a, u32 b) {
    u32 product = 0;
#pragma unroll 8
    for (int bit = 31; bit >= 0; bit--) {
        if (a >> bit & 1) product ^= b;
        b = next(b);
    }
    return product;
}
__device__ u32 power(u64 bits) {
    u32 product = 1u << 31;
    for (int n = 0; bits != 0; bits >>= 1, n++)
        if (bits & 1) product = multiply(product, POWERS[n]);
    return product;
}
__device__ u32 word_at(const unsigned char *bytes) {
    return (u32)bytes[0] | (u32)bytes[1] << 8 | (u32)bytes[2] << 16 | (u32)bytes[3] << 24;
}
__device__ u32 step(const u32 tables[4][256], u32 word) {
    return tables[0][word & 255] ^ tables[1][word >> 8 & 255] ^ tables[2][word >> 16 & 255] ^ tables[3][word >> 24];
}
// A chunk after the other by GROUP threads: by a block of them, or by each warp of it.
template <u32 GROUP>
__device__ void digest(u32 stride, const u64 *chunks, const u64 *lens, u32 *digests, u64 count) {
    __shared__ u32 tables[4][256];
    __shared__ u32 sums[2];
    u32 thread = threadIdx.x % GROUP, groups = THREADS / GROUP;
    u32 made[4] = {0, 0, 0, 0}, constant = stride;
#pragma unroll
    for (int bit = 31; bit >= 0; bit--) {
        if (threadIdx.x >> (bit & 7) & 1) made[bit >> 3] ^= constant;
        constant = next(constant);
    }
#pragma unroll
    for (int byte = 0; byte < 4; byte++) tables[byte][threadIdx.x] = made[byte];
    u32 own = power(32ull * (GROUP - thread)), inversions = ~0u, parity = 0;
    u64 known = 0;
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    for (u64 chunk = blockIdx.x * (u64)groups + threadIdx.x / GROUP; chunk < count; chunk += gridDim.x * (u64)groups) {
        const unsigned char *bytes = (const unsigned char *)chunks[chunk];
        u64 len = lens[chunk], words = (len + 3) / 4, gap = words * 4 - len;
        u64 at = thread + words - (words + GROUP - 1) / GROUP * GROUP;
        u32 mine = 0;
        if ((long long)at < 0) at += GROUP;
        if (at == 0 && gap != 0) {
            for (u64 byte = gap; byte < 4; byte++) mine |= (u32)bytes[byte - gap] << (8 * byte);
            at += GROUP;
        }
        const unsigned char *whole = bytes - gap;
        if ((((u64)whole) & 3) == 0) {
#pragma unroll 8
            for (; at < words; at += GROUP) mine = step(tables, mine) ^ ((const u32 *)whole)[at];
        } else {
            for (; at < words; at += GROUP) mine = step(tables, mine) ^ word_at(whole + at * 4);
        }
        mine = multiply(mine, own);
        for (u32 lane = 16; lane != 0; lane >>= 1) mine ^= __shfl_xor_sync(~0u, mine, lane);
        if (GROUP > 32) {
            if ((thread & 31) == 0) atomicXor(&sums[parity], mine);
            __syncthreads();
        }
        if (thread == 0) {
            if (GROUP > 32) {
                mine = sums[parity];
                sums[parity] = 0;
            }
            if (len != known) inversions = multiply(~0u, power(8 * len));
            known = len;
            digests[chunk] = ~(mine ^ inversions);
        }
        parity ^= 1;
    }
}
// Few chunks: all threads of a block have one.
extern "C" __global__ void __launch_bounds__(THREADS) kvarts_crc32(const u64 *chunks, const u64 *lens, u32 *digests, u64 count) {
    digest<THREADS>(POWERS[STRIDE], chunks, lens, digests, count);
}
// Many chunks: each warp has one.
extern "C" __global__ void __launch_bounds__(THREADS) kvarts_crc32_many(const u64 *chunks, const u64 *lens, u32 *digests, u64 count) {
    digest<32>(POWERS[STRIDE_OF_WARP], chunks, lens, digests, count);
}
