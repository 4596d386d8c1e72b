/* kvarts.h: copies blocks between a Kvarts server and the memory of an engine's processes or devices.
 *
 * The scheduler of the engine connects, takes a pool (kvarts_pool_take), and stages the blocks of each request (kvarts_stage_begin). A worker
 * connects, attaches to the pool by its name (kvarts_attach), describes its pages once for each request (kvarts_pages_describe), and lands
 * layers (kvarts_land, kvarts_landed_wait). Computed blocks take the opposite path: kvarts_draft_begin, kvarts_save, kvarts_draft_put.
 *
 * An engine whose blocks are opaque pages and that stages nothing uses a queue (kvarts_queue_open): it posts puts, gets, look-ups and deletes
 * of many keys, with a descriptor of registered memory for each block, and polls their completions.
 *
 * - A call that can fail returns a status. kvarts_why returns a sentence with the cause of the last failed call of this thread and the remedy.
 * - Every pointer must be valid during the call. Out-parameters are written only if the status is KVARTS_OK, unless the call says otherwise.
 *   Parameters that may be null are named as such. Text is UTF-8 and ends with a zero byte.
 * - Several threads may use a handle at the same time, except during the call that frees it. Handles may be freed in any order: the library keeps
 *   the memory that a device or a disk may still use until the use has ended. Freeing null has no effect.
 * - Calls on the engine's threads that enqueue work (kvarts_land, kvarts_landed_wait, kvarts_save, kvarts_saving_layer, the calls that post
 *   a transfer, kvarts_queue_poll) do not wait. The description of a call says if it waits.
 * - After fork, the child process must connect again. It cannot use the handles of its parent.
 */
#ifndef KVARTS_H
#define KVARTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Each value stands for one reaction of the engine. */
typedef enum kvarts_status {
  KVARTS_OK = 0,
  KVARTS_MISS = 1,      /* the block is not stored: compute it */
  KVARTS_RETRY = 2,     /* a temporary condition: call again later */
  KVARTS_REFUSED = 3,   /* a quota, a limit or a missing right */
  KVARTS_INVALID = 4,   /* the call itself is wrong: change it */
  KVARTS_DEADLINE = 5,  /* the timeout expired */
  KVARTS_CORRUPT = 6,   /* the bytes read do not match their digest: compute the block */
  KVARTS_READ_ONLY = 7, /* the store is read-only after a fault */
  KVARTS_BUG = 8        /* a defect in Kvarts: report it */
} kvarts_status;

/* The error text of this thread's last failed call. The text is valid until the next call of this thread. */
const char *kvarts_why(void);
/* The library's version, for example "0.1.0". */
const char *kvarts_version(void);

/* -- A server, and the blocks of a model on it ----------------------------------------------------------------------------------------- */

typedef struct kvarts_client kvarts_client;
typedef struct kvarts_blocks kvarts_blocks;

/* `endpoint` is `unix:PATH`, a socket on the server's host; pools require such an endpoint. `token` may be null. Waits for the server. */
kvarts_status kvarts_connect(const char *endpoint, const char *token, kvarts_client **client);
void kvarts_client_free(kvarts_client *client);

/* All fields that decide the bytes of blocks. The texts of the first line are required; null in the second line means "none". Set exactly one of
 * `spec` and `page_bytes`, and leave the other null or 0. `spec` is the name of a shipped model, or the text of a spec. With `page_bytes` a block
 * is one flat page of this size on each rank. */
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

/* The blocks of one group and rank. A block has separate parts for each group. `rank` -1 means the rank of the identity. */
typedef struct kvarts_column {
  const kvarts_blocks *blocks;
  uint32_t group;
  int32_t rank;
} kvarts_column;

/* Writes the size in bytes of each part of a block, over all layers, at most `room` sizes. `count` receives the number of parts. `bytes` may be
 * null if `room` is 0. */
kvarts_status kvarts_column_parts(const kvarts_column *column, uint64_t *bytes, size_t room, size_t *count);

/* -- Names of blocks ------------------------------------------------------------------------------------------------------------------- */

/* A key is 32 bytes. kvarts_key and kvarts_chain make the same keys as every other client of Kvarts. kvarts_key uses a `name` of 32 bytes
 * unchanged, and digests a name of any other length up to 4096 bytes. */
kvarts_status kvarts_key(const void *name, size_t nbytes, uint8_t *key);
/* Writes the keys of all full blocks of a text, at most `room` keys of 32 bytes. Each key identifies its block and all tokens before the block.
 * `parent` is the key (32 bytes) of the block before the first token; null if the text begins the prompt. `count` receives the number of full
 * blocks. */
