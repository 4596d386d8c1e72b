"""What routers are told: seeded courses of an engine, a store and its events, in every order in which they can arrive. What a router has put together
is what the store has, wherever the course is cut."""

import random
import unittest
from typing import NamedTuple

from kvarts import events
from kvarts.events import Ledger
from seeded import Seeded

COLUMNS, KEYS = 2, 12


class Described(NamedTuple):
    name: str


class Course:
    """A store with columns of blocks, whose newest events are kept; a router; and an engine between them, of which parts run in any order."""

    bounds, rings, rarely = {}, (4, 40), 0.05

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.ledger = Ledger(COLUMNS, **self.bounds)
        self.store = {}  # key -> columns that are here
        self.events, self.read, self.ring = [], 0, self.chance.choice(self.rings)
        self.puts = []  # [asked, key, columns that are left to store, whether it was answered for]
        self.asking = None  # [asked, keys, columns that are left to ask, what was found]
        self.routers, self.cleared = set(), False
        self.described = set()
        self.ledger.lost()

    # The store.

    def tell(self, what, column, key):
        self.events.append((what, column, key))

    def leaves(self, what):
        """Something goes: a column of a block, all of a block, or all blocks."""
        if what == "namespace":
            self.store.clear()
            return self.tell("emptied", None, None)
        if self.store:
            key = self.chance.choice(sorted(self.store))
            gone = sorted(self.store[key])
            for column in gone if what == "block" else [self.chance.choice(gone)]:
                self.store[key].discard(column)
                self.tell("gone", column, key)
            if not self.store[key]:
                del self.store[key]

    def comes(self, key, column):
        if column not in self.store.setdefault(key, set()):
            self.store[key].add(column)
            self.tell("stored", column, key)

    def other(self):
        """Another engine stores."""
        self.comes(self.chance.randrange(KEYS), self.chance.randrange(COLUMNS))

    # The engine.

    def describe(self, keys):
        self.ledger.describe([(key, Described(f"name {key}")) for key in keys])
        self.described.update(keys)

    def put(self):
        first = self.chance.randrange(KEYS)
        keys = range(first, min(KEYS, first + 3))
        self.describe(keys)
        asked = self.ledger.ask()
        self.puts += [[asked, key, list(range(COLUMNS))] for key in keys]

    def put_on(self):
        if not self.puts:
            return
        at = self.chance.randrange(len(self.puts))
        asked, key, left = self.puts[at]
        if left:
            return self.comes(key, left.pop())
        self.ledger.answer(asked, [key], [True])
        del self.puts[at]

    def put_fails(self):
        if self.puts:
            self.ledger.doubt([self.puts.pop()[1]])

    def find(self):
        keys = sorted(self.chance.sample(range(KEYS), 3))
        keys = [keys[at] for at in self.ledger.lacks(keys)]
        self.describe(keys)
        self.ledger.doubt(keys)

    # The follower.

    def follow(self):
        if len(self.events) - self.read > self.ring:
            self.read = len(self.events) - self.chance.randrange(self.ring)
            return self.ledger.lost()
        for what, column, key in self.events[self.read : self.read + self.chance.randrange(5)]:
            self.read += 1
            if what == "emptied":
                self.ledger.emptied()
            else:
                self.happened(what == "stored", column, key)

    def happened(self, is_stored, column, key):
        self.ledger.happened(is_stored, column, [key])

    def ask(self):
        if self.asking is None and (keys := self.ledger.doubted()):
            self.asking = [self.ledger.ask(), keys, list(range(COLUMNS)), [True] * len(keys)]

    def ask_on(self):
        if self.asking is None:
            return
        asked, keys, left, found = self.asking
        if not left:
            self.ledger.answer(asked, keys, found)
            self.asking = None
            return
        column = left.pop()
        found[:] = [one and column in self.store.get(key, ()) for one, key in zip(found, keys)]

    def away(self):
        if self.asking is None:
            self.ledger.away()
            self.take()
            assert not self.routers, "away: routers count on a server that is not there"
            self.read = len(self.events)
            self.ledger.lost()

    # The router.

    def clear(self):
        """vLLM has told that all of its blocks are gone."""
        self.routers.clear()
        self.ledger.cleared()

    def take(self):
        gone, there = self.ledger.take()
        for _, name in gone:
            assert name in self.routers, "removed: never told"
            self.routers.remove(name)
        for block in there:
            assert block.name not in self.routers, "told twice"
            self.routers.add(block.name)

    # All of it.

    def go(self):
        often = [self.put_on, self.follow] * 3 + [self.ask_on] * 2
        ways = [*often, self.put, self.find, self.ask, self.take, self.other]
        rare = [self.put_fails, self.away, self.clear, lambda: self.leaves("namespace")]
        for _ in range(self.chance.randrange(20, 400)):
            kind = self.chance.random()
            if kind < self.rarely:
                self.chance.choice(rare)()
            elif kind < 0.25:
                self.leaves(self.chance.choice(("block", "column")))
            else:
                self.chance.choice(ways)()
        self.cut()

    def cut(self):
        """Nothing happens any more, and all that has is told."""
        while self.puts:
            self.put_on()
        while self.read < len(self.events) or self.asking or self.ledger._doubted:
            self.ask()
            self.ask_on()
            self.follow()
        self.take()
        assert not self.ledger.has_news, "news: left when all was told"
        whole = {f"name {key}" for key in self.described if len(self.store.get(key, ())) == COLUMNS}
        self.judge(whole)

    def judge(self, whole):
        assert self.routers == whole, f"differs: routers know {sorted(self.routers)}, the store has {sorted(whole)}"


