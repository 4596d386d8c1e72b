// Streams and events. A stream is a thread that does what it is given, in order; a test can let it stand still. See
// standin.h.
#include "standin.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct stream {
    struct context *context;
    // As tests count them: from 1 in the order in which they were made. All contexts' usual streams are 0.
    size_t number;
    struct work *first, **last;
    // Counted from the stream's beginning.
    uint64_t given, done;
    int destroyed;
    // Whether the engine captures it into a graph.
    enum { NOT_CAPTURED, CAPTURED, INVALIDATED } capture;
};

struct event {
    struct context *context;
    struct stream *stream;
    uint64_t target;
    // Recorded in a stream that was captured: a node of the graph, and no point in time.
    int captured;
    int live;
};

// Streams and events are never freed: a handle that is used after its end is recognised.
enum { MANY = 4096 };
static struct stream *streams[MANY];
static size_t made = 1;
static char standing[MANY];
static struct event *events[MANY * 16];
static size_t events_made;

struct context *context_of(struct stream *stream) { return stream->context; }

static void release(struct work *work) {
    for (size_t at = 0; at < work->count; at++)
        for (int side = 0; side < 2; side++)
            if (work->parts[at].uses[side]) --*work->parts[at].uses[side];
    for (int at = 0; at < 4; at++)
        if (work->uses[at]) --*work->uses[at];
    free(work->parts);
    free(work->staged);
    free(work);
}

static result perform(const struct work *work) {
    if (work->what == DIGEST) return run_digest(&work->digest);
    if (work->what == SLOTS) return run_slots(&work->moved);
    if (work->what == BUSY) usleep((unsigned)(work->target / 1000));
    // From the last to the first: parts of one call have no order.
    for (size_t at = work->count; at-- > 0;) {
        const struct part *part = &work->parts[at];
        memmove(part->to, part->from, part->len);
    }
    return OK;
}

static void *run(void *argument) {
    struct stream *stream = argument;
    struct context *context = stream->context;
    lock_books();
    for (;;) {
        while (!(stream->first && !standing[stream->number]) && !(stream->destroyed && !stream->first)) wait_for_change();
        struct work *work = stream->first;
        if (!work) break;
        if (work->what == WAIT) {
            while (work->other->done < work->target && !context->broken) wait_for_change();
        } else if (work->what == WORD) {
            while (*work->word < work->least && !context->broken) {
                unlock_books();
                usleep(100);
                lock_books();
            }
        } else if (!context->broken) {
            result code = failure_of_next_work();
            if (!code) {
                unlock_books();
                code = perform(work);
                lock_books();
            }
            if (code) context->broken = code;
        }
        stream->first = work->next;
        if (!stream->first) stream->last = &stream->first;
        stream->done++;
        release(work);
        changed();
    }
    unlock_books();
    return NULL;
}

static struct stream *start(struct context *context, size_t number) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->context = context;
    stream->number = number;
    stream->last = &stream->first;
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, stream)) abort();
    pthread_detach(thread);
    return stream;
}

static struct stream *known(void *handle) {
    for (size_t at = 1; at < made; at++)
        if (streams[at] == handle) return streams[at];
    return NULL;
}

// The default stream has no handle, or 1.
static int is_usual(void *handle) { return (uintptr_t)handle <= 1; }

static struct stream *usual(void) {
    if (!current->usual) current->usual = start(current, 0);
    return current->usual;
}

struct stream *stream_of(void *handle, const char *call) {
    if (is_usual(handle)) return usual();
    struct stream *stream = known(handle);
    if (!stream || stream->destroyed) {
        misuse("%s with a stream that %s", call, stream ? "was destroyed" : "is none");
        return NULL;
    }
    if (stream->context != current) {
        misuse("%s with a stream of another context", call);
        return NULL;
    }
    return stream;
}

// Something that may not be done with a stream that is captured: the graph is gone with it.
static result invalidate(struct stream *stream, const char *what, result code) {
    misuse("%s: the graph that the engine captures is lost", what);
    stream->capture = INVALIDATED;
    return code;
}

void enqueue(struct stream *stream, struct work *work) {
    if (stream->capture) {
        // Every launch of the graph would do the work again, and now it is not done at all.
        misuse("work of ours becomes part of the graph that the engine captures");
        release(work);
        return;
    }
    *stream->last = work;
    stream->last = &work->next;
    stream->given++;
    changed();
}

