// The machine's own driver, watched: every call is handed on to it, and written down on the way. The tests that know the
// stand-in (standin.h) run over it as they are, on a GPU: calls are counted and can be made to fail before the driver hears of
// them, what was made and not given back is told, a stream stands still by waiting for a word in host memory, and device memory
// is looked at beside all streams. What only the stand-in can do (a device that breaks on demand, misuse that is survived) has no
// entry here.
//
// The tests have it loaded as libcuda.so (KVARTS_LIBCUDA) and it is called otherwise, so that the driver itself (libcuda.so.1) is loaded beside
// it, by us and by libcufile.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
typedef uint64_t address;
typedef void *handle;
struct name {
    char bytes[64];
};

enum { OK = 0, NOT_READY = 600, NOT_FOUND = 500, MANY = 8192, STREAMS = 1 << 20, RELAXED = 2 };

static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;

static struct call {
    const char *name;
    void *real;
    uint64_t calls, fails_in;
    result code, always;
} calls[96];

static struct {
    const char *what;
    int count;
} alive[16];

static char wrong[4096];
static uint64_t pageable;
// Contexts that this thread has pushed, and how it meets captures.
static _Thread_local int depth, mode;
static int retained[16];
static handle context_of[16];
// Words in pinned memory for streams that stand still, made with the context: while a stream stands still, a driver may
// block a caller that asks it for such memory. Each word is used once.
enum { WORDS = 1 << 16 };
static struct {
    volatile uint32_t *host;
    address seen;
    size_t used;
} words[16];

// From 1 in the order in which they were made; 0 are the default streams.
static struct {
    handle stream;
    // A word that its work waits for, while it stands still: 0 until it goes on.
    volatile uint32_t *word;
    int stands, waits;
} streams[STREAMS];
static size_t made = 1;

// Host memory that is pinned.
static struct {
    const char *base;
    size_t len;
} pinned[MANY];

// A point behind each work that was given to a stream.
static struct {
    handle event, context;
} works[MANY];

static void *driver(const char *symbol) {
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "the machine's driver cannot be loaded: %s\n", dlerror());
        exit(1);
    }
    return dlsym(library, symbol);
}

static struct call *call_of(const char *name) {
    for (size_t at = 0; at < sizeof calls / sizeof *calls; at++) {
        if (!calls[at].name) {
            calls[at].name = strdup(name);
            calls[at].real = driver(name);
        }
        if (!strcmp(calls[at].name, name)) return &calls[at];
    }
    return &calls[0];
}

static void live(const char *what, int by) {
    pthread_mutex_lock(&books);
    for (size_t at = 0; at < sizeof alive / sizeof *alive; at++)
        if (!alive[at].what || !strcmp(alive[at].what, what)) {
            alive[at].what = what;
            alive[at].count += by;
            break;
        }
    pthread_mutex_unlock(&books);
}

// Counts a call: its answer if it is to fail, or the driver's entry.
static void *enter(const char *name, result *code) {
    pthread_mutex_lock(&books);
    struct call *call = call_of(name);
    call->calls++;
    *code = call->fails_in && --call->fails_in == 0 ? call->code : call->always;
    void *real = call->real;
    pthread_mutex_unlock(&books);
    if (!*code && !real) *code = NOT_FOUND;
    return real;
}

// A call of the driver that is not the tested code's: it is not counted.
#define BESIDE(name, ...) (((result(*)(__VA_ARGS__))(call_beside(name))))
static void *call_beside(const char *name) {
    void *real = driver(name);
    if (!real) {
        fprintf(stderr, "the machine's driver has no %s\n", name);
        exit(1);
    }
    return real;
}

// From now on the calls of this thread break no capture of any thread. Gives the mode that was set before.
static int relax(void) {
    int before = RELAXED;
    BESIDE("cuThreadExchangeStreamCaptureMode", int *)(&before);
    return before;
}

static void restore(int before) { BESIDE("cuThreadExchangeStreamCaptureMode", int *)(&before); }

// What stands between calls with and without work for a stream: whether it must stand still, and a point behind the work.
static size_t number_of(handle stream) {
    if ((uintptr_t)stream <= 1) return 0;
    for (size_t at = made; --at > 0;)
        if (streams[at].stream == stream) return at;
    return STREAMS - 1;
}

// What waits for the word still reads it: the memory stays. The books are locked.
static void let_go(size_t at) {
    if (!streams[at].word) return;
    *streams[at].word = 1;
    streams[at].word = NULL;
    streams[at].waits = 0;
}

