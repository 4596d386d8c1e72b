/* kvarts.h: copies blocks between a Kvarts server and the memory of an engine's processes or devices.
 *
 * The scheduler of the engine connects, takes a pool (kvarts_pool_take), and stages the blocks of each request: the server reads these blocks into
 * the pool (kvarts_stage_begin). A worker connects, attaches to the pool by the pool's name (kvarts_attach), describes its pages once for each
 * request (kvarts_pages_describe), and lands layers: the library copies each layer from the pool into the pages (kvarts_land,
 * kvarts_landed_wait). Computed blocks take the opposite path: kvarts_draft_begin, kvarts_save, kvarts_draft_put.
 *
 * An engine that stores opaque pages and needs no staging uses a queue (kvarts_queue_open). The engine posts puts, gets, look-ups and deletes of
 * many keys, and polls their completions. Puts and gets have a descriptor of registered memory for each block.
 *
 * - A call that can fail returns a status. kvarts_why returns a sentence with the cause and the remedy of this thread's last failed call.
 * - Every pointer must be valid during the call. Out-parameters are written only if the status is KVARTS_OK, unless the description of the call
 *   states an exception. The description of a call names the parameters that may be null. Text is UTF-8 and ends with a zero byte.
 * - Several threads may use a handle at the same time, except during the call that frees the handle. Handles may be freed in any order. The
 *   library keeps its memory as long as a device or a disk may use this memory. Freeing null has no effect.
 * - The calls that the engine makes between its steps do not wait: kvarts_land, kvarts_landed_wait, kvarts_save, kvarts_saving_layer, the calls
 *   that post a transfer, and kvarts_queue_poll. If another call waits, its description states this.
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

/* The status of a call or of a key, with the reaction that the engine must have. */
typedef enum kvarts_status {
  KVARTS_OK = 0,
  KVARTS_MISS = 1,      /* the block is not stored: compute the block */
  KVARTS_RETRY = 2,     /* a temporary condition: repeat the call later */
  KVARTS_REFUSED = 3,   /* refused because of a quota, a limit or a missing right */
  KVARTS_INVALID = 4,   /* the arguments or the order of calls are wrong: correct the call */
  KVARTS_DEADLINE = 5,  /* the timeout expired */
  KVARTS_CORRUPT = 6,   /* the bytes read do not match their digest: compute the block */
  KVARTS_READ_ONLY = 7, /* the store is read-only after a fault */
  KVARTS_BUG = 8        /* a defect in Kvarts: report it */
} kvarts_status;

/* The error text of this thread's last failed call. The text is valid until this thread calls the library again. */
const char *kvarts_why(void);
/* The library's version, for example "0.1.0". */
const char *kvarts_version(void);

/* -- A server, and the blocks of a model on it ----------------------------------------------------------------------------------------- */

typedef struct kvarts_client kvarts_client;
typedef struct kvarts_blocks kvarts_blocks;

/* Connects to a server, and waits for the answer. `endpoint` is `unix:PATH`, with the path of the socket of a server on this host. Pools require an
 * endpoint of this form. `token` may be null. */
kvarts_status kvarts_connect(const char *endpoint, const char *token, kvarts_client **client);
void kvarts_client_free(kvarts_client *client);

/* All fields that determine the bytes of blocks. `model` to `layout_version` are required. `tokenizer` to `window` may be null, which means "none".
 * Set either `spec` or `page_bytes`, and leave the other field null or 0. `spec` is the name of a model whose spec the library contains
 * (`kvarts model list` of the same version lists the names), or the text of a spec in TOML. If `page_bytes` is set, a block is one flat page of
 * this size on each rank. */
typedef struct kvarts_identity {
  const char *model, *revision, *dtype, *engine, *layout, *layout_version;
  const char *tokenizer, *adapter, *quantisation, *scales, *rope, *window;
  const char *spec;
  uint64_t page_bytes;
  uint32_t block_tokens;
  uint16_t tp_size, tp_rank;
} kvarts_identity;

/* Registers the identity on the server, and waits for the answer. */
kvarts_status kvarts_blocks_of(const kvarts_client *client, const kvarts_identity *identity, kvarts_blocks **blocks);
void kvarts_blocks_free(kvarts_blocks *blocks);

