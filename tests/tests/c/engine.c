// The processes of an engine, in C: a scheduler and its workers, each with a column of its own. They speak by lines, which the test passes
// from one to the other (tests/tests/serve_c.rs):
//
//   engine scheduler SOCKET          says `pool NAME`, and `draft RANK STRETCHES`; reads `saved`; says `staged RANK STRETCHES`; reads `landed`
//   engine worker SOCKET RANK DEVICE reads NAME; saves what it is told to, says `saved`; lands what it is told to, says `landed`
//
// A worker's device is `emulated`, or `cuda:0` over the stand-in for the driver.
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvarts.h"

enum { BLOCKS = 40, RANKS = 2, SLOTS = 97, PAGE = 32 << 10, ROWS = 16, ROW = PAGE / ROWS, STRETCHES = 64, MINUTE = 60 * 1000 };

static void end(const char *what) {
  fprintf(stderr, "%s: %s\n", what, kvarts_why());
  exit(1);
}

#define TRY(call) \
  do { \
    if ((call) != KVARTS_OK) end(#call); \
  } while (0)
#define SAME(a, b) \
  do { \
    if ((a) != (b)) { \
      fprintf(stderr, "line %d: %s is not %s: %s\n", __LINE__, #a, #b, kvarts_why()); \
      exit(1); \
    } \
  } while (0)

static void say(const char *format, ...) {
  va_list words;
  va_start(words, format);
  vprintf(format, words);
  va_end(words);
  fflush(stdout);
}

static char *hear(void) {
  static char line[4096];
  if (!fgets(line, sizeof line, stdin)) {
    fprintf(stderr, "nobody speaks any more\n");
    exit(1);
  }
  return line;
}

static uint8_t byte(int rank, int block, size_t at) { return (uint8_t)(block * 31 + rank * 101 + 7 + at * 13 + at / 251); }

static kvarts_client *connected(const char *socket) {
  char endpoint[512];
  snprintf(endpoint, sizeof endpoint, "unix:%s", socket);
  kvarts_client *client = NULL;
  TRY(kvarts_connect(endpoint, NULL, &client));
  return client;
}

static kvarts_identity identity(void) {
  return (kvarts_identity){.model = "llama-in-c",
                           .revision = "r1",
                           .dtype = "bfloat16",
                           .engine = "an engine in C",
                           .layout = "pages",
                           .layout_version = "1",
                           .page_bytes = PAGE,
                           .block_tokens = 16,
                           .tp_size = RANKS};
}

static void keys(uint8_t *all) {
  memset(all, 0, BLOCKS * 32);
  for (int block = 0; block < BLOCKS; block++) all[block * 32] = (uint8_t)(block + 1);
}

static void say_stretches(const char *what, int rank, const kvarts_stretch *all, size_t count) {
  say("%s %d", what, rank);
  for (size_t at = 0; at < count; at++)
    say(" %llu %u %u %u", (unsigned long long)all[at].at, all[at].blocks, all[at].first, all[at].count);
  say("\n");
}

static size_t read_stretches(char *line, kvarts_stretch *all) {
  size_t count = 0;
  for (char *word = strtok(line, " \n"); word && count < STRETCHES; word = strtok(NULL, " \n"), count++) {
    all[count].at = strtoull(word, NULL, 10);
    all[count].blocks = (uint32_t)atoi(strtok(NULL, " \n"));
    all[count].first = (uint32_t)atoi(strtok(NULL, " \n"));
    all[count].count = (uint32_t)atoi(strtok(NULL, " \n"));
  }
  return count;
}

static void refusals(kvarts_client *client, kvarts_pool *pool, const kvarts_column *column) {
  kvarts_client *other = NULL;
  SAME(kvarts_connect(NULL, NULL, &other), KVARTS_INVALID);
  SAME(strncmp(kvarts_why(), "endpoint is null: ", 18), 0);
  SAME(kvarts_connect("unix:/nowhere/at/all", NULL, &other) == KVARTS_OK, false);
  SAME(other, NULL);
  kvarts_memory *memory = NULL;
  SAME(kvarts_attach(client, "0123", &memory), KVARTS_INVALID);
  SAME(kvarts_attach(client, "00000000000000000000000000000000", &memory) == KVARTS_OK, false);
  kvarts_identity wrong = identity();
  wrong.tp_rank = RANKS;
  kvarts_blocks *blocks = NULL;
  SAME(kvarts_blocks_of(client, &wrong, &blocks), KVARTS_INVALID);
  SAME(strncmp(kvarts_why(), "tp_rank", 7), 0);
  kvarts_column no_group = *column;
  no_group.group = 9;
  size_t count = 0;
  SAME(kvarts_column_parts(&no_group, NULL, 0, &count), KVARTS_INVALID);
  kvarts_stage *stage = NULL;
  SAME(kvarts_stage_begin(pool, column, 1, NULL, 0, 0, 1000, &stage), KVARTS_INVALID);
  SAME(kvarts_stage_begin(pool, column, 1, NULL, 1, 0, 1000, &stage), KVARTS_INVALID);
  kvarts_lander *lander = NULL;
  SAME(kvarts_lander_open("tpu:0", 0, 1000, &lander), KVARTS_INVALID);
  SAME(kvarts_pool_name(NULL), NULL);
  kvarts_client_free(NULL);
}

static int scheduler(const char *socket) {
  kvarts_client *client = connected(socket);
  kvarts_identity is = identity();
  kvarts_blocks *blocks = NULL;
  TRY(kvarts_blocks_of(client, &is, &blocks));
  kvarts_column columns[RANKS] = {{blocks, 0, -1}, {blocks, 0, 1}};
  uint64_t bytes = 0;
  size_t count = 0;
  TRY(kvarts_column_parts(&columns[1], &bytes, 1, &count));
  SAME(count, 1);
  SAME(bytes, PAGE);
  kvarts_pool *pool = NULL;
  TRY(kvarts_pool_take(client, (size_t)PAGE * BLOCKS * RANKS * 2, &pool));
  refusals(client, pool, &columns[0]);
  say("pool %s\n", kvarts_pool_name(pool));

  // As schedulers do it is asked first what is here: nothing.
  uint8_t chain[BLOCKS * 32];
  keys(chain);
  kvarts_stage *stage = NULL;
  uint32_t staged = 1;
  bool is_over = false;
  TRY(kvarts_stage_begin(pool, columns, RANKS, chain, BLOCKS, 0, MINUTE, &stage));
  TRY(kvarts_stage_wait(stage, MINUTE, &staged, &is_over));
  SAME(is_over, true);
  SAME(staged, 0);
  SAME(kvarts_stage_outcome(stage), KVARTS_MISS);
  kvarts_stage_free(stage);

  kvarts_draft *drafts[RANKS];
  kvarts_stretch stretches[STRETCHES];
  for (int rank = 0; rank < RANKS; rank++) {
    TRY(kvarts_draft_begin(pool, &columns[rank], chain, BLOCKS, 0, &drafts[rank]));
    TRY(kvarts_draft_stretches(drafts[rank], stretches, STRETCHES, &count));
    say_stretches("draft", rank, stretches, count);
  }
  SAME(strcmp(hear(), "saved\n"), 0);
  for (int rank = 0; rank < RANKS; rank++) {
    uint8_t outcomes[BLOCKS];
    memset(outcomes, 0xFF, sizeof outcomes);
    TRY(kvarts_draft_put(drafts[rank], NULL, 0, MINUTE, outcomes, BLOCKS));
    for (int block = 0; block < BLOCKS; block++) SAME(outcomes[block], KVARTS_STORED);
    SAME(kvarts_draft_put(drafts[rank], NULL, 0, MINUTE, NULL, 0), KVARTS_INVALID);
    kvarts_draft_free(drafts[rank]);
  }
  // Another one finds them there, and reads nothing.
  TRY(kvarts_stage_begin(pool, columns, RANKS, chain, BLOCKS, 0, MINUTE, &stage));
  TRY(kvarts_stage_wait(stage, MINUTE, &staged, &is_over));
  SAME(staged, BLOCKS);
  TRY(kvarts_stage_outcome(stage));
  for (int rank = 0; rank < RANKS; rank++) {
    TRY(kvarts_stage_stretches(stage, (size_t)rank, stretches, STRETCHES, &count));
    say_stretches("staged", rank, stretches, count);
  }
  SAME(kvarts_stage_stretches(stage, RANKS, stretches, STRETCHES, &count), KVARTS_INVALID);
  SAME(strcmp(hear(), "landed\n"), 0);
  kvarts_stage_free(stage);
  kvarts_blocks_free(blocks);
  kvarts_pool_free(pool);
  kvarts_client_free(client);
  return 0;
}

// The engine's memory: of this process, or of the stand-in's device, which the host cannot touch but by the stand-in.
struct memory {
  kvarts_span span;
  void *cuda;
};

static void *symbol(const struct memory *of, const char *name) {
  void *found = dlsym(of->cuda, name);
  if (!found) end(name);
  return found;
}

static struct memory allocate(const char *device) {
  struct memory made = {{0, (uint64_t)SLOTS * 2 * PAGE}, NULL};
  if (!strcmp(device, "emulated")) {
    made.span.address = (uint64_t)(uintptr_t)calloc(1, made.span.nbytes);
    return made;
  }
  made.cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!made.cuda) end("no driver");
  int (*retain)(void **, int), (*push)(void *), (*pop)(void **), (*take)(uint64_t *, size_t);
  *(void **)&retain = symbol(&made, "cuDevicePrimaryCtxRetain");
  *(void **)&push = symbol(&made, "cuCtxPushCurrent_v2");
  *(void **)&pop = symbol(&made, "cuCtxPopCurrent_v2");
  *(void **)&take = symbol(&made, "cuMemAlloc_v2");
  void *context = NULL;
  SAME(retain(&context, 0), 0);
  SAME(push(context), 0);
  SAME(take(&made.span.address, made.span.nbytes), 0);
  SAME(pop(&context), 0);
  return made;
}

static void copy(const struct memory *of, size_t at, uint8_t *bytes, size_t len, bool is_in) {
  if (!of->cuda) {
    uint8_t *there = (uint8_t *)(uintptr_t)of->span.address + at;
    memcpy(is_in ? there : bytes, is_in ? bytes : there, len);
    return;
  }
  int (*move)(uint64_t, uint8_t *, size_t);
  *(void **)&move = symbol(of, is_in ? "standin_poke" : "standin_peek");
  move(of->span.address + at, bytes, len);
}

static void describe(kvarts_lander *lander, const kvarts_column *column, const struct memory *memory, int shift, uint32_t *slots,
                     kvarts_pages **pages) {
  // Sixteen rows of a page lie apart in the engine's slots, as of a worker that has half of the heads.
  kvarts_part part = {.stride = 2 * PAGE,
                      .outer = {ROWS, ROW, 2 * ROW},
                      .inner = {1, 0, 0},
                      .row_bytes = ROW};
  for (int block = 0; block < BLOCKS; block++) slots[block] = (uint32_t)(block * 7 + shift) % SLOTS;
  TRY(kvarts_pages_describe(lander, column, &memory->span, 1, &part, 1, slots, BLOCKS, 1, pages));
}

static int worker(const char *socket, int rank, const char *device) {
  kvarts_client *client = connected(socket);
  kvarts_identity is = identity();
  is.tp_rank = (uint16_t)rank;
  kvarts_blocks *blocks = NULL;
  TRY(kvarts_blocks_of(client, &is, &blocks));
  kvarts_column column = {blocks, 0, -1};
  kvarts_memory *pool = NULL;
  char *name = hear();
  name[strcspn(name, "\n")] = 0;
  TRY(kvarts_attach(client, name, &pool));
  size_t nbytes = 0;
  SAME(kvarts_memory_address(pool, &nbytes) != NULL, true);
  SAME(nbytes >= (size_t)PAGE * BLOCKS * RANKS * 2, true);

  kvarts_lander *lander = NULL;
  TRY(kvarts_lander_open(device, 1 << 20, MINUTE, &lander));
  TRY(kvarts_lander_pin(lander, pool));
  uint64_t stream = 0;
  TRY(kvarts_lander_stream(lander, &stream));
  struct memory memory = allocate(device);
  kvarts_pages *pages = NULL;
  uint32_t slots[BLOCKS];
  describe(lander, &column, &memory, 3, slots, &pages);
  static uint8_t page[PAGE], found[2 * PAGE];
  for (int block = 0; block < BLOCKS; block++) {
    for (size_t at = 0; at < PAGE; at++) page[at] = byte(rank, block, at);
    for (int row = 0; row < ROWS; row++) copy(&memory, (size_t)slots[block] * 2 * PAGE + (size_t)row * 2 * ROW, page + row * ROW, ROW, true);
  }
  kvarts_stretch stretches[STRETCHES];
  kvarts_move move = {stretches, read_stretches(hear(), stretches), pages};
  kvarts_saving *saving = NULL;
  TRY(kvarts_save(lander, pool, &move, 1, NULL, &saving));
  bool is_done = false;
  SAME(kvarts_saving_done(saving, 0, &is_done), KVARTS_INVALID);
  TRY(kvarts_saving_layer(saving, 0, stream));
  TRY(kvarts_saving_finish(saving));
  TRY(kvarts_saving_done(saving, MINUTE, &is_done));
  SAME(is_done, true);
  SAME(kvarts_saving_layer(saving, 0, stream), KVARTS_INVALID);
  kvarts_saving_free(saving);
  kvarts_pages_free(pages);
  say("saved\n");

  // Into other slots.
  describe(lander, &column, &memory, 45, slots, &pages);
  move = (kvarts_move){stretches, read_stretches(hear(), stretches), pages};
  kvarts_landed *landed = NULL;
  TRY(kvarts_land(lander, pool, &move, 1, &stream, NULL, &landed));
  TRY(kvarts_landed_wait(landed, 0, stream));
  SAME(kvarts_landed_wait(landed, 1, stream), KVARTS_INVALID);
  TRY(kvarts_lander_synchronize(lander, stream));
  TRY(kvarts_landed_done(landed, MINUTE, &is_done));
  SAME(is_done, true);
  for (int block = 0; block < BLOCKS; block++) {
    copy(&memory, (size_t)slots[block] * 2 * PAGE, found, sizeof found, false);
    for (size_t at = 0; at < PAGE; at++) SAME(found[at / ROW * 2 * ROW + at % ROW], byte(rank, block, at));
  }
  kvarts_landed_free(landed);
  kvarts_pages_free(pages);
  kvarts_lander_free(lander);
  kvarts_memory_free(pool);
  kvarts_blocks_free(blocks);
  kvarts_client_free(client);
  say("landed\n");
  return 0;
}

int main(int count, char **words) {
  if (count == 3 && !strcmp(words[1], "scheduler")) return scheduler(words[2]);
  if (count == 5 && !strcmp(words[1], "worker")) return worker(words[2], atoi(words[3]), words[4]);
  fprintf(stderr, "scheduler SOCKET | worker SOCKET RANK DEVICE\n");
  return 2;
}
