/* kvarts.h: blocks of a Kvarts server in the memory of an engine's processes, and in the memory of its devices.
 *
 * The scheduler connects, takes a pool (kvarts_pool_take) and stages what a request needs (kvarts_stage). A worker connects, attaches to the
 * pool by its name (kvarts_attach), describes its pages once a request (kvarts_pages_describe) and lands layers (kvarts_land,
 * kvarts_landed_wait). What was computed goes back the same way: kvarts_draft, kvarts_save, kvarts_draft_put.
 *
 * Where blocks are opaque pages and nothing is staged, a queue (kvarts_queue_open) moves them: puts, gets, look-ups and deletes of many keys are
 * posted, with a descriptor of registered memory for each block, and their completions polled.
 *
 * - A call that may fail returns a status; kvarts_why says in a sentence why the last call of this thread failed, and what to do.
 * - Every pointer is to memory that is valid for the call; out-parameters are written where the status is KVARTS_OK, and only there. Where null is
 *   allowed it is said. Text is UTF-8, ended by a zero.
 * - A handle may be used by several threads, but for the call that frees it. Handles may be freed in any order: what a device or a disk may still
 *   use is kept until it does not. Freeing null does nothing.
 * - Calls on one of the engine's threads that enqueue work (kvarts_land, kvarts_landed_wait, kvarts_save, kvarts_saving_layer, those that post
 *   a transfer, kvarts_queue_poll) wait for nothing. Those that wait say so.
 * - A process that was forked connects anew: no handle is of use in it.
 */
#ifndef KVARTS_H
#define KVARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What an engine does about it decides which one it is. */
typedef enum kvarts_status {
  KVARTS_OK = 0,
  KVARTS_MISS = 1,      /* not here: compute it */
  KVARTS_RETRY = 2,     /* not now: call again later */
  KVARTS_REFUSED = 3,   /* a quota, a bound, a right */
  KVARTS_INVALID = 4,   /* the call is wrong as it is */
  KVARTS_DEADLINE = 5,  /* the time was over first */
  KVARTS_CORRUPT = 6,   /* what was stored is not what was read: compute it */
  KVARTS_READ_ONLY = 7, /* the store takes no writes after a fault */
  KVARTS_BUG = 8        /* a defect in Kvarts: report it */
} kvarts_status;

/* Of this thread's last call that failed. The text lives until the thread's next call. */
const char *kvarts_why(void);
/* The library's version, for example "0.1.0". */
const char *kvarts_version(void);

/* -- A server, and the blocks of a model there ------------------------------------------------------------------------------------------- */

typedef struct kvarts_client kvarts_client;
typedef struct kvarts_blocks kvarts_blocks;

/* `unix:PATH` on the server's host; pools need that. `token` may be null. Waits for the server. */
kvarts_status kvarts_connect(const char *endpoint, const char *token, kvarts_client **client);
void kvarts_client_free(kvarts_client *client);

/* What decides the bytes of blocks. The first line of words is needed; null in the second stands for "none". Of `spec` (the name of a shipped model, or a spec's text) and `page_bytes` (a block is
 * one flat page of this size on each rank) one is given, the other null or 0. */
typedef struct kvarts_identity {
  const char *model, *revision, *dtype, *engine, *layout, *layout_version;
  const char *tokenizer, *adapter, *quantisation, *scales, *rope, *window;
  const char *spec;
  uint64_t page_bytes;
  uint32_t block_tokens;
  uint16_t tp_size, tp_rank;
} kvarts_identity;

/* Registers the identity. Waits for the server. */
kvarts_status kvarts_blocks_of(const kvarts_client *client, const kvarts_identity *identity, kvarts_blocks **blocks);
void kvarts_blocks_free(kvarts_blocks *blocks);

/* Blocks of one group and rank: of each group a block has parts of its own. `rank` -1 is the identity's own. */
typedef struct kvarts_column {
  const kvarts_blocks *blocks;
  uint32_t group;
  int32_t rank;
} kvarts_column;

/* The bytes of each part of a block, through all layers: at most `room` of them are written; `count` is how many there are. `bytes` may be null
 * where `room` is 0. */
kvarts_status kvarts_column_parts(const kvarts_column *column, uint64_t *bytes, size_t room, size_t *count);

