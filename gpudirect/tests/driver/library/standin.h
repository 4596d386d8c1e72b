// A stand-in for NVIDIA's driver libraries, in host memory, for machines without a GPU. It is a double: it shows in which
// order our code calls what, with which addresses, and what it gives back. That a GPU takes those calls, or how fast, it
// cannot show.
//
// The calls behave as CUDA's documentation says, and where that leaves a choice, as badly for the caller as it allows:
// work is done later, on a thread for each stream; copies of one batch run from the last to the first; addresses are
// never used twice; copies with host memory that is not pinned end before the call does; the driver knows no newer PTX than
// one of CUDA 11.0. What is an error is answered as one. What no correct program does besides (memory that is freed while a
// copy uses it, a call without a context, a handle after its end) is written down as misuse, which tests ask for, and so is
// what no guest of an engine does: work or events of ours in a graph that the engine captures.
//
// All books are under one lock, which every entry point holds from ENTER to leave().
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef int result;
typedef uint64_t address;

enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CONTEXT_IS_DESTROYED = 709,
    ILLEGAL_ADDRESS = 700,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_PTX = 218,
    NO_BINARY_FOR_GPU = 209,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_ISOLATION = 905,
    CAPTURED_EVENT = 907,
};

enum { DEVICES = 2 };

struct stream;

// The primary context of a device. Its handle is its address.
struct context {
    int ordinal;
    int retained;
    // The error that some work ended with: from then on every call in the context answers with it.
    result broken;
    struct stream *usual;
};

// Device memory. The address is a reservation that the host can neither read nor write; the bytes lie in `bytes`.
struct memory {
    struct memory *next;
    address base;
    size_t len;
    // What the driver calls one allocation: all of it, or pieces of this many bytes, each mapped by itself.
    size_t grain;
    char *bytes;
    int fd;
    struct context *context;
    // How often it was opened, if it is another process's.
    int opens;
    uint64_t owner, serial;
    // Work under way that touches it.
    int uses;
    int live;
    struct trailer *trailer;
};

// Host memory that was registered, or allocated by the driver, which is `own`. The device knows it by another address than the host.
struct pinned {
    struct pinned *next;
    struct context *context;
    char *base;
    size_t len;
    address seen;
    int mapped;
    int own;
    int uses;
    int live;
};

// Bytes that work moves, and what it uses for that.
struct part {
    char *to;
    const char *from;
    size_t len;
    int *uses[2];
};

// A launch of the digest kernel: three arrays in device memory.
struct digest {
    address chunks, lens, digests;
    uint64_t count;
};

// A launch of the kernel that moves rows of slots: its parameter.
struct moved {
    address slots, ring, pool;
    uint64_t ring_stride, pool_stride, ring_outer, pool_outer, ring_inner, pool_inner, bytes;
    uint32_t count, outer, inner, to_pool;
};

enum what { COPY, DIGEST, WAIT, WORD, BUSY, SLOTS };

// One thing that a stream does.
struct work {
    struct work *next;
    enum what what;
    size_t count;
    struct part *parts;
    char *staged;
    struct digest digest;
    struct moved moved;
    struct stream *other;
    uint64_t target;
    // A word in host memory, and the least that is waited for.
    const volatile uint32_t *word;
    uint32_t least;
    int *uses[4];
};

// state.c
extern struct context contexts[DEVICES];
extern _Thread_local struct context *current;
void misuse(const char *format, ...) __attribute__((format(printf, 1, 2)));
void live(const char *what, int change);
result enter(const char *name, int in_context);
result leave(result code);
// Sleeps until something changed; the lock is held before and after.
void wait_for_change(void);
void changed(void);
void lock_books(void);
void unlock_books(void);
result failure_of_next_work(void);
// An engine's capture in global mode begins, or ends: whether nothing broke it.
int capture_globally(int on);

#define ENTER(in_context)                                \
    do {                                                 \
        result entered = enter(__func__, in_context);    \
        if (entered != OK) return entered;               \
    } while (0)

// memory.c
struct memory *memory_at(address at, size_t len);
struct pinned *pinned_at(const void *host, size_t len);
struct pinned *pinned_seen_at(address at, size_t len);
// Whether an address was ever the device's.
int is_devices(address at);
const char *kind_of(address at);
void forget_memory_of(struct context *context);

// stream.c
struct stream *stream_of(void *handle, const char *call);
struct context *context_of(struct stream *stream);
void enqueue(struct stream *stream, struct work *work);
void wait_until_done(struct stream *stream);
void forget_streams_of(struct context *context);

// kernel.c
result run_digest(const struct digest *digest);
result run_slots(const struct moved *moved);
void forget_modules_of(struct context *context);
