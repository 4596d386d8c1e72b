"""The scheduler's side of a connector: it reads a request's blocks into a pool before they are promised, and stores saved blocks from the pool.

No call makes the scheduler wait. Work that may wait for the server runs in the link's thread; puts and calls for sessions have their own threads.
Guarantees:

- When a staging has ended with `blocks`, every part of these blocks is in the pool, verified, and held until `let_go`. No later failure of disks,
  networks or servers affects them.
- Every staging ends: its look-up within half of `timeout`; its reads when no block has arrived for `timeout`, or, if the planner knows the
  engine's times, when the wait has taken as long as computing would have.
- For saved blocks, the caller is notified which leading blocks are stored in every column.
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

#: Seconds that the link's thread waits for arriving blocks before it checks for other work.
_LOOK = 0.001
#: Seconds between two look-ups of blocks that are about to be stored.
_ASK = 0.01
#: The key of a block that is never stored.
_NONE = kvarts.key("kvarts", "none")
#: Causes of absent blocks, as `Match.missing` names them.
MISSING = ("evicted", "expired", "deleted", "out_of_service", "never_stored", "cut_off")
#: Threads that wait for puts.
_PUTTERS = 4
#: Seconds after which the blocks of a waiting request are looked up again, because they may have been deleted.
FRESH = 2.0


class Group(NamedTuple):
    """A group of layers of which a prefix needs the same blocks. `ranks`: its columns, one for each rank with its own bytes."""

    number: int
    #: The number of last tokens whose blocks a prefix needs; `None`: all.
    window: int | None
    ranks: tuple

    def first_of(self, boundary, block_tokens):
        """The first block that a prefix of `boundary` blocks needs."""
        if self.window is None:
            return 0
        return max(0, boundary - -(-self.window // block_tokens))


def spec_of(name, block_tokens, columns):
    """The spec of blocks for a store. `columns`: for each group (number, number of ranks with their own bytes, for each layer the bytes of its parts on
    one rank)."""
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
    """Blocks of one request that are read into the pool. `within`: seconds after which the staging ends with the blocks that have arrived.
    `expected`: the number of leading blocks that another engine is about to store."""

    def __init__(self, keys, first, prompt_tokens, spare, within=None, expected=0):
        self.keys = keys
        #: The number of leading blocks that are in the engine's memory already.
        self.first = first
        self.prompt_tokens, self.spare = prompt_tokens, spare
        self.began = time.monotonic()
        #: The number of leading blocks in the store; `None` until the look-up is answered.
        self.stored = None
        #: The number of leading blocks that can be promised, and the positions in the pool of those from `first` on: (group, rank) -> (first block,
        #: stretches).
        self.blocks, self.columns = first, {}
        #: Set last: afterwards the staging does not change.
        self.over = threading.Event()
        #: When a request was first answered with it.
        self.answered = None
        self.within = within
        self.why = None
        #: The causes of absent blocks, from the store; and the number of leading blocks that are worth loading, from the planner.
        self.missing, self.pays = None, None
        self.wanted = self.asked = None  # the number of blocks that are being staged, and since when
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
        """Records that a request is answered with this staging."""
        self.answered = self.answered or time.monotonic()

    def reasons(self):
        """The reasons for which requested blocks are not staged: reason -> number of blocks."""
        last = self.blocks
        if self.stored is None:
            # The look-up had no answer.
            return {self.why or "Silence": len(self.keys) - last} if last < len(self.keys) else {}
        found = {name: getattr(self.missing, name) for name in MISSING} if self.missing else {}
        stored = max(last, self.stored)
        paid = stored if self.pays is None else max(last, min(self.pays, stored))
        found["unpaid"] = stored - paid
        # Without a reason: blocks that are kept back for a draft model.
        found[self.why or "spare"] = paid - last
        return {name: count for name, count in found.items() if count > 0}

    def stretches(self, column, first, last):
        """The positions of these blocks of a column."""
        begin, stretches = self.columns[column]
        return cut(stretches, first - begin, last - begin)


def cut(stretches, first, last):
    """The parts of stretches that have the blocks `first` to `last`, counted from the first block of all stretches."""
    found, at = [], 0
    for place, blocks, begin, count in stretches:
        low, high = max(first, at), min(last, at + count)
        if low < high:
            found.append((place, blocks, begin + low - at, high - low))
        at += count
    if sum(count for *_, count in found) != max(0, last - first):
        raise ValueError(f"the blocks {first} to {last} are not staged: the stage has {at} blocks (a defect in Kvarts; report it)")
    return found


class Saving(NamedTuple):
    """Room in the pool for consecutive blocks of a group."""

    group: int
    first: int
    keys: list
    parent: bytes
    #: rank -> draft of `Pool.draft`
    drafts: dict

    def stretches(self):
        """The positions in the pool, by rank."""
        return {rank: draft.stretches() for rank, draft in self.drafts.items()}


class Desk:
    """A pool with its stages, drafts and puts. `link`: the connection; `naming`: the identity of the blocks, as arguments of `Client.pages`; `groups`: the
    groups that a prefix needs; `settings`: `pool_bytes`, `timeout`, `durable`, `steps` of the engine for the planner (`kvarts.steps`), and `plans`:
    whether the planner leaves out blocks that load too slowly; `opened(pages, pool)`: called in the link's thread before the pool is used."""

    def __init__(self, link, naming, groups, block_tokens, settings, opened=lambda pages, pool: None):
        self.groups = groups
        self._naming, self._block_tokens, self._link = naming, block_tokens, link
        self._timeout, self._durable = settings.timeout, settings.durable
        self._steps, self._plans, self._told = settings.steps, settings.plans, None
        self._pool_bytes, self._when_opened = settings.pool_bytes, opened
        self._pool = self._pages = self._client = None
        #: The pool's name, for the workers, and the namespace of the blocks; `None` until the pool is open.
        self.name = self.namespace = None
        self._opening, self._again, self._knocked, self._why = False, 0.0, 0.0, None
        self._settled = threading.Event()
        self._stagings, self._expecting = [], []
        #: The numbers of blocks that stages have found in the pool, and that arrived for them.
        self.found = self.came = 0
        self._pins, self._pace = Pins(), Pace()
        self._sessions = Sessions([(group.number, rank) for group in groups for rank in group.ranks])
        self._calls = Calls(link)
        self._putters = concurrent.futures.ThreadPoolExecutor(_PUTTERS, thread_name_prefix="kvarts-put")
        self.open()

    # Of the scheduler's thread.

    def open(self):
        """Begins to open a pool on the server, if none is open or being opened."""
        if self._pool is None and not self._opening and not self._link.away and time.monotonic() >= self._again:
            self._opening = True
            self._link.do(self._opened, self._not_opened)

    def settle(self, timeout):
        """Waits until the first attempt to open a pool has ended. For the start of an engine."""
        # ends: `timeout`, the caller's
        self._settled.wait(timeout)

    def knock(self):
        """Restores a broken connection. A worker can attach to the pool only while this process is connected to the server."""
        if self._pool is not None and time.monotonic() >= self._knocked + self._timeout / 2:
            self._knocked = time.monotonic()
            self._link.do(lambda client: self._pages.exists([_NONE]) and None, lambda error: None)

    def stage(self, keys, first, prompt_tokens, spare=0, within=None, expected=0):
        """Begins to read blocks from `first` on into the pool. `spare`: the number of last blocks that must be stored but are not promised; `within`:
        seconds after which the staging ends with the blocks that have arrived; `expected`: the number of leading blocks to wait for, until no further
        one was stored for `timeout`."""
        staging = Staging(keys, first, prompt_tokens, spare, within, expected)
        self._link.do(lambda client: self._look_up(staging), lambda error: self._failed(staging, error))
        return staging

    def let_go(self, staging):
        """Releases the blocks of a staging."""
        staging.is_wanted = False
        self._link.then(lambda: self._close(staging))

    def room_for(self, group, keys, first, parent):
        """Reserves room for saved blocks of a group, in every column; `None` if the pool has no room now. It does not wait."""
        drafts = {}
        try:
            for rank in group.ranks:
                drafts[rank] = self._pool.draft(self._pages, keys, group=group.number, rank=rank, first_block=first, wait=False)
        except kvarts.Error:
            self.give_back([Saving(group.number, first, keys, parent, drafts)])
            return None
        return Saving(group.number, first, keys, parent, drafts)

    def give_back(self, savings):
        """Releases unused room."""
        drafts = [draft for saving in savings for draft in saving.drafts.values()]
        if drafts:
            # In the link's thread: the release may start a read that waits for a connection.
            self._link.then(lambda: [draft.close() for draft in drafts])

    def forget(self):
        """Discards all blocks in the pool that no request holds."""
        self._link.then(lambda: self._pool is not None and self._pool.clear())

    def put(self, saving, done, ttl=None):
        """Stores the blocks in this room, for `ttl` seconds at most. Calls `done(stored, error)` in another thread: the number of leading blocks that
        are stored, and the error of the next one."""
        self._putters.submit(self._put, saving, done, ttl)

    def pin(self, keys, seconds, done):
        """Protects the stored blocks of a chain from eviction. Calls `done(blocks, error)` in the link's thread, with the number of protected blocks."""

        def pin(client):
            blocks = self._pins.hold(self._pages, keys, seconds) if self._pages is not None else 0
            self._link.answered()
            done(blocks, None)

        self._link.do(pin, lambda error: done(0, error))

    def go_on(self, keys, turn, done):
        """Records a turn of a session that has ended and is stored. Calls `done(how, error)` in the sessions' thread, or at once if too many turns
        wait."""

        def go_on():
            if self._pages is None:
                return done(None, kvarts.Retry("the pool of shared memory is not open yet", "Away"))
            keyed = [key if len(key) == 32 else kvarts.key(key) for key in keys]
            done(self._sessions.go_on(self._client, self._pages, keyed, turn), None)

        self._calls.give(go_on, lambda error: done(None, error), len(keys))

    def end_session(self, name, dropped):
        """Ends the session of this name. Calls `dropped(error)` if the call failed; the session then ends with its lease."""
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
        """Opens the pool. It is opened once, because the workers are attached to it."""
        pages = client.pages(durable=self._durable, timeout=self._timeout / 2, **self._naming)
        pool = client.shared_pool(self._pool_bytes)
        # A pool keeps saved blocks only while it receives events of their deletion, to which it subscribes at its first stage.
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
            logger.warning("kvarts: the pool of shared memory could not be opened; no block is loaded or saved until a retry succeeds: %s", error)
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
        """Looks up the blocks, and begins to stage those that are worth loading."""
        if not staging.is_wanted:
            return self._end(staging)
        if self._pool is None:
            return self._failed(staging, kvarts.Retry("the pool of shared memory is not open yet", "Away"))
        match = self._matched(staging.keys)
        self._link.answered()
        staging.stored, staging.missing = match.blocks, match.missing
        blocks = match.blocks
        if max(blocks, staging.first) < staging.expected:
            return self._expect(staging)
        self._found(staging, blocks)

    def _expect(self, staging):
        """Waits for expected blocks, and stages the stored ones meanwhile. Not with windows, because each length of a prefix needs other blocks of them."""
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
        """Looks up expected blocks again, if it is time; returns whether the wait is over."""
        now = time.monotonic()
        if staging.is_wanted and now < staging.again:
            return False
        try:
            match = self._matched(staging.keys) if staging.is_wanted else None
        except kvarts.Error as error:
            self._link.failed(error)
            if not staging.stages:
                raise
            # Blocks in the pool stay valid.
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
        """Looks up blocks, and holds them until they are read. Beyond the tenant's limit of holds the look-up holds nothing: a block that is evicted before
        its read is a miss."""
        try:
            return self._pages.match(keys, hold=2 * self._timeout)
        except (kvarts.Refused, kvarts.Retry) as error:
            # `Busy`: too many leases, of this tenant or of all tenants.
            if error.reason not in ("PinCap", "Busy"):
                raise
            return self._pages.match(keys)

    def _found(self, staging, blocks):
        """Stages those of the stored blocks that are worth loading."""
        if staging.spare and blocks > staging.first:
            blocks = self._pages.match(staging.keys[: blocks - staging.spare]).blocks if blocks > staging.spare else 0
        times = self._steps.times
        # The store values blocks by the engine's times, so it receives the times also without plans.
        # Blocks that another engine computed for this request are always loaded.
        is_asked = not staging.expected and (self._plans or times is not self._told)
        if times is not None and blocks > staging.first and is_asked:
            blocks = self._paying(staging, blocks, times)
        self._begin(staging, blocks)

    def _paying(self, staging, blocks, times):
        # A request is scheduled when all of its blocks are in the pool, and not computed before.
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
        # There is no plan for blocks that only other nodes have.
        if not self._plans or found.plan is None or found.blocks < blocks:
            return blocks
        pays = max(found.plan.blocks, staging.first)
        if not self._pace.pays(self._bytes_of(first, pays), self._spared_ms(times, staging, pays), time.monotonic()):
            pays = first
        staging.pays = pays
        # The plan does not know which blocks are in the pool already.
        if pays < blocks and (here := self._in_pool(staging, blocks)) > pays:
            return here
        until = time.monotonic() + found.plan.held_ms / 1000
        staging.until = until if staging.until is None else min(until, staging.until)
        return pays

    def _bytes_of(self, first, blocks):
        """The bytes to read for a prefix of this number of blocks, behind `first`, if no block is in the pool."""
        own = ((group, max(first, group.first_of(blocks, self._block_tokens))) for group in self.groups)
        return sum(max(0, blocks - begin) * len(group.ranks) * self._pages.block_bytes(group.number) for group, begin in own)

    def _spared_ms(self, times, staging, blocks):
        cached = staging.first * self._block_tokens
        return times.prefill_ms(cached, max(1, blocks * self._block_tokens - cached))

    def _learn_pace(self, staging, least):
        """Records whether a planned stage was too slow, for later plans."""
        if staging.pays is None or staging.pays <= staging.first:
            return
        if least >= staging.wanted:
            self._pace.was_good()
            return
        now = time.monotonic()
        # Absent blocks say nothing about the pace, nor does a pool that has no room at once.
        is_slow = staging.why == "late" or any(isinstance(stage.why, (kvarts.Retry, kvarts.Deadline)) for stage, *_ in staging.stages)
        if is_slow and now - staging.asked >= self._timeout / 4:
            self._pace.was_slow(self._bytes_of(staging.first, least), now - staging.asked, now)

    def _in_pool(self, staging, blocks):
        """The number of leading blocks in the pool, among those that a prefix of this length needs."""
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
        """Begins to stage the blocks that a prefix of this number of blocks needs."""
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
        """The stages for a prefix of this number of blocks. Each one is added to `stages` at once, so that none is lost if a later one fails."""
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
        """Waits a moment for arriving blocks; returns whether any staging is still open."""
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
                except Exception as error:  # after a defect here, the waiting request must continue
                    if not isinstance(error, kvarts.Error):
                        logger.exception("kvarts: a stage failed because of a defect in Kvarts; report it")
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
        # Count the arrived blocks after the end of the stages: the last blocks arrive just before it.
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
            # Late blocks still go to the pool, for the next request.
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
        except Exception as error:  # after a defect here, the caller must still get its result
            logger.exception("kvarts: a put failed because of a defect in Kvarts; report it")
            stored, why = 0, error
        for draft in saving.drafts.values():
            draft.close()
        done(stored, why)

    def _timeout_of(self, saving):
        nbytes = len(saving.keys) * self._pages.block_bytes(saving.group) * len(saving.drafts)
        # A put may wait for the other puts of the pool's threads.
        return allowed(self._timeout, _PUTTERS * nbytes)
