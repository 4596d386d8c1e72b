// Runs the device kernels on the processor: a thread for each of their threads, a barrier for __syncthreads. What it shows
// is that the source is right as a program, not that a GPU or NVRTC takes it. See scripts/kernels.
#include <pthread.h>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

struct Dim {
    unsigned x;
};
struct uint4 {
    unsigned x, y, z, w;
};
static thread_local Dim threadIdx, blockIdx;
static Dim gridDim{1}, blockDim{1};
static pthread_barrier_t barrier, warps[32];

#define __constant__ static const
#define __device__ static
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static
#define __syncthreads() pthread_barrier_wait(&barrier)

// All threads of a warp come to each of them.
static unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned lane) {
    static unsigned values[1024];
    pthread_barrier_t *warp = &warps[threadIdx.x / 32];
    values[threadIdx.x] = value;
    pthread_barrier_wait(warp);
    unsigned other = values[threadIdx.x ^ lane];
    pthread_barrier_wait(warp);
    return other;
}
static void atomicXor(unsigned *to, unsigned value) { __atomic_fetch_xor(to, value, __ATOMIC_SEQ_CST); }

#include "crc32.cu"
#include "gather.cu"
#include "slots.cu"

static u32 plain(const unsigned char *bytes, size_t len) {
    u32 crc = ~0u;
    for (size_t at = 0; at < len; at++) {
        crc ^= bytes[at];
        for (int bit = 0; bit < 8; bit++) crc = (crc & 1) ? (crc >> 1) ^ 0xedb88320u : crc >> 1;
    }
    return ~crc;
}

template <typename Kernel> static void launch(unsigned blocks, unsigned threads, bool barriers, Kernel kernel) {
    gridDim.x = blocks;
    blockDim.x = threads;
    // Blocks one after the other: shared memory is one variable here.
    for (unsigned block = 0; block < blocks; block++) {
        if (barriers) pthread_barrier_init(&barrier, nullptr, threads);
        for (auto &warp : warps)
            if (barriers) pthread_barrier_init(&warp, nullptr, 32);
        std::vector<std::thread> all;
        for (unsigned thread = 0; thread < threads; thread++)
            all.emplace_back([=] {
                threadIdx.x = thread;
                blockIdx.x = block;
                kernel();
            });
        for (auto &one : all) one.join();
        if (barriers) pthread_barrier_destroy(&barrier);
        for (auto &warp : warps)
            if (barriers) pthread_barrier_destroy(&warp);
    }
}

int main() {
    std::vector<unsigned char> from(200000), to(200000, 0xee);
    unsigned seed = 1;
    for (auto &byte : from) {
        seed = seed * 1664525u + 1013904223u;
        byte = seed >> 24;
    }
    std::vector<u64> chunks, lens;
    std::vector<u32> wanted;
    for (size_t skew : {0, 1, 2, 3, 4, 7})
        for (size_t len : {0, 1, 3, 4, 5, 1023, 1024, 1025, 4096, 4096, 4097, 65536, 100003}) {
            chunks.push_back((u64)(from.data() + skew));
            lens.push_back(len);
            wanted.push_back(plain(from.data() + skew, len));
        }
    int bad = 0;
    for (bool many : {false, true}) {
        std::vector<u32> digests(chunks.size());
        auto kernel = many ? kvarts_crc32_many : kvarts_crc32;
        launch(3, THREADS, true, [&] { kernel(chunks.data(), lens.data(), digests.data(), chunks.size()); });
        for (size_t at = 0; at < digests.size(); at++) bad += digests[at] != wanted[at];
        std::printf("crc32%s: %zu chunks, %d wrong so far\n", many ? " of many" : "", digests.size(), bad);
    }

    Table table{};
    size_t at = 0;
    for (size_t len : {1, 16, 17, 64, 1000, 4096, 5000, 33}) {
        table.to[table.count] = (u64)(to.data() + at + (len & 1));
        table.from[table.count] = (u64)(from.data() + 2 * at);
        table.len[table.count++] = len;
        at += len + 64;
    }
    launch(3, 64, false, [&] { kvarts_gather(table); });
    std::vector<unsigned char> expected(200000, 0xee);
    for (u64 piece = 0; piece < table.count; piece++)
        for (u64 byte = 0; byte < table.len[piece]; byte++)
            expected[table.to[piece] - (u64)to.data() + byte] = ((unsigned char *)table.from[piece])[byte];
    int wrong = to != expected;
    std::printf("gather: %llu pieces, %s\n", table.count, wrong ? "wrong" : "right");

    // Rows of every width that the kernel tells apart, longer and shorter than a piece.
    std::vector<u32> slots = {5, 0, 9, 3, 7, 2};
    for (u64 bytes : {4096, 16, 48, 4, 20, 17, 1, 5000, 8200})
        for (u32 to_pool : {0, 1}) {
            std::vector<unsigned char> ring(from.begin(), from.begin() + 150000), pool(600000, 0xdd);
            Moved moved{(u64)slots.data(), (u64)ring.data() + 16, (u64)pool.data() + 32, bytes * 2, bytes * 6, bytes, bytes * 2,
                        bytes * 6, bytes * 60 / 3, bytes, (u32)slots.size(), 2, 1, to_pool};
            std::vector<unsigned char> right_ring = ring, right_pool = pool;
            for (size_t slot = 0; slot < slots.size(); slot++)
                for (u64 row = 0; row < 2; row++) {
                    unsigned char *here = right_ring.data() + 16 + slot * moved.ring_stride + row * moved.ring_outer;
                    unsigned char *there = right_pool.data() + 32 + slots[slot] * moved.pool_stride + row * moved.pool_outer;
                    memcpy(to_pool ? there : here, to_pool ? here : there, bytes);
                }
            launch(3, 64, false, [&] { kvarts_slots(moved); });
            bool is_right = ring == right_ring && pool == right_pool;
            wrong += !is_right;
            std::printf("slots: rows of %llu bytes %s the pool, %s\n", bytes, to_pool ? "to" : "from", is_right ? "right" : "wrong");
        }
    return bad + wrong;
}