/* -- Names of blocks ---------------------------------------------------------------------------------------------------------------------- */

/* A key is 32 bytes. These make the ones that every other client of Kvarts makes: `name` of 32 bytes is kept as it is, of any other length up to
 * 4096 it is digested. */
kvarts_status kvarts_key(const void *name, size_t nbytes, uint8_t *key);
/* The keys of all full blocks of a text: each names its block and everything before it. `parent`: 32 bytes, the key of the block before the first
 * token; null: none is before it. At most `room` keys are written, 32 bytes each; `count` is how many there are. */
kvarts_status kvarts_chain(const uint32_t *tokens, size_t token_count, uint32_t block_tokens, const uint8_t *parent, uint8_t *keys, size_t room,
                           size_t *count);

/* -- Memory that blocks lie in ------------------------------------------------------------------------------------------------------------- */

typedef struct kvarts_memory kvarts_memory;

/* Memory of this process alone, at least `nbytes` of it, into which the server's disks write directly. Waits for the server. */
kvarts_status kvarts_memory_take(const kvarts_client *client, size_t nbytes, kvarts_memory **memory);
/* The first `nbytes`, whole pages, of a file in memory (memfd_create, /dev/shm) that the engine has, mapped once more: the server's disks write into
 * it directly. The descriptor stays the caller's; the file is sealed against shrinking if it was made to allow that, and is not shortened in any
 * case. Waits for the server. */
kvarts_status kvarts_memory_adopt(const kvarts_client *client, int file, size_t nbytes, kvarts_memory **memory);
/* Memory of any kind, read and written through a copy. It stays mapped until the handle is freed and each transfer that it was given to was polled.
 * Bytes that another registered memory of this process has are refused (KVARTS_INVALID). Memory of a handle of another kind must not be registered:
 * two blocks of one get that lie on the same bytes through different handles are not noticed. */
kvarts_status kvarts_memory_register(void *address, size_t nbytes, kvarts_memory **memory);
void kvarts_memory_free(kvarts_memory *memory);
/* Where it is in this process. `nbytes` may be null. It is there for as long as the handle is. */
void *kvarts_memory_address(const kvarts_memory *memory, size_t *nbytes);

/* -- A pool: memory that the processes of one engine share ------------------------------------------------------------------------------- */

typedef struct kvarts_pool kvarts_pool;

/* Takes at least `nbytes` of memory from the server. */
kvarts_status kvarts_pool_take(const kvarts_client *client, size_t nbytes, kvarts_pool **pool);
void kvarts_pool_free(kvarts_pool *pool);
/* What workers attach by: a secret of the engine's. The text lives as long as the pool's handle. */
const char *kvarts_pool_name(const kvarts_pool *pool);
/* The pool's memory in this process. */
kvarts_status kvarts_pool_memory(const kvarts_pool *pool, kvarts_memory **memory);

/* The memory of a pool that another process of the same tenant has taken. */
kvarts_status kvarts_attach(const kvarts_client *client, const char *name, kvarts_memory **memory);

/* Blocks of a pool that lie beside each other: of an extent of `blocks` blocks at offset `at`, `[part][block]`, `count` from `first` on. It means the
 * same in every process that has the pool. */
typedef struct kvarts_stretch {
  uint64_t at;
  uint32_t blocks, first, count;
} kvarts_stretch;

/* -- Transfers: many keys at once, posted and polled --------------------------------------------------------------------------------------- */

typedef struct kvarts_queue kvarts_queue;

/* `nbytes` from `at` on of a memory. Of a pool's memory only where nothing is staged or drafted in the pool. */
typedef struct kvarts_descriptor {
  const kvarts_memory *memory;
  uint64_t at, nbytes;
} kvarts_descriptor;

/* The most keys of a transfer. */
#define KVARTS_TRANSFER_KEYS 65536

/* Transfers of blocks of one column. `depth`: the most that may be posted and not polled, 0 for as many as there are by default; `ttl_ms`: as of
 * kvarts_draft_put. */
kvarts_status kvarts_queue_open(const kvarts_client *client, const kvarts_column *column, uint32_t depth, uint64_t ttl_ms, kvarts_queue **queue);
/* Cancels what is under way. Of it no completion tells when its memory is free: memory that was registered stays mapped then, so cancel and poll
 * before. */
