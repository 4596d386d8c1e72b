/* Pages of a cache in C, from beginning to end: put from memory of the program, look up, estimate, get into the memory of a pool, delete. The
 * program posts transfers, and polls their completions when an eventfd is readable.
 *
 *   cc pages.c $(pkg-config --cflags --libs kvarts) -o pages && ./pages SOCKET
 */
#define _POSIX_C_SOURCE 200809L
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvarts.h>

enum { BLOCKS = 8, PAGE = 65536, TOKENS = 16, SECOND = 1000, MINUTE = 60 * SECOND };

static void check(kvarts_status status, const char *what) {
  if (status == KVARTS_OK) return;
  fprintf(stderr, "%s: status %d: %s\n", what, (int)status, kvarts_why());
  exit(1);
}

/* Waits for the completion of one transfer. An engine would continue its work instead, and poll between two of its steps. */
static kvarts_completion answer(const kvarts_queue *queue, uint64_t transfer) {
  kvarts_completion done = {0};
  bool is_there = false;
  while (!is_there) {
    struct pollfd bell = {.fd = kvarts_queue_eventfd(queue), .events = POLLIN};
    if (poll(&bell, 1, MINUTE) != 1) {
      fprintf(stderr, "no completion within a minute\n");
      exit(1);
    }
    check(kvarts_queue_poll(queue, &done, NULL, 0, &is_there), "kvarts_queue_poll");
  }
  if (done.transfer != transfer) {
    fprintf(stderr, "received the completion of another transfer\n");
    exit(1);
  }
  return done;
}

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: pages SOCKET\n");
    return 2;
  }
  char endpoint[512];
  snprintf(endpoint, sizeof endpoint, "unix:%s", argv[1]);
  kvarts_client *client = NULL;
  check(kvarts_connect(endpoint, NULL, &client), "kvarts_connect");

  /* The fields that decide the bytes of a block: caches that differ in one of them never see each other's blocks. */
  kvarts_identity identity = {.model = "example", .revision = "1", .dtype = "bfloat16", .engine = "pages.c", .layout = "pages",
                              .layout_version = "1", .page_bytes = PAGE, .block_tokens = TOKENS, .tp_size = 1};
  kvarts_blocks *blocks = NULL;
  check(kvarts_blocks_of(client, &identity, &blocks), "kvarts_blocks_of");
  kvarts_column column = {.blocks = blocks, .group = 0, .rank = -1};
  kvarts_queue *queue = NULL;
  check(kvarts_queue_open(client, &column, 0, 0, &queue), "kvarts_queue_open");

  /* The keys of the blocks, from the tokens of a prompt. */
  uint32_t tokens[BLOCKS * TOKENS];
  for (uint32_t at = 0; at < BLOCKS * TOKENS; at++) tokens[at] = at * 7;
  uint8_t keys[BLOCKS * 32];
  size_t count = 0;
  check(kvarts_chain(tokens, BLOCKS * TOKENS, TOKENS, NULL, keys, BLOCKS, &count), "kvarts_chain");

  /* Memory of the program, and memory that the server's disks write into. */
  uint8_t *own = malloc((size_t)BLOCKS * PAGE);
  if (!own) return 1;
  for (size_t at = 0; at < (size_t)BLOCKS * PAGE; at++) own[at] = (uint8_t)(at / PAGE * 31 + at * 13 + at / 251);
  kvarts_memory *source = NULL, *target = NULL;
  check(kvarts_memory_register(own, (size_t)BLOCKS * PAGE, &source), "kvarts_memory_register");
  kvarts_pool *pool = NULL;
  check(kvarts_pool_take(client, (size_t)BLOCKS * PAGE, &pool), "kvarts_pool_take");
  check(kvarts_pool_memory(pool, &target), "kvarts_pool_memory");
  kvarts_descriptor from[BLOCKS], into[BLOCKS];
  for (size_t block = 0; block < BLOCKS; block++) {
    from[block] = (kvarts_descriptor){source, block * PAGE, PAGE};
    into[block] = (kvarts_descriptor){target, (BLOCKS - 1 - block) * PAGE, PAGE};
  }

  uint64_t transfer = 0;
  check(kvarts_put(queue, keys, from, BLOCKS, MINUTE, &transfer), "kvarts_put");
  printf("put: %u blocks written\n", answer(queue, transfer).written);
  check(kvarts_exists(queue, keys, BLOCKS, MINUTE, &transfer), "kvarts_exists");
  printf("exists: the first %u blocks are stored\n", answer(queue, transfer).prefix);

  /* Estimates whether loading is faster than computing, from prefills that this engine measured and from the server's reads. */
  kvarts_sample measured[] = {{.computed = BLOCKS * TOKENS, .ms = 2000}, {.computed = 8 * BLOCKS * TOKENS, .ms = 20000}};
  kvarts_cost cost;
  check(kvarts_estimate(client, blocks, keys, BLOCKS, (BLOCKS + 1) * TOKENS, measured, 2, &cost), "kvarts_estimate");
  printf("estimate: %u of %u blocks are worth loading\n", cost.blocks, cost.here);
  check(kvarts_get(queue, keys, into, BLOCKS, MINUTE, &transfer), "kvarts_get");
  printf("get: %u blocks are complete and verified\n", answer(queue, transfer).good);
  const uint8_t *there = kvarts_memory_address(target, NULL);
  for (size_t block = 0; block < BLOCKS; block++)
    if (memcmp(there + into[block].at, own + from[block].at, PAGE)) {
      fprintf(stderr, "block %zu has other bytes\n", block);
      return 1;
    }
  check(kvarts_delete(queue, keys, BLOCKS, MINUTE, &transfer), "kvarts_delete");
  printf("delete: %u blocks were stored and are deleted\n", answer(queue, transfer).good);
  check(kvarts_exists(queue, keys, BLOCKS, MINUTE, &transfer), "kvarts_exists");
  kvarts_completion done = answer(queue, transfer);
  printf("exists: %u blocks are stored; the first key: status %d, %s\n", done.good, (int)done.first, kvarts_why());

  kvarts_queue_free(queue);
  kvarts_memory_free(source);
  kvarts_memory_free(target);
  kvarts_pool_free(pool);
  kvarts_blocks_free(blocks);
  kvarts_client_free(client);
  free(own);
  return 0;
}
