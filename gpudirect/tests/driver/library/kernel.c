// Modules and launches. The device code is not run: what the two kernels of this repository do is done here by the
// parameters that they are launched with. Their own source is run by scripts/kernels. See standin.h.
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct module {
    struct context *context;
    char *source;
    int launches;
    int live;
};

struct function {
    struct module *module;
    enum { GATHER, CRC32, BUSY_FOR, BUSY_ALL, MOVES_SLOTS } kernel;
    // What the PTX says of it: entries of its table, threads of a block.
    unsigned long size;
};

// Never freed: a handle that is used after its end is recognised.
static struct module *modules[256];
static size_t made;
static struct function *functions[256];
static size_t functions_made;

void forget_modules_of(struct context *context) {
    for (size_t at = 0; at < made; at++)
        if (modules[at]->live && modules[at]->context == context) {
            if (!context->broken) misuse("a context is released that has a module");
            modules[at]->live = 0;
            live("modules", -1);
        }
}

// The number behind some words of a source, or 0.
static unsigned long number_behind(const char *source, const char *words) {
    const char *at = strstr(source, words);
    return at ? strtoul(at + strlen(words), NULL, 10) : 0;
}

// The newest PTX that the driver knows, and the device's architecture: those of CUDA 11.0 and of its oldest usual device.
static unsigned long newest = 70;
static const unsigned long ARCHITECTURE = 70;

static result judge(const char *image) {
    const char *version = strstr(image, ".version "), *target = strstr(image, ".target sm_");
    if (!version || !target) return INVALID_PTX;
    unsigned long major = strtoul(version + strlen(".version "), NULL, 10), minor = number_behind(strchr(version, '.') + 1, ".");
    if (major * 10 + minor > newest) return UNSUPPORTED_PTX_VERSION;
    return strtoul(target + strlen(".target sm_"), NULL, 10) > ARCHITECTURE ? NO_BINARY_FOR_GPU : OK;
}

result cuModuleLoadData(struct module **to, const void *image) {
    ENTER(1);
    result judged = judge(image);
    if (made == sizeof modules / sizeof *modules || judged) return leave(judged ? judged : INVALID_IMAGE);
    struct module *module = calloc(1, sizeof *module);
    module->context = current;
    module->source = strdup(image);
    module->live = 1;
    *to = modules[made++] = module;
    live("modules", 1);
    return leave(OK);
}

static struct module *module_of(void *handle, const char *call) {
    for (size_t at = 0; at < made; at++)
        if (modules[at] == handle && modules[at]->live && modules[at]->context == current) return modules[at];
    misuse("%s with a module that is none here, or was unloaded", call);
    return NULL;
}

result cuModuleUnload(void *handle) {
    ENTER(1);
    struct module *module = module_of(handle, "cuModuleUnload");
    if (!module) return leave(INVALID_HANDLE);
    if (module->launches) misuse("a module is unloaded while its kernel is under way");
    module->live = 0;
    live("modules", -1);
    return leave(OK);
}

result cuModuleGetFunction(struct function **to, void *handle, const char *name) {
    ENTER(1);
    struct module *module = module_of(handle, "cuModuleGetFunction");
    if (!module) return leave(INVALID_HANDLE);
    char head[128];
    snprintf(head, sizeof head, ".visible .entry %s(", name);
    int gather = !strcmp(name, "kvarts_gather"), crc = !strcmp(name, "kvarts_crc32") || !strcmp(name, "kvarts_crc32_many");
    int busy = !strcmp(name, "kvarts_wait"), all = !strcmp(name, "kvarts_busy"), slots = !strcmp(name, "kvarts_slots");
    if (!strstr(module->source, head) || !(gather || crc || busy || all || slots)) return leave(NOT_FOUND);
    struct function *function = calloc(1, sizeof *function);
    function->module = module;
    function->kernel = gather ? GATHER : crc ? CRC32 : slots ? MOVES_SLOTS : all ? BUSY_ALL : BUSY_FOR;
    // Behind a number of eight bytes each entry of the gather kernel's table has three of them.
    if (busy || all) function->size = 1;
    else if (slots) function->size = number_behind(module->source, "kvarts_slots_param_0[") == sizeof(struct moved);
    else if (gather) function->size = (number_behind(module->source, "kvarts_gather_param_0[") - 8) / 24;
    else function->size = number_behind(module->source, ".maxntid ");
    if (!function->size) return leave(NOT_FOUND);
    *to = functions[functions_made++] = function;
    return leave(OK);
}

