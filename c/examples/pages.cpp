// A cache in C++ with libkvarts: handles that free themselves, and failures as exceptions of this program. The library throws no exceptions and never
// calls functions of the program, so no exception passes through the library.
//
//   c++ -std=c++17 pages.cpp $(pkg-config --cflags --libs kvarts) -o pages && ./pages SOCKET
#include <poll.h>

#include <array>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <kvarts.h>

namespace {

struct Failed : std::runtime_error {
  kvarts_status status;
  explicit Failed(kvarts_status with) : std::runtime_error(kvarts_why()), status(with) {}
};

void check(kvarts_status status) {
  if (status != KVARTS_OK) throw Failed(status);
}

template <auto FREE>
struct Freed {
  template <class Handle>
  void operator()(Handle *handle) const noexcept {
    FREE(handle);
  }
};
using Client = std::unique_ptr<kvarts_client, Freed<kvarts_client_free>>;
using Blocks = std::unique_ptr<kvarts_blocks, Freed<kvarts_blocks_free>>;
using Memory = std::unique_ptr<kvarts_memory, Freed<kvarts_memory_free>>;

// Makes a handle with a call whose last parameter receives the handle.
template <class Owner, class Call, class... Given>
Owner made(Call call, Given... given) {
  typename Owner::pointer handle = nullptr;
  check(call(given..., &handle));
  return Owner(handle);
}

using Key = std::array<uint8_t, 32>;

Key named(const std::string &name) {
  Key key{};
  check(kvarts_key(name.data(), name.size(), key.data()));
  return key;
}

// Transfers of one column. The destructor cancels the transfers in progress.
class Queue {
 public:
  Queue(const Client &client, const kvarts_column &column)
      : queue_(made<Handle>(kvarts_queue_open, client.get(), &column, 0U, uint64_t{0})) {}

  uint64_t put(const std::vector<Key> &keys, const std::vector<kvarts_descriptor> &from) {
    uint64_t transfer = 0;
    check(kvarts_put(queue_.get(), bytes(keys), from.data(), keys.size(), MINUTE, &transfer));
    return transfer;
  }

  uint64_t get(const std::vector<Key> &keys, const std::vector<kvarts_descriptor> &into) {
    uint64_t transfer = 0;
    check(kvarts_get(queue_.get(), bytes(keys), into.data(), keys.size(), MINUTE, &transfer));
    return transfer;
  }

  uint64_t erase(const std::vector<Key> &keys) {
    uint64_t transfer = 0;
    check(kvarts_delete(queue_.get(), bytes(keys), keys.size(), MINUTE, &transfer));
    return transfer;
  }

  // The next completion, with a status for each of at most `room` keys.
  std::pair<kvarts_completion, std::vector<uint8_t>> next(size_t room) {
    kvarts_completion done{};
    std::vector<uint8_t> results(room);
    for (bool is_there = false; !is_there;) {
      pollfd bell{kvarts_queue_eventfd(queue_.get()), POLLIN, 0};
      if (poll(&bell, 1, MINUTE) != 1) throw std::runtime_error("no completion within a minute");
      check(kvarts_queue_poll(queue_.get(), &done, results.data(), room, &is_there));
    }
    if (done.count < room) results.resize(done.count);
    return {done, results};
  }

 private:
  static constexpr int MINUTE = 60 * 1000;
  using Handle = std::unique_ptr<kvarts_queue, Freed<kvarts_queue_free>>;
  static const uint8_t *bytes(const std::vector<Key> &keys) { return keys.front().data(); }
  Handle queue_;
};

void run(const std::string &socket) {
  constexpr size_t COUNT = 4, PAGE = 16384;
  const auto client = made<Client>(kvarts_connect, ("unix:" + socket).c_str(), nullptr);
  kvarts_identity identity{};
  identity.model = "example";
  identity.revision = "1";
  identity.dtype = "bfloat16";
  identity.engine = "pages.cpp";
  identity.layout = "pages";
  identity.layout_version = "1";
  identity.page_bytes = PAGE;
  identity.block_tokens = 16;
  identity.tp_size = 1;
  const auto blocks = made<Blocks>(kvarts_blocks_of, client.get(), &identity);
  Queue queue(client, {blocks.get(), 0, -1});

  const auto memory = made<Memory>(kvarts_memory_take, client.get(), 2 * COUNT * PAGE);
  auto *bytes = static_cast<uint8_t *>(kvarts_memory_address(memory.get(), nullptr));
  for (size_t at = 0; at < COUNT * PAGE; at++) bytes[at] = static_cast<uint8_t>(at / PAGE * 17 + at * 5 + at / 241);
  std::vector<Key> keys;
  std::vector<kvarts_descriptor> from, into;
  for (size_t at = 0; at < COUNT; at++) {
    keys.push_back(named("page " + std::to_string(at)));
    from.push_back({memory.get(), at * PAGE, PAGE});
    into.push_back({memory.get(), (COUNT + at) * PAGE, PAGE});
  }

  // Two transfers run at the same time; the number in a completion identifies its transfer.
  const std::vector<Key> first(keys.begin(), keys.begin() + 2), rest(keys.begin() + 2, keys.end());
  const uint64_t one = queue.put(first, {from.begin(), from.begin() + 2});
  const uint64_t other = queue.put(rest, {from.begin() + 2, from.end()});
  uint32_t written = 0;
  for (int left = 2; left > 0; left--) {
    const auto done = queue.next(0).first;
    if (done.transfer != one && done.transfer != other) throw std::logic_error("a transfer that was not posted");
    written += done.written;
  }
  std::cout << "put: " << written << " pages written\n";

  keys[1] = named("a page that was never put");
  queue.get(keys, into);
  const auto [done, results] = queue.next(COUNT);
  std::cout << "get: " << done.good << " of " << done.count << " pages; the error of the second page: " << kvarts_why() << "\n";
  for (size_t at = 0; at < COUNT; at++) {
    const bool is_same = std::memcmp(bytes + into[at].at, bytes + from[at].at, PAGE) == 0;
    if ((results[at] == KVARTS_OK) != (at != 1) || (at != 1 && !is_same)) throw std::logic_error("a page has other bytes or another status");
  }
  queue.erase(keys);
  std::cout << "delete: " << queue.next(0).first.good << " pages\n";

  // A call with a descriptor that is too short fails at once, with a reason.
  try {
    into[0].nbytes--;
    queue.get({keys[0]}, {into[0]});
    throw std::logic_error("a descriptor that is too short was accepted");
  } catch (const Failed &failed) {
    std::cout << "refused: status " << failed.status << ", " << failed.what() << "\n";
  }
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 2) {
    std::cerr << "usage: pages SOCKET\n";
    return 2;
  }
  try {
    run(argv[1]);
  } catch (const std::exception &error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