class Bounded(Course):
    """With room for fewer blocks than there are."""

    bounds, rings, rarely = {"told": 6, "described": 3}, (400,), 0.005

    def judge(self, whole):
        assert len(self.ledger._known) <= 3 and len(self.ledger._told) <= 6, "bounds: passed"
        assert self.ledger._here <= self.ledger._known.keys() | self.ledger._told.keys(), "bounds: forgotten blocks are kept"
        assert self.routers <= whole, f"lies: routers know {sorted(self.routers - whole)}, which the store has not"


def answers_last(self, asked, keys, found, answer=Ledger.answer):
    """Whatever happened in between."""
    for key in keys:
        if key in self._known and self._known[key].asked <= asked:
            self._known[key].columns = None
    answer(self, asked, keys, found)


def takes_answers_as_they_come(self, asked, keys, found, answer=Ledger.answer):
    for key in keys:
        if key in self._known:
            self._known[key].asked = 0
    answer(self, asked, keys, found)


def forgets_what_is_not_described(self, is_stored, column, keys, happened=Ledger.happened):
    happened(self, is_stored, column, [key for key in keys if key in self._known])


def asks_only_what_was_told(self, lost=Ledger.lost):
    lost(self)
    self._doubted = dict.fromkeys(self._told)


class Courses(Seeded, unittest.TestCase):
    course = Course

    def test_routers_know_what_the_store_has_wherever_a_course_is_cut(self):
        told = sum(len(course.routers) for course in self.every_seed(5))
        self.assertGreater(told, 100)

    def test_an_answer_that_ends_later_than_an_event_does_not_count(self):
        self.expect_seen("differs", (events.Ledger, "answer", answers_last))

    def test_of_two_answers_that_overtake_each_other_none_counts(self):
        self.expect_seen("differs", (events.Ledger, "answer", takes_answers_as_they_come))

    def test_all_is_asked_for_after_a_gap(self):
        self.expect_seen("differs", (events.Ledger, "lost", lambda self: None))
        self.expect_seen("differs", (events.Ledger, "lost", asks_only_what_was_told))

    def test_blocks_of_a_namespace_that_is_deleted_are_gone(self):
        self.expect_seen("differs", (events.Ledger, "emptied", lambda self: None))

    def test_a_block_is_there_when_all_of_its_columns_are(self):
        self.expect_seen("differs", (events.Ledger, "_is_whole", lambda self, block: block.rest or bool(block.columns)))

    def test_what_routers_forgot_is_told_again(self):
        self.expect_seen("removed", (events.Ledger, "cleared", lambda self: None))


class Orders(unittest.TestCase):
    def test_a_block_that_was_stored_while_it_was_asked_for_is_asked_for_again(self):
        # Found by seed 9620 of the courses.
        ledger = Ledger(COLUMNS)
        ledger.describe([(1, Described("name 1"))])
        put = ledger.ask()
        ledger.happened(True, 1, [1])
        asked = ledger.ask()
        ledger.happened(True, 0, [1])
        ledger.answer(put, [1], [True])
        # The question came to the server before the block did.
        ledger.answer(asked, [1], [False])
        self.assertEqual((ledger.take(), ledger.doubted()), (([], []), [1]))


class BoundedCourses(Seeded, unittest.TestCase):
    course = Bounded

    def test_routers_know_nothing_that_the_store_has_not(self):
        told = sum(len(course.routers) for course in self.every_seed(5))
        self.assertGreater(told, 100)

    def test_what_is_not_described_any_more_is_told_as_gone(self):
        self.expect_seen("lies", (events.Ledger, "happened", forgets_what_is_not_described))
