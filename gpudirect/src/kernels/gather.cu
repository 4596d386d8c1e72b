// Moves pieces: each block of threads takes a piece after the other, sixteen bytes a thread where both sides allow.
struct Table { unsigned long long count; unsigned long long to[160], from[160], len[160]; };
extern "C" __global__ void kvarts_gather(Table table) {
    for (unsigned long long at = blockIdx.x; at < table.count; at += gridDim.x) {
        char *to = (char *)table.to[at];
        const char *from = (const char *)table.from[at];
        unsigned long long len = table.len[at], wide = 0;
        if ((((unsigned long long)to | (unsigned long long)from) & 15) == 0) {
            wide = len / 16;
            for (unsigned long long i = threadIdx.x; i < wide; i += blockDim.x)
                ((uint4 *)to)[i] = ((const uint4 *)from)[i];
        }
        for (unsigned long long i = wide * 16 + threadIdx.x; i < len; i += blockDim.x) to[i] = from[i];
    }
}