/* A column: the blocks of one group and one rank. A group is one KV cache of a model; a block has separate parts for each group. `rank` -1 means the
 * rank of the identity. */
typedef struct kvarts_column {
  const kvarts_blocks *blocks;
  uint32_t group;
  int32_t rank;
} kvarts_column;

/* Writes the size in bytes of each part of a block into `bytes`, for all layers in order, at most `room` sizes. `count` receives the number of
 * parts. `bytes` may be null if `room` is 0. */
kvarts_status kvarts_column_parts(const kvarts_column *column, uint64_t *bytes, size_t room, size_t *count);

/* -- Names of blocks ------------------------------------------------------------------------------------------------------------------- */

/* A key has 32 bytes. kvarts_key and kvarts_chain compute the same keys as all other clients of Kvarts. kvarts_key uses a `name` of 32 bytes
 * unchanged as the key. It hashes a name of any other length up to 4096 bytes. */
kvarts_status kvarts_key(const void *name, size_t nbytes, uint8_t *key);
/* Writes the keys of all full blocks of a sequence of tokens, at most `room` keys of 32 bytes. Each key identifies its block and all tokens before
 * the block. `parent` is the key (32 bytes) of the block before the first token. `parent` is null if the first token begins the prompt. `count`
 * receives the number of full blocks. */
kvarts_status kvarts_chain(const uint32_t *tokens, size_t token_count, uint32_t block_tokens, const uint8_t *parent, uint8_t *keys, size_t room,
                           size_t *count);

/* -- Memory for blocks ----------------------------------------------------------------------------------------------------------------- */

typedef struct kvarts_memory kvarts_memory;

/* Takes at least `nbytes` of memory that only this process uses. The server's disks write directly into this memory. Waits for the server. */
kvarts_status kvarts_memory_take(const kvarts_client *client, size_t nbytes, kvarts_memory **memory);
/* Maps the first `nbytes` (whole pages) of an in-memory file of the engine (memfd_create, /dev/shm) a second time. The server's disks write directly
 * into these pages. The caller keeps its descriptor of the file. The caller must never shorten the file; if the file allows seals, the call seals
 * the file against shrinking. Waits for the server. */
kvarts_status kvarts_memory_adopt(const kvarts_client *client, int file, size_t nbytes, kvarts_memory **memory);
/* Registers memory of any kind. Transfers copy the bytes of this memory. Keep the memory mapped until its handle is freed and every transfer that
 * uses the memory has been polled. The call fails with KVARTS_INVALID if a byte belongs to another registered memory of this process. Do not
 * register memory of kvarts_memory_take, kvarts_memory_adopt or a pool: the library does not detect that two blocks of one get share bytes through
 * different handles. */
kvarts_status kvarts_memory_register(void *address, size_t nbytes, kvarts_memory **memory);
void kvarts_memory_free(kvarts_memory *memory);
/* Returns the address of the memory in this process. The address is valid until the handle is freed. `nbytes` receives the size of the memory, and
 * may be null. */
void *kvarts_memory_address(const kvarts_memory *memory, size_t *nbytes);

/* -- A pool: memory that the processes of one engine share ----------------------------------------------------------------------------- */

typedef struct kvarts_pool kvarts_pool;

/* Takes a pool of at least `nbytes` from the server. Waits for the server. */
kvarts_status kvarts_pool_take(const kvarts_client *client, size_t nbytes, kvarts_pool **pool);
void kvarts_pool_free(kvarts_pool *pool);
/* Returns the name with which workers attach to the pool. The name is a secret of the engine. The text is valid until the pool's handle is freed. */
const char *kvarts_pool_name(const kvarts_pool *pool);
/* Returns the memory of the pool in this process. */
kvarts_status kvarts_pool_memory(const kvarts_pool *pool, kvarts_memory **memory);

/* Attaches to a pool that another process of the same tenant has taken, and returns the memory of the pool. Waits for the server. */
kvarts_status kvarts_attach(const kvarts_client *client, const char *name, kvarts_memory **memory);

