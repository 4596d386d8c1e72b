// Stands for an engine that computes on all of a device, in measurements: every thread multiplies and adds, and reads memory of which no
// cache holds much. `mask` is the number of pieces less one, which has only ones in it.
extern "C" __global__ void kvarts_busy(float4 *memory, unsigned long long mask, unsigned rounds) {
    unsigned long long threads = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long at = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    float a = threadIdx.x, b = blockIdx.x, c = 1.0f, d = 2.0f;
    for (unsigned round = 0; round < rounds; round++, at += threads) {
        float4 read = memory[at & mask];
#pragma unroll 1
        for (int step = 0; step < 32; step++) {
            a = a * 1.0001f + read.x;
            b = b * 0.9999f + read.y;
            c = c * 1.0002f + read.z;
            d = d * 0.9998f + read.w;
        }
    }
    // Never so; but a compiler does not know that, and leaves nothing of the above out.
    if (a + b + c + d == 0.0123456f) memory[at & mask] = make_float4(a, b, c, d);
}