static void before_work(handle stream) {
    pthread_mutex_lock(&books);
    size_t at = number_of(stream);
    int hold = streams[at].stands && !streams[at].waits;
    if (hold) streams[at].waits = 1;
    pthread_mutex_unlock(&books);
    if (!hold) return;
    int was = relax();
    handle context = NULL;
    result code = BESIDE("cuCtxGetCurrent", handle *)(&context);
    int device = 0;
    while (device < 15 && context_of[device] != context) device++;
    pthread_mutex_lock(&books);
    size_t word = words[device].used++;
    pthread_mutex_unlock(&books);
    address seen = words[device].seen + word * sizeof(uint32_t);
    // Until the word is at least 1.
    if (!code && word < WORDS) code = BESIDE("cuStreamWaitValue32_v2", handle, address, uint32_t, unsigned)(stream, seen, 1, 0);
    if (code || word >= WORDS) {
        fprintf(stderr, "a stream cannot be made to stand still: %d, word %zu\n", code, word);
        exit(1);
    }
    restore(was);
    pthread_mutex_lock(&books);
    streams[at].word = &words[device].host[word];
    // It was let go meanwhile.
    if (!streams[at].stands) let_go(at);
    pthread_mutex_unlock(&books);
}

static void behind_work(handle stream) {
    handle event = NULL, context = NULL;
    int was = relax();
    if (!BESIDE("cuCtxGetCurrent", handle *)(&context) && !BESIDE("cuEventCreate", handle *, unsigned)(&event, 2)) {
        if (BESIDE("cuEventRecord", handle, handle)(event, stream)) BESIDE("cuEventDestroy_v2", handle)(event);
        else {
            pthread_mutex_lock(&books);
            size_t at = 0;
            while (at < MANY - 1 && works[at].event) at++;
            works[at].event = event;
            works[at].context = context;
            pthread_mutex_unlock(&books);
        }
    }
    restore(was);
}

static void pin(const char *base, size_t len) {
    pthread_mutex_lock(&books);
    for (size_t at = 0; at < MANY; at++)
        if (!pinned[at].base) {
            pinned[at].base = base;
            pinned[at].len = len;
            break;
        }
    pthread_mutex_unlock(&books);
}

static void unpin(const char *base) {
    pthread_mutex_lock(&books);
    for (size_t at = 0; at < MANY; at++)
        if (pinned[at].base == base) pinned[at].base = NULL;
    pthread_mutex_unlock(&books);
}

static void count_pageable(const char *host, size_t len) {
    pthread_mutex_lock(&books);
    int is_pinned = 0;
    for (size_t at = 0; at < MANY; at++)
        is_pinned |= pinned[at].base && host >= pinned[at].base && host + len <= pinned[at].base + pinned[at].len;
    pageable += !is_pinned;
    pthread_mutex_unlock(&books);
}

// Hands a call on: types in brackets, arguments in brackets.
#define HAND_ON(types, given)                           \
    result code;                                        \
    void *real = enter(__func__, &code);                \
    if (!code) code = ((result(*) types)real)given

#define PLAIN(name, typed, types, given) \
    result name typed {                  \
        HAND_ON(types, given);           \
        return code;                     \
    }

PLAIN(cuInit, (unsigned flags), (unsigned), (flags))
PLAIN(cuDeviceGetCount, (int *to), (int *), (to))
PLAIN(cuDeviceGet, (int *to, int at), (int *, int), (to, at))
PLAIN(cuDeviceGetName, (char *to, int len, int device), (char *, int, int), (to, len, device))
PLAIN(cuDeviceTotalMem_v2, (size_t *to, int device), (size_t *, int), (to, device))
PLAIN(cuCtxSetCurrent, (handle context), (handle), (context))
PLAIN(cuCtxGetCurrent, (handle *to), (handle *), (to))
PLAIN(cuMemGetInfo_v2, (size_t *free, size_t *total), (size_t *, size_t *), (free, total))
PLAIN(cuPointerGetAttribute, (void *to, int what, address at), (void *, int, address), (to, what, at))
PLAIN(cuIpcGetMemHandle, (struct name *to, address at), (struct name *, address), (to, at))
PLAIN(cuMemHostGetDevicePointer_v2, (address *to, void *host, unsigned flags), (address *, void *, unsigned), (to, host, flags))
PLAIN(cuStreamQuery, (handle stream), (handle), (stream))
PLAIN(cuStreamSynchronize, (handle stream), (handle), (stream))
PLAIN(cuStreamIsCapturing, (handle stream, int *to), (handle, int *), (stream, to))
PLAIN(cuEventRecord, (handle event, handle stream), (handle, handle), (event, stream))
PLAIN(cuEventQuery, (handle event), (handle), (event))
PLAIN(cuModuleGetFunction, (handle *to, handle module, const char *name), (handle *, handle, const char *), (to, module, name))
PLAIN(cuDevicePrimaryCtxReset_v2, (int device), (int), (device))

