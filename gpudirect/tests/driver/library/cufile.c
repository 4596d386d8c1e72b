// A stand-in for libcufile: reads of files into the device memory of the stand-in for libcuda. It is a double: that
// nvidia-fs moves the bytes it cannot show. See standin.h.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    OK = 0,
    DRIVER_NOT_INITIALIZED = 5001,
    CUDA_MEMORY_TYPE_INVALID = 5013,
    IO_NOT_SUPPORTED = 5007,
    INVALID_FILE_TYPE = 5018,
    INVALID_FILE_OPEN_FLAG = 5019,
    INVALID_VALUE = 5022,
    MEMORY_ALREADY_REGISTERED = 5023,
    MEMORY_NOT_REGISTERED = 5024,
    HANDLE_NOT_REGISTERED = 5027,
    DRIVER_ALREADY_OPEN = 5026,
    HANDLE_ALREADY_REGISTERED = 5028,
};

struct status {
    int code;
    int cuda;
};

struct description {
    int type;
    union {
        int fd;
        void *handle;
    } of;
    const void *operations;
};

struct properties {
    struct {
        unsigned major, minor;
        size_t poll_threshold, direct_max;
        unsigned status, control;
    } nvfs;
    unsigned features, cache_max, buffer_cache_max, pinned_max, batch_max, batch_timeout;
};

struct file {
    int fd;
    int live;
};

struct buffer {
    struct buffer *next;
    char *base;
    size_t len;
    uint64_t serial;
    int reads;
    int live;
};

static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;
static int opened;
static struct file *files[4096];
static size_t made;
static struct buffer *buffers;
static size_t alignment = 1;
// Whether files have no straight way, and whether it may go another: then it does, and says nothing.
static int detours, may_detour = 1;
// What the next reads do: 1 gives fewer bytes, 2 fails with an errno, 3 with an error of cuFile.
static int mode, times;
static long argument;

static void *driver(const char *name) {
    // It stays loaded: nothing here works without it.
    static void *library;
    if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : NULL;
}

static void note(const char *text) {
    void (*tell)(const char *) = (void (*)(const char *))driver("standin_note");
    if (tell) tell(text);
}

static void live(const char *what, int by) {
    void (*tell)(const char *, int) = (void (*)(const char *, int))driver("standin_live_by");
    if (tell) tell(what, by);
}

static char *span(const void *at, size_t len, uint64_t *serial) {
    char *(*ask)(uint64_t, size_t, uint64_t *) = (char *(*)(uint64_t, size_t, uint64_t *))driver("standin_span");
    return ask ? ask((uint64_t)at, len, serial) : NULL;
}

static struct status leave(int code) {
    pthread_mutex_unlock(&books);
    return (struct status){code, 0};
}

struct status cuFileDriverOpen(void) {
    pthread_mutex_lock(&books);
    opened++;
    live("cuFile drivers", 1);
    return leave(OK);
}

struct status cuFileDriverClose_v2(void) {
    pthread_mutex_lock(&books);
    if (!opened) {
        note("cuFileDriverClose without cuFileDriverOpen");
        return leave(DRIVER_NOT_INITIALIZED);
    }
    opened--;
    live("cuFile drivers", -1);
    return leave(OK);
}

struct status cuFileDriverClose(void) { return cuFileDriverClose_v2(); }

long cuFileUseCount(void) { return opened; }

struct status cuFileGetVersion(int *version) {
    *version = 1130;
    return (struct status){OK, 0};
}

struct status cuFileDriverGetProperties(struct properties *to) {
    pthread_mutex_lock(&books);
    memset(to, 0, sizeof *to);
    to->nvfs.major = 2;
    to->nvfs.direct_max = 16384;
    to->buffer_cache_max = 1024;
    return leave(opened ? OK : DRIVER_NOT_INITIALIZED);
}

#ifndef WITHOUT_PARAMETERS
struct status cuFileSetParameterBool(int what, _Bool is) {
    pthread_mutex_lock(&books);
    if (opened) return leave(DRIVER_ALREADY_OPEN);
    if (what < 0 || what > 11) return leave(INVALID_VALUE);
    if (what == 1) may_detour = is;
    return leave(OK);
}
#endif

static struct file *file_of(void *handle) {
    for (size_t at = 0; at < made; at++)
        if (files[at] == handle && files[at]->live) return files[at];
    return NULL;
}

struct status cuFileHandleRegister(void **to, struct description *of) {
    pthread_mutex_lock(&books);
    // The real one opens the driver by itself; ours asks that a caller has opened it, which closes it later.
    if (!opened) note("cuFileHandleRegister before cuFileDriverOpen");
    if (of->type != 1 || of->operations) return leave(INVALID_FILE_TYPE);
    // The real one refused files of the store, which have this flag; docs/GPU.md.
    if (fcntl(of->of.fd, F_GETFL) & O_NOFOLLOW) return leave(INVALID_FILE_OPEN_FLAG);
    for (size_t at = 0; at < made; at++)
        if (files[at]->live && files[at]->fd == of->of.fd) return leave(HANDLE_ALREADY_REGISTERED);
    if (detours && !may_detour) return leave(IO_NOT_SUPPORTED);
    struct file *file = calloc(1, sizeof *file);
    file->fd = of->of.fd;
    file->live = 1;
    *to = files[made++] = file;
    live("cuFile handles", 1);
    return leave(OK);
}

