"""The measurements. Each contestant does the same in turns; a turn goes to another one first in each round."""

import concurrent.futures
import contextlib
import os
import random
import time

from driver import MIB, drop_caches, machine_seconds, on_disk, sync

#: Where the pages of each part begin, so that no part finds another one's.
BESIDE, KILLED, FLIPPED = 1 << 20, 1 << 25, 1 << 26
#: Places for pages in the second part.
SLOTS = 64


@contextlib.contextmanager
def ready(stores, count, note):
    """A worker for each store; they start one after the other and stay."""
    workers = {}
    try:
        for store in stores:
            try:
                workers[store] = store.worker(count)
            except (OSError, RuntimeError) as error:
                note(store, f"SKIPPED: {error}")
        for store, worker in list(workers.items()):
            try:
                worker.answer()
            except RuntimeError as error:
                note(store, f"SKIPPED: {error}")
                workers.pop(store).kill()
        yield workers
    finally:
        for worker in workers.values():
            worker.kill()


def timed(store, worker, command, place):
    """One command, with what it cost."""
    before, machine = store.cost(worker), machine_seconds()
    answer = worker.ask(**command)
    after = store.cost(worker)
    flushed = sync(place)
    return {
        "seconds": answer["seconds"],
        "good": answer["good"],
        "cpu": after[0] - before[0],
        "device_read": after[1] - before[1],
        "flush_seconds": flushed,
        "machine_cpu": machine_seconds() - machine,
    }


def speed(stores, results, rounds, count, place, note):
    """Puts of new pages and cold gets of them."""
    with ready(stores, count, note) as workers:
        for turn in range(rounds):
            order = list(workers)
            random.Random(turn).shuffle(order)
            for store in order:
                worker, found = workers[store], results[store.entry.name]
                first = turn * count
                worker.ask("fill", first=first, count=count)
                sync(place)
                put = timed(store, worker, {"do": "transfer", "kind": "put", "first": first, "count": count}, place)
                worker.ask("clear")
                found["caches_dropped"] = drop_caches(store.place)
                get = timed(store, worker, {"do": "transfer", "kind": "get", "first": first, "count": count}, place)
                get.update(worker.ask("check", first=first, count=count))
                found.setdefault("puts", []).append(put)
                found.setdefault("gets", []).append(get)
                note(store, f"round {turn}: put {count / put['seconds']:.0f} MiB/s, get {count / get['seconds']:.0f} MiB/s, wrong {len(get['wrong'])}")
        for store in workers:
            results[store.entry.name]["disk_ratio"] = on_disk(store.place) / (rounds * count * MIB)


def beside(stores, results, rounds, count, rate, seconds, place, note):
    """Gets of one page at a time, alone and while another process puts `rate` pages a second in batches of 16."""
    writing = [store for store in stores if store.entry.shared]
    with ready(stores, SLOTS, note) as readers, ready(writing, SLOTS, note) as writers:
        for store, reader in readers.items():  # what is read afterwards
            for first in range(BESIDE, BESIDE + count, SLOTS):
                reader.ask("fill", first=first, count=SLOTS)
                reader.ask("transfer", kind="put", first=first, count=SLOTS)
        for turn in range(rounds):
            order = list(readers)
            random.Random(turn).shuffle(order)
            for store in order:
                found, reader = results[store.entry.name], readers[store]
                writer = writers.get(store, reader)
                writer.ask("fill", first=0, count=SLOTS)
                sync(place)
                drop_caches(store.place)
                alone = reader.ask("singles", first=BESIDE, count=count // 3, seed=turn, seconds=seconds / 2)
                drop_caches(store.place)
                writer.ask("pace", first=(2 + turn) * BESIDE, rate=rate, batch=16)
                time.sleep(0.5)
                busy = reader.ask("singles", first=BESIDE + count // 3, count=count * 2 // 3, seed=turn, seconds=seconds)
                puts = writer.ask("unpace")
                for name, one in (("alone", alone), ("busy", busy)):
                    found.setdefault(f"{name}_ms", []).append(one["ms"])
                    found[f"{name}_bad"] = found.get(f"{name}_bad", 0) + one["failed"] + one["wrong"]
                found.setdefault("beside_mib", []).append(puts["mib"])
                note(store, f"round {turn}: {len(busy['ms'])} gets beside {puts['mib']:.0f} MiB/s of puts")


def killed(store, found, count):
    """SIGKILL to all of its processes in the middle of puts: what had been acknowledged, and whether bytes are right."""
    worker = store.worker(count)
    worker.answer()
    worker.ask("fill", first=KILLED, count=count)
    worker.send("transfer", kind="put", first=KILLED, count=count, tell=True)
    stored = []
    while len(stored) < count // 2:
        stored += worker.answer().get("stored", [])
    store.crash(worker)
    worker = store.worker(count)
    worker.answer()
    got = worker.ask("transfer", kind="get", first=KILLED, count=count)
    checked = worker.ask("check", first=KILLED, count=count)
    # One key of a batch that is not there may fail all of it: those that were acknowledged are asked for alone, too.
    lost = 0
    for n in stored:
        worker.ask("transfer", kind="get", first=n, count=1)
        one = worker.ask("check", first=n, count=1)
        lost += 1 - one["good"]
    found["killed"] = {"acknowledged": len(stored), "lost": lost, "wrong": len(checked["wrong"]), "good": got["good"]}
    worker.end()


def flipped(store, found, count=8):
    """One bit of one page on disk, while no process runs; the page before and the page after are asked for, too."""
    worker = store.worker(count)
    worker.answer()
    worker.ask("fill", first=FLIPPED, count=count)
    worker.ask("transfer", kind="put", first=FLIPPED, count=count)
    worker.end()
    if store.server is not None:
        store.server.stop()
    sync(os.path.dirname(store.place))
    there = store.flip(FLIPPED + 3)
    drop_caches(store.place)
    if store.server is not None:
        store.server.start()
    if not there:
        found["flipped"] = "the page was not found on disk"
        return
    worker = store.worker(count)
    worker.answer()
    told = {}
    for n in range(count):
        worker.ask("clear")
        worker.ask("transfer", kind="get", first=FLIPPED + n, count=1)
        one = worker.ask("check", first=FLIPPED + n, count=1)
        told[n] = "wrong bytes" if one["wrong"] else "right" if one["good"] else "refused"
    others = sum(told[n] == "right" for n in told if n != 3)
    found["flipped"] = f"{told[3]}; of {count - 1} others {others} right"
    worker.end()


def faults(stores, results, count, note):
    """Nothing of this is timed: several contestants at a time, because most of it is their start."""

    def one(store):
        found = results[store.entry.name]
        for name, part in (("killed", lambda: killed(store, found, count)), ("flipped", lambda: flipped(store, found))):
            try:
                part()
            except Exception as error:  # a contestant that does not start again is a result, too
                found[name] = f"failed: {str(error)[:300]}"
            note(store, f"{name}: {found[name]}")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(one, stores))