/* A stretch: adjacent blocks in a pool. An extent of `blocks` blocks begins at offset `at` of the pool, in the order `[part][block]`. The stretch is
 * `count` blocks of this extent, from block `first` on. A stretch is valid in every process that uses the pool. */
typedef struct kvarts_stretch {
  uint64_t at;
  uint32_t blocks, first, count;
} kvarts_stretch;

/* -- Transfers: many keys at once, posted and polled ----------------------------------------------------------------------------------- */

typedef struct kvarts_queue kvarts_queue;

/* A range of a memory: `nbytes` bytes from offset `at` on. Use the memory of a pool only if the pool has no stages and no drafts. */
typedef struct kvarts_descriptor {
  const kvarts_memory *memory;
  uint64_t at, nbytes;
} kvarts_descriptor;

/* The maximum number of keys of a transfer. */
#define KVARTS_TRANSFER_KEYS 65536

/* Opens a queue for transfers of blocks of one column. `depth` is the maximum number of transfers that are posted and not yet polled; 0 selects
 * the default. `ttl_ms` is the time to live of the blocks that are put; with 0 the server decides the time to live. */
kvarts_status kvarts_queue_open(const kvarts_client *client, const kvarts_column *column, uint32_t depth, uint64_t ttl_ms, kvarts_queue **queue);
/* Frees the queue, and cancels its transfers in progress. Completions can no longer be polled, so the caller cannot determine when the library stops
 * using registered memory of these transfers. This memory must stay mapped. If you must unmap it, cancel and poll the transfers before you free the
 * queue. */
void kvarts_queue_free(kvarts_queue *queue);
/* Returns a file descriptor for poll(2), which is readable exactly while completions wait. The queue owns the descriptor; do not read from the
 * descriptor. Returns -1 if the queue is null. */
int kvarts_queue_eventfd(const kvarts_queue *queue);

/* kvarts_put, kvarts_get, kvarts_exists and kvarts_delete post a transfer of `count` keys:
 * - `transfer` receives a number, which identifies the transfer in its completion.
 * - A call with wrong arguments (KVARTS_INVALID), or with a full queue (KVARTS_RETRY), fails at once and has no completion. Every other transfer has
 *   one completion, even if the server is unreachable.
 * - kvarts_put and kvarts_get need a descriptor for each key, with exactly the size of a block. Do not use the memory of the descriptors until the
 *   transfer has been polled.
 * - A key without a result after `timeout_ms` has the status KVARTS_DEADLINE. 0 selects the timeout of the client.
 *
 * kvarts_put stores the missing blocks durably. KVARTS_OK for a key means that this put or an earlier put stored the block. The first put of a key
 * wins. */
kvarts_status kvarts_put(const kvarts_queue *queue, const uint8_t *keys, const kvarts_descriptor *from, size_t count, uint64_t timeout_ms,
                         uint64_t *transfer);
/* Reads blocks. KVARTS_OK for a key means that its block is complete and verified in the memory of its descriptor. With any other status the bytes
 * of this memory are undefined. */
kvarts_status kvarts_get(const kvarts_queue *queue, const uint8_t *keys, const kvarts_descriptor *into, size_t count, uint64_t timeout_ms,
                         uint64_t *transfer);
/* Looks keys up. The status of a key is KVARTS_OK if the block can be read now, KVARTS_MISS if the block is not stored, and KVARTS_RETRY if the put
 * of the block has not ended. */
kvarts_status kvarts_exists(const kvarts_queue *queue, const uint8_t *keys, size_t count, uint64_t timeout_ms, uint64_t *transfer);
/* Deletes blocks. The status of a key is KVARTS_OK if the block was stored and is deleted permanently, and KVARTS_MISS if the block was not
 * stored. */
kvarts_status kvarts_delete(const kvarts_queue *queue, const uint8_t *keys, size_t count, uint64_t timeout_ms, uint64_t *transfer);
/* Ends a transfer early. Keys without a result have the status KVARTS_RETRY. The transfer completes when its memory is no longer in use. The call has
 * no effect on a transfer that has ended. */
kvarts_status kvarts_cancel(const kvarts_queue *queue, uint64_t transfer);

