// Device memory, registered host memory, and memory of other processes. See standin.h.
#include "standin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = 4096 };

// The last page of a memory, which every process sees that has it open.
struct trailer {
    uint64_t serial;
    uint64_t len;
    int opens;
};

// The name of a memory for other processes.
struct name {
    char magic[8];
    uint32_t pid;
    int32_t fd;
    uint64_t len;
    uint64_t serial;
    char rest[32];
};
_Static_assert(sizeof(struct name) == 64, "a handle has 64 bytes");

static struct memory *memories;
static struct pinned *pins;
static uint64_t serials;
static size_t room = (size_t)1 << 30;
// What the next allocations are made of: pieces of this many bytes, or a single piece.
static size_t grain;

static size_t paged(size_t len) { return (len + PAGE - 1) / PAGE * PAGE; }

// Addresses that the host cannot touch, with a page behind them that no allocation has.
static address reserve(size_t len) {
    void *at = mmap(NULL, paged(len) + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? 0 : (address)at;
}

struct memory *memory_at(address at, size_t len) {
    for (struct memory *each = memories; each; each = each->next)
        if (each->live && at >= each->base && at - each->base <= each->len && len <= each->len - (at - each->base))
            return each;
    return NULL;
}

struct pinned *pinned_at(const void *host, size_t len) {
    const char *at = host;
    for (struct pinned *each = pins; each; each = each->next)
        if (each->live && at >= each->base && at < each->base + each->len)
            return len <= each->len - (size_t)(at - each->base) ? each : NULL;
    return NULL;
}

struct pinned *pinned_seen_at(address at, size_t len) {
    for (struct pinned *each = pins; each; each = each->next)
        if (each->live && each->mapped && at >= each->seen && at - each->seen < each->len)
            return len <= each->len - (at - each->seen) ? each : NULL;
    return NULL;
}

int is_devices(address at) {
    for (struct memory *each = memories; each; each = each->next)
        if (at >= each->base && at < each->base + paged(each->len) + PAGE) return 1;
    for (struct pinned *each = pins; each; each = each->next)
        if (at >= each->seen && at < each->seen + paged(each->len) + PAGE) return 1;
    return 0;
}

const char *kind_of(address at) {
    for (struct memory *each = memories; each; each = each->next)
        if (at >= each->base && at < each->base + paged(each->len) + PAGE)
            return each->live ? "beyond device memory" : "device memory that was given back";
    for (struct pinned *each = pins; each; each = each->next) {
        if (at >= (address)each->base && at < (address)each->base + each->len)
            return each->live ? "registered host memory" : "host memory that is no longer registered";
        if (at >= each->seen && at < each->seen + each->len) return "registered memory as the device sees it";
    }
    return "host memory, or nothing";
}

static struct memory *make(int fd, size_t len, uint64_t owner, uint64_t serial) {
    struct memory *memory = calloc(1, sizeof *memory);
    char *bytes = mmap(NULL, paged(len) + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memory->base = reserve(len);
    if (bytes == MAP_FAILED || !memory->base) {
        free(memory);
        return NULL;
    }
    memory->bytes = bytes;
    memory->trailer = (struct trailer *)(bytes + paged(len));
    memory->len = len;
    memory->grain = grain ? grain : len;
    memory->fd = fd;
    memory->context = current;
    memory->owner = owner;
    memory->serial = serial;
    memory->live = 1;
    memory->next = memories;
    memories = memory;
    return memory;
}

static void end(struct memory *memory) {
    memory->live = 0;
    live(memory->opens ? "memories opened" : "memories", -1);
    memory->opens = 0;
    close(memory->fd);
    // Work that still uses it must not crash the test that is about it.
    if (!memory->uses) munmap(memory->bytes, paged(memory->len) + PAGE);
}

result cuMemAlloc_v2(address *to, size_t len) {
    ENTER(1);
    size_t used = 0;
    for (struct memory *each = memories; each; each = each->next) used += each->live && !each->opens ? each->len : 0;
    if (!len) return leave(INVALID_VALUE);
    if (len > room || used > room - len) return leave(OUT_OF_MEMORY);
    int fd = memfd_create("stand-in", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(paged(len) + PAGE))) return leave(OUT_OF_MEMORY);
    struct memory *memory = make(fd, len, (uint64_t)getpid(), ++serials);
    if (!memory) return leave(OUT_OF_MEMORY);
    // Bytes that were never written are recognized by this value when they are read.
    memset(memory->bytes, 0xd5, len);
    memory->trailer->serial = memory->serial;
    memory->trailer->len = len;
    live("memories", 1);
    *to = memory->base;
    return leave(OK);
}

result cuMemGetInfo_v2(size_t *available, size_t *total) {
    ENTER(1);
    size_t used = 0;
    for (struct memory *each = memories; each; each = each->next) used += each->live && !each->opens ? each->len : 0;
    *total = room;
    *available = used > room ? 0 : room - used;
    return leave(OK);
}

result cuMemFree_v2(address base) {
    ENTER(1);
    struct memory *memory = memory_at(base, 0);
    if (!memory || memory->base != base || memory->opens || memory->context != current) {
        misuse("cuMemFree of what is no allocation of this context: %s", kind_of(base));
        return leave(INVALID_VALUE);
    }
    if (memory->uses) misuse("memory is freed while work under way uses it");
    if (__atomic_load_n(&memory->trailer->opens, __ATOMIC_SEQ_CST)) misuse("memory is freed while a process has it open");
    end(memory);
    return leave(OK);
}

result cuPointerGetAttribute(void *to, int what, address at) {
    ENTER(1);
    struct memory *memory = memory_at(at, 1);
    struct pinned *pinned = memory ? NULL : pinned_at((void *)at, 1);
    if (!memory && !pinned) pinned = pinned_seen_at(at, 1);
    if (!memory && !pinned) return leave(INVALID_VALUE);
    size_t piece = memory ? (at - memory->base) / memory->grain * memory->grain : 0;
    switch (what) {
    case 2: *(uint32_t *)to = memory ? 2 : 1; break;
    case 9: *(int32_t *)to = memory ? memory->context->ordinal : 0; break;
    case 11: *(uint64_t *)to = memory ? memory->base + piece : (address)pinned->base; break;
    case 12: *(uint64_t *)to = !memory ? pinned->len : memory->len - piece < memory->grain ? memory->len - piece : memory->grain; break;
    default: return leave(INVALID_VALUE);
    }
    return leave(OK);
}

result cuMemHostRegister_v2(void *base, size_t len, unsigned flags) {
    ENTER(1);
    if (!base || !len || (flags & ~3u)) return leave(INVALID_VALUE);
    for (struct pinned *each = pins; each; each = each->next)
        if (each->live && (char *)base < each->base + each->len && each->base < (char *)base + len)
            return leave(HOST_MEMORY_ALREADY_REGISTERED);
    struct pinned *pinned = calloc(1, sizeof *pinned);
    *pinned = (struct pinned){.next = pins, .context = current, .base = base, .len = len, .seen = reserve(len), .live = 1};
    pinned->mapped = (flags & 2) != 0;
    // Without the flag only this context knows it.
    if (!(flags & 1)) misuse("cuMemHostRegister without CU_MEMHOSTREGISTER_PORTABLE");
    pins = pinned;
    live("registrations", 1);
    return leave(OK);
}

result cuMemAllocHost_v2(void **to, size_t len) {
    ENTER(1);
    if (!len) return leave(INVALID_VALUE);
    void *base = mmap(NULL, paged(len), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return leave(OUT_OF_MEMORY);
    struct pinned *pinned = calloc(1, sizeof *pinned);
    *pinned = (struct pinned){.next = pins, .context = current, .base = base, .len = len, .seen = reserve(len), .mapped = 1, .own = 1, .live = 1};
    pins = pinned;
    live("host memories", 1);
    *to = base;
    return leave(OK);
}

result cuMemFreeHost(void *base) {
    ENTER(1);
    struct pinned *pinned = pinned_at(base, 0);
    if (!pinned || pinned->base != base || !pinned->own) {
        misuse("cuMemFreeHost of what is no host memory of the driver");
        return leave(INVALID_VALUE);
    }
    if (pinned->uses) misuse("host memory is freed while work under way uses it");
    else munmap(pinned->base, paged(pinned->len));
    pinned->live = 0;
    live("host memories", -1);
    return leave(OK);
}

result cuMemHostUnregister(void *base) {
    ENTER(1);
    struct pinned *pinned = pinned_at(base, 0);
    if (!pinned || pinned->base != base || pinned->own) {
        misuse("cuMemHostUnregister of what is not registered");
        return leave(HOST_MEMORY_NOT_REGISTERED);
    }
    if (pinned->uses) misuse("memory is unregistered while work under way uses it");
    pinned->live = 0;
    live("registrations", -1);
    return leave(OK);
}

result cuMemHostGetDevicePointer_v2(address *to, void *host, unsigned flags) {
    ENTER(1);
    struct pinned *pinned = pinned_at(host, 1);
    if (!pinned || !pinned->mapped || flags) {
        misuse("cuMemHostGetDevicePointer of %s", kind_of((address)host));
        return leave(INVALID_VALUE);
    }
    *to = pinned->seen + (address)((char *)host - pinned->base);
    return leave(OK);
}

result cuIpcGetMemHandle(struct name *name, address base) {
    ENTER(1);
    struct memory *memory = memory_at(base, 0);
    if (!memory || memory->opens) return leave(INVALID_VALUE);
    // The driver's handle would be that of the whole allocation: a process that opens it looks in the wrong place.
    if (memory->base != base) misuse("cuIpcGetMemHandle inside an allocation");
    memset(name, 0, sizeof *name);
    memcpy(name->magic, "standin", 8);
    name->pid = (uint32_t)getpid();
    name->fd = memory->fd;
    name->len = memory->len;
    name->serial = memory->serial;
    return leave(OK);
}

result cuIpcOpenMemHandle_v2(address *to, struct name name, unsigned flags) {
    ENTER(1);
    if (flags != 1 || memcmp(name.magic, "standin", 8)) return leave(INVALID_VALUE);
    if (name.pid == (uint32_t)getpid()) return leave(INVALID_CONTEXT);
    for (struct memory *each = memories; each; each = each->next)
        if (each->live && each->opens && each->owner == name.pid && each->serial == name.serial) {
            each->opens++;
            *to = each->base;
            return leave(OK);
        }
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", name.pid, name.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct stat about;
    if (fd < 0 || fstat(fd, &about) || (uint64_t)about.st_size != paged(name.len) + PAGE) {
        if (fd >= 0) close(fd);
        return leave(INVALID_VALUE);
    }
    struct memory *memory = make(fd, name.len, name.pid, name.serial);
    if (!memory || memory->trailer->serial != name.serial) return leave(INVALID_VALUE);
    memory->opens = 1;
    __atomic_add_fetch(&memory->trailer->opens, 1, __ATOMIC_SEQ_CST);
    live("memories opened", 1);
    *to = memory->base;
    return leave(OK);
}

result cuIpcCloseMemHandle(address base) {
    ENTER(1);
    struct memory *memory = memory_at(base, 0);
    if (!memory || memory->base != base || !memory->opens) {
        misuse("cuIpcCloseMemHandle of what is not open: %s", kind_of(base));
        return leave(INVALID_VALUE);
    }
    if (memory->opens > 1) {
        memory->opens--;
        return leave(OK);
    }
    if (memory->uses) misuse("memory is closed while work under way uses it");
    __atomic_sub_fetch(&memory->trailer->opens, 1, __ATOMIC_SEQ_CST);
    end(memory);
    return leave(OK);
}

void forget_memory_of(struct context *context) {
    for (struct memory *each = memories; each; each = each->next)
        if (each->live && each->context == context) {
            if (!context->broken) misuse("a context is released that has memory");
            end(each);
        }
    for (struct pinned *each = pins; each; each = each->next)
        if (each->live && each->context == context) {
            if (!context->broken) misuse("a context is released that has registered memory");
            each->live = 0;
            live(each->own ? "host memories" : "registrations", -1);
        }
}

// What tests ask and say.

static int look(address at, char *out, const char *in, size_t len) {
    lock_books();
    struct memory *memory = memory_at(at, len);
    char *bytes = memory ? memory->bytes + (at - memory->base) : NULL;
    if (bytes && out) memcpy(out, bytes, len);
    if (bytes && in) memcpy(bytes, in, len);
    return leave(bytes ? OK : ILLEGAL_ADDRESS);
}

// Bytes of device memory, beside all streams.
int standin_peek(address at, char *to, size_t len) { return look(at, to, NULL, len); }
int standin_poke(address at, const char *from, size_t len) { return look(at, NULL, from, len); }

// Memory that is allocated from now on is made of pieces of `bytes` bytes, each an allocation of its own; 0: of one piece.
void standin_grain(size_t bytes) {
    lock_books();
    grain = bytes;
    unlock_books();
}

void standin_room(size_t bytes) {
    lock_books();
    room = bytes;
    unlock_books();
}

// For the other libraries: where the bytes of device memory lie, and which memory it is. NULL if there is none.
char *standin_span(address at, size_t len, uint64_t *serial) {
    lock_books();
    struct memory *memory = memory_at(at, len);
    if (memory && serial) *serial = memory->serial;
    char *bytes = memory ? memory->bytes + (at - memory->base) : NULL;
    unlock_books();
    return bytes;
}