// An address in a kernel: device memory, or registered memory as the device sees it.
static char *reach(address at, size_t len, int **uses) {
    struct memory *memory = memory_at(at, len);
    struct pinned *pinned = memory ? NULL : pinned_seen_at(at, len);
    if (!memory && !pinned) {
        misuse("a kernel reaches %zu bytes of %s", len, kind_of(at));
        return NULL;
    }
    if (uses) ++*(*uses = memory ? &memory->uses : &pinned->uses);
    return memory ? memory->bytes + (at - memory->base) : pinned->base + (at - pinned->seen);
}

// The table lies in the parameter: a number, then as many entries of three kinds as the PTX says.
static result gather(struct function *function, struct stream *stream, void **parameters) {
    const uint64_t *table = parameters[0];
    unsigned long size = function->size;
    if (8 + size * 24 > 4096 || table[0] > size) {
        misuse("a gather of %llu pieces with a table of %lu", (unsigned long long)table[0], size);
        return INVALID_VALUE;
    }
    struct work *work = calloc(1, sizeof *work);
    work->what = COPY;
    work->parts = calloc(table[0] + 1, sizeof *work->parts);
    for (uint64_t at = 0; at < table[0]; at++) {
        uint64_t len = table[1 + 2 * size + at];
        struct part *part = &work->parts[work->count];
        if (!len) continue;
        part->to = reach(table[1 + at], len, &part->uses[0]);
        part->from = reach(table[1 + size + at], len, &part->uses[1]);
        part->len = part->to && part->from ? len : 0;
        // On a GPU it is found out later and breaks the context.
        if (!part->len) current->broken = ILLEGAL_ADDRESS;
        work->count++;
    }
    work->uses[0] = &function->module->launches;
    ++*work->uses[0];
    enqueue(stream, work);
    return OK;
}

static result crc32_of(struct function *function, struct stream *stream, void **parameters) {
    struct work *work = calloc(1, sizeof *work);
    work->what = DIGEST;
    struct digest *digest = &work->digest;
    memcpy(&digest->chunks, parameters[0], 8);
    memcpy(&digest->lens, parameters[1], 8);
    memcpy(&digest->digests, parameters[2], 8);
    memcpy(&digest->count, parameters[3], 8);
    int inside = reach(digest->chunks, digest->count * 8, &work->uses[0]) != NULL;
    inside &= reach(digest->lens, digest->count * 8, &work->uses[1]) != NULL;
    inside &= reach(digest->digests, digest->count * 4, &work->uses[2]) != NULL;
    if ((digest->chunks | digest->lens) % 8 || digest->digests % 4) misuse("arrays of a kernel lie askew");
    if (!inside) current->broken = ILLEGAL_ADDRESS;
    work->uses[3] = &function->module->launches;
    ++*work->uses[3];
    enqueue(stream, work);
    return OK;
}

// For nanoseconds; where the whole device is busy, for as many as it has rounds.
static result busy(struct function *function, struct stream *stream, void **parameters) {
    struct work *work = calloc(1, sizeof *work);
    work->what = BUSY;
    if (function->kernel == BUSY_ALL) {
        uint64_t memory, mask;
        memcpy(&memory, parameters[0], 8);
        memcpy(&mask, parameters[1], 8);
        memcpy(&work->target, parameters[2], 4);
        reach(memory, (mask + 1) * 16, &work->uses[1]);
    } else memcpy(&work->target, parameters[0], 8);
    work->uses[0] = &function->module->launches;
    ++*work->uses[0];
    enqueue(stream, work);
    return OK;
}

// The last byte that rows reach behind their beginning.
static uint64_t rows_end(const struct moved *moved, uint64_t outer, uint64_t inner) {
    return (moved->outer - 1) * outer + (moved->inner - 1) * inner + moved->bytes;
}

static result slots_of(struct function *function, struct stream *stream, void **parameters) {
    struct work *work = calloc(1, sizeof *work);
    work->what = SLOTS;
    struct moved *moved = &work->moved;
    memcpy(moved, parameters[0], sizeof *moved);
    if (!moved->count || !moved->outer || !moved->inner || !moved->bytes) misuse("a move of no rows");
    uint64_t ring = (moved->count - 1) * moved->ring_stride + rows_end(moved, moved->ring_outer, moved->ring_inner);
    int inside = reach(moved->slots, moved->count * 4ull, &work->uses[0]) != NULL;
    inside &= reach(moved->ring, ring, &work->uses[1]) != NULL;
    // Where the slots are is known when it runs; the memory that slot zero is in is the one that is used.
    inside &= reach(moved->pool, 1, &work->uses[2]) != NULL;
    if (!inside) current->broken = ILLEGAL_ADDRESS;
    work->uses[3] = &function->module->launches;
    ++*work->uses[3];
    enqueue(stream, work);
    return OK;
}