typedef enum kvarts_kind { KVARTS_PUT = 0, KVARTS_GET = 1, KVARTS_EXISTS = 2, KVARTS_DELETE = 3 } kvarts_kind;

typedef struct kvarts_completion {
  uint64_t transfer;
  kvarts_kind kind;
  uint32_t count;      /* keys of the transfer */
  uint32_t good;       /* keys with the status KVARTS_OK */
  uint32_t prefix;     /* leading keys with the status KVARTS_OK */
  uint32_t written;    /* blocks that a put wrote, without the blocks that were already stored */
  kvarts_status first; /* the first status that is not KVARTS_OK, in the order of the keys; KVARTS_OK if all keys have KVARTS_OK */
} kvarts_completion;

/* Takes a completion. If several transfers have ended, the call takes the completion of the transfer that was posted first. `is_there` receives false
 * if no transfer has ended. `results` receives a kvarts_status for each key, in the order of the keys, at most `room` values. `results` may be null
 * if `room` is 0. If a key has a status other than KVARTS_OK, kvarts_why returns the error text of the first such key. */
kvarts_status kvarts_queue_poll(const kvarts_queue *queue, kvarts_completion *completion, uint8_t *results, size_t room, bool *is_there);

/* -- The cost of a prefix -------------------------------------------------------------------------------------------------------------- */

/* A prefill that the engine measured: the engine computed `computed` tokens after `cached` cached tokens in `ms` milliseconds. */
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
  double first_token_ms;            /* time to the first token with this load and this computation */
  double recompute_all_ms;          /* time to the first token if nothing is loaded */
  double disk_bytes_per_second;     /* the read rate of the server's disks, measured by the server */
  uint64_t disk_outstanding_bytes;  /* bytes that were requested from the disks and have not been delivered */
} kvarts_cost;

/* Estimates whether the prefix of a prompt is loaded faster than it is computed. The prompt has `prompt_tokens` tokens; `keys` are the keys of its
 * leading full blocks. The server estimates from measurements of its own reads and from the engine's `samples` (at least one), and keeps the samples
 * for this model. Waits for the server. */
kvarts_status kvarts_estimate(const kvarts_client *client, const kvarts_blocks *blocks, const uint8_t *keys, size_t count, uint64_t prompt_tokens,
                              const kvarts_sample *samples, size_t sample_count, kvarts_cost *cost);

/* -- Staging: the blocks of a request are read into a pool before the engine uses them ------------------------------------------------- */

typedef struct kvarts_stage kvarts_stage;

/* Reads `count` consecutive blocks of a chain into the pool, the same blocks in every column, and holds the blocks there. `keys` has 32 bytes for
 * each block. `first_block` is the number of blocks of the chain before the first key. The stage ends when all blocks have arrived, when the next
 * block cannot arrive, or when no block has arrived for `silence_ms`. */
kvarts_status kvarts_stage_begin(const kvarts_pool *pool, const kvarts_column *columns, size_t column_count, const uint8_t *keys, size_t count,
                                 uint32_t first_block, uint64_t silence_ms, kvarts_stage **stage);
/* Releases the blocks of the stage, and stops its reads. Reads for which another stage waits continue. */
void kvarts_stage_free(kvarts_stage *stage);
/* Waits until the stage has ended, at most `timeout_ms`; with 0 the call returns immediately. `staged` receives the number of leading blocks that are
 * held in the pool in every column. `is_over` receives whether the stage has ended. `staged` and `is_over` may be null. */
kvarts_status kvarts_stage_wait(const kvarts_stage *stage, uint64_t timeout_ms, uint32_t *staged, bool *is_over);
/* Returns KVARTS_OK if all blocks are staged or the stage has not ended. Otherwise returns the reason why the first missing block is not staged. */
kvarts_status kvarts_stage_outcome(const kvarts_stage *stage);
/* Writes the places of the staged blocks of a column, in the order of the chain, at most `room` stretches. `column` is the index in the columns of
 * kvarts_stage_begin. `count` receives the number of stretches. */
kvarts_status kvarts_stage_stretches(const kvarts_stage *stage, size_t column, kvarts_stretch *stretches, size_t room, size_t *count);

/* -- Drafts: room in a pool for blocks that the engine saves and puts ------------------------------------------------------------------ */