void kvarts_queue_free(kvarts_queue *queue);
/* A descriptor for poll(2), readable exactly while completions wait; it is the queue's, and nothing is read from it. -1 of null. */
int kvarts_queue_eventfd(const kvarts_queue *queue);

/* These post a transfer: `keys` has `count` keys, and `transfer` is the number by which its completion names it. What is wrong as it is, or does not fit
 * into the queue (KVARTS_RETRY), is refused here and has no completion; every other transfer has one, also where the server is away. With a
 * descriptor for each key, of exactly the bytes of a block: its memory is left alone until the transfer is polled. `timeout_ms`: after it, keys that
 * have no answer are answered KVARTS_DEADLINE; 0 leaves it to the client.
 *
 * Stores the blocks that are missing, durably: KVARTS_OK of a key says that it is stored, now or already. The first put of a key wins. */
kvarts_status kvarts_put(const kvarts_queue *queue, const uint8_t *keys, const kvarts_descriptor *from, size_t count, uint64_t timeout_ms,
                         uint64_t *transfer);
/* Reads blocks. KVARTS_OK of a key says that its block is complete and verified in its memory; of another status the bytes there mean nothing. */
kvarts_status kvarts_get(const kvarts_queue *queue, const uint8_t *keys, const kvarts_descriptor *into, size_t count, uint64_t timeout_ms,
                         uint64_t *transfer);
/* KVARTS_OK of a key says that it can be read now, KVARTS_MISS that it is not here, KVARTS_RETRY that its put has not ended. */
kvarts_status kvarts_exists(const kvarts_queue *queue, const uint8_t *keys, size_t count, uint64_t timeout_ms, uint64_t *transfer);
/* KVARTS_OK of a key says that it was here and does not come back, KVARTS_MISS that it was not here. */
kvarts_status kvarts_delete(const kvarts_queue *queue, const uint8_t *keys, size_t count, uint64_t timeout_ms, uint64_t *transfer);
/* Ends a transfer early: keys without an answer are answered KVARTS_RETRY, as soon as nothing uses its memory. One that has ended stays as it is. */
kvarts_status kvarts_cancel(const kvarts_queue *queue, uint64_t transfer);

typedef enum kvarts_kind { KVARTS_PUT = 0, KVARTS_GET = 1, KVARTS_EXISTS = 2, KVARTS_DELETE = 3 } kvarts_kind;

typedef struct kvarts_completion {
  uint64_t transfer;
  kvarts_kind kind;
  uint32_t count;      /* keys */
  uint32_t good;       /* those that went well */
  uint32_t prefix;     /* leading ones that went well */
  uint32_t written;    /* blocks that a put wrote; those that were here already are not counted */
  kvarts_status first; /* of the first key that did not go well; KVARTS_OK where all did */
} kvarts_completion;

/* Takes the completion of the transfer that was posted first of those that have ended; `is_there` says whether there is one. `results` gets a
 * kvarts_status for each key, in their order, at most `room`; null where `room` is 0. Where a key did not go well kvarts_why says what the first such
 * one met. */
kvarts_status kvarts_queue_poll(const kvarts_queue *queue, kvarts_completion *completion, uint8_t *results, size_t room, bool *is_there);

/* -- What a prefix costs ------------------------------------------------------------------------------------------------------------------- */

/* A prefill of the engine's that was measured: `computed` tokens behind `cached` ones took so long. */
typedef struct kvarts_sample {
  uint64_t cached, computed;
  double ms;
} kvarts_sample;

typedef struct kvarts_cost {
  uint32_t here;                    /* leading blocks that can be restored */
  uint32_t blocks;                  /* those of them that are worth it: load these, and compute the rest */
  uint64_t disk_bytes;              /* what is loaded for that */
  double load_ms;                   /* how long that takes */
  double recompute_ms;              /* how long the rest is computed */
  double first_token_ms;            /* until the first token, both together */
  double recompute_all_ms;          /* until the first token with nothing loaded */
  double disk_bytes_per_second;     /* as the server's reads find its disks */
  uint64_t disk_outstanding_bytes;  /* asked of them and not delivered yet */
} kvarts_cost;