result cuLaunchKernel(void *handle, unsigned blocks, unsigned blocks_y, unsigned blocks_z, unsigned threads,
                      unsigned threads_y, unsigned threads_z, unsigned shared, void *in, void **parameters, void **extra) {
    ENTER(1);
    struct function *function = NULL;
    for (size_t at = 0; at < functions_made; at++)
        if (functions[at] == handle) function = functions[at];
    if (!function || !function->module->live || function->module->context != current) {
        misuse("cuLaunchKernel of what is no kernel here, or was unloaded");
        return leave(INVALID_HANDLE);
    }
    struct stream *stream = stream_of(in, "cuLaunchKernel");
    if (!stream) return leave(INVALID_HANDLE);
    int flat = blocks_y == 1 && blocks_z == 1 && threads_y == 1 && threads_z == 1;
    if (!blocks || !threads || threads > 1024 || !flat || shared || extra) {
        misuse("cuLaunchKernel of %u blocks of %u threads", blocks, threads);
        return leave(INVALID_VALUE);
    }
    if (function->kernel == GATHER) return leave(gather(function, stream, parameters));
    if (function->kernel == BUSY_FOR || function->kernel == BUSY_ALL) return leave(busy(function, stream, parameters));
    if (function->kernel == MOVES_SLOTS) return leave(slots_of(function, stream, parameters));
    if (threads != function->size) misuse("%u threads, the kernel is written for %lu", threads, function->size);
    return leave(crc32_of(function, stream, parameters));
}

// On the stream's thread, without the books.
result run_digest(const struct digest *digest) {
    result code = OK;
    lock_books();
    char *chunks = reach(digest->chunks, digest->count * 8, NULL), *lens = reach(digest->lens, digest->count * 8, NULL);
    char *digests = reach(digest->digests, digest->count * 4, NULL);
    for (uint64_t at = 0; at < digest->count && chunks && lens && digests && !code; at++) {
        uint64_t chunk, len;
        memcpy(&chunk, chunks + at * 8, 8);
        memcpy(&len, lens + at * 8, 8);
        const char *bytes = len ? reach(chunk, len, NULL) : "";
        uint32_t crc = ~0u;
        for (uint64_t byte = 0; bytes && byte < len; byte++) {
            crc ^= (unsigned char)bytes[byte];
            for (int bit = 0; bit < 8; bit++) crc = (crc & 1) ? (crc >> 1) ^ 0xedb88320u : crc >> 1;
        }
        crc = ~crc;
        if (bytes) memcpy(digests + at * 4, &crc, 4);
        else code = ILLEGAL_ADDRESS;
    }
    unlock_books();
    return code;
}

// From the last slot to the first, and so with its rows: they have no order.
result run_slots(const struct moved *moved) {
    result code = OK;
    lock_books();
    uint64_t end = rows_end(moved, moved->pool_outer, moved->pool_inner);
    for (uint64_t at = moved->count; at-- > 0 && !code;) {
        uint32_t slot = 0;
        char *number = reach(moved->slots + at * 4, 4, NULL);
        if (number) memcpy(&slot, number, 4);
        char *pool = number ? reach(moved->pool + slot * moved->pool_stride, end, NULL) : NULL;
        char *ring = reach(moved->ring + at * moved->ring_stride, rows_end(moved, moved->ring_outer, moved->ring_inner), NULL);
        if (!pool || !ring) {
            code = ILLEGAL_ADDRESS;
            break;
        }
        for (uint64_t row = (uint64_t)moved->outer * moved->inner; row-- > 0;) {
            uint64_t outer = row / moved->inner, inner = row % moved->inner;
            char *here = ring + outer * moved->ring_outer + inner * moved->ring_inner;
            char *there = pool + outer * moved->pool_outer + inner * moved->pool_inner;
            memmove(moved->to_pool ? there : here, moved->to_pool ? here : there, moved->bytes);
        }
    }
    unlock_books();
    return code;
}

// What tests say.

// The newest PTX that the driver knows, as ten times its version.
void standin_ptx(unsigned long version) {
    lock_books();
    newest = version;
    unlock_books();
}