kvarts_status kvarts_chain(const uint32_t *tokens, size_t token_count, uint32_t block_tokens, const uint8_t *parent, uint8_t *keys, size_t room,
                           size_t *count);

/* -- Memory for blocks ----------------------------------------------------------------------------------------------------------------- */

typedef struct kvarts_memory kvarts_memory;

/* Takes at least `nbytes` of memory that only this process uses. The server's disks write into it directly. Waits for the server. */
kvarts_status kvarts_memory_take(const kvarts_client *client, size_t nbytes, kvarts_memory **memory);
/* Maps the first `nbytes` (whole pages) of an existing file in memory of the engine (memfd_create, /dev/shm) a second time. The server's disks
 * write into it directly. The caller keeps its descriptor. The call seals the file against shrinking if the file allows seals; the caller must
 * never shorten the file. Waits for the server. */
kvarts_status kvarts_memory_adopt(const kvarts_client *client, int file, size_t nbytes, kvarts_memory **memory);
/* Registers memory of any kind. Transfers copy its bytes. Keep it mapped until the handle is freed and every transfer that uses it has been
 * polled. The call fails with KVARTS_INVALID if a byte belongs to another registered memory of this process. Do not register memory that a handle
 * of another kind refers to: the library does not detect that two blocks of one get share bytes through different handles. */
kvarts_status kvarts_memory_register(void *address, size_t nbytes, kvarts_memory **memory);
void kvarts_memory_free(kvarts_memory *memory);
/* Returns the address of the memory in this process, valid until the handle is freed. `nbytes` receives its size, and may be null. */
void *kvarts_memory_address(const kvarts_memory *memory, size_t *nbytes);

/* -- A pool: memory that the processes of one engine share ----------------------------------------------------------------------------- */

typedef struct kvarts_pool kvarts_pool;

/* Takes a pool of at least `nbytes` from the server. Waits for the server. */
kvarts_status kvarts_pool_take(const kvarts_client *client, size_t nbytes, kvarts_pool **pool);
void kvarts_pool_free(kvarts_pool *pool);
/* The name with which workers attach to the pool: a secret of the engine. The text is valid until the pool's handle is freed. */
const char *kvarts_pool_name(const kvarts_pool *pool);
/* The memory of the pool in this process. */
kvarts_status kvarts_pool_memory(const kvarts_pool *pool, kvarts_memory **memory);

/* The memory of a pool that another process of the same tenant has taken. Waits for the server. */
kvarts_status kvarts_attach(const kvarts_client *client, const char *name, kvarts_memory **memory);

/* Adjacent blocks in a pool: `count` blocks, beginning with block `first`, of an extent of `blocks` blocks at offset `at` of the pool. The layout
 * of the extent is `[part][block]`. A stretch is valid in every process that uses the pool. */
typedef struct kvarts_stretch {
  uint64_t at;
  uint32_t blocks, first, count;
} kvarts_stretch;

/* -- Transfers: many keys at once, posted and polled ----------------------------------------------------------------------------------- */

typedef struct kvarts_queue kvarts_queue;

/* `nbytes` of a memory, beginning at offset `at`. Use the memory of a pool only if the pool has no stages and no drafts. */
typedef struct kvarts_descriptor {
  const kvarts_memory *memory;
  uint64_t at, nbytes;
} kvarts_descriptor;

/* The maximum number of keys of a transfer. */
#define KVARTS_TRANSFER_KEYS 65536

/* Opens a queue for transfers of blocks of one column. `depth` is the maximum number of transfers that are posted and not yet polled; 0 selects
 * the default. `ttl_ms` has the same meaning as in kvarts_draft_put. */
kvarts_status kvarts_queue_open(const kvarts_client *client, const kvarts_column *column, uint32_t depth, uint64_t ttl_ms, kvarts_queue **queue);
/* Cancels the transfers in progress. Their completions can no longer be polled, so the caller cannot detect when the library stops using
 * registered memory: such memory must then stay mapped. To unmap it, cancel and poll the transfers before you free the queue. */
void kvarts_queue_free(kvarts_queue *queue);
/* Returns a descriptor for poll(2), which is readable exactly while completions wait. The queue owns it; do not read from it. Returns -1 if the queue
 * is null. */
int kvarts_queue_eventfd(const kvarts_queue *queue);