void cuFileHandleDeregister(void *handle) {
    pthread_mutex_lock(&books);
    struct file *file = file_of(handle);
    if (file) {
        file->live = 0;
        live("cuFile handles", -1);
    } else {
        note("cuFileHandleDeregister of what is no handle");
    }
    pthread_mutex_unlock(&books);
}

static struct buffer *buffer_of(const void *base) {
    for (struct buffer *each = buffers; each; each = each->next)
        if (each->live && each->base == base) return each;
    return NULL;
}

struct status cuFileBufRegister(const void *base, size_t len, int flags) {
    pthread_mutex_lock(&books);
    if (!opened) note("cuFileBufRegister before cuFileDriverOpen");
    uint64_t serial = 0;
    if (!len || (flags & ~1)) return leave(INVALID_VALUE);
    if (!span(base, len, &serial)) {
        note("cuFileBufRegister of what is no device memory");
        return leave(CUDA_MEMORY_TYPE_INVALID);
    }
    if (buffer_of(base)) return leave(MEMORY_ALREADY_REGISTERED);
    struct buffer *buffer = calloc(1, sizeof *buffer);
    *buffer = (struct buffer){.next = buffers, .base = (char *)base, .len = len, .serial = serial, .live = 1};
    buffers = buffer;
    live("cuFile buffers", 1);
    return leave(OK);
}

struct status cuFileBufDeregister(const void *base) {
    pthread_mutex_lock(&books);
    struct buffer *buffer = buffer_of(base);
    if (!buffer) {
        note("cuFileBufDeregister of what is not registered");
        return leave(MEMORY_NOT_REGISTERED);
    }
    uint64_t serial = 0;
    if (!span(buffer->base, buffer->len, &serial) || serial != buffer->serial)
        note("cuFileBufDeregister of memory that was freed before");
    if (buffer->reads) note("cuFileBufDeregister while a read is under way");
    buffer->live = 0;
    live("cuFile buffers", -1);
    return leave(OK);
}

// What is wrong with a read, as the code that it answers with.
static long check(struct file *file, struct buffer *buffer, size_t size, long offset, long into) {
    if (!file) {
        note("cuFileRead with a handle that is none, or was deregistered");
        return -HANDLE_NOT_REGISTERED;
    }
    if (!buffer) {
        // The real one copies through memory of its own; then registering was for nothing.
        note("cuFileRead into a buffer that is not registered");
        return -MEMORY_NOT_REGISTERED;
    }
    if (offset < 0 || into < 0 || (size_t)into > buffer->len || size > buffer->len - (size_t)into) {
        note("cuFileRead beyond its buffer");
        return -INVALID_VALUE;
    }
    if (((size_t)offset | size | ((size_t)buffer->base + (size_t)into)) % alignment) {
        note("cuFileRead that is not aligned");
        return -INVALID_VALUE;
    }
    return 0;
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t offset, off_t into) {
    pthread_mutex_lock(&books);
    struct file *file = file_of(handle);
    struct buffer *buffer = buffer_of(base);
    long wrong = check(file, buffer, size, offset, into);
    char *bytes = wrong ? NULL : span((char *)base + into, size, NULL);
    if (!wrong && !bytes) {
        note("cuFileRead into memory that was freed");
        wrong = -CUDA_MEMORY_TYPE_INVALID;
    }
    int does = times ? mode : 0;
    if (times) times--;
    if (!wrong && does == 3) wrong = -argument;
    if (wrong || does == 2) {
        pthread_mutex_unlock(&books);
        errno = does == 2 ? (int)argument : EIO;
        return wrong ? wrong : -1;
    }
    if (does == 1 && (size_t)argument < size) size = (size_t)argument;
    buffer->reads++;
    int fd = file->fd;
    pthread_mutex_unlock(&books);
    ssize_t got = pread(fd, bytes, size, offset);
    pthread_mutex_lock(&books);
    buffer->reads--;
    pthread_mutex_unlock(&books);
    return got;
}

// What tests say.

// The next `count` reads: 1 give `what` bytes at most, 2 fail with -1 and the errno `what`, 3 with the error `what`.
void standin_reads(int how, long what, int count) {
    pthread_mutex_lock(&books);
    mode = how;
    argument = what;
    times = count;
    pthread_mutex_unlock(&books);
}

// What offsets, lengths and addresses of reads must be multiples of.
void standin_alignment(size_t bytes) { alignment = bytes; }

// Files have no straight way from now on, or have one.
void standin_detours(int on) { detours = on; }