result cuGetErrorName(result of, const char **to) {
    return BESIDE("cuGetErrorName", result, const char **)(of, to);
}

result cuDevicePrimaryCtxRetain(handle *to, int device) {
    HAND_ON((handle *, int), (to, device));
    if (code) return code;
    live("contexts retained", 1);
    int at = device % 16;
    context_of[at] = *to;
    if (retained[at]++) return code;
    handle left;
    void *host = NULL;
    int was = relax();
    BESIDE("cuCtxPushCurrent_v2", handle)(*to);
    words[at].used = WORDS;
    if (!BESIDE("cuMemAllocHost_v2", void **, size_t)(&host, WORDS * sizeof(uint32_t))) {
        memset(host, 0, WORDS * sizeof(uint32_t));
        words[at].host = host;
        words[at].used = BESIDE("cuMemHostGetDevicePointer_v2", address *, void *, unsigned)(&words[at].seen, host, 0) ? WORDS : 0;
    }
    BESIDE("cuCtxPopCurrent_v2", handle *)(&left);
    restore(was);
    return code;
}

result cuDevicePrimaryCtxRelease_v2(int device) {
    // With its last user the context goes, and the points in it.
    pthread_mutex_lock(&books);
    // What stands still goes with it as well, and its memory.
    int last = --retained[device % 16] == 0;
    for (size_t at = 0; last && at < made; at++) streams[at].word = NULL;
    if (last)
        for (size_t at = 0; at < MANY; at++)
            if (works[at].context == context_of[device % 16]) works[at].event = NULL;
    pthread_mutex_unlock(&books);
    HAND_ON((int), (device));
    if (!code) live("contexts retained", -1);
    return code;
}

result cuCtxPushCurrent_v2(handle context) {
    HAND_ON((handle), (context));
    depth += !code;
    return code;
}

result cuCtxPopCurrent_v2(handle *to) {
    HAND_ON((handle *), (to));
    depth -= !code;
    return code;
}

result cuThreadExchangeStreamCaptureMode(int *to) {
    int wanted = *to;
    HAND_ON((int *), (to));
    if (!code) mode = wanted;
    return code;
}

// A word of the driver's own in the default stream would wait for it, or it for us.
static handle aside(void) {
    handle stream = NULL;
    if (BESIDE("cuStreamCreate", handle *, unsigned)(&stream, 1)) abort();
    return stream;
}

static result end(handle stream) {
    result code = BESIDE("cuStreamSynchronize", handle)(stream);
    BESIDE("cuStreamDestroy_v2", handle)(stream);
    return code;
}

result cuMemAlloc_v2(address *to, size_t len) {
    HAND_ON((address *, size_t), (to, len));
    if (code) return code;
    live("memories", 1);
    // As in the stand-in: bytes that were never written are recognized.
    int was = relax();
    handle stream = aside();
    BESIDE("cuMemsetD8Async", address, unsigned char, size_t, handle)(*to, 0xd5, len, stream);
    end(stream);
    restore(was);
    return code;
}

result cuMemFree_v2(address base) {
    HAND_ON((address), (base));
    if (!code) live("memories", -1);
    return code;
}

result cuIpcOpenMemHandle_v2(address *to, struct name name, unsigned flags) {
    HAND_ON((address *, struct name, unsigned), (to, name, flags));
    if (!code) live("memories opened", 1);
    return code;
}

result cuIpcCloseMemHandle(address base) {
    HAND_ON((address), (base));
    if (!code) live("memories opened", -1);
    return code;
}

result cuMemHostRegister_v2(void *base, size_t len, unsigned flags) {
    HAND_ON((void *, size_t, unsigned), (base, len, flags));
    if (!code) {
        live("registrations", 1);
        pin(base, len);
    }
    return code;
}

result cuMemHostUnregister(void *base) {
    HAND_ON((void *), (base));
    if (!code) {
        live("registrations", -1);
        unpin(base);
    }
    return code;
}