typedef struct kvarts_draft kvarts_draft;

typedef enum kvarts_outcome {
  KVARTS_STORED = 0,
  KVARTS_ALREADY_THERE = 1,  /* an earlier put stored the block; the first put of a key wins */
  KVARTS_IN_FLIGHT = 2,      /* another put of the key has not ended */
  KVARTS_HELD_ELSEWHERE = 3, /* not written here: the cluster's directory lists a copy on another node */
  KVARTS_NOT_STORED = 4      /* the put of the block failed */
} kvarts_outcome;

/* Reserves room in the pool for `count` consecutive blocks of a chain. `first_block` is the number of blocks of the chain before the first key. */
kvarts_status kvarts_draft_begin(const kvarts_pool *pool, const kvarts_column *column, const uint8_t *keys, size_t count, uint32_t first_block,
                                 kvarts_draft **draft);
/* Frees the room of the draft. The library reuses the room after all saves that were begun with this draft have stopped writing to it. */
void kvarts_draft_free(kvarts_draft *draft);
/* Writes the places of the draft's blocks, as kvarts_stage_stretches does. The call fails after kvarts_draft_put. */
kvarts_status kvarts_draft_stretches(const kvarts_draft *draft, kvarts_stretch *stretches, size_t room, size_t *count);
/* Puts the blocks durably from their places, and waits for the outcomes, at most `timeout_ms`. A draft can be put only once.
 * - `parent` is the key (32 bytes) of the block before the first block. `parent` is null if the first block begins the prompt.
 * - `ttl_ms` is the time to live. With 0 the server decides the time to live.
 * - `outcomes` has room for `count` values of kvarts_outcome, and may be null. `outcomes` is written even if the status is not KVARTS_OK.
 * The status is KVARTS_OK if the outcome of every block is one of KVARTS_STORED, KVARTS_ALREADY_THERE and KVARTS_HELD_ELSEWHERE. Otherwise it is the
 * status of the first block with another outcome. If the pool has staged blocks of this model before, the stored blocks stay in the pool for later
 * stages. */
kvarts_status kvarts_draft_put(const kvarts_draft *draft, const uint8_t *parent, uint64_t ttl_ms, uint64_t timeout_ms, uint8_t *outcomes,
                               size_t count);

/* -- Landing and saving: between a pool and the pages on a device ---------------------------------------------------------------------- */

typedef struct kvarts_lander kvarts_lander;
typedef struct kvarts_pages kvarts_pages;
typedef struct kvarts_landed kvarts_landed;
typedef struct kvarts_saving kvarts_saving;

/* Opens a device. `device` is `cuda:N` for the primary context of this process, or `emulated` for memory of this process. A worker needs one lander.
 * The lander allocates three rings of `ring_bytes` on the device: for landings, for landings whose pages are still in use at their start, and for
 * saves. 0 selects the default size. A landing or a save is stuck if it takes longer than `timeout_ms`, counted from the end of the previous landing
 * or save. The library never frees the memory of a stuck landing or save, and every later call fails with its error. */
kvarts_status kvarts_lander_open(const char *device, uint64_t ring_bytes, uint64_t timeout_ms, kvarts_lander **lander);
void kvarts_lander_free(kvarts_lander *lander);
/* Registers the memory of a pool with the device. Make this call once for each pool: copies from or to unregistered memory may wait inside the
 * driver. */
kvarts_status kvarts_lander_pin(const kvarts_lander *lander, const kvarts_memory *memory);
/* Creates a stream for tests and for engines without streams. The stream exists as long as the lander. Engines with streams pass their own stream: a
 * cudaStream_t, converted to a number. */
kvarts_status kvarts_lander_stream(const kvarts_lander *lander, uint64_t *stream);
/* Waits until the stream has completed all enqueued work. */
kvarts_status kvarts_lander_synchronize(const kvarts_lander *lander, uint64_t stream);

/* A span: memory on the device. The spans of an emulated device are memory of this process. The caller must keep this memory mapped as long as
 * landings write to it. */
typedef struct kvarts_span {
  uint64_t address, nbytes;
} kvarts_span;

