// What kvarts.h says of transfers, in uses that are wrong and in those at its edges: each answered as the header says. Runs over a server's socket and
// says nothing; a line of its own is where it ends with an error.
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kvarts.h"

enum { PAGE = 8192, PAGES = 8, MINUTE = 60 * 1000 };

#define IS(is, expected) \
  do { \
    long long left = (long long)(is), right = (long long)(expected); \
    if (left != right) { \
      fprintf(stderr, "line %d: %s is %lld and not %lld: %s\n", __LINE__, #is, left, right, kvarts_why()); \
      exit(1); \
    } \
  } while (0)
#define SAYS(words) IS(strstr(kvarts_why(), words) != NULL, true)

static kvarts_client *client;
static kvarts_blocks *blocks;

static kvarts_queue *opened(uint32_t depth) {
  kvarts_column column = {blocks, 0, -1};
  kvarts_queue *queue = NULL;
  IS(kvarts_queue_open(client, &column, depth, 0, &queue), KVARTS_OK);
  return queue;
}

static void named(const char *name, uint8_t *key) { IS(kvarts_key(name, strlen(name), key), KVARTS_OK); }

static bool rings(const kvarts_queue *queue, int wait) {
  struct pollfd bell = {.fd = kvarts_queue_eventfd(queue), .events = POLLIN};
  return poll(&bell, 1, wait) == 1;
}

static kvarts_completion answer(const kvarts_queue *queue, uint8_t *results, size_t room) {
  kvarts_completion done;
  bool is_there = false;
  IS(rings(queue, MINUTE), true);
  IS(kvarts_queue_poll(queue, &done, results, room, &is_there), KVARTS_OK);
  IS(is_there, true);
  return done;
}

static void names(void) {
  uint8_t key[32], other[32], chain[4 * 32], rest[32];
  static char letters[5000];
  IS(kvarts_key(NULL, 3, key), KVARTS_INVALID);
  IS(kvarts_key("", 0, key), KVARTS_INVALID);
  IS(kvarts_key(letters, sizeof letters, key), KVARTS_INVALID);
  IS(kvarts_key("name", 4, NULL), KVARTS_INVALID);
  memset(other, 9, sizeof other);
  IS(kvarts_key(other, 32, key), KVARTS_OK);
  IS(memcmp(key, other, 32), 0);
  named("name", key);
  named("named", other);
  IS(memcmp(key, other, 32) != 0, true);
  uint32_t tokens[] = {1, 2, 3, 4, 5, 6, 7};
  size_t count = 0;
  IS(kvarts_chain(tokens, 7, 0, NULL, chain, 4, &count), KVARTS_INVALID);
  IS(kvarts_chain(tokens, 7, 2, NULL, chain, 4, NULL), KVARTS_INVALID);
  IS(kvarts_chain(tokens, 7, 2, NULL, chain, 4, &count), KVARTS_OK);
  IS(count, 3);
  // The same block behind its parent, and without it.
  IS(kvarts_chain(tokens + 4, 2, 2, chain + 32, rest, 1, &count), KVARTS_OK);
  IS(memcmp(rest, chain + 64, 32), 0);
  IS(kvarts_chain(tokens + 4, 2, 2, NULL, rest, 1, &count), KVARTS_OK);
  IS(memcmp(rest, chain + 64, 32) != 0, true);
}

static void memories(kvarts_memory **page) {
  kvarts_memory *none = NULL;
  static uint8_t own[PAGES * PAGE + 64];
  IS(kvarts_memory_register(NULL, PAGE, &none), KVARTS_INVALID);
  IS(kvarts_memory_register(own, 0, &none), KVARTS_INVALID);
  IS(kvarts_memory_register(own, PAGE, NULL), KVARTS_INVALID);
  IS(kvarts_memory_take(NULL, PAGE, &none), KVARTS_INVALID);
  IS(kvarts_memory_adopt(client, -1, PAGE, &none), KVARTS_INVALID);
  int ends[2];
  IS(pipe(ends), 0);
  IS(kvarts_memory_adopt(client, ends[0], PAGE, &none) != KVARTS_OK, true);
  close(ends[0]);
  IS(kvarts_memory_adopt(client, ends[0], PAGE, &none) != KVARTS_OK, true);
  close(ends[1]);
  IS(none == NULL, true);
  IS(kvarts_memory_address(NULL, NULL) == NULL, true);
  // At no boundary at all.
  size_t nbytes = 0;
  IS(kvarts_memory_register(own + 33, PAGES * PAGE, page), KVARTS_OK);
  IS(kvarts_memory_address(*page, &nbytes) == own + 33, true);
  IS(nbytes, PAGES * PAGE);
  // What another memory has some bytes of is refused, and what lies beside it is not.
  size_t overlaps[][2] = {{0, 34}, {33, PAGES * PAGE}, {33 + PAGE, PAGE}, {32 + PAGES * PAGE, 2}, {0, sizeof own}};
  for (size_t n = 0; n < sizeof overlaps / sizeof *overlaps; n++) {
    IS(kvarts_memory_register(own + overlaps[n][0], overlaps[n][1], &none), KVARTS_INVALID);
    SAYS("already registered");
  }
  IS(none == NULL, true);
  size_t beside[][2] = {{0, 33}, {33 + PAGES * PAGE, 31}};
  for (size_t n = 0; n < 2; n++) {
    // Freed, it is no other's any more.
    for (int again = 0; again < 2; again++) {
      IS(kvarts_memory_register(own + beside[n][0], beside[n][1], &none), KVARTS_OK);
      kvarts_memory_free(none);
    }
    none = NULL;
  }
}

static void refused(kvarts_queue *queue, kvarts_memory *memory) {
  uint8_t key[2 * 32];
  named("one", key);
  named("two", key + 32);
  uint64_t transfer = 77;
  kvarts_queue *none = NULL;
  kvarts_column column = {blocks, 9, -1};
  IS(kvarts_queue_open(client, &column, 0, 0, &none), KVARTS_INVALID);
  IS(kvarts_queue_open(client, NULL, 0, 0, &none), KVARTS_INVALID);
  IS(none == NULL, true);
  kvarts_descriptor at[2] = {{memory, 0, PAGE}, {memory, PAGE - 1, PAGE}};
  IS(kvarts_get(queue, key, at, 2, MINUTE, &transfer), KVARTS_INVALID);  // both have one byte
  at[1].at = PAGE;
  IS(kvarts_get(NULL, key, at, 2, MINUTE, &transfer), KVARTS_INVALID);
  IS(kvarts_get(queue, NULL, at, 2, MINUTE, &transfer), KVARTS_INVALID);
  IS(kvarts_get(queue, key, NULL, 2, MINUTE, &transfer), KVARTS_INVALID);
  SAYS("descriptors is null");
  IS(kvarts_get(queue, key, at, 2, MINUTE, NULL), KVARTS_INVALID);
  IS(kvarts_get(queue, key, at, 0, MINUTE, &transfer), KVARTS_INVALID);
  IS(kvarts_exists(queue, key, 0, MINUTE, &transfer), KVARTS_INVALID);
  static uint8_t many[(KVARTS_TRANSFER_KEYS + 1) * 32];
  IS(kvarts_exists(queue, many, KVARTS_TRANSFER_KEYS + 1, MINUTE, &transfer), KVARTS_INVALID);
  at[1].nbytes = PAGE - 1;
  IS(kvarts_put(queue, key, at, 2, MINUTE, &transfer), KVARTS_INVALID);
  SAYS("8192");
  at[1] = (kvarts_descriptor){memory, (PAGES - 1) * PAGE + 1, PAGE};
  IS(kvarts_put(queue, key, at, 2, MINUTE, &transfer), KVARTS_INVALID);
  at[1] = (kvarts_descriptor){memory, UINT64_MAX, 2};
  IS(kvarts_put(queue, key, at, 2, MINUTE, &transfer), KVARTS_INVALID);
  at[1] = (kvarts_descriptor){NULL, 0, PAGE};
  IS(kvarts_put(queue, key, at, 2, MINUTE, &transfer), KVARTS_INVALID);
  IS(transfer, 77);
  // Nothing of all that was begun, and a call with no place for an answer takes none.
  kvarts_completion done;
  bool is_there = true;
  IS(kvarts_queue_poll(queue, &done, NULL, 0, &is_there), KVARTS_OK);
  IS(is_there, false);
  IS(rings(queue, 0), false);
  IS(kvarts_exists(queue, key, 1, MINUTE, &transfer), KVARTS_OK);
  IS(rings(queue, MINUTE), true);
  IS(kvarts_queue_poll(queue, NULL, NULL, 0, &is_there), KVARTS_INVALID);
  IS(kvarts_queue_poll(queue, &done, NULL, 1, &is_there), KVARTS_INVALID);
  IS(kvarts_queue_poll(queue, &done, NULL, 0, NULL), KVARTS_INVALID);
  IS(answer(queue, NULL, 0).transfer, transfer);
  IS(rings(queue, 0), false);
  IS(kvarts_queue_eventfd(NULL), -1);
  IS(kvarts_cancel(queue, transfer), KVARTS_OK);
  IS(kvarts_cancel(queue, 123456), KVARTS_OK);
  IS(kvarts_cancel(NULL, transfer), KVARTS_INVALID);
}

static void answered(kvarts_queue *queue, kvarts_memory *memory) {
  uint8_t key[3 * 32], results[3];
  uint8_t *bytes = kvarts_memory_address(memory, NULL);
  uint64_t transfer = 0;
  named("one", key);
  named("absent", key + 32);
  memcpy(key + 64, key, 32);
  memset(bytes, 1, PAGE);
  memset(bytes + PAGE, 2, PAGE);
  kvarts_descriptor at[3] = {{memory, 0, PAGE}, {memory, PAGE, PAGE}, {memory, 2 * PAGE, PAGE}};
  IS(kvarts_put(queue, key, at, 1, MINUTE, &transfer), KVARTS_OK);
  kvarts_completion done = answer(queue, results, 3);
  IS(done.kind, KVARTS_PUT);
  IS(done.count, 1);
  IS(done.written, 1);
  IS(results[0], KVARTS_OK);
  // The first put wins: the second one goes well, and changes nothing.
  IS(kvarts_put(queue, key, at + 1, 1, MINUTE, &transfer), KVARTS_OK);
  done = answer(queue, results, 1);
  IS(done.good, 1);
  IS(done.written, 0);
  // A block that is there, one that is not, and a key that stands again.
  memset(bytes, 0, 3 * PAGE);
  IS(kvarts_get(queue, key, at, 3, MINUTE, &transfer), KVARTS_OK);
  memset(results, 99, sizeof results);
  done = answer(queue, results, 2);
  SAYS("not");
  IS(done.transfer, transfer);
  IS(done.kind, KVARTS_GET);
  IS(done.count, 3);
  IS(done.good, 1);
  IS(done.prefix, 1);
  IS(done.first, KVARTS_MISS);
  IS(results[0], KVARTS_OK);
  IS(results[1], KVARTS_MISS);
  IS(results[2], 99);
  for (size_t byte = 0; byte < PAGE; byte++) IS(bytes[byte], 1);
  for (size_t byte = 2 * PAGE; byte < 3 * PAGE; byte++) IS(bytes[byte], 0);
  IS(kvarts_delete(queue, key, 2, MINUTE, &transfer), KVARTS_OK);
  done = answer(queue, results, 3);
  IS(done.kind, KVARTS_DELETE);
  IS(results[0], KVARTS_OK);
  IS(results[1], KVARTS_MISS);
  IS(kvarts_exists(queue, key, 1, MINUTE, &transfer), KVARTS_OK);
  done = answer(queue, results, 3);
  IS(done.kind, KVARTS_EXISTS);
  IS(done.first, KVARTS_MISS);
}

// A queue that is full takes no more until it was polled; each of two that wait is handed out by itself, the first one first.
static void full(void) {
  kvarts_queue *queue = opened(2);
  uint8_t key[32];
  uint64_t one = 0, two = 0, none = 0;
  named("one", key);
  IS(kvarts_exists(queue, key, 1, MINUTE, &one), KVARTS_OK);
  IS(kvarts_exists(queue, key, 1, MINUTE, &two), KVARTS_OK);
  IS(kvarts_exists(queue, key, 1, MINUTE, &none), KVARTS_RETRY);
  IS(none, 0);
  uint64_t first = answer(queue, NULL, 0).transfer, second = answer(queue, NULL, 0).transfer;
  IS(first + second, one + two);
  IS(first != second, true);
  IS(kvarts_exists(queue, key, 1, MINUTE, &none), KVARTS_OK);
  kvarts_queue_free(queue);
}

// Into a file in memory that the engine has mapped itself.
static void adopted(kvarts_queue *queue, kvarts_memory *memory) {
  int file = memfd_create("engine", MFD_ALLOW_SEALING);
  IS(ftruncate(file, 4 * PAGE), 0);
  uint8_t *mapped = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  IS(mapped != MAP_FAILED, true);
  kvarts_memory *known = NULL;
  IS(kvarts_memory_adopt(client, file, 4 * PAGE, &known), KVARTS_OK);
  close(file);
  uint8_t key[32], *bytes = kvarts_memory_address(memory, NULL);
  uint64_t transfer = 0;
  named("adopted", key);
  memset(bytes, 55, PAGE);
  kvarts_descriptor from = {memory, 0, PAGE}, into = {known, PAGE, PAGE};
  IS(kvarts_put(queue, key, &from, 1, MINUTE, &transfer), KVARTS_OK);
  IS(answer(queue, NULL, 0).good, 1);
  IS(kvarts_get(queue, key, &into, 1, MINUTE, &transfer), KVARTS_OK);
  IS(answer(queue, NULL, 0).good, 1);
  for (size_t byte = 0; byte < PAGE; byte++) IS(mapped[PAGE + byte], 55);
  kvarts_memory_free(known);
  munmap(mapped, 4 * PAGE);
}

static void estimated(void) {
  uint8_t key[32];
  kvarts_cost cost = {0};
  named("adopted", key);
  kvarts_sample samples[] = {{0, 1000, 100.0}, {0, 10000, 1500.0}};
  IS(kvarts_estimate(client, blocks, key, 1, 64, NULL, 0, &cost), KVARTS_INVALID);
  samples[1].ms = -1;
  IS(kvarts_estimate(client, blocks, key, 1, 64, samples, 2, &cost), KVARTS_INVALID);
  samples[1].ms = 1500;
  IS(kvarts_estimate(client, blocks, key, 1, 64, samples, 2, NULL), KVARTS_INVALID);
  IS(kvarts_estimate(client, NULL, key, 1, 64, samples, 2, &cost), KVARTS_INVALID);
  IS(kvarts_estimate(client, blocks, key, 1, 64, samples, 2, &cost), KVARTS_OK);
  IS(cost.here, 1);
  IS(cost.blocks <= cost.here, true);
  IS(cost.disk_bytes, cost.blocks * PAGE);
  IS(cost.recompute_all_ms > 0 && cost.disk_bytes_per_second > 0, true);
  IS(cost.first_token_ms <= cost.recompute_all_ms, true);
  named("absent", key);
  IS(kvarts_estimate(client, blocks, key, 1, 64, samples, 2, &cost), KVARTS_OK);
  IS(cost.here, 0);
  IS(cost.disk_bytes, 0);
}

int main(int count, char **words) {
  if (count != 2) return 2;
  char endpoint[512];
  snprintf(endpoint, sizeof endpoint, "unix:%s", words[1]);
  IS(kvarts_connect(endpoint, NULL, &client), KVARTS_OK);
  IS(strlen(kvarts_version()) > 4, true);
  kvarts_identity identity = {.model = "refusals", .revision = "1", .dtype = "bf16", .engine = "refusals.c", .layout = "pages",
                              .layout_version = "1", .page_bytes = PAGE, .block_tokens = 16, .tp_size = 1};
  IS(kvarts_blocks_of(client, &identity, &blocks), KVARTS_OK);
  kvarts_queue *queue = opened(0);
  kvarts_memory *memory = NULL;
  names();
  memories(&memory);
  refused(queue, memory);
  answered(queue, memory);
  full();
  adopted(queue, memory);
  estimated();
  // Freed in an order of its own: what goes on needs none of it.
  kvarts_client_free(client);
  kvarts_blocks_free(blocks);
  uint8_t key[32];
  uint64_t transfer = 0;
  named("adopted", key);
  IS(kvarts_exists(queue, key, 1, MINUTE, &transfer), KVARTS_OK);
  IS(answer(queue, NULL, 0).good, 1);
  kvarts_descriptor into = {memory, 0, PAGE};
  IS(kvarts_get(queue, key, &into, 1, MINUTE, &transfer), KVARTS_OK);
  kvarts_memory_free(memory);
  IS(answer(queue, NULL, 0).good, 1);
  kvarts_queue_free(queue);
  kvarts_queue_free(NULL);
  return 0;
}