result cuMemAllocHost_v2(void **to, size_t len) {
    HAND_ON((void **, size_t), (to, len));
    if (!code) {
        live("host memories", 1);
        pin(*to, len);
    }
    return code;
}

result cuMemFreeHost(void *base) {
    HAND_ON((void *), (base));
    if (!code) {
        live("host memories", -1);
        unpin(base);
    }
    return code;
}

result cuStreamCreate(handle *to, unsigned flags) {
    HAND_ON((handle *, unsigned), (to, flags));
    if (code) return code;
    live("streams", 1);
    pthread_mutex_lock(&books);
    if (made < STREAMS - 1) streams[made++].stream = *to;
    pthread_mutex_unlock(&books);
    return code;
}

result cuStreamDestroy_v2(handle stream) {
    // Another stream may get the same handle.
    pthread_mutex_lock(&books);
    size_t at = number_of(stream);
    if (at && at < STREAMS - 1) streams[at].stream = NULL;
    pthread_mutex_unlock(&books);
    HAND_ON((handle), (stream));
    if (!code) live("streams", -1);
    return code;
}

result cuEventCreate(handle *to, unsigned flags) {
    HAND_ON((handle *, unsigned), (to, flags));
    if (!code) live("events", 1);
    return code;
}

result cuEventDestroy_v2(handle event) {
    HAND_ON((handle), (event));
    if (!code) live("events", -1);
    return code;
}

result cuModuleLoadData(handle *to, const void *image) {
    HAND_ON((handle *, const void *), (to, image));
    if (!code) live("modules", 1);
    return code;
}

result cuModuleUnload(handle module) {
    HAND_ON((handle), (module));
    if (!code) live("modules", -1);
    return code;
}

// Work for a stream: it stands still before, and a point is behind.
#define WORK(stream, types, given)                      \
    result code;                                        \
    void *real = enter(__func__, &code);                \
    if (code) return code;                              \
    before_work(stream);                                \
    code = ((result(*) types)real)given;                \
    if (!code) behind_work(stream);                     \
    return code

result cuStreamWaitEvent(handle stream, handle event, unsigned flags) {
    WORK(stream, (handle, handle, unsigned), (stream, event, flags));
}

result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t len, handle stream) {
    count_pageable(from, len);
    WORK(stream, (address, const void *, size_t, handle), (to, from, len, stream));
}

result cuMemcpyDtoHAsync_v2(void *to, address from, size_t len, handle stream) {
    count_pageable(to, len);
    WORK(stream, (void *, address, size_t, handle), (to, from, len, stream));
}

result cuMemcpyDtoDAsync_v2(address to, address from, size_t len, handle stream) {
    WORK(stream, (address, address, size_t, handle), (to, from, len, stream));
}

result cuLaunchKernel(handle of, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                      unsigned shared, handle stream, void **parameters, void **extra) {
    WORK(stream,
         (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **),
         (of, x, y, z, threads, threads_y, threads_z, shared, stream, parameters, extra));
}

#ifndef WITHOUT_BATCH
result cuMemcpyBatchAsync(address *to, address *from, size_t *sizes, size_t count, void *attributes, size_t *firsts, size_t kinds,
                          size_t *failed, handle stream) {
    WORK(stream, (address *, address *, size_t *, size_t, void *, size_t *, size_t, size_t *, handle),
         (to, from, sizes, count, attributes, firsts, kinds, failed, stream));
}
#endif

// What tests ask and say: standin.h has the words.

uint64_t standin_calls(const char *name) {
    pthread_mutex_lock(&books);
    uint64_t count = 0;
    for (size_t at = 0; at < sizeof calls / sizeof *calls && calls[at].name; at++)
        if (!strcmp(calls[at].name, name)) count = calls[at].calls;
    pthread_mutex_unlock(&books);
    return count;
}

int standin_misuse(char *to, size_t len) {
    snprintf(to, len, "%s", wrong);
    return wrong[0] != 0;
}

int standin_live(char *to, size_t len) {
    size_t written = 0;
    *to = 0;
    pthread_mutex_lock(&books);
    for (size_t at = 0; at < sizeof alive / sizeof *alive; at++)
        if (alive[at].count && written < len)
            written += (size_t)snprintf(to + written, len - written, "%s: %d\n", alive[at].what, alive[at].count);
    pthread_mutex_unlock(&books);
    return written != 0;
}

