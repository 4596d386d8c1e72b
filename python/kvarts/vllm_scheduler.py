"""The scheduler's side of `KvartsLayers`: it stages and promises blocks to requests, and selects the blocks to save.

vLLM looks up a request repeatedly until the request's blocks are in the pool. Then vLLM schedules the request, and the blocks land in the same step.
The blocks of a running request are saved in the step that computes them, or later. Windows are saved in that step or not at all, because the engine
does not keep them.
"""

import time
from collections import deque

import kvarts

from . import vllm_handover
from .link import logger, reason_of
from .sessions import Turn
from .staging import Desk
from .uses import Uses
from .vllm_messages import Move, Step
from .vllm_stats import Stats
from .vllm_steps import measure
from .vllm_terms import terms_of

#: The limit of bytes that a step saves. Further blocks wait for the next step. Windows do not count, because they cannot wait.
_STEP_BYTES = 256 << 20
#: The limit of failed puts of a request after which its blocks are offered again.
_TRIES = 3
#: The time for which the blocks of an ended request wait for room in the pool, in timeouts.
_KEPT = 5


class _Known:
    """A scheduled request whose blocks are saved."""

    def __init__(self, request, terms, promised, least=0, used=None):
        self.request, self.terms = request, terms
        self.bound = 0 if terms.skip_save else terms.max_offload_tokens
        #: The minimum of blocks of a stored request; and the number of leading blocks with enough uses, if uses are counted.
        self.least, self.used = least, used
        self.promised = promised
        self.saved = promised  # blocks before this one are stored or being stored
        self.windows = promised  # windows before this block were kept, or are gone
        self.state = None  # the last boundary, in tokens, whose state was kept
        self.asked = None  # a look-up of the request's blocks in the store
        self.sent = set()  # saves that the workers have
        self.putting = 0  # the number of saves that are being put from the pool to the store
        self.held = None  # the number of blocks to pin after the request's end, when they are stored
        self.is_gone = False  # whether no further block will be saved
        self.tries = 0
        self.last = None  # its slots, once it has ended
        self.is_ended = False  # whether its last windows were kept
        self.until = 0.0  # how long its slots are kept then


class _Save:
    """A save of blocks."""

    def __init__(self, known, group, first, last, savings):
        self.known, self.group, self.first, self.last, self.savings = known, group, first, last, savings
        self.taken = 0  # the number of workers that have copied their part
        self.stored, self.why, self.open = last - first, None, len(savings)
        self.certain = self.stored  # the number of leading blocks that are stored according to a put
        self.offered = None  # the argument for the announcer's `saved`


