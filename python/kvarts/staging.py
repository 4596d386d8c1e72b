"""The scheduler's side of a connector: what a request needs comes into a pool before it is promised, and leaves from there when it was
saved.

Nothing here makes a scheduler wait: what may wait for the server is done in the link's thread, puts and calls for sessions in threads of their own. What
holds:

- A staging that is over with `blocks` has every part of these blocks in the pool, verified, and held until it is let go of. Nothing that
  happens to disks, networks or servers afterwards takes them away.
- A staging ends: a look-up within half of `timeout`, a stage when nothing came for `timeout`, and where the planner knows the engine's
  times, when waiting has cost as much as computing would have.
- Of blocks that were saved a caller learns which leading ones are stored, in every column.
"""

import concurrent.futures
import json
import threading
import time
from typing import NamedTuple

import kvarts

from .link import allowed, logger, reason_of
from .pace import Pace
from .pins import Pins
from .session_calls import Calls
from .sessions import Sessions

#: How long the link's thread waits for what arrives before it looks for other work.
_LOOK = 0.001
#: How often the store is asked for blocks that are about to be stored.
_ASK = 0.01
#: A block that nobody has.
_NONE = kvarts.key("kvarts", "none")
#: Why a store does not have blocks, as `Match.missing` calls it.
MISSING = ("evicted", "expired", "deleted", "out_of_service", "never_stored", "cut_off")
#: Threads that wait for puts.
_PUTTERS = 4
#: Seconds after which what a request that still waits was answered with is asked for again: it may have been deleted.
FRESH = 2.0


