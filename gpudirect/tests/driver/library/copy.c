// Copies: one by one, and in batches. See standin.h.
#include "standin.h"

#include <stdlib.h>
#include <string.h>

// How one end of a copy may lie.
enum end { DEVICE, HOST, PINNED_OR_DEVICE };

struct attributes {
    unsigned order;
    int hints[4];
    unsigned flags;
};

// Where the bytes of one end lie; NULL if it may not be what it is. Counts who uses it.
static char *bytes_of(address at, size_t len, enum end end, const char *call, int **uses) {
    struct memory *memory = end == HOST ? NULL : memory_at(at, len);
    if (memory) {
        ++*(*uses = &memory->uses);
        return memory->bytes + (at - memory->base);
    }
    struct pinned *pinned = end == DEVICE ? NULL : pinned_at((void *)at, len);
    if (pinned) {
        ++*(*uses = &pinned->uses);
        return (char *)at;
    }
    // Ordinary memory: the host's side of single copies may be that, if none of it is registered.
    if (end == HOST && !is_devices(at) && !pinned_at((void *)at, 0) && !pinned_at((void *)(at + len - 1), 0)) {
        *uses = NULL;
        return (char *)at;
    }
    static const char *const wanted[] = {"device memory", "host memory", "device memory or registered host memory"};
    misuse("%s: %zu bytes that are no %s: %s", call, len, wanted[end], kind_of(at));
    *uses = NULL;
    return NULL;
}

static struct work *new_copy(size_t count) {
    struct work *work = calloc(1, sizeof *work);
    work->what = COPY;
    work->count = count;
    work->parts = calloc(count ? count : 1, sizeof *work->parts);
    return work;
}

static void drop_copy(struct work *work) {
    for (size_t at = 0; at < work->count; at++)
        for (int side = 0; side < 2; side++)
            if (work->parts[at].uses[side]) --*work->parts[at].uses[side];
    free(work->parts);
    free(work->staged);
    free(work);
}

static int fill(struct part *part, address to, enum end to_end, address from, enum end from_end, size_t len, const char *call) {
    part->to = bytes_of(to, len, to_end, call, &part->uses[0]);
    part->from = bytes_of(from, len, from_end, call, &part->uses[1]);
    part->len = len;
    return part->to && part->from;
}

static uint64_t pageable;

// Copies with host memory that is not pinned so far.
uint64_t standin_pageable(void) {
    lock_books();
    uint64_t count = pageable;
    unlock_books();
    return count;
}

// The driver moves host memory that is not pinned through memory of its own and may wait for the device meanwhile, in
// calls that are named asynchronous too: here it always does.
static result copy(address to, enum end to_end, address from, enum end from_end, size_t len, void *handle, const char *call) {
    struct stream *stream = stream_of(handle, call);
    if (!stream) return INVALID_HANDLE;
    if (!len) return OK;
    struct work *work = new_copy(1);
    if (!fill(work->parts, to, to_end, from, from_end, len, call)) {
        drop_copy(work);
        return INVALID_VALUE;
    }
    int waits = !work->parts->uses[0] || !work->parts->uses[1];
    enqueue(stream, work);
    if (!waits) return OK;
    pageable++;
    wait_until_done(stream);
    return current->broken;
}

result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t len, void *stream) {
    ENTER(1);
    return leave(copy(to, DEVICE, (address)from, HOST, len, stream, "cuMemcpyHtoDAsync"));
}

result cuMemcpyDtoHAsync_v2(void *to, address from, size_t len, void *stream) {
    ENTER(1);
    return leave(copy((address)to, HOST, from, DEVICE, len, stream, "cuMemcpyDtoHAsync"));
}

result cuMemcpyDtoDAsync_v2(address to, address from, size_t len, void *stream) {
    ENTER(1);
    return leave(copy(to, DEVICE, from, DEVICE, len, stream, "cuMemcpyDtoDAsync"));
}

result cuMemsetD8Async(address to, unsigned char byte, size_t len, void *handle) {
    ENTER(1);
    const char *call = "cuMemsetD8Async";
    struct stream *stream = stream_of(handle, call);
    if (!stream) return leave(INVALID_HANDLE);
    struct work *work = new_copy(1);
    work->parts->to = bytes_of(to, len, DEVICE, call, &work->parts->uses[0]);
    if (!work->parts->to) {
        drop_copy(work);
        return leave(INVALID_VALUE);
    }
    work->staged = malloc(len);
    memset(work->staged, byte, len);
    work->parts->from = work->staged;
    work->parts->len = len;
    enqueue(stream, work);
    return leave(OK);
}

// Returns when the bytes are staged: they reach the device when the default stream comes to it, and other streams do not
// wait for that.
result cuMemcpyHtoD_v2(address to, const void *from, size_t len) {
    ENTER(1);
    struct stream *stream = stream_of(NULL, "cuMemcpyHtoD");
    if (!len) return leave(OK);
    struct work *work = new_copy(1);
    if (!fill(work->parts, to, DEVICE, (address)from, HOST, len, "cuMemcpyHtoD")) {
        drop_copy(work);
        return leave(INVALID_VALUE);
    }
    if (!work->parts->uses[1]) {
        work->staged = malloc(len);
        memcpy(work->staged, from, len);
        work->parts->from = work->staged;
        enqueue(stream, work);
    } else {
        enqueue(stream, work);
        wait_until_done(stream);
    }
    return leave(current->broken);
}

result cuMemcpyDtoH_v2(void *to, address from, size_t len) {
    ENTER(1);
    result code = copy((address)to, HOST, from, DEVICE, len, NULL, "cuMemcpyDtoH");
    if (code) return leave(code);
    wait_until_done(stream_of(NULL, "cuMemcpyDtoH"));
    return leave(current->broken);
}

#ifndef WITHOUT_BATCH
result cuMemcpyBatchAsync(address *to, address *from, size_t *sizes, size_t count, struct attributes *attributes,
                          size_t *firsts, size_t attribute_count, size_t *failed, void *handle) {
    ENTER(1);
    *failed = (size_t)-1;
    const char *call = "cuMemcpyBatchAsync";
    if ((uintptr_t)handle <= 1) {
        misuse("%s into the default stream", call);
        return leave(INVALID_VALUE);
    }
    struct stream *stream = stream_of(handle, call);
    if (!stream) return leave(INVALID_HANDLE);
    if (!count || attribute_count != 1 || firsts[0] != 0 || attributes->order < 1 || attributes->order > 3) {
        misuse("%s of %zu copies with %zu attributes, order %u", call, count, attribute_count, attributes->order);
        return leave(INVALID_VALUE);
    }
    struct work *work = new_copy(count);
    size_t bytes = 0, at = 0;
    for (; at < count; at++) {
        struct part *part = &work->parts[at];
        if (!sizes[at]) misuse("%s with a copy of nothing", call);
        if (!sizes[at] || !fill(part, to[at], PINNED_OR_DEVICE, from[at], PINNED_OR_DEVICE, sizes[at], call)) {
            *failed = at;
            drop_copy(work);
            return leave(INVALID_VALUE);
        }
        bytes += sizes[at];
    }
    // Any other order than the stream's lets the sources be read now, whatever stands before them in the stream.
    if (attributes->order != 1) {
        work->staged = malloc(bytes);
        char *next = work->staged;
        for (at = 0; at < count; next += sizes[at++]) {
            memcpy(next, work->parts[at].from, sizes[at]);
            work->parts[at].from = next;
        }
    }
    enqueue(stream, work);
    return leave(OK);
}
#endif
