// The books: one lock, misuse, what is alive, contexts, failures that a test asked for. See standin.h.
#include "standin.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;

struct context contexts[DEVICES] = {{.ordinal = 0}, {.ordinal = 1}};
_Thread_local struct context *current;
static int initialised;
static int devices = DEVICES;

static struct {
    int count;
    char text[16384];
} wrong;

// What is asked of an entry point: how often it was called, and which of the next calls fails.
static struct call {
    const char *name;
    uint64_t calls;
    uint64_t fails_in;
    result code;
    // The answer of every call, if it is not OK.
    result always;
} calls[96];

static struct {
    const char *what;
    int count;
} alive[16];

// Contexts that this thread has pushed over others.
enum { DEEP = 16 };
static _Thread_local struct context *below[DEEP];
static _Thread_local int depth;

// How this thread meets captures: 0 global, 1 thread-local, 2 relaxed.
static _Thread_local int capture_mode;
// Whether an engine's thread captures a graph, in global mode.
static int capturing, broke_capture;
// What is not allowed meanwhile to threads in global mode: it fails, and the capture with it.
static const char *const unsafe_calls[] = {
    "cuEventQuery",        "cuStreamQuery", "cuStreamSynchronize", "cuMemAlloc_v2",   "cuMemFree_v2",     "cuMemAllocHost_v2",
    "cuMemFreeHost",       "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2",   "cuMemHostRegister_v2", "cuMemHostUnregister", "cuModuleLoadData",
};

static uint64_t work_fails_in;
static result work_code;

void lock_books(void) { pthread_mutex_lock(&books); }
void unlock_books(void) { pthread_mutex_unlock(&books); }
void changed(void) { pthread_cond_broadcast(&change); }
void wait_for_change(void) { pthread_cond_wait(&change, &books); }

void misuse(const char *format, ...) {
    size_t at = strlen(wrong.text);
    wrong.count++;
    if (at + 256 > sizeof wrong.text) return;
    va_list list;
    va_start(list, format);
    vsnprintf(wrong.text + at, sizeof wrong.text - at - 2, format, list);
    va_end(list);
    strcat(wrong.text, "\n");
}

void live(const char *what, int by) {
    for (size_t at = 0; at < sizeof alive / sizeof *alive; at++)
        if (!alive[at].what || !strcmp(alive[at].what, what)) {
            alive[at].what = what;
            alive[at].count += by;
            return;
        }
}

static struct call *call_of(const char *name) {
    for (size_t at = 0; at < sizeof calls / sizeof *calls; at++) {
        if (!calls[at].name) calls[at].name = strdup(name);
        if (!strcmp(calls[at].name, name)) return &calls[at];
    }
    return &calls[0];
}

result enter(const char *name, int in_context) {
    lock_books();
    struct call *call = call_of(name);
    call->calls++;
    if (call->fails_in && --call->fails_in == 0) return leave(call->code);
    if (call->always) return leave(call->always);
    for (size_t at = 0; capturing && !capture_mode && at < sizeof unsafe_calls / sizeof *unsafe_calls; at++)
        if (!strcmp(name, unsafe_calls[at])) {
            misuse("%s breaks the graph that another thread captures", name);
            broke_capture = 1;
            return leave(STREAM_CAPTURE_UNSUPPORTED);
        }
    if (!initialised && strcmp(name, "cuInit")) {
        misuse("%s before cuInit", name);
        return leave(NOT_INITIALIZED);
    }
    if (!in_context) return OK;
    if (!current || !current->retained) {
        misuse("%s without a current context", name);
        return leave(INVALID_CONTEXT);
    }
    return current->broken ? leave(current->broken) : OK;
}

result leave(result code) {
    unlock_books();
    return code;
}

result failure_of_next_work(void) {
    if (work_fails_in && --work_fails_in == 0) return work_code;
    return OK;
}