/* The next four calls post a transfer of `count` keys. `transfer` receives a number, which identifies the transfer in its completion. A call
 * that is wrong (KVARTS_INVALID), or for which the queue has no room (KVARTS_RETRY), fails at once and has no completion. Every other transfer has
 * one completion, even if the server is unreachable. kvarts_put and kvarts_get have a descriptor for each key, with exactly the size of a block;
 * do not use that memory until the transfer has been polled. Keys without a result after `timeout_ms` get KVARTS_DEADLINE; 0 selects the timeout of
 * the client.
 *
 * kvarts_put stores the missing blocks durably. KVARTS_OK for a key means that its block is stored, by this put or before. The first put of a key
 * wins. */
kvarts_status kvarts_put(const kvarts_queue *queue, const uint8_t *keys, const kvarts_descriptor *from, size_t count, uint64_t timeout_ms,
                         uint64_t *transfer);
/* Reads blocks. KVARTS_OK for a key means that its block is complete and verified in its memory. With any other status the bytes there are
 * undefined. */
kvarts_status kvarts_get(const kvarts_queue *queue, const uint8_t *keys, const kvarts_descriptor *into, size_t count, uint64_t timeout_ms,
                         uint64_t *transfer);
/* Looks keys up. For each key: KVARTS_OK if the block can be read now, KVARTS_MISS if it is not stored, KVARTS_RETRY if its put has not ended. */
kvarts_status kvarts_exists(const kvarts_queue *queue, const uint8_t *keys, size_t count, uint64_t timeout_ms, uint64_t *transfer);
/* Deletes blocks. For each key: KVARTS_OK if the block was stored and is deleted permanently, KVARTS_MISS if it was not stored. */
kvarts_status kvarts_delete(const kvarts_queue *queue, const uint8_t *keys, size_t count, uint64_t timeout_ms, uint64_t *transfer);
/* Ends a transfer early. Keys without a result get KVARTS_RETRY as soon as nothing uses the memory of the transfer any more. The call has no effect
 * on a transfer that has ended. */
kvarts_status kvarts_cancel(const kvarts_queue *queue, uint64_t transfer);

typedef enum kvarts_kind { KVARTS_PUT = 0, KVARTS_GET = 1, KVARTS_EXISTS = 2, KVARTS_DELETE = 3 } kvarts_kind;

typedef struct kvarts_completion {
  uint64_t transfer;
  kvarts_kind kind;
  uint32_t count;      /* keys */
  uint32_t good;       /* keys with KVARTS_OK */
  uint32_t prefix;     /* leading keys with KVARTS_OK */
  uint32_t written;    /* blocks that a put wrote, without the blocks that were already stored */
  kvarts_status first; /* the status of the first key without KVARTS_OK; KVARTS_OK if there is none */
} kvarts_completion;

/* Takes the completion of one transfer: of the ended transfers, the transfer that was posted first. `is_there` receives false if none has
 * ended. `results` receives a kvarts_status for each key, in the order of the keys, at most `room`; it may be null if `room` is 0. If a key
 * has a status other than KVARTS_OK, kvarts_why returns the error text of the first such key. */
kvarts_status kvarts_queue_poll(const kvarts_queue *queue, kvarts_completion *completion, uint8_t *results, size_t room, bool *is_there);

/* -- The cost of a prefix -------------------------------------------------------------------------------------------------------------- */

/* A measured prefill of the engine: it computed `computed` tokens after `cached` cached tokens in `ms` milliseconds. */
typedef struct kvarts_sample {
  uint64_t cached, computed;
  double ms;
} kvarts_sample;

typedef struct kvarts_cost {
  uint32_t here;                    /* leading blocks that can be restored */
  uint32_t blocks;                  /* leading blocks that are worth loading: load these, and compute the rest */
  uint64_t disk_bytes;              /* bytes to load from disk for these blocks */
  double load_ms;                   /* time to load these blocks */
  double recompute_ms;              /* time to compute the rest */
  double first_token_ms;            /* time to the first token with both */
  double recompute_all_ms;          /* time to the first token if nothing is loaded */
  double disk_bytes_per_second;     /* the rate of the server's disks, measured by its reads */
  uint64_t disk_outstanding_bytes;  /* bytes requested from the disks and not delivered yet */
} kvarts_cost;

/* Estimates whether to load or to compute the prefix of a prompt of `prompt_tokens` tokens. `keys` are the keys of its leading full blocks. The
 * server uses measurements of its own reads and the engine's `samples` (at least one), and remembers the samples for this model. Waits for the
 * server. */
kvarts_status kvarts_estimate(const kvarts_client *client, const kvarts_blocks *blocks, const uint8_t *keys, size_t count, uint64_t prompt_tokens,
                              const kvarts_sample *samples, size_t sample_count, kvarts_cost *cost);

/* -- Staging: the blocks of a request, before the engine relies on them ---------------------------------------------------------------- */

typedef struct kvarts_stage kvarts_stage;