void wait_until_done(struct stream *stream) {
    uint64_t target = stream->given;
    while (stream->done < target) wait_for_change();
}

result cuStreamCreate(struct stream **to, unsigned flags) {
    ENTER(1);
    if (flags > 1 || made == MANY) return leave(INVALID_VALUE);
    // A stream without the flag would wait for the default stream and so for whatever the engine does there.
    if (flags != 1) misuse("cuStreamCreate without CU_STREAM_NON_BLOCKING");
    *to = streams[made] = start(current, made);
    made++;
    live("streams", 1);
    return leave(OK);
}

result cuStreamDestroy_v2(void *handle) {
    ENTER(1);
    struct stream *stream = is_usual(handle) ? NULL : stream_of(handle, "cuStreamDestroy");
    if (!stream) return leave(INVALID_HANDLE);
    // What it was given is still done, and this call does not wait for it.
    stream->destroyed = 1;
    live("streams", -1);
    changed();
    return leave(OK);
}

result cuStreamQuery(void *handle) {
    ENTER(1);
    struct stream *stream = is_usual(handle) ? usual() : known(handle);
    if (!stream || stream->destroyed || stream->context != current) return leave(INVALID_HANDLE);
    if (stream->capture) return leave(invalidate(stream, "cuStreamQuery", STREAM_CAPTURE_UNSUPPORTED));
    return leave(stream->done < stream->given ? NOT_READY : OK);
}

result cuStreamIsCapturing(void *handle, int *to) {
    ENTER(1);
    struct stream *stream = is_usual(handle) ? usual() : known(handle);
    if (!stream || stream->destroyed || stream->context != current) return leave(INVALID_HANDLE);
    *to = (int)stream->capture;
    return leave(OK);
}

result cuStreamSynchronize(void *handle) {
    ENTER(1);
    struct stream *stream = stream_of(handle, "cuStreamSynchronize");
    if (!stream) return leave(INVALID_HANDLE);
    wait_until_done(stream);
    return leave(current->broken);
}

static struct event *event_of(void *handle, const char *call) {
    for (size_t at = 0; at < events_made; at++)
        if (events[at] == handle && events[at]->live) {
            if (events[at]->context == current) return events[at];
            misuse("%s with an event of another context", call);
            return NULL;
        }
    misuse("%s with an event that is none, or was destroyed", call);
    return NULL;
}

result cuEventCreate(struct event **to, unsigned flags) {
    ENTER(1);
    if (flags > 7 || events_made == sizeof events / sizeof *events) return leave(INVALID_VALUE);
    struct event *event = calloc(1, sizeof *event);
    event->context = current;
    event->live = 1;
    *to = events[events_made++] = event;
    live("events", 1);
    return leave(OK);
}

result cuEventRecord(void *handle, void *of) {
    ENTER(1);
    struct event *event = event_of(handle, "cuEventRecord");
    struct stream *stream = stream_of(of, "cuEventRecord");
    if (!event || !stream) return leave(INVALID_HANDLE);
    event->captured = stream->capture != NOT_CAPTURED;
    if (event->captured) misuse("an event of ours becomes part of the graph that the engine captures");
    event->stream = stream;
    event->target = stream->given;
    return leave(OK);
}

result cuEventQuery(void *handle) {
    ENTER(1);
    struct event *event = event_of(handle, "cuEventQuery");
    if (!event) return leave(INVALID_HANDLE);
    if (event->captured) return leave(invalidate(event->stream, "cuEventQuery", CAPTURED_EVENT));
    return leave(event->stream && event->stream->done < event->target ? NOT_READY : OK);
}

result cuEventDestroy_v2(void *handle) {
    ENTER(1);
    struct event *event = event_of(handle, "cuEventDestroy");
    if (!event) return leave(INVALID_HANDLE);
    // Streams that wait for it have taken what they need.
    event->live = 0;
    live("events", -1);
    return leave(OK);
}