class Finder:
    """The finder of an engine. `plan`: the engine's blocks; `settings`: the operator's settings; `blocks_of`: returns the slots of a request; `manager`:
    vLLM's manager of caches; `announcer(plan, naming, groups, settings)`: makes the announcer for routers, if events are enabled."""

    def __init__(self, plan, settings, reads=True, writes=True, announcer=None):
        self.plan, self.settings, self.stats = plan, settings, Stats()
        self.blocks_of = self.manager = None
        self._reads, self._writes = reads, writes
        self._announces, self._routers = announcer, None
        self._link = settings.link()
        self._desk = self._naming = None
        self._workers, self._attached = 0, {}
        self._began = None  # when workers were first waited for
        self._stagings = {}  # request -> (Staging, time of its first look-up)
        self._renewals = {}  # request -> a second staging, for a request that waits long
        self._loads = []  # of the step that is being made
        self._waiting = set()  # requests that vLLM schedules when their loads have landed
        self._landing = {}  # number -> [Staging, number of workers for which it has landed]
        self._known = {}  # request -> _Known
        self._computing = {}  # name -> scheduled request
        self._saves = {}  # number -> _Save
        self._putting, self._answers = 0, deque()  # puts under way; results, from their threads
        self._held = deque()  # from the link's thread: (blocks, number of pinned blocks, error)
        self._turns = deque()  # from the sessions' thread: (outcome of a turn, error)
        self._terms = {}  # request -> its terms
        self._unasked = {}  # request -> (reason, number of blocks that were not looked up)
        self._used = {}  # request -> number of its leading blocks with enough uses
        self._uses = Uses(settings.store_after) if settings.store_after > 1 else None
        self._numbers = 0
        self._counted = {}  # source -> number of staged blocks that are counted already

    def meet(self, facts):
        """Takes the facts of all workers, which determine the identity of the blocks."""
        self._workers = len(facts)
        self._naming, groups = self.plan.named(facts)
        settings = self.settings
        self._desk = Desk(self._link, self._naming, groups, self.plan.block_tokens, settings)
        if self._announces is not None:
            self._routers = self._announces(self.plan, self._naming, groups, settings)

    def _is_ready(self):
        """Whether every worker is attached to the pool; `None` while workers may still attach."""
        if self._desk is None or self._link.away:
            return False
        name = self._desk.name
        if name is not None and sum(pool == name for pool in self._attached.values()) == self._workers:
            return True
        self._desk.knock()
        self._began = self._began or time.monotonic()
        return None if time.monotonic() - self._began < self.settings.timeout else False

    # Before a request is scheduled.

    def find(self, request, computed):
        """The number of staged tokens behind the computed ones; `None` while that is unknown. At least one token is left to compute."""
        size, name = self.plan.block_tokens, request.request_id
        first, last = computed // size, (request.num_tokens - 1) // size
        most = first + self._terms_of(request).max_load_tokens // size
        if not self._reads or last <= first or computed % size or getattr(request, "skip_reading_prefix_cache", False):
            return self._nothing(name)
        self._unasked[name] = ("max_load_tokens", max(0, last - most))
        if (last := min(last, most)) <= first:
            return self._nothing(name)
        staging, since = self._stagings.get(name, (None, time.monotonic()))
        staging = self._renewed(name, staging)
        if staging is None or first < staging.first:
            if not (is_ready := self._is_ready()):
                self._unasked[name] = ("away", last - first)
                return None if is_ready is None else self._nothing(name)
            self._nothing(name)
            handed = self._handed(request, last) if staging is None else 0
            staging = self._desk.stage(self.plan.keys(request, 0, last), first, request.num_tokens, self.plan.spare, expected=handed)
            self._stagings[name] = staging, since
        elif staging.is_old and name not in self._renewals and self._is_ready():
            self._renewals[name] = self._desk.stage(staging.keys, staging.first, request.num_tokens, self.plan.spare)
        if not staging.is_over or name in self._renewals:
            return None
        staging.answer()
        return max(0, staging.blocks - first) * size

    def _terms_of(self, request):
        terms = self._terms.get(request.request_id)
        if terms is None:
            terms = self._terms[request.request_id] = terms_of(request)
        return terms

    def _handed(self, request, last):
        """The number of leading blocks to wait for, because another engine has computed them for this request."""
        handed = vllm_handover.expected(request, self.plan, self._desk.namespace, last)
        if handed.why is not None:
            self.stats.add("unhanded", handed.blocks, handed.why)
            return 0
        return handed.blocks

    def _renewed(self, name, staging):
        """Replaces a request's `Staging` by a newer `Staging`. If the server did not answer the newer one, the earlier `Staging` stays valid."""
        renewal = self._renewals.get(name)
        if renewal is None or not renewal.is_over:
            return staging
        del self._renewals[name]
        if renewal.stored is None:
            self._desk.let_go(renewal)
            staging.answered = None
            return staging
        self._desk.let_go(staging)
        self._stagings[name] = renewal, self._stagings[name][1]
        return renewal

    def _nothing(self, name):
        for staging in (self._stagings.pop(name, (None, 0.0))[0], self._renewals.pop(name, None)):
            if staging is not None:
                self._desk.let_go(staging)
        return 0

    def allocated(self, request, blocks, external):
        """Records that vLLM has scheduled a request with `external` staged tokens."""
        name, size = request.request_id, self.plan.block_tokens
        is_new = name not in self._computing
        self._computing[name] = request
        if name in self._waiting and not external:
            # The promised blocks have landed. Everything else about the request is known.
            self._waiting.remove(name)
            return
        staging, since = self._stagings.pop(name, (None, 0.0))
        if (renewal := self._renewals.pop(name, None)) is not None:
            self._desk.let_go(renewal)
        count, last = external // size, 0
        if count:
            last = staging.blocks
            self._promised(staging, last - count, last, blocks, name if self.plan.states else None)
            self.stats.add("promised", count)
            self.stats.add("waited", time.monotonic() - since)
        self._count_missing(name, staging)
        if staging is not None and staging.expected:
            self.stats.add("handed", min(last, staging.expected))
            self.stats.add("unhanded", staging.expected - min(last, staging.expected), staging.why or "Silence")
        self._known.pop(name, None)
        if self._writes and self._desk is not None:
            known = self._known[name] = self._made_known(request, last, is_new)
            if known.bound:
                # Blocks that the engine has and the store lacks are offered, too: an earlier request could not save them.
                known.asked = staging or self._ask(request)
            self._learn_stored(known)
        elif staging is not None:
            self._tell_found(request, staging)
        if staging is not None and not count:
            self._desk.let_go(staging)

    def _count_missing(self, name, staging):
        """Counts the blocks that a request computes although it looked them up, by reason."""
        why, blocks = self._unasked.pop(name, ("", 0))
        self.stats.add("unstaged", blocks, why)
        for why, blocks in staging.reasons().items() if staging is not None else ():
            self.stats.add("unstaged", blocks, why)

    def _made_known(self, request, promised, is_new):
        """The record of a request that is scheduled, for the first time or again."""
        terms, settings = self._terms_of(request), self.settings
        if vllm_handover.is_prefill(request):
            # Another engine needs its blocks now.
            return _Known(request, terms, promised)
        if self._uses is not None and is_new:
            keys = self.plan.keys(request, 0, request.num_prompt_tokens // self.plan.block_tokens)
            self._used[request.request_id] = self._uses.use(keys)
        return _Known(request, terms, promised, settings.minimum_blocks, self._used.get(request.request_id))

    def _ask(self, request):
        """Looks up a request's blocks without staging them. No request waits for the result."""
        count = (request.num_tokens - 1) // self.plan.block_tokens
        if not count or not self._is_ready():
            return None
        return self._desk.stage(self.plan.keys(request, 0, count), count, request.num_tokens)

    def _promised(self, staging, first, last, blocks, waits):
        """Adds a load of these blocks to the step that is being made. `waits`: the request that waits for the load."""
        stretches, slots = {}, {}
        for group in self._desk.groups:
            own = blocks[group.number % self.plan.groups]
            begin = max(first, group.first_of(last, self.plan.block_tokens))
            # The engine may need less of a window than was staged.
            while group.window is not None and begin < last and not all(self.plan.slots(group, own, begin, begin + 1)):
                begin += 1
            if begin < last:
                stretches[group.number] = {rank: staging.stretches((group.number, rank), begin, last) for rank in group.ranks}
                slots[group.number] = self.plan.slots(group, own, begin, last)
        self._numbers += 1
        self._loads.append(Move(self._numbers, stretches, slots, waits))
        self._landing[self._numbers] = [staging, 0]
        if waits is not None:
            self._waiting.add(waits)

    # Before a step.

    def step(self, output):
        step, self._loads = Step(loads=self._loads), []
        measure(self.settings.steps, self._computing, output.num_scheduled_tokens, bool(step.loads))
        if self._desk is None:
            return step
        self._desk.open()
        if len(self._attached) < self._workers or set(self._attached.values()) != {self._desk.name}:
            step.pool, step.naming = self._desk.name, self._naming
        self.take_answers()
        if self._routers is not None:
            self._routers.look(self.manager)
        if self._is_ready() and not self._link.puts_away:
            self._save_all(step, output)
            self._save_states(step, output)
        now = time.monotonic()
        for name, known in list(self._known.items()):
            if known.last is not None and not known.sent:
                left = self._end_of(known, 0) - known.saved
                if left > 0 and now <= known.until:
                    continue
                if left > 0:
                    self.stats.add("dropped", left, "away" if self._link.puts_away else "busy")
                step.over.add(name)
                self._forget(name)
        return step

    def ran(self):
        """Records that the oldest step has run."""
        self.settings.steps.end()

    def _save_all(self, step, output):
        room = max(1, _STEP_BYTES // self.plan.bytes_of_block)
        for name, known in self._known.items():
            self._learn_stored(known)
            if known.asked is not None and known.last is None:
                # Windows cannot wait for the look-up.
                known.saved = self._hashed(known.request)
            scheduled = output.num_scheduled_tokens.get(name, 0)
            end = self._end_of(known, scheduled)
            last = min(end, known.saved + room)
            has_windows = self.plan.has_windows and (end > known.windows or known.last is not None)
            is_running = known.request.num_computed_tokens + scheduled > 0
            if last <= known.saved and not has_windows or known.last is None and not is_running:
                continue
            blocks = known.last or self.blocks_of(name)
            if last > known.saved:
                if self._send(step, known, None, known.saved, last, blocks):
                    room -= last - known.saved
                    known.saved = last
                elif known.last is not None:
                    self._make_room()
            if has_windows and not known.is_ended:
                self._save_windows(step, known, end, blocks)
                known.windows, known.is_ended = max(known.windows, end), known.last is not None

    def _make_room(self):
        """Releases the staged blocks of the waiting request that was staged last; its next look-up stages them again. Waiting requests may fill the pool,
        while ended requests need room in the pool and keep the engine's memory."""
        name = next((name for name, (staging, _) in reversed(self._stagings.items()) if staging.is_over), None)
        if name is not None:
            self._nothing(name)

    def _learn_stored(self, known):
        """After the look-up, sets the first block to save: the first one that the store lacks. If the look-up failed, all computed blocks are saved."""
        if known.asked is not None and known.asked.is_over:
            known.saved = known.promised if known.asked.stored is None else known.asked.stored
            self._tell_found(known.request, known.asked)
            known.asked = None

    def _tell_found(self, request, asked):
        """Reports found blocks to routers, too, because this engine knows their tokens."""
        if self._routers is not None and asked.stored:
            self._routers.found(request, asked.stored)

    def _hashed(self, request):
        return len(request.block_hashes) // self.plan.hashes

    def _end_of(self, known, scheduled):
        """The number of leading blocks that can be saved after the step that is being made. Blocks of the prompt count with the step; blocks of the answer
        count after vLLM has accepted their output, because drafts may be rejected. The limits of the request and of the operator apply."""
        computed = self._computed(known.request, scheduled)
        if computed < known.least:
            return 0
        return min(computed, known.bound // self.plan.block_tokens, computed if known.used is None else known.used)

    def _computed(self, request, scheduled):
        computed = request.num_computed_tokens
        tokens = max(computed - request.num_in_flight_tokens, min(computed + scheduled, request.num_prompt_tokens), 0)
        return min(tokens // self.plan.block_tokens, self._hashed(request))

    def _save_windows(self, step, known, end, blocks):
        prompt = known.request.num_prompt_tokens // self.plan.block_tokens
        for group in self._desk.groups:
            if group.number % self.plan.groups in self.plan.states:
                continue
            own = blocks[group.number % self.plan.groups]
            for first, last in self.plan.kept(group, known.windows, end, prompt, known.last is not None) if group.window is not None else ():
                # Windows that had passed when the request was scheduled are not available.
                while first < last and not all(self.plan.slots(group, own, first, first + 1)):
                    first += 1
                if first < last:
                    self._send(step, known, group, first, last, blocks)

    def _save_states(self, step, output):
        """Saves states at the boundaries at which vLLM computes them. vLLM reports the boundaries in the step that computes them."""
        told = getattr(output, "kv_connector_block_state", None)
        for name, offers in (told.boundary_state_offloads if told is not None and self.plan.states else {}).items():
            known = self._known.get(name)
            for tokens in sorted({tokens for *_, tokens in offers}) if known is not None else ():
                places = {number: place for number, place, at in offers if at == tokens and place}
                self._save_state(step, known, tokens, places)

    def _save_state(self, step, known, tokens, places):
        """Saves the state of every group at a boundary, if the policy keeps it."""
        size = self.plan.block_tokens
        last, rest = divmod(tokens, size)
        before = known.promised * size if known.state is None else known.state
        if rest or tokens > known.bound or last > self._hashed(known.request) or last < known.least:
            return
        if known.used is not None and last > known.used:
            return
        if not self.plan.keeps_state(tokens, before, known.request.num_prompt_tokens // size * size):
            return
        known.state = tokens
        for group in self._desk.groups:
            place = places.get(group.number % self.plan.groups)
            if place is not None:
                self._send(step, known, group, last - 1, last, None, [place])

    def _send(self, step, known, group, first, last, blocks, places=None):
        """Adds a save of blocks to the step, of one group of windows or of all groups with every block; returns whether the pool had room. `places`: the
        engine's slots, if they differ from those of the request's blocks."""
        given = places
        keys = self.plan.keys(known.request, first, last)
        parent = self.plan.keys(known.request, first - 1, first)[0] if first else b""
        savings, stretches, slots = [], {}, {}
        for one in [group] if group is not None else [one for one in self._desk.groups if one.window is None]:
            places = given or self.plan.slots(one, blocks[one.number % self.plan.groups], first, last)
            # Slot zero means that there is no block.
            saving = self._desk.room_for(one, keys, first, parent) if all(places) and places else None
            if saving is None:
                self._desk.give_back(savings)
                if group is not None:
                    self.stats.add("dropped", last - first, "busy" if all(places) else "gone")
                return False
            savings.append(saving)
            stretches[one.number], slots[one.number] = saving.stretches(), places
        self._numbers += 1
        step.saves.append(Move(self._numbers, stretches, slots))
        save = self._saves[self._numbers] = _Save(known, group, first, last, savings)
        if self._routers is not None and group is None:
            save.offered = self._routers.offered(known.request, first, last)
        known.sent.add(self._numbers)
        return True

    # After a step.

    def learn(self, told):
        self._attached.update(told.attached)
        for number, count in told.done.items():
            if (landing := self._landing.get(number)) is not None:
                landing[1] += count
                if landing[1] == self._workers:
                    del self._landing[number]
                    self._desk.let_go(landing[0])
            elif (save := self._saves.get(number)) is not None:
                save.taken += count
                if save.taken == self._workers:
                    del self._saves[number]
                    save.known.sent.remove(number)
                    save.known.putting += 1
                    self._putting += len(save.savings)
                    for saving in save.savings:
                        answer = lambda stored, why, save=save: self._answers.append((save, stored, why))  # noqa: E731
                        self._desk.put(saving, answer, save.known.terms.ttl)

    @property
    def is_saving(self):
        """Whether saves or puts are under way."""
        return bool(self._saves or self._putting)

    def take_answers(self):
        while self._answers:
            self._putting -= 1
            self._stored(*self._answers.popleft())
        while self._held:
            blocks, held, why = self._held.popleft()
            self.stats.add("pinned", held)
            self.stats.add("unpinned", blocks - held, "NotHere" if why is None else reason_of(why))
        while self._turns:
            how, why = self._turns.popleft()
            self.stats.add("turns", 1, how if why is None else reason_of(why))

    def _stored(self, save, stored, why):
        """Takes the result of a put."""
        save.certain = min(save.certain, stored)
        if stored < save.stored and getattr(why, "reason", None) != "InFlight":  # another process is storing the block
            save.stored, save.why = stored, why
        save.open -= 1
        if save.open:
            return
        if save.offered is not None:
            self._routers.saved(save.offered, save.certain)
        known, left = save.known, save.last - save.first - save.stored
        known.putting -= 1
        self.stats.add("saved", save.stored)
        self._hold_stored(known)
        if not left:
            self._link.answered()
            return
        self._link.put_failed(save.why)
        known.tries += 1
        if save.group is None and known.last is None and known.tries <= _TRIES and self._known.get(known.request.request_id) is known:
            known.saved = min(known.saved, save.first + save.stored)
        else:
            # Blocks behind a missing block are useless.
            known.bound = min(known.bound, (save.first + save.stored) * self.plan.block_tokens) if save.group is None else known.bound
            self.stats.add("dropped", left, reason_of(save.why))

    def handed_over(self, request):
        """The parameters for the decode engine, if another engine decodes this request. Called before `finished`."""
        if not vllm_handover.is_prefill(request) or self._desk is None or self._desk.namespace is None:
            return None
        known, blocks = self._known.get(request.request_id), 0
        if known is not None and self._is_ready() and not self._link.puts_away:
            blocks = min(self._end_of(known, 0), request.num_prompt_tokens // self.plan.block_tokens)
        return vllm_handover.offered(request, self.plan, self._desk.namespace, blocks)

    def finished(self, request, blocks):
        """Records the end of a request; returns whether vLLM must keep its slots until the workers have copied them."""
        name = request.request_id
        self._nothing(name)
        self._unasked.pop(name, None)
        terms = self._terms.pop(name, None) or terms_of(request)
        is_let_in = self._computing.pop(name, None) is not None
        is_measured = self._used.pop(name, None) is not None
        self.settings.steps.forget(name)
        if name in self._waiting:
            # vLLM itself keeps the slots until the load has landed. No block was computed.
            self._waiting.remove(name)
            self._known.pop(name, None)
            return False
        computed = self._computed(request, 0)
        if is_measured:
            self._uses.use(self.plan.keys(request, request.num_prompt_tokens // self.plan.block_tokens, computed))
        known = self._known.get(name)
        if known is None:
            self._hold(request, computed if is_let_in else 0, terms)
            return False
        known.held = computed
        self._learn_stored(known)
        if known.asked is not None:
            # The request has ended before its look-up.
            known.asked, known.saved = None, known.promised
        known.last = [list(own) for own in blocks]
        known.until = time.monotonic() + _KEPT * self.settings.timeout
        end = self._end_of(known, 0)
        has_windows = self.plan.has_windows and end > (0 if self.plan.keeps_ends else known.windows)
        if known.sent or (self._is_ready() and (end > known.saved or has_windows)):
            return True
        self._forget(name)
        return False

    def _forget(self, name):
        """Drops a request of which no further block will be saved."""
        known = self._known.pop(name)
        known.is_gone = True
        self._hold_stored(known)

    def _hold_stored(self, known):
        """Pins the blocks of a request, or records its turn, when all of its saves have ended."""
        if known.is_gone and not known.putting and known.held is not None:
            blocks, known.held = known.held, None
            self._hold(known.request, blocks, known.terms)

    def _hold(self, request, blocks, terms):
        if self._desk is None:
            return
        if not blocks:
            if terms.session_ends and terms.session:
                self._desk.end_session(terms.session, lambda why: self._turns.append((None, why)))
            return
        if terms.pin:
            self._desk.pin(self.plan.keys(request, 0, blocks), terms.pin, lambda held, why: self._held.append((blocks, held, why)))
        if terms.session and self._writes:
            shared = terms.session_shared_tokens // self.plan.block_tokens
            turn = Turn(terms.session, terms.session_of, shared, terms.session_ends)
            self._desk.go_on(self.plan.keys(request, 0, blocks), turn, lambda *told: self._turns.append(told))

    def forget(self):
        """Discards the pool's copies of blocks, as other connectors clear their host tiers. Stored blocks stay in the store."""
        if self._desk is not None:
            self._desk.forget()

    def is_behind(self):
        """Whether vLLM must continue with steps without a request: for kept slots, for loads that hold blocks of the pool, and for pending events."""
        if self._landing or any(known.last is not None for known in self._known.values()):
            return True
        return self._routers is not None and (self._putting > 0 or self._routers.has_news)

    def take_events(self):
        """The pending events for routers."""
        if self._routers is None:
            return ()
        self.take_answers()
        return self._routers.take()

    def take_stats(self):
        if self._desk is not None:
            for source, count in (("pool", self._desk.found), ("read", self._desk.came)):
                self.stats.add("staged", count - self._counted.get(source, 0), source)
                self._counted[source] = count
        return self.stats.take()

    def close(self):
        if self._routers is not None:
            self._routers.close(self.settings.timeout)
        try:
            (self._desk or self._link).close(self.settings.timeout)
        except kvarts.Error as error:
            logger.warning("kvarts: the scheduler's side of the connector did not close in time: %s", error)