/* What the server says of a prompt of `prompt_tokens` whose leading full blocks have these keys, by its own reads and by the engine's `samples` (at
 * least one). It remembers the samples as this model's. Waits for the server. */
kvarts_status kvarts_estimate(const kvarts_client *client, const kvarts_blocks *blocks, const uint8_t *keys, size_t count, uint64_t prompt_tokens,
                              const kvarts_sample *samples, size_t sample_count, kvarts_cost *cost);

/* -- Staging: what a request needs, before the engine promises it ------------------------------------------------------------------------ */

typedef struct kvarts_stage kvarts_stage;

/* Holds and reads `count` blocks that follow each other in a chain (`keys`: 32 bytes each), the same ones in each column; `first_block` stand before
 * them. It ends when all are here, when the next one cannot come, or when nothing has come for `silence_ms`. */
kvarts_status kvarts_stage_begin(const kvarts_pool *pool, const kvarts_column *columns, size_t column_count, const uint8_t *keys, size_t count,
                                 uint32_t first_block, uint64_t silence_ms, kvarts_stage **stage);
/* Lets go of the blocks, and stops reads that no other stage waits for. */
void kvarts_stage_free(kvarts_stage *stage);
/* Waits until it is over, at most `timeout_ms`; 0 only looks. `staged`: leading blocks that are here in each column, and held. Either may be null. */
kvarts_status kvarts_stage_wait(const kvarts_stage *stage, uint64_t timeout_ms, uint32_t *staged, bool *is_over);
/* KVARTS_OK where all is staged or it goes on; else why the first block that is not staged is not. */
kvarts_status kvarts_stage_outcome(const kvarts_stage *stage);
/* Where the staged blocks of a column lie, in the order of the chain: at most `room` stretches are written, `count` is how many there are. */
kvarts_status kvarts_stage_stretches(const kvarts_stage *stage, size_t column, kvarts_stretch *stretches, size_t room, size_t *count);

/* -- Drafts: room for what is saved, and the put from there ------------------------------------------------------------------------------ */

typedef struct kvarts_draft kvarts_draft;

typedef enum kvarts_outcome {
  KVARTS_STORED = 0,
  KVARTS_ALREADY_THERE = 1,
  KVARTS_IN_FLIGHT = 2,
  KVARTS_HELD_ELSEWHERE = 3,
  KVARTS_NOT_STORED = 4
} kvarts_outcome;

kvarts_status kvarts_draft_begin(const kvarts_pool *pool, const kvarts_column *column, const uint8_t *keys, size_t count, uint32_t first_block,
                                 kvarts_draft **draft);
/* Gives the room back, once no save that was given the draft writes there any more. */
void kvarts_draft_free(kvarts_draft *draft);
kvarts_status kvarts_draft_stretches(const kvarts_draft *draft, kvarts_stretch *stretches, size_t room, size_t *count);
/* Puts the blocks from where they lie, durably, and waits for the answer, at most `timeout_ms`. `parent`: 32 bytes, the block before the first; null:
 * the first begins the prompt. `ttl_ms` 0 leaves their time to live to the server. `outcomes` has `count` kvarts_outcome; null where they are
 * not wanted. Once a draft. KVARTS_OK where each block is stored or was there; else what the first other one met. What was stored stays in
 * the pool for later stages. */
kvarts_status kvarts_draft_put(const kvarts_draft *draft, const uint8_t *parent, uint64_t ttl_ms, uint64_t timeout_ms, uint8_t *outcomes,
                               size_t count);

/* -- Landing and saving: a pool's memory and pages on a device ---------------------------------------------------------------------------- */

typedef struct kvarts_lander kvarts_lander;
typedef struct kvarts_pages kvarts_pages;
typedef struct kvarts_landed kvarts_landed;
typedef struct kvarts_saving kvarts_saving;

/* `cuda:N` in the primary context of this process, or `emulated`: memory of this process. One for each worker; three times `ring_bytes` of the
 * device's memory (landings, landings whose pages are in use when they come, saves), 0 for as many as there are by default. What takes longer than `timeout_ms` once the one before it has ended is stuck: its
 * memory is kept for good, and every later call says so. */