class Group(NamedTuple):
    """Blocks that a prefix needs alike: which columns of them there are, one for each rank that has bytes of its own."""

    number: int
    #: Of how many last tokens a prefix needs the blocks: `None` for all.
    window: int | None
    ranks: tuple

    def first_of(self, boundary, block_tokens):
        """The first block that a prefix of so many blocks needs."""
        if self.window is None:
            return 0
        return max(0, boundary - -(-self.window // block_tokens))


def spec_of(name, block_tokens, columns):
    """How blocks are described to a store: of each group its number, how many ranks have bytes of their own, and of every layer the bytes of
    each of its parts, of one rank."""
    layers, parts, kinds = [], {}, {}
    for number, ranks, sizes in columns:
        for of_layer in sizes:
            own = [f"g{number}-{nbytes}" + (f"-{at}" if at else "") for at, nbytes in enumerate(of_layer)]
            for part, nbytes in zip(own, of_layer):
                parts[part] = _PART.format(name=part, bytes=nbytes * ranks, heads=0 if ranks == 1 else ranks, group=number)
            kind = own[0] if len(own) == 1 else "-".join([f"g{number}", *map(str, of_layer)])
            kinds[kind] = f"{kind} = {json.dumps(own)}"
            layers.append(f'{{ of = ["{kind}"] }}')
    return _SPEC.format(name=name, tokens=block_tokens, layers=", ".join(layers), kinds="\n".join(kinds.values()), parts="".join(parts.values()))


_SPEC = """
name = "{name}"
source = "the KV caches' specification"
block_tokens = {tokens}
layers = [{layers}]
[layer]
{kinds}
{parts}"""
_PART = """
[part.{name}]
kind = "dense_kv"
role = "page"
bytes = {bytes}
heads = {heads}
dtype = "opaque"
group = {group}
"""


class Staging:
    """Blocks of one request on their way into the pool. `within`: seconds, after which what has come has to do. `expected`: of so many leading
    blocks it is known that they are about to be stored."""

    def __init__(self, keys, first, prompt_tokens, spare, within=None, expected=0):
        self.keys = keys
        #: Blocks before that are in the engine's memory already.
        self.first = first
        self.prompt_tokens, self.spare = prompt_tokens, spare
        self.began = time.monotonic()
        #: Leading blocks that the store has, once that is known.
        self.stored = None
        #: How many leading blocks can be promised, and where those behind `first` lie in the pool: (group, rank) -> (first block, stretches).
        self.blocks, self.columns = first, {}
        #: Set last: from here on nothing of it changes.
        self.over = threading.Event()
        #: When it was answered with first.
        self.answered = None
        self.within = within
        self.why = None
        #: Why what the store does not have is not there, by its own account; and how many leading blocks are worth loading, where it was asked.
        self.missing, self.pays = None, None
        self.wanted = self.asked = None  # blocks that are being staged, and since when
        self.until = None if within is None else self.began + within
        self.expected, self.heard, self.again = expected, self.began, 0.0
        self.stages = []
        self.is_wanted = True

    @property
    def is_over(self):
        return self.over.is_set()

    @property
    def is_old(self):
        return self.answered is not None and time.monotonic() > self.answered + FRESH

    def answer(self):
        """Takes notice that a request is answered with it."""
        self.answered = self.answered or time.monotonic()

    def reasons(self):
        """Why what was asked for and not staged is not: reason -> blocks."""
        last = self.blocks
        if self.stored is None:
            # The look-up had no answer.
            return {self.why or "Silence": len(self.keys) - last} if last < len(self.keys) else {}
        found = {name: getattr(self.missing, name) for name in MISSING} if self.missing else {}
        stored = max(last, self.stored)
        paid = stored if self.pays is None else max(last, min(self.pays, stored))
        found["unpaid"] = stored - paid
        # Without a reason: what a draft model needs behind a prefix.
        found[self.why or "spare"] = paid - last
        return {name: count for name, count in found.items() if count > 0}

    def stretches(self, column, first, last):
        """Where these blocks of a column lie."""
        begin, stretches = self.columns[column]
        return cut(stretches, first - begin, last - begin)


def cut(stretches, first, last):
    """Those of stretches that have the blocks `first` to `last`, counted through all of them."""
    found, at = [], 0
    for place, blocks, begin, count in stretches:
        low, high = max(first, at), min(last, at + count)
        if low < high:
            found.append((place, blocks, begin + low - at, high - low))
        at += count
    if sum(count for *_, count in found) != max(0, last - first):
        raise ValueError(f"the blocks {first} to {last} do not exist: the stage has {at}")
    return found


class Saving(NamedTuple):
    """Room in the pool for blocks of a group that follow each other."""

    group: int
    first: int
    keys: list
    parent: bytes
    #: rank -> what `Pool.draft` gave
    drafts: dict

    def stretches(self):
        """By rank."""
        return {rank: draft.stretches() for rank, draft in self.drafts.items()}


class Desk:
    """A pool with its stages, drafts and puts. `link`: of what is connected; `naming`: how `Client.pages` calls the blocks; `groups`: what a
    prefix needs; `settings`: `pool_bytes`, `timeout`, `durable`, `steps` of the engine for the planner (`kvarts.steps`), and `plans`: whether
    what does not pay is left out; `opened(pages, pool)`: is called in the link's thread before the pool is there for others."""

    def __init__(self, link, naming, groups, block_tokens, settings, opened=lambda pages, pool: None):
        self.groups = groups
        self._naming, self._block_tokens, self._link = naming, block_tokens, link
        self._timeout, self._durable = settings.timeout, settings.durable
        self._steps, self._plans, self._told = settings.steps, settings.plans, None
        self._pool_bytes, self._when_opened = settings.pool_bytes, opened
        self._pool = self._pages = self._client = None
        #: The pool's name, for the workers, and that of the blocks' namespace, once there is one.
        self.name = self.namespace = None
        self._opening, self._again, self._knocked, self._why = False, 0.0, 0.0, None
        self._settled = threading.Event()
        self._stagings, self._expecting = [], []
        #: Blocks that stages have found in the pool, and that came for them.
        self.found = self.came = 0
        self._pins, self._pace = Pins(), Pace()
        self._sessions = Sessions([(group.number, rank) for group in groups for rank in group.ranks])
        self._calls = Calls(link)
        self._putters = concurrent.futures.ThreadPoolExecutor(_PUTTERS, thread_name_prefix="kvarts-put")
        self.open()

    # Of the scheduler's thread.

    def open(self):
        """Takes a pool from the server, if there is none and none is being taken."""
        if self._pool is None and not self._opening and not self._link.away and time.monotonic() >= self._again:
            self._opening = True
            self._link.do(self._opened, self._not_opened)

    def settle(self, timeout):
        """Waits until it is known whether there is a pool: for an engine that starts."""
        # ends: `timeout`, the caller's
        self._settled.wait(timeout)

    def knock(self):
        """Has the connection made again if it broke: a worker finds the pool only where the server knows of it."""
        if self._pool is not None and time.monotonic() >= self._knocked + self._timeout / 2:
            self._knocked = time.monotonic()
            self._link.do(lambda client: self._pages.exists([_NONE]) and None, lambda error: None)

    def stage(self, keys, first, prompt_tokens, spare=0, within=None, expected=0):
        """Brings what these blocks from `first` on need into the pool. `spare`: so many blocks at the end must be stored, and are not
        promised; `within`: after so many seconds it ends with what has come; `expected`: so many leading blocks are waited for until no more of
        them was stored for `timeout`."""
        staging = Staging(keys, first, prompt_tokens, spare, within, expected)
        self._link.do(lambda client: self._look_up(staging), lambda error: self._failed(staging, error))
        return staging

    def let_go(self, staging):
        """Its blocks are not needed any more."""
        staging.is_wanted = False
        self._link.then(lambda: self._close(staging))

    def room_for(self, group, keys, first, parent):
        """Room for blocks of a group that are to be saved, in every column; `None` where there is none now. It waits for nothing."""
        drafts = {}
        try:
            for rank in group.ranks:
                drafts[rank] = self._pool.draft(self._pages, keys, group=group.number, rank=rank, first_block=first, wait=False)
        except kvarts.Error:
            self.give_back([Saving(group.number, first, keys, parent, drafts)])
            return None
        return Saving(group.number, first, keys, parent, drafts)

    def give_back(self, savings):
        """Room that is not used."""
        drafts = [draft for saving in savings for draft in saving.drafts.values()]
        if drafts:
            # A read that waits for room may begin then, and wait for a connection.
            self._link.then(lambda: [draft.close() for draft in drafts])

    def forget(self):
        """What no request holds is read again when it is asked for."""
        self._link.then(lambda: self._pool is not None and self._pool.clear())

    def put(self, saving, done, ttl=None):
        """Stores what lies in this room, for `ttl` seconds at most. `done(stored, error)` is called in another thread: of the leading blocks how
        many are stored, and why not more."""
        self._putters.submit(self._put, saving, done, ttl)

    def pin(self, keys, seconds, done):
        """Holds what the store has of a chain against eviction. `done(blocks, error)` is called in the link's thread."""

        def pin(client):
            blocks = self._pins.hold(self._pages, keys, seconds) if self._pages is not None else 0
            self._link.answered()
            done(blocks, None)

        self._link.do(pin, lambda error: done(0, error))

    def go_on(self, keys, turn, done):
        """A turn of a session is over and stored. `done(how, error)` is called in the sessions' thread, or at once where too many turns wait."""

        def go_on():
            if self._pages is None:
                return done(None, kvarts.Retry("no pool yet", "Away"))
            keyed = [key if len(key) == 32 else kvarts.key(key) for key in keys]
            done(self._sessions.go_on(self._client, self._pages, keyed, turn), None)

        self._calls.give(go_on, lambda error: done(None, error), len(keys))

    def end_session(self, name, dropped):
        """The conversation of this name has no further turn. `dropped(error)`: is called where that could not be said; then its lease ends it."""
        self._calls.give(lambda: self._pages is not None and self._sessions.end(self._client, name), dropped)

    def close(self, timeout):
        deadline = time.monotonic() + timeout
        self._putters.shutdown(wait=False, cancel_futures=True)
        self._calls.end()
        self._link.stop(timeout)
        self._calls.join(max(0.0, deadline - time.monotonic()))
        self._pool = None
        self._link.close(timeout)

    # Of the link's thread.

    def _opened(self, client):
        """Once: what is staged lies in the pool that the workers have."""
        pages = client.pages(durable=self._durable, timeout=self._timeout / 2, **self._naming)
        pool = client.shared_pool(self._pool_bytes)
        # A pool keeps what is saved in it from when it knows of the deletes of these blocks: it asks for that when it first stages any.
        columns = [(pages, group.number, rank) for group in self.groups[:1] for rank in group.ranks[:1]]
        stage = pool.stage(columns, [_NONE], silence=self._timeout)
        # ends: its argument, half of the timeout
        stage.wait(self._timeout / 2)
        stage.close()
        self._when_opened(pages, pool)
        self._client = client
        self._pages, self._pool, self.name, self.namespace = pages, pool, pool.name, pages.namespace
        self._opening = False
        self._settled.set()

    def _not_opened(self, error):
        self._again = time.monotonic() + self._link.pause
        self._opening = False
        self._settled.set()
        if str(error) != self._why:
            logger.warning("kvarts: the shared memory could not be opened, so no block is loaded or saved: %s", error)
        self._why = str(error)

    def _failed(self, staging, error):
        staging.why = reason_of(error)
        self._end(staging)

    def _end(self, staging):
        if self._pool is not None:
            counts = self._pool.counts
            self.found, self.came = counts["hits"] + counts["shared"], counts["came"]
        staging.over.set()
        if not staging.is_wanted:
            self._close(staging)

    def _close(self, staging):
        stages, staging.stages = staging.stages, []
        for stage, *_ in stages:
            stage.close()

    def _look_up(self, staging):
        """What the store has, and what of it pays."""
        if not staging.is_wanted:
            return self._end(staging)
        if self._pool is None:
            return self._failed(staging, kvarts.Retry("no pool yet", "Away"))
        match = self._matched(staging.keys)
        self._link.answered()
        staging.stored, staging.missing = match.blocks, match.missing
        blocks = match.blocks
        if max(blocks, staging.first) < staging.expected:
            return self._expect(staging)
        self._found(staging, blocks)

    def _expect(self, staging):
        """What is there already comes into the pool meanwhile; not windows, which lie elsewhere behind each block."""
        now = time.monotonic()
        staging.again = now + _ASK
        if staging not in self._expecting:
            self._expecting.append(staging)
            staging.heard = now
            self._link.watch(self._look)
        if staging.stored > staging.first and all(group.window is None for group in self.groups):
            before, staging.stages = staging.stages, []
            self._stages_of(staging, staging.stored, staging.stages)
            for stage, *_ in before:
                stage.close()

    def _ask_again(self, staging):
        """Asks for what is expected, if it is time to; whether that is over."""
        now = time.monotonic()
        if staging.is_wanted and now < staging.again:
            return False
        try:
            match = self._matched(staging.keys) if staging.is_wanted else None
        except kvarts.Error as error:
            self._link.failed(error)
            if not staging.stages:
                raise
            # What lies in the pool stays good.
            staging.wanted = staging.stored
            self._stagings.append(staging)
            return True
        self._link.answered()
        blocks = 0
        if match is not None:
            blocks, staging.missing = match.blocks, match.missing
        if staging.is_wanted and blocks < staging.expected and now < staging.heard + self._timeout:
            staging.again = now + _ASK
            if blocks > staging.stored:
                staging.stored, staging.heard = blocks, now
                self._expect(staging)
            return False
        staging.stored = blocks
        self._found(staging, blocks)
        return True

    def _matched(self, keys):
        """What the store has, held until it is read. A tenant that may hold no more loads without: what is evicted before it is read is a miss."""
        try:
            return self._pages.match(keys, hold=2 * self._timeout)
        except (kvarts.Refused, kvarts.Retry) as error:
            # `Busy`: there are too many leases together, of this tenant or of all.
            if error.reason not in ("PinCap", "Busy"):
                raise
            return self._pages.match(keys)

    def _found(self, staging, blocks):
        """Stages what of these blocks pays."""
        if staging.spare and blocks > staging.first:
            blocks = self._pages.match(staging.keys[: blocks - staging.spare]).blocks if blocks > staging.spare else 0
        times = self._steps.times
        # The store takes its blocks to be worth what the engine takes to compute them, also where nothing is left out.
        # What another engine has computed for this request is not computed again.
        is_asked = not staging.expected and (self._plans or times is not self._told)
        if times is not None and blocks > staging.first and is_asked:
            blocks = self._paying(staging, blocks, times)
        self._begin(staging, blocks)

    def _paying(self, staging, blocks, times):
        # A request is let in when all of it is in the pool: nothing of it is computed before.
        first = staging.first
        found = self._pages.match(
            staging.keys[:blocks],
            times=times,
            prompt_tokens=staging.prompt_tokens,
            hbm_blocks=first,
            hbm_boundaries=[first] if first else [],
            overlap="none",
        )
        self._told = times
        # What only other nodes have has no plan.
        if not self._plans or found.plan is None or found.blocks < blocks:
            return blocks
        pays = max(found.plan.blocks, staging.first)
        if not self._pace.pays(self._bytes_of(first, pays), self._spared_ms(times, staging, pays), time.monotonic()):
            pays = first
        staging.pays = pays
        # A plan knows of the disks, not of the pool: what lies there need not be loaded.
        if pays < blocks and (here := self._in_pool(staging, blocks)) > pays:
            return here
        until = time.monotonic() + found.plan.held_ms / 1000
        staging.until = until if staging.until is None else min(until, staging.until)
        return pays

    def _bytes_of(self, first, blocks):
        """What a prefix of so many blocks has to be read of, behind `first`, if nothing of it is in the pool."""
        own = ((group, max(first, group.first_of(blocks, self._block_tokens))) for group in self.groups)
        return sum(max(0, blocks - begin) * len(group.ranks) * self._pages.block_bytes(group.number) for group, begin in own)

    def _spared_ms(self, times, staging, blocks):
        cached = staging.first * self._block_tokens
        return times.prefill_ms(cached, max(1, blocks * self._block_tokens - cached))

    def _learn_pace(self, staging, least):
        """What a stage that a plan has advised tells of the next one."""
        if staging.pays is None or staging.pays <= staging.first:
            return
        if least >= staging.wanted:
            self._pace.was_good()
            return
        now = time.monotonic()
        # What is merely not there says nothing of the pace; nor does a pool without room, at once.
        is_slow = staging.why == "late" or any(isinstance(stage.why, (kvarts.Retry, kvarts.Deadline)) for stage, *_ in staging.stages)
        if is_slow and now - staging.asked >= self._timeout / 4:
            self._pace.was_slow(self._bytes_of(staging.first, least), now - staging.asked, now)

    def _in_pool(self, staging, blocks):
        """How many leading blocks are in the pool, of those that a prefix of this length needs."""
        before = self._pool.counts["hits"]
        stages = self._stages_of(staging, blocks)
        found = self._pool.counts["hits"] - before
        for stage, *_ in stages:
            stage.close()
        needed = sum((blocks - begin) * len(columns) for _, begin, columns in stages)
        if any(group.window is not None for group in self.groups):
            # A prefix that ends earlier needs other windows.
            return blocks if found == needed else 0
        return staging.first + found * (blocks - staging.first) // needed

    def _begin(self, staging, blocks):
        """Stages what a prefix of so many blocks needs."""
        if blocks <= staging.first or not staging.is_wanted:
            self._close(staging)
            return self._end(staging)
        before, staging.stages = staging.stages, []
        self._stages_of(staging, blocks, staging.stages)
        for stage, *_ in before:
            stage.close()
        staging.wanted, staging.asked = blocks, time.monotonic()
        if staging not in self._stagings:
            self._stagings.append(staging)
        self._link.watch(self._look)

    def _stages_of(self, staging, blocks, stages=None):
        """Stages of what a prefix of this number of blocks needs; they are added to `stages` one by one, so that none is lost when one fails."""
        ranges, stages = {}, [] if stages is None else stages
        for group in self.groups:
            begin = max(staging.first, group.first_of(blocks, self._block_tokens))
            ranges.setdefault(begin, []).extend((group.number, rank) for rank in group.ranks)
        for begin, columns in ranges.items():
            stage = self._pool.stage(
                [(self._pages, *column) for column in columns],
                staging.keys[begin:blocks],
                first_block=begin,
                silence=allowed(self._timeout, 0),
            )
            stages.append((stage, begin, columns))
        return stages

    def _look(self):
        """Waits a little for what arrives; whether there is anything to look for."""
        if self._stagings:
            first = next((stage for stage, *_ in self._stagings[0].stages if not stage.is_over), None)
            if first is not None:
                # ends: `_LOOK`, its argument
                first.wait(_LOOK)
        elif self._expecting:
            # ends: after `_LOOK` seconds
            time.sleep(_LOOK)
        for among, look in ((self._expecting, self._ask_again), (self._stagings, self._is_settled)):
            for staging in list(among):
                try:
                    if look(staging):
                        among.remove(staging)
                except Exception as error:  # a defect here must not leave a request that waits
                    if not isinstance(error, kvarts.Error):
                        logger.exception("kvarts: a stage failed")
                    among.remove(staging)
                    self._failed(staging, error)
        return bool(self._stagings or self._expecting)

    def _is_settled(self, staging):
        if not staging.is_wanted:
            self._close(staging)
            self._end(staging)
            return True
        is_late = staging.until is not None and time.monotonic() >= staging.until
        if not is_late and not all(stage.is_over for stage, *_ in staging.stages):
            return False
        # What has come is counted when they are over, and not before: the last of it comes just before that.
        least = min(begin + stage.staged for stage, begin, _ in staging.stages)
        if least < staging.wanted:
            staging.why = next((reason_of(stage.why) for stage, *_ in staging.stages if stage.why is not None), "late")
            if any(group.window is not None for group in self.groups) and least > staging.first:
                # A prefix that ends earlier needs other blocks.
                staging.until = None if staging.within is None else time.monotonic() + staging.within / 4
                self._begin(staging, self._pages.match(staging.keys[: min(least, staging.wanted - 1)]).blocks)
                return staging.is_over
        self._learn_pace(staging, least)
        staging.columns = {column: (begin, stage.stretches(at)) for stage, begin, columns in staging.stages for at, column in enumerate(columns)}
        staging.blocks = max(staging.first, least)
        if staging.blocks == staging.first and not is_late:
            # What is late goes on to the pool, for whoever asks next.
            self._close(staging)
        self._end(staging)
        return True

    # Of threads that put.

    def _put(self, saving, done, ttl):
        stored, why = len(saving.keys), None
        try:
            for draft in saving.drafts.values():
                results = draft.put(parent=saving.parent, durable=self._durable, ttl=ttl, timeout=self._timeout_of(saving))
                good = results.index(False) if False in results else len(results)
                if good < stored:
                    stored, why = good, draft.why
        except kvarts.Error as error:
            stored, why = 0, error
        except Exception as error:  # a defect here must not leave what waits for it
            logger.exception("kvarts: a put failed")
            stored, why = 0, error
        for draft in saving.drafts.values():
            draft.close()
        done(stored, why)

    def _timeout_of(self, saving):
        nbytes = len(saving.keys) * self._pages.block_bytes(saving.group) * len(saving.drafts)
        # In a queue behind others.
        return allowed(self._timeout, _PUTTERS * nbytes)