result cuStreamWaitEvent(void *handle, void *for_event, unsigned flags) {
    ENTER(1);
    struct stream *stream = stream_of(handle, "cuStreamWaitEvent");
    struct event *event = event_of(for_event, "cuStreamWaitEvent");
    if (!stream || !event) return leave(INVALID_HANDLE);
    if (flags) return leave(INVALID_VALUE);
    if (!event->stream) return leave(OK);
    if (event->captured) {
        misuse("a stream of ours joins the capture of the engine's graph");
        stream->capture = CAPTURED;
        return leave(OK);
    }
    if (stream->capture)
        return leave(invalidate(stream, "cuStreamWaitEvent for what is outside", STREAM_CAPTURE_ISOLATION));
    struct work *work = calloc(1, sizeof *work);
    work->what = WAIT;
    work->other = event->stream;
    work->target = event->target;
    enqueue(stream, work);
    return leave(OK);
}

// Waits until a word is at least a value, which is what flags 0 mean.
result cuStreamWaitValue32_v2(void *handle, address at, uint32_t least, unsigned flags) {
    ENTER(1);
    struct stream *stream = stream_of(handle, "cuStreamWaitValue32");
    struct pinned *pinned = pinned_seen_at(at, 4);
    if (!stream || !pinned || flags) return leave(stream ? INVALID_VALUE : INVALID_HANDLE);
    struct work *work = calloc(1, sizeof *work);
    work->what = WORD;
    work->word = (const volatile uint32_t *)(pinned->base + (at - pinned->seen));
    work->least = least;
    enqueue(stream, work);
    return leave(OK);
}

// An engine's own calls for its graph. A graph of this stand-in has no nodes: work of others is not taken into it.
result cuStreamBeginCapture_v2(void *handle, int mode) {
    ENTER(1);
    struct stream *stream = stream_of(handle, "cuStreamBeginCapture");
    if (!stream || stream->capture) return leave(INVALID_HANDLE);
    stream->capture = CAPTURED;
    if (mode == 0) capture_globally(1);
    return leave(OK);
}

result cuStreamEndCapture(void *handle, void **graph) {
    ENTER(1);
    struct stream *stream = stream_of(handle, "cuStreamEndCapture");
    if (!stream || !stream->capture) return leave(INVALID_HANDLE);
    int good = capture_globally(0) && stream->capture == CAPTURED;
    stream->capture = NOT_CAPTURED;
    *graph = good ? stream : NULL;
    return leave(good ? OK : STREAM_CAPTURE_INVALIDATED);
}

result cuGraphGetNodes(void *graph, void **nodes, size_t *count) {
    (void)graph, (void)nodes;
    *count = 0;
    return OK;
}

result cuGraphDestroy(void *graph) {
    (void)graph;
    return OK;
}

void forget_streams_of(struct context *context) {
    for (size_t at = 1; at < made; at++)
        if (streams[at]->context == context && !streams[at]->destroyed) {
            if (!context->broken) misuse("a context is released that has a stream");
            streams[at]->destroyed = 1;
            live("streams", -1);
        }
    for (size_t at = 0; at < events_made; at++)
        if (events[at]->context == context && events[at]->live) {
            if (!context->broken) misuse("a context is released that has an event");
            events[at]->live = 0;
            live("events", -1);
        }
    changed();
}

// What tests ask and say.

// Streams that were made so far: the number of the latest.
size_t standin_streams(void) {
    lock_books();
    size_t latest = made - 1;
    unlock_books();
    return latest;
}

uint64_t standin_stream(size_t number) {
    lock_books();
    uint64_t handle = number < made ? (uint64_t)streams[number] : 0;
    unlock_books();
    return handle;
}

// A stream, made already or not, stands still before its next work, or goes on.
void standin_stand(size_t number, int still) {
    lock_books();
    standing[number % MANY] = still != 0;
    changed();
    unlock_books();
}

// Work that no stream has finished.
uint64_t standin_pending(void) {
    lock_books();
    uint64_t pending = 0;
    for (size_t at = 1; at < made; at++) pending += streams[at]->given - streams[at]->done;
    for (int at = 0; at < DEVICES; at++)
        if (contexts[at].usual) pending += contexts[at].usual->given - contexts[at].usual->done;
    unlock_books();
    return pending;
}

// The engine captures a graph from a stream, or ends that: whether the graph is good, and of this stream alone.
int standin_capture_of(size_t number, int on) {
    lock_books();
    struct stream *stream = streams[number % MANY];
    int good = stream && stream->capture == (on ? NOT_CAPTURED : CAPTURED);
    if (stream) stream->capture = on ? CAPTURED : NOT_CAPTURED;
    for (size_t at = 1; at < made; at++) good &= on || !streams[at]->capture;
    return leave(good);
}
