"""One contestant in a process of its own: takes commands, one JSON document a line, and answers each with one or more.
`worker.py MODULE CLASS PLACE PAGES SETTINGS`. Run by scripts/bench-engines."""

import importlib
import json
import os
import random
import sys
import threading
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the engines print goes to the log
module, name, place, count, settings = sys.argv[1:6]


def answer(**document):
    print(json.dumps(document), file=answers, flush=True)


class Work:
    def __init__(self, contestant):
        self.one = contestant
        self.results = {}  # page -> whether its last batch went well
        self.answered = {}
        self.waiting = threading.Condition()
        self.asking = False

    def transfer(self, kind, first, count, tell=False):
        """Pages `first`... from or into the slots 0..., as many batches at a time as the contestant takes."""
        starts = list(range(0, count, self.one.batch))
        under_way, good = {}, 0
        began = time.monotonic()
        while starts or under_way:
            while starts and len(under_way) < self.one.depth:
                at = starts.pop(0)
                slots = list(range(at, min(at + self.one.batch, count)))
                numbers = [first + slot for slot in slots]
                under_way[self.one.begin(kind, numbers, slots)] = numbers
            for batch, results in self.one.finished():
                numbers = under_way.pop(batch)
                self.results.update(zip(numbers, results))
                good += sum(map(bool, results))
                if tell:
                    answer(stored=[n for n, result in zip(numbers, results) if result])
        return {"seconds": time.monotonic() - began, "good": good}

    def wait(self, batch):
        """The results of one batch, where several threads wait: one of them asks for all."""
        while True:
            with self.waiting:
                while batch not in self.answered and self.asking:
                    self.waiting.wait()
                if batch in self.answered:
                    return self.answered.pop(batch)
                self.asking = True
            found = dict(self.one.finished())
            with self.waiting:
                self.answered.update(found)
                self.asking = False
                self.waiting.notify_all()

    def fill(self, first, count):
        for slot in range(count):
            self.one.slots.fill(slot, first + slot)

    def check(self, first, count):
        """What a get gave: pages that it called good, and those of them that have other bytes."""
        good = [slot for slot in range(count) if self.results.get(first + slot)]
        wrong = [first + slot for slot in good if not self.one.slots.has(slot, first + slot)]
        return {"good": len(good), "wrong": wrong}

    def singles(self, first, count, seed, seconds):
        """Pages of this range, each once and one at a time: milliseconds of each."""
        numbers = random.Random(seed).sample(range(first, first + count), count)
        took, wrong, failed = [], 0, 0
        end = time.monotonic() + seconds
        for n in numbers:
            began = time.monotonic()
            if began > end:
                break
            [result] = self.wait(self.one.begin("get", [n], [0]))
            took.append((time.monotonic() - began) * 1e3)
            if not result:
                failed += 1
            elif len(took) % 16 == 0 and not self.one.slots.has(0, n):
                wrong += 1
        return {"ms": took, "failed": failed, "wrong": wrong}

    def paced(self, first, rate, batch, stop, done):
        """Puts `rate` MiB a second from the last slots on, until told to stop."""
        slots = list(range(self.one.slots.count - batch, self.one.slots.count))
        n, began, good = first, time.monotonic(), 0
        while not stop.is_set():
            numbers = list(range(n, n + batch))
            for slot, number in zip(slots, numbers):
                # Another page of a pool costs the engine nothing; to write all of it would cost this process.
                self.one.slots.page(slot)[:16] = number.to_bytes(16, "little")
            good += sum(map(bool, self.wait(self.one.begin("put", numbers, slots))))
            n += batch
            late = began + (n - first) / rate - time.monotonic()
            if late > 0:
                stop.wait(late)
        done["mib"] = good / (time.monotonic() - began)
        done["good"] = good


class Pacer:
    """Puts in a thread, for as long as other commands come."""

    def __init__(self, work, first, rate, batch):
        self.stop, self.done = threading.Event(), {}
        self.thread = threading.Thread(target=work.paced, args=(first, rate, batch, self.stop, self.done))
        self.thread.start()

    def end(self):
        self.stop.set()
        self.thread.join()
        return self.done


def main():
    began = time.monotonic()
    contestant = getattr(importlib.import_module(module), name)(place, int(count), json.loads(settings))
    work, pacer = Work(contestant), None
    answer(ready=time.monotonic() - began)
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "pace":
            pacer = Pacer(work, **command)
            answer(pacing=True)
        elif do == "unpace":
            answer(**pacer.end())
        elif do == "clear":
            contestant.slots.clear()
            answer(cleared=True)
        elif do == "end":
            contestant.close()
            answer(ended=True)
            return
        else:
            answer(**(getattr(work, do)(**command) or {}))


main()