/* Reads `count` consecutive blocks of a chain (`keys`: 32 bytes each), the same blocks in every column, into the pool, and holds them there.
 * `first_block` is the number of blocks before them in the chain. The stage ends when all blocks have arrived, when the next block cannot arrive,
 * or when no block has arrived for `silence_ms`. */
kvarts_status kvarts_stage_begin(const kvarts_pool *pool, const kvarts_column *columns, size_t column_count, const uint8_t *keys, size_t count,
                                 uint32_t first_block, uint64_t silence_ms, kvarts_stage **stage);
/* Releases the blocks, and stops reads that no other stage waits for. */
void kvarts_stage_free(kvarts_stage *stage);
/* Waits until the stage has ended, at most `timeout_ms`; with 0 it returns immediately. `staged` receives the number of leading blocks that are in
 * the pool, and held, in every column; `is_over` receives whether the stage has ended. Both parameters may be null. */
kvarts_status kvarts_stage_wait(const kvarts_stage *stage, uint64_t timeout_ms, uint32_t *staged, bool *is_over);
/* KVARTS_OK if all blocks are staged or the stage has not ended; otherwise the reason why the first missing block is not staged. */
kvarts_status kvarts_stage_outcome(const kvarts_stage *stage);
/* Writes the places of the staged blocks of a column, in the order of the chain, at most `room` stretches. `count` receives the number of
 * stretches. */
kvarts_status kvarts_stage_stretches(const kvarts_stage *stage, size_t column, kvarts_stretch *stretches, size_t room, size_t *count);

/* -- Drafts: space for blocks to save, and the put of these blocks ---------------------------------------------------------------------- */

typedef struct kvarts_draft kvarts_draft;

typedef enum kvarts_outcome {
  KVARTS_STORED = 0,
  KVARTS_ALREADY_THERE = 1,  /* stored before; the first put of a key wins */
  KVARTS_IN_FLIGHT = 2,      /* another put of the key has not ended */
  KVARTS_HELD_ELSEWHERE = 3, /* not written here: another node of the cluster is recorded as a holder */
  KVARTS_NOT_STORED = 4
} kvarts_outcome;

/* Reserves space in the pool for `count` consecutive blocks of a chain. `first_block` is the number of blocks before them in the chain. */
kvarts_status kvarts_draft_begin(const kvarts_pool *pool, const kvarts_column *column, const uint8_t *keys, size_t count, uint32_t first_block,
                                 kvarts_draft **draft);
/* Frees the space. The library reuses the space when no save that was begun with the draft writes there any more. */
void kvarts_draft_free(kvarts_draft *draft);
/* Writes the places of the blocks, as kvarts_stage_stretches does. Fails after kvarts_draft_put. */
kvarts_status kvarts_draft_stretches(const kvarts_draft *draft, kvarts_stretch *stretches, size_t room, size_t *count);
/* Puts the blocks durably from their places, and waits for the outcomes, at most `timeout_ms`. A draft can be put once. `parent` is the key (32
 * bytes) of the block before the first block; null if the first block begins the prompt. With `ttl_ms` 0 the server decides the time to live.
 * `outcomes` has room for `count` values of kvarts_outcome, and may be null. The status is KVARTS_OK if every block was stored, was stored before,
 * or is held elsewhere; otherwise it is the status of the first other block, and `outcomes` is written nevertheless. Stored blocks stay in the pool
 * for later stages, if the pool has staged blocks of their model before. */
kvarts_status kvarts_draft_put(const kvarts_draft *draft, const uint8_t *parent, uint64_t ttl_ms, uint64_t timeout_ms, uint8_t *outcomes,
                               size_t count);

/* -- Landing and saving: between a pool and the pages on a device ---------------------------------------------------------------------- */

typedef struct kvarts_lander kvarts_lander;
typedef struct kvarts_pages kvarts_pages;
typedef struct kvarts_landed kvarts_landed;
typedef struct kvarts_saving kvarts_saving;

/* Opens a device: `cuda:N` in the primary context of this process, or `emulated`, which is memory of this process. A worker needs one lander. It
 * allocates three rings of `ring_bytes` on the device (for landings, for landings whose pages are still in use at their start, and for saves); 0
 * selects the default size. A landing or a save is stuck if it takes longer than `timeout_ms`, counted from the end of the previous
 * landing or save: the library never frees its memory, and every later call fails with this error. */