kvarts_status kvarts_lander_open(const char *device, uint64_t ring_bytes, uint64_t timeout_ms, kvarts_lander **lander);
void kvarts_lander_free(kvarts_lander *lander);
/* Registers a pool's memory with the device, once: copies with memory that is not may wait inside the driver. */
kvarts_status kvarts_lander_pin(const kvarts_lander *lander, const kvarts_memory *memory);
/* A stream of its own, for engines that have none and for tests: it lives as long as the lander. Engines give theirs (a cudaStream_t as a number). */
kvarts_status kvarts_lander_stream(const kvarts_lander *lander, uint64_t *stream);
/* Waits until the stream has done everything that it was given. */
kvarts_status kvarts_lander_synchronize(const kvarts_lander *lander, uint64_t stream);

/* Memory on the device; of this process where the device is emulated, and then it stays there as long as anything lands in it. */
typedef struct kvarts_span {
  uint64_t address, nbytes;
} kvarts_span;

/* How often, and bytes from one to the next in a chunk of the block and in a page. */
typedef struct kvarts_rows {
  uint32_t count;
  uint64_t in_block, in_page;
} kvarts_rows;

/* Where a part of a block lies in pages: which of the spans; where its rows begin in a chunk; where slot zero begins in the span, and bytes from one
 * slot to the next; rows within rows. A page that is one piece on both sides has rows of count 1 and all of its bytes in a row. */
typedef struct kvarts_part {
  uint32_t memory;
  uint64_t first_in_block, base, stride;
  kvarts_rows outer, inner;
  uint64_t row_bytes;
} kvarts_part;

/* Describes where the engine has `slot_count / per_block` blocks: a part for each part of a block (kvarts_column_parts), and `per_block` slots for each
 * block in the order of its tokens. KVARTS_INVALID if a row leaves its span, or two share a byte. */
kvarts_status kvarts_pages_describe(const kvarts_lander *lander, const kvarts_column *column, const kvarts_span *spans, size_t span_count,
                                    const kvarts_part *parts, size_t part_count, const uint32_t *slots, size_t slot_count, uint32_t per_block,
                                    kvarts_pages **pages);
void kvarts_pages_free(kvarts_pages *pages);

/* Blocks of a pool and the pages that they belong to, in the same order. */
typedef struct kvarts_move {
  const kvarts_stretch *stretches;
  size_t count;
  const kvarts_pages *pages;
} kvarts_move;

/* Begins to land all layers. Pages are written behind what the stream `after` was given so far; null: they are idle now. They are
 * in use until the landing is done, also if it was freed: two landings into the same pages are in no order. `stage` may be null; one of this
 * process is held until all has landed. */
kvarts_status kvarts_land(const kvarts_lander *lander, const kvarts_memory *memory, const kvarts_move *moves, size_t count, const uint64_t *after,
                          const kvarts_stage *stage, kvarts_landed **landed);
/* It lands all the same. */
void kvarts_landed_free(kvarts_landed *landed);
/* What the stream is given from now on runs when this layer has landed. */
kvarts_status kvarts_landed_wait(const kvarts_landed *landed, uint32_t layer, uint64_t stream);
/* Waits until all layers have landed, at most `timeout_ms`; 0 only looks. */
kvarts_status kvarts_landed_done(const kvarts_landed *landed, uint64_t timeout_ms, bool *is_done);

/* Begins to take layers from pages that have every byte of their blocks. `draft` may be null; one of this process is held until all have left. */
kvarts_status kvarts_save(const kvarts_lander *lander, const kvarts_memory *memory, const kvarts_move *moves, size_t count, const kvarts_draft *draft,
                          kvarts_saving **saving);
/* Freed before its end it leaves bytes that are no blocks. */
void kvarts_saving_free(kvarts_saving *saving);
/* This layer leaves behind what the stream was given so far; what it is given from now on may write the pages. In the order of layers. */
kvarts_status kvarts_saving_layer(const kvarts_saving *saving, uint32_t layer, uint64_t stream);
/* No more layers come. KVARTS_INVALID where some are missing. */
kvarts_status kvarts_saving_finish(const kvarts_saving *saving);
/* Waits until all layers are in the pool, at most `timeout_ms`; 0 only looks. Behind kvarts_saving_finish. */
kvarts_status kvarts_saving_done(const kvarts_saving *saving, uint64_t timeout_ms, bool *is_done);

#ifdef __cplusplus
}
#endif

#endif
