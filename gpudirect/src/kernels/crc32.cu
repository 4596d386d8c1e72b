// The digest of the store on the device; see crc.rs, whose twin this follows line for line.
typedef unsigned int u32;
typedef unsigned long long u64;
#define THREADS 256
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

__device__ u32 multiply(u32 a, u32 b) {
    u32 product = 0;
#pragma unroll 1
    for (u32 bit = 1u << 31; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b & 1u) ? (b >> 1) ^ POLYNOMIAL : b >> 1;
    }
    return product;
}
__device__ u32 power(u64 bits) {
    u32 product = 1u << 31;
    for (int n = 0; bits != 0; bits >>= 1, n++)
        if (bits & 1) product = multiply(product, POWERS[n]);
    return product;
}
__device__ u32 word_at(const unsigned char *bytes, u64 at) {
    if ((((u64)bytes) & 3) == 0) return *(const u32 *)(bytes + at);
    return (u32)bytes[at] | (u32)bytes[at + 1] << 8 | (u32)bytes[at + 2] << 16 | (u32)bytes[at + 3] << 24;
}
extern "C" __global__ void __launch_bounds__(THREADS) kvarts_crc32(const u64 *chunks, const u64 *lens, u32 *digests, u64 count) {
    __shared__ u32 tables[4][256];
    __shared__ u32 sum;
    u32 thread = threadIdx.x;
    u32 constant = power(32ull * THREADS);
    for (u32 entry = thread; entry < 1024; entry += THREADS)
        tables[entry >> 8][entry & 255] = multiply((entry & 255) << (8 * (entry >> 8)), constant);
    for (u64 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        const unsigned char *bytes = (const unsigned char *)chunks[chunk];
        u64 len = lens[chunk], words = len / 4, at = thread;
        if (thread == 0) sum = 0;
        __syncthreads();
        u32 mine = 0;
        for (; at < words; at += THREADS)
            mine = tables[0][mine & 255] ^ tables[1][mine >> 8 & 255] ^ tables[2][mine >> 16 & 255]
                 ^ tables[3][mine >> 24] ^ word_at(bytes, at * 4);
        if (thread < words) mine = multiply(mine, power(8 * (len - (at - THREADS) * 4)));
        if (thread == 0) {
            u32 tail = 0;
            for (u64 byte = words * 4; byte < len; byte++) {
                tail ^= bytes[byte];
                for (int bit = 0; bit < 8; bit++) tail = (tail & 1u) ? (tail >> 1) ^ POLYNOMIAL : tail >> 1;
            }
            mine ^= tail;
        }
        atomicXor(&sum, mine);
        __syncthreads();
        if (thread == 0) digests[chunk] = ~(sum ^ multiply(0xffffffffu, power(8 * len)));
        __syncthreads();
    }
}