/* `count` rows of bytes. `in_block` is the distance in bytes between two rows in a chunk of the block; `in_page` is their distance in a page. */
typedef struct kvarts_rows {
  uint32_t count;
  uint64_t in_block, in_page;
} kvarts_rows;

/* The place of a part of a block in the pages of the engine. A slot is the number of a page.
 * - `memory` is the index of the span, and `base` is the offset of slot zero in the span. `stride` is the distance in bytes between two slots.
 * - `first_in_block` is the offset of the first row in a chunk.
 * - `outer` and `inner` are two nested levels of rows. Each row has `row_bytes` bytes. If the bytes of a page are contiguous in the block and in the
 *   page, both counts are 1, and the single row has all bytes of the page. */
typedef struct kvarts_part {
  uint32_t memory;
  uint64_t first_in_block, base, stride;
  kvarts_rows outer, inner;
  uint64_t row_bytes;
} kvarts_part;

/* Describes the pages of `slot_count / per_block` blocks. `parts` has one element for each part of a block (kvarts_column_parts). `slots` has
 * `per_block` slots for each block, in the order of the block's tokens. Fails with KVARTS_INVALID if a row lies outside its span, or if two rows
 * share a byte. */
kvarts_status kvarts_pages_describe(const kvarts_lander *lander, const kvarts_column *column, const kvarts_span *spans, size_t span_count,
                                    const kvarts_part *parts, size_t part_count, const uint32_t *slots, size_t slot_count, uint32_t per_block,
                                    kvarts_pages **pages);
void kvarts_pages_free(kvarts_pages *pages);

/* The blocks of one column in a pool, and the pages of these blocks in the same order. */
typedef struct kvarts_move {
  const kvarts_stretch *stretches;
  size_t count;
  const kvarts_pages *pages;
} kvarts_move;

/* Begins to land all layers. The landing writes to the pages after all work that is enqueued on the stream `after` at this time. If `after` is null,
 * the pages must not be in use now. The pages are in use until the landing is done, even if its handle is freed earlier. Two landings into the same
 * pages have no order. `stage` may be null. If it is not null, its blocks are held until all layers have landed. */
kvarts_status kvarts_land(const kvarts_lander *lander, const kvarts_memory *memory, const kvarts_move *moves, size_t count, const uint64_t *after,
                          const kvarts_stage *stage, kvarts_landed **landed);
/* Frees the handle. The landing continues. */
void kvarts_landed_free(kvarts_landed *landed);
/* Makes the stream wait for this layer: work that is enqueued on the stream after this call runs after the layer has landed. */
kvarts_status kvarts_landed_wait(const kvarts_landed *landed, uint32_t layer, uint64_t stream);
/* Waits until all layers have landed, at most `timeout_ms`; with 0 the call returns immediately. `is_done` receives whether all layers have
 * landed. */
kvarts_status kvarts_landed_done(const kvarts_landed *landed, uint64_t timeout_ms, bool *is_done);

/* Begins to save layers from pages. The rows of the pages must cover every byte of their blocks. `draft` may be null. If it is not null, its room is
 * held until all layers are in the pool. */
kvarts_status kvarts_save(const kvarts_lander *lander, const kvarts_memory *memory, const kvarts_move *moves, size_t count, const kvarts_draft *draft,
                          kvarts_saving **saving);
/* Frees the handle. If the save has not ended, the blocks in the pool are not valid. */
void kvarts_saving_free(kvarts_saving *saving);
/* Copies this layer after all work that is enqueued on the stream at this time. Work that is enqueued on the stream after this call may write to the
 * pages. Make this call for all layers in order. */
kvarts_status kvarts_saving_layer(const kvarts_saving *saving, uint32_t layer, uint64_t stream);
/* Ends the save. Fails with KVARTS_INVALID if layers are missing. */
kvarts_status kvarts_saving_finish(const kvarts_saving *saving);
/* Waits until all layers are in the pool, at most `timeout_ms`; with 0 the call returns immediately. Make this call after kvarts_saving_finish. */
kvarts_status kvarts_saving_done(const kvarts_saving *saving, uint64_t timeout_ms, bool *is_done);

#ifdef __cplusplus
}
#endif

#endif