void standin_fail(const char *name, uint64_t nth, result code) {
    pthread_mutex_lock(&books);
    struct call *call = call_of(name);
    call->fails_in = nth;
    call->code = code;
    pthread_mutex_unlock(&books);
}

void standin_refuse_call(const char *name, result code) {
    pthread_mutex_lock(&books);
    call_of(name)->always = code;
    pthread_mutex_unlock(&books);
}

int standin_thread(void) { return mode * 100 + depth; }

uint64_t standin_pageable(void) { return pageable; }

size_t standin_streams(void) {
    pthread_mutex_lock(&books);
    size_t latest = made - 1;
    pthread_mutex_unlock(&books);
    return latest;
}

uint64_t standin_stream(size_t number) { return (uint64_t)streams[number % STREAMS].stream; }

void standin_stand(size_t number, int still) {
    pthread_mutex_lock(&books);
    size_t at = number % STREAMS;
    streams[at].stands = still;
    if (!still) let_go(at);
    pthread_mutex_unlock(&books);
}

// Inside the context of a device that is open, whichever.
static int inside(void) {
    for (int at = 0; at < 16; at++)
        if (retained[at] > 0) return BESIDE("cuCtxPushCurrent_v2", handle)(context_of[at]) == OK;
    return 0;
}

static void outside(void) {
    handle left;
    BESIDE("cuCtxPopCurrent_v2", handle *)(&left);
}

uint64_t standin_pending(void) {
    uint64_t pending = 0;
    int was = relax();
    for (size_t at = 0; at < MANY; at++) {
        pthread_mutex_lock(&books);
        handle event = works[at].event, context = works[at].context;
        if (event && !BESIDE("cuCtxPushCurrent_v2", handle)(context)) {
            result code = BESIDE("cuEventQuery", handle)(event);
            if (code != NOT_READY) {
                BESIDE("cuEventDestroy_v2", handle)(event);
                works[at].event = NULL;
            } else pending++;
            handle left;
            BESIDE("cuCtxPopCurrent_v2", handle *)(&left);
        } else works[at].event = NULL;
        pthread_mutex_unlock(&books);
    }
    restore(was);
    return pending;
}

static int look(address at, char *to, const char *from, size_t len) {
    if (!inside()) return 1;
    int was = relax();
    handle stream = aside();
    result code = to ? BESIDE("cuMemcpyDtoHAsync_v2", void *, address, size_t, handle)(to, at, len, stream)
                     : BESIDE("cuMemcpyHtoDAsync_v2", address, const void *, size_t, handle)(at, from, len, stream);
    result ended = end(stream);
    restore(was);
    outside();
    return code ? code : ended;
}

int standin_peek(address at, char *to, size_t len) { return look(at, to, NULL, len); }
int standin_poke(address at, const char *from, size_t len) { return look(at, NULL, from, len); }

// Ends a capture: whether the graph is good, and nothing of ours is in it.
static int end_capture(handle stream, const char *what) {
    handle graph = NULL;
    size_t nodes = 0;
    result code = BESIDE("cuStreamEndCapture", handle, handle *)(stream, &graph);
    if (!code && graph) BESIDE("cuGraphGetNodes", handle, handle *, size_t *)(graph, NULL, &nodes);
    if (graph) BESIDE("cuGraphDestroy", handle)(graph);
    int good = !code && graph && !nodes;
    if (!good) snprintf(wrong, sizeof wrong, "%s: the graph is lost (%d) or has %zu nodes of ours\n", what, code, nodes);
    return good;
}

// This thread captures a graph in global mode, or ends that. What is called on it meanwhile is not the engine's.
void standin_capture(int on) {
    static handle stream;
    if (!inside()) return;
    if (on) {
        stream = aside();
        if (BESIDE("cuStreamBeginCapture_v2", handle, int)(stream, 0)) snprintf(wrong, sizeof wrong, "no capture begins\n");
    } else {
        end_capture(stream, "an engine's capture");
        BESIDE("cuStreamDestroy_v2", handle)(stream);
    }
    outside();
}

int standin_capture_of(size_t number, int on) {
    if (!inside()) return 0;
    handle stream = streams[number % STREAMS].stream;
    int good = on ? !BESIDE("cuStreamBeginCapture_v2", handle, int)(stream, 0) : end_capture(stream, "a stream's capture");
    outside();
    return good;
}

// The newest PTX that the driver knows: one older than the kernels' takes none of them.
void standin_ptx(unsigned long version) { standin_refuse_call("cuModuleLoadData", version < 70 ? 222 : OK); }