kvarts_status kvarts_lander_open(const char *device, uint64_t ring_bytes, uint64_t timeout_ms, kvarts_lander **lander);
void kvarts_lander_free(kvarts_lander *lander);
/* Registers the memory of a pool with the device. Call it once for each pool: copies with unregistered memory may wait inside the driver. */
kvarts_status kvarts_lander_pin(const kvarts_lander *lander, const kvarts_memory *memory);
/* Creates a stream for tests and for engines without streams. It exists as long as the lander. Engines with streams pass their own stream, a
 * cudaStream_t as a number. */
kvarts_status kvarts_lander_stream(const kvarts_lander *lander, uint64_t *stream);
/* Waits until the stream has done all work that was enqueued on it. */
kvarts_status kvarts_lander_synchronize(const kvarts_lander *lander, uint64_t stream);

/* Memory on the device. On an emulated device it is memory of this process, which the caller must keep as long as landings write to it. */
typedef struct kvarts_span {
  uint64_t address, nbytes;
} kvarts_span;

/* `count` rows, and the distance in bytes between two rows: `in_block` in a chunk of the block, `in_page` in a page. */
typedef struct kvarts_rows {
  uint32_t count;
  uint64_t in_block, in_page;
} kvarts_rows;

/* The place of a part of a block in pages. `memory` is the index of the span; `first_in_block` the offset of the first row in a chunk; `base` the
 * offset of slot zero in the span; `stride` the distance in bytes between two slots. `outer` and `inner` are two nested levels of rows of
 * `row_bytes`. A page that is contiguous on both sides has rows of count 1, and one row has all of its bytes. */
typedef struct kvarts_part {
  uint32_t memory;
  uint64_t first_in_block, base, stride;
  kvarts_rows outer, inner;
  uint64_t row_bytes;
} kvarts_part;

/* Describes the pages of `slot_count / per_block` blocks: one kvarts_part for each part of a block (kvarts_column_parts), and `per_block` slots for
 * each block, in the order of its tokens. KVARTS_INVALID if a row lies outside its span, or if two rows share a byte. */
kvarts_status kvarts_pages_describe(const kvarts_lander *lander, const kvarts_column *column, const kvarts_span *spans, size_t span_count,
                                    const kvarts_part *parts, size_t part_count, const uint32_t *slots, size_t slot_count, uint32_t per_block,
                                    kvarts_pages **pages);
void kvarts_pages_free(kvarts_pages *pages);

/* Blocks of a pool, and the pages of these blocks in the same order. */
typedef struct kvarts_move {
  const kvarts_stretch *stretches;
  size_t count;
  const kvarts_pages *pages;
} kvarts_move;

/* Begins to land all layers. The pages are written after all work that is enqueued on the stream `after` at this time; null means that the pages are
 * idle now. The pages are in use until the landing is done, even if its handle is freed before: two landings into the same pages have no order.
 * `stage` may be null; a stage of this process is held until all layers have landed. */
kvarts_status kvarts_land(const kvarts_lander *lander, const kvarts_memory *memory, const kvarts_move *moves, size_t count, const uint64_t *after,
                          const kvarts_stage *stage, kvarts_landed **landed);
/* Frees the handle. The landing continues. */
void kvarts_landed_free(kvarts_landed *landed);
/* Makes the stream wait for this layer: work enqueued on the stream from now on runs after the layer has landed. */
kvarts_status kvarts_landed_wait(const kvarts_landed *landed, uint32_t layer, uint64_t stream);
/* Waits until all layers have landed, at most `timeout_ms`; with 0 it returns immediately. */
kvarts_status kvarts_landed_done(const kvarts_landed *landed, uint64_t timeout_ms, bool *is_done);

/* Begins to save layers from pages, which must have every byte of their blocks. `draft` may be null; a draft of this process is held until all
 * layers are in the pool. */
kvarts_status kvarts_save(const kvarts_lander *lander, const kvarts_memory *memory, const kvarts_move *moves, size_t count, const kvarts_draft *draft,
                          kvarts_saving **saving);
/* Frees the handle. If the save has not ended, the bytes in the pool are not valid blocks. */
void kvarts_saving_free(kvarts_saving *saving);
/* Copies this layer after all work that is enqueued on the stream at this time. Work enqueued on the stream from now on may write to the pages. Call
 * it for all layers in order. */
kvarts_status kvarts_saving_layer(const kvarts_saving *saving, uint32_t layer, uint64_t stream);
/* Ends the save. KVARTS_INVALID if layers are missing. */
kvarts_status kvarts_saving_finish(const kvarts_saving *saving);
/* Waits until all layers are in the pool, at most `timeout_ms`; with 0 it returns immediately. Call it after kvarts_saving_finish. */
kvarts_status kvarts_saving_done(const kvarts_saving *saving, uint64_t timeout_ms, bool *is_done);

#ifdef __cplusplus
}
#endif

#endif