// What codes are called; those of newer drivers have no name here.
static const struct {
    result code;
    const char *name;
} names[] = {
    {1, "CUDA_ERROR_INVALID_VALUE"},         {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "CUDA_ERROR_NOT_INITIALIZED"},       {4, "CUDA_ERROR_DEINITIALIZED"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE"},   {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},      {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},     {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},   {218, "CUDA_ERROR_INVALID_PTX"},
    {220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"}, {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"},
    {226, "CUDA_ERROR_CONTAINED"},           {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"},           {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},     {702, "CUDA_ERROR_LAUNCH_TIMEOUT"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}, {710, "CUDA_ERROR_ASSERT"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}, {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR"}, {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS"},  {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"},
    {718, "CUDA_ERROR_INVALID_PC"},          {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {806, "CUDA_ERROR_MPS_RPC_FAILURE"},     {810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}, {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
    {907, "CUDA_ERROR_CAPTURED_EVENT"},      {911, "CUDA_ERROR_EXTERNAL_DEVICE"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

result cuGetErrorName(result code, const char **to) {
    *to = NULL;
    for (size_t at = 0; at < sizeof names / sizeof *names; at++)
        if (names[at].code == code) *to = names[at].name;
    return *to ? OK : INVALID_VALUE;
}

result cuInit(unsigned flags) {
    ENTER(0);
    if (flags) return leave(INVALID_VALUE);
    initialised = 1;
    return leave(OK);
}

result cuDeviceGetCount(int *count) {
    ENTER(0);
    *count = devices;
    return leave(OK);
}

result cuDeviceGet(int *device, int ordinal) {
    ENTER(0);
    if (ordinal < 0 || ordinal >= devices) return leave(INVALID_DEVICE);
    *device = ordinal;
    return leave(OK);
}

result cuDeviceGetName(char *name, int len, int device) {
    ENTER(0);
    if (device < 0 || device >= devices) return leave(INVALID_DEVICE);
    snprintf(name, (size_t)len, "stand-in %d, no GPU", device);
    return leave(OK);
}

result cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER(0);
    if (device < 0 || device >= devices) return leave(INVALID_DEVICE);
    *bytes = (size_t)1 << 30;
    return leave(OK);
}

result cuDevicePrimaryCtxRetain(struct context **context, int device) {
    ENTER(0);
    if (device < 0 || device >= devices) return leave(INVALID_DEVICE);
    *context = &contexts[device];
    contexts[device].retained++;
    live("contexts retained", 1);
    return leave(OK);
}

result cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(0);
    if (device < 0 || device >= devices) return leave(INVALID_DEVICE);
    struct context *context = &contexts[device];
    if (!context->retained) {
        misuse("a context is released more often than it was retained");
        return leave(INVALID_CONTEXT);
    }
    live("contexts retained", -1);
    if (--context->retained == 0) {
        // What is left goes with the context. Only where the context is broken could no caller give it back before.
        forget_streams_of(context);
        forget_modules_of(context);
        forget_memory_of(context);
        context->broken = OK;
    }
    return leave(OK);
}

// Everything in the context is gone, even if a caller still uses it.
result cuDevicePrimaryCtxReset_v2(int device) {
    ENTER(0);
    if (device < 0 || device >= devices) return leave(INVALID_DEVICE);
    contexts[device].broken = CONTEXT_IS_DESTROYED;
    changed();
    return leave(OK);
}

result cuCtxSetCurrent(struct context *context) {
    ENTER(0);
    if (context && (context < contexts || context >= contexts + DEVICES || !context->retained)) {
        misuse("a context is made current that is not retained");
        return leave(INVALID_CONTEXT);
    }
    current = context;
    return leave(OK);
}

result cuCtxGetCurrent(struct context **to) {
    ENTER(0);
    *to = current;
    return leave(OK);
}

result cuCtxPushCurrent_v2(struct context *context) {
    ENTER(0);
    if (context < contexts || context >= contexts + DEVICES || !context->retained || depth == DEEP) {
        misuse("a context is pushed that is not retained, or too deep");
        return leave(INVALID_CONTEXT);
    }
    below[depth++] = current;
    current = context;
    return leave(OK);
}

result cuCtxPopCurrent_v2(struct context **to) {
    ENTER(0);
    if (!depth) {
        misuse("a context is popped that was not pushed");
        return leave(INVALID_CONTEXT);
    }
    *to = current;
    current = below[--depth];
    return leave(OK);
}

result cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(0);
    if (*mode < 0 || *mode > 2) return leave(INVALID_VALUE);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return leave(OK);
}

// What tests ask and say.

// Everything that was wrong, a line each.
int standin_misuse(char *to, size_t len) {
    lock_books();
    int count = wrong.count;
    snprintf(to, len, "%s", wrong.text);
    return leave(count);
}

// Begins a new list: for tests that do something wrong on purpose.
void standin_forgive(void) {
    lock_books();
    wrong.count = 0;
    wrong.text[0] = 0;
    unlock_books();
}

// What was made and not given back, a line each.
int standin_live(char *to, size_t len) {
    lock_books();
    int count = 0;
    size_t at = 0;
    *to = 0;
    for (size_t each = 0; each < sizeof alive / sizeof *alive; each++) {
        if (!alive[each].count) continue;
        count += alive[each].count < 0 ? 1 : alive[each].count;
        at += (size_t)snprintf(to + at, at < len ? len - at : 0, "%s: %d\n", alive[each].what, alive[each].count);
    }
    return leave(count);
}

uint64_t standin_calls(const char *name) {
    lock_books();
    uint64_t count = call_of(name)->calls;
    unlock_books();
    return count;
}

// The `nth` next call (from 1) of an entry point does nothing but answer with `code`.
void standin_fail(const char *name, uint64_t nth, result code) {
    lock_books();
    struct call *call = call_of(name);
    call->fails_in = nth;
    call->code = code;
    unlock_books();
}

// Every call of an entry point does nothing but answer with `code`, until that is OK.
void standin_refuse_call(const char *name, result code) {
    lock_books();
    call_of(name)->always = code;
    unlock_books();
}

int capture_globally(int on) {
    capturing = on;
    int good = !broke_capture;
    if (!on) broke_capture = 0;
    return good;
}

// A thread that is none of ours begins to capture a graph, or ends that.
void standin_capture(int on) {
    lock_books();
    capture_globally(on);
    unlock_books();
}

// How this thread meets captures, and how many contexts it has pushed.
int standin_thread(void) { return capture_mode * 100 + depth; }

// The `nth` next work (from 1) that a stream begins breaks its context.
void standin_break(uint64_t nth, result code) {
    lock_books();
    work_fails_in = nth;
    work_code = code;
    unlock_books();
}

void standin_devices(int count) {
    lock_books();
    devices = count;
    unlock_books();
}

// For the other libraries.
void standin_note(const char *text) {
    lock_books();
    misuse("%s", text);
    unlock_books();
}

void standin_live_by(const char *what, int by) {
    lock_books();
    live(what, by);
    unlock_books();
}
